"""The engine: it decides which message of which operation moves next. Everything here is a plain object.

Invariant: ``engine.Engine`` knows no thread, socket or clock; ``now`` is an argument.
"""
