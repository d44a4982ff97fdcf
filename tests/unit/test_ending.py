"""The launcher's choice of the worker that failed first."""

import pytest

from totalreduce.launch.ending import find_first_failure
from totalreduce.launch.workers import WorkerResult


def worker(rank: int, exit_code: int, *last_errors: str, signal: str | None = None) -> WorkerResult:
    return WorkerResult(rank, 1000 + rank, exit_code, signal, 1.0, last_errors)


LOST_1 = "totalreduce.foundation.errors.PeerLost: rank 1 is lost: it has closed the group after ValueError: bad data"
LOST_2 = "[rank0]: torch.distributed.DistBackendError: rank 2 is lost: its connection ended"
RAISED = "ValueError: bad data"

CASES = {
    "the victim ended first": ([worker(0, 1, "  raise error", LOST_1), worker(1, 1, RAISED)], 0, 1),
    "the culprit ended first": ([worker(0, 1, LOST_1), worker(1, 1, RAISED)], 1, 1),
    "a chain": ([worker(0, 1, LOST_2), worker(1, 3, RAISED), worker(2, 1, LOST_1)], 0, 1),
    "ranks that name each other": ([worker(0, 1, LOST_1), worker(1, 1, "PeerLost: rank 0 is lost: silent")], 0, 0),
    "the lost rank was stopped by the launcher": ([worker(0, 1, LOST_1), worker(1, -9, signal="SIGKILL")], 0, 0),
    "the lost rank ended well": ([worker(0, 1, LOST_1), worker(1, 0)], 0, 0),
    "a rank that does not exist": ([worker(0, 1, LOST_2)], 0, 0),
    "a program that prints such words": ([worker(0, 1, "it said rank 1 is lost: why", RAISED), worker(1, 1)], 0, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_failure(case: str) -> None:
    results, first_to_end, expected = CASES[case]
    assert find_first_failure(results[first_to_end], results).rank == expected
