"""The top floor: tools for testing code that uses this library, and the library itself. Public.

``run_ranks`` runs one function on several ranks of one process; the conformance suite checks a transport.
"""

from totalreduce.testing.ranks import RankTransport, run_ranks

__all__ = ["RankTransport", "run_ranks"]
