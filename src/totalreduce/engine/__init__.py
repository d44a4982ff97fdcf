"""When things run. Everything here is a plain object but for ``runner``, the one file with threads.

Invariant: ``engine.Engine`` knows no thread, socket or clock; ``now`` is an argument.
"""
