"""The top floor: tools for testing code that uses this library, and the library itself. Public.

``run_ranks`` runs one function on several ranks of one process; the conformance suite checks a transport.
"""

from totalreduce.testing.conformance import Backend, Case, ConformanceError, check_case
from totalreduce.testing.conformance_cases import check_simulated, check_transport
from totalreduce.testing.conformance_oracle import Collective
from totalreduce.testing.ranks import RankTransport, TransportFactory, run_ranks

__all__ = [
    "Backend",
    "Case",
    "Collective",
    "ConformanceError",
    "RankTransport",
    "TransportFactory",
    "check_case",
    "check_simulated",
    "check_transport",
    "run_ranks",
]
