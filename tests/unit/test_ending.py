"""The launcher's choice of the worker that failed first, and of the error that it shows."""

from typing import Any

import pytest

from totalreduce.launch.ending import failure_of, find_first_failure
from totalreduce.launch.workers import WorkerResult


def worker(rank: int, exit_code: int, *last_errors: str, signal: str | None = None, **more: Any) -> WorkerResult:
    return WorkerResult(rank, 1000 + rank, exit_code, signal, 1.0, last_errors, **more)


LOST_1 = "totalreduce.foundation.errors.PeerLost: rank 1 is lost: it has closed the group after ValueError: bad data"
LOST_2 = "[rank0]: torch.distributed.DistBackendError: rank 2 is lost: its connection ended"
CAUGHT_1 = "training failed: rank 1 is lost: it has closed the group"
RAISED = "ValueError: bad data"

CASES = {
    "the victim ended first": ([worker(0, 1, "  raise error", LOST_1), worker(1, 1, RAISED)], 0, 1),
    "the culprit ended first": ([worker(0, 1, LOST_1), worker(1, 1, RAISED)], 1, 1),
    "a chain": ([worker(0, 1, LOST_2), worker(1, 3, RAISED), worker(2, 1, LOST_1)], 0, 1),
    "ranks that name each other": ([worker(0, 1, LOST_1), worker(1, 1, "PeerLost: rank 0 is lost: silent")], 0, 0),
    "the lost rank was stopped by the launcher": (
        [worker(0, 1, LOST_1), worker(1, -9, signal="SIGKILL", was_stopped=True)],
        *(0, 0),
    ),
    "the lost rank was stopped after its error": (
        [worker(0, 1, LOST_1), worker(1, -9, signal="SIGKILL", was_stopped=True, error=RAISED)],
        *(0, 1),
    ),
    "a lost rank on another host that was killed": ([worker(0, 1, LOST_1), worker(1, 137, signal="SIGKILL")], 0, 1),
    "an error that the program has caught": ([worker(0, 1, CAUGHT_1), worker(1, 1, "failed: bad data")], 0, 1),
    "the lost rank ended well": ([worker(0, 1, LOST_1), worker(1, 0)], 0, 0),
    "a rank that does not exist": ([worker(0, 1, LOST_2)], 0, 0),
    "a program that prints such words": ([worker(0, 1, "it said rank 1 is lost: why", RAISED), worker(1, 1)], 0, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_failure(case: str) -> None:
    results, first_to_end, expected = CASES[case]
    assert find_first_failure(results[first_to_end], results).rank == expected


TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 9, in <module>', "    step()"]
NOISE = [f"cleanup {number}" for number in range(20)]
ENDS = {
    "nothing": ([], "", []),
    "no exception": (["one", "two"], "", ["one", "two"]),
    "an exception": ([*NOISE, *TRACEBACK, RAISED], RAISED, [*NOISE[-6:], *TRACEBACK, RAISED]),
    "an exception and a little": ([*TRACEBACK, RAISED, *NOISE[:4]], RAISED, [*TRACEBACK, RAISED, *NOISE[:4]]),
    "an exception and much": (
        [*NOISE, *TRACEBACK, RAISED, *NOISE],
        RAISED,
        [*NOISE[-4:], *TRACEBACK, RAISED, *NOISE[:2]],
    ),
    "of torch": ([f"[rank3]: {line}" for line in (*TRACEBACK, RAISED)], RAISED, None),
    "one after the other": ([*TRACEBACK, "KeyError: 3", "During handling", *TRACEBACK, RAISED], RAISED, None),
    "a message of lines": ([*TRACEBACK, "RuntimeError: a", "b", "c"], "RuntimeError: a", None),
    "one of a destructor afterwards": (
        [*TRACEBACK, RAISED, "Exception ignored in: <function f>", *TRACEBACK, "OSError: closed"],
        RAISED,
        None,
    ),
    "one without its end": ([*TRACEBACK], "", TRACEBACK),
}


@pytest.mark.parametrize("case", ENDS)
def test_the_error_of_a_process_is_found_among_what_it_has_written(case: str) -> None:
    lines, error, shown = ENDS[case]
    assert failure_of(lines) == (error, tuple(lines[-10:] if shown is None else shown))
