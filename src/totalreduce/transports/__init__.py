"""Moves bytes between ranks and knows no collective.

A transport owns connections and liveness; what leaves and where arriving bytes go it asks of an ``Endpoint``.
"""
