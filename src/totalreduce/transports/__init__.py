"""Transports: they move bytes between ranks and know no collective.

A transport owns connections and liveness. An ``Endpoint`` supplies its messages and the memory for arriving bodies.
"""
