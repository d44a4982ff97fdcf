"""The launcher's choice of the worker that failed first, and of the error that it shows."""

from typing import Any

import pytest

from totalreduce.launch.ending import describe_failures, failure_of, find_first_failure
from totalreduce.launch.program_errors import ProgramErrors
from totalreduce.launch.tracebacks import Trace
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
    "all states are lost, by an error of the program": (
        [
            worker(
                0, 1, error="totalreduce.foundation.errors.RecoveryError: all processes that had the state are lost"
            ),
            worker(1, 1, error=RAISED, traceback=('  File "train.py", line 9, in <module>', "    step()", RAISED)),
        ],
        *(0, 1),
    ),
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
    assert failure_of(lines)[:2] == (error, tuple(lines[-10:] if shown is None else shown))


# ---------------------------------------------------------------------------------------------- the program's own error

TORCH = "/env/lib/python3.11/site-packages/torch/nn/modules/module.py"
DEEP = (
    "Traceback (most recent call last):",
    '  File "/home/me/train.py", line 30, in <module>',
    "    main()",
    '  File "/home/me/train.py", line 12, in main',
    "    loss = model(batch)",
    "           ^^^^^^^^^^^^",
    *(f'  File "{TORCH}", line {line}, in _call' for line in range(14)),
    f'  File "{Trace.of.__func__.__code__.co_filename}", line 3, in of',
    "    raise ValueError",
    "ValueError: bad data",
)


def test_the_line_of_the_user_comes_first_and_packages_are_folded() -> None:
    failure = failure_of([*NOISE, *DEEP, *NOISE])
    assert failure.traceback == DEEP
    failed = worker(1, 1, *failure.lines, error=failure.error, traceback=failure.traceback)
    assert describe_failures(failed, [worker(0, 1, LOST_1, error=LOST_1), failed], "/home/me") == [
        "rank 1 failed first at train.py:12 (loss = model(batch)): ValueError: bad data",
        "  train.py:30 (main())",
        "  train.py:12 (loss = model(batch))",
        "  … 15 frames of torch and totalreduce",
        "  exit code 1 after 1.0 s",
        "the others: rank 0 exit code 1",
    ]


def raised(rank: int, line: int, error: str, **more: Any) -> WorkerResult:
    traceback = (f'  File "/home/me/train.py", line {line}, in f', f"    step({line})", error)
    return worker(rank, 1, *traceback, error=error, traceback=traceback, **more)


def test_ranks_that_fail_alike_are_shown_once_and_each_other_error_of_the_program() -> None:
    results = [raised(0, 9, "ValueError: 0"), raised(1, 9, "ValueError: 1"), raised(2, 7, "KeyError: 2")]
    results += [raised(3, 9, LOST_1), worker(4, 137, signal="SIGKILL"), worker(5, 0)]
    assert describe_failures(results[1], results, "/home") == [
        "ranks 0 and 1 failed first at me/train.py:9 (step(9)): ValueError: 1",
        "  me/train.py:9 (step(9))",
        "  exit code 1 after 1.0 s",
        "rank 2 failed, too at me/train.py:7 (step(7)): KeyError: 2",
        "  me/train.py:7 (step(7))",
        "  exit code 1 after 1.0 s",
        "the others: rank 3 exit code 1; rank 4 killed by SIGKILL; rank 5 exit code 0",
    ]


def test_without_a_line_of_the_user_the_last_lines_are_shown() -> None:
    failed = worker(1, 3, "no data")
    assert describe_failures(failed, [failed], "/") == ["rank 1 failed first: exit code 3 after 1.0 s", "  no data"]


FAULTS = {
    "an error of the program": (DEEP, "ValueError at /home/me/train.py:12"),
    "in the standard library": (
        (
            *DEEP[:5],
            '  File "/usr/lib/python3.11/json/decoder.py", line 8, in raw_decode',
            "json.JSONDecodeError: Extra data",
        ),
        "JSONDecodeError at /home/me/train.py:12",
    ),
    "of the library's arguments": ((*DEEP[:5], "totalreduce.foundation.errors.ConfigurationError: no"), "Conf"),
    "only of packages": ((DEEP[0], DEEP[6], "ValueError: bad"), f"ValueError at {TORCH}:0"),
    "of the syntax": (('  File "/home/me/train.py", line 3', "    if", "      ^", "SyntaxError: no"), "SyntaxError at"),
    "of the command line": (("usage: train.py", "train.py: error: unknown --foo"), "train.py: error: unknown --foo"),
    "of torch": (tuple(f"[rank1]: {line}" for line in DEEP), "ValueError at /home/me/train.py:12"),
    "a missing file": ((*DEEP[:5], "FileNotFoundError: [Errno 2] No such file"), "FileNotFoundError at"),
}
PASSING = {
    "a lost rank": LOST_1,
    "made of a lost rank": "RuntimeError: rank 1 is lost: its connection ended",
    "a connection": "ConnectionResetError: [Errno 104] Connection reset by peer",
    "gloo": "RuntimeError: [/pytorch/gloo/pair.cc:525] Connection closed by peer [127.0.0.1]:4000",
    "a deadline": "totalreduce.foundation.errors.DeadlineExceededError: allreduce 'a' took 5 s",
    "no memory on the GPU": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    "a full disk": "OSError: [Errno 28] No space left on device",
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_is_the_programs_error(case: str) -> None:
    lines, expected = FAULTS[case]
    failure = failure_of(lines)
    assert worker(0, 1, error=failure.error, traceback=failure.traceback).trace.of_program.startswith(expected)


@pytest.mark.parametrize("case", PASSING)
def test_what_another_start_may_mend_is_not_the_programs_error(case: str) -> None:
    failure = failure_of([*DEEP[:5], PASSING[case]])
    assert failure.error == PASSING[case]
    assert worker(0, 1, error=failure.error, traceback=failure.traceback).trace.of_program == ""
    assert worker(0, 137, signal="SIGKILL", error=RAISED, traceback=DEEP).trace.of_program == ""


def test_the_same_error_on_a_second_start_is_repeated() -> None:
    errors = ProgramErrors()
    assert not errors.is_repeated(1, "ValueError at a:1", 0.0)
    assert not errors.is_repeated(1, "ValueError at a:2", 1.0)
    assert not errors.is_repeated(1, "", 2.0), "a lost rank"
    assert errors.is_repeated(1, "ValueError at a:2", 3.0)
    assert not errors.is_repeated(2, "ValueError at a:2", 3.0), "another seat"


def test_an_error_after_a_minute_of_training_is_not_repeated() -> None:
    errors = ProgramErrors()
    for begin in (0.0, 1000.0, 2000.0):
        errors.started(1)
        errors.joined([0, 1], begin)
        errors.joined([0, 1], begin + 50.0)
        assert not errors.is_repeated(1, "ValueError at a:1", begin + 61.0)
    errors.started(1)
    assert errors.is_repeated(1, "ValueError at a:1", 9000.0), "it never was a rank"


def test_one_error_of_all_ranks_needs_no_second_start() -> None:
    errors = ProgramErrors()
    for seat in range(3):
        assert not errors.are_equal(range(3))
        errors.is_repeated(seat, "ValueError at a:1", 0.0)
    assert errors.are_equal(range(3))
    assert not errors.are_equal([0]), "nobody else"
    errors.started(0)
    assert errors.are_equal(range(3)), "another start was faster than the errors of the other ranks"
    errors.joined([0], 1.0)
    assert not errors.are_equal(range(3)), "another start has helped"
    errors.started(0)
    errors.is_repeated(2, "KeyError at a:1", 0.0)
    assert not errors.are_equal(range(3))
