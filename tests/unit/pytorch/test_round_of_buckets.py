"""A round over a list of reducers: who is told what, in which order, and what an error leaves behind."""

from __future__ import annotations

import threading

import pytest
import torch

from totalreduce.foundation.errors import DeadlineExceededError, MissingTensorError
from totalreduce.pytorch.round import GradientReducer, Phase, Round


class Recorder(GradientReducer):
    """Notes its calls in a list that several share."""

    def __init__(self, name: str, calls: list[tuple[object, ...]], num_parameters: int, *, hooked: bool = True) -> None:
        self.name, self.calls, self.hooked = name, calls, hooked
        self.parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(num_parameters)]
        self.error: Exception | None = None
        self.active: int | None = None

    def begin(self, *, joined: bool = False, again: bool = False) -> None:
        self.calls.append((self.name, "begin", "again" if again else joined))

    def ready(self, member: int) -> None:
        self.calls.append((self.name, "ready", member))

    def close(self) -> None:
        self.calls.append((self.name, "close"))

    def finish(self, active: int) -> int:
        self.calls.append((self.name, "finish", active))
        if self.error is not None:
            raise self.error
        return active if self.active is None else self.active

    def install(self) -> None:
        self.calls.append((self.name, "install"))

    def commit(self) -> None:
        self.calls.append((self.name, "commit"))

    def undo(self) -> None:
        self.calls.append((self.name, "undo"))

    def abandon(self) -> None:
        self.calls.append((self.name, "abandon"))


def make() -> tuple[Round, list[Recorder], list[tuple[object, ...]]]:
    calls: list[tuple[object, ...]] = []
    reducers = [Recorder("a", calls, 2), Recorder("b", calls, 3, hooked=False), Recorder("c", calls, 1)]
    return Round(reducers, 4), reducers, calls


def test_a_round_from_begin_to_end() -> None:
    round_, reducers, calls = make()
    reducers[0].active = 3
    assert round_.hooked == [*reducers[0].parameters, *reducers[2].parameters]
    assert (round_.phase, round_.in_flight) == (Phase.LOCAL, False)
    round_.open()
    assert (round_.phase, round_.in_flight) == (Phase.OPEN, True)
    for index in (2, 0, 1):
        round_.ready(index)
    round_.close()
    assert (round_.phase, round_.in_flight) == (Phase.CLOSED, True)
    round_.finish()
    assert (round_.phase, round_.active, round_.in_flight) == (Phase.SYNCHRONISED, 3, False)
    assert calls == [
        *((name, "begin", False) for name in "abc"),
        ("c", "ready", 0),
        ("a", "ready", 0),
        ("a", "ready", 1),
        *((name, "close") for name in "abc"),
        ("a", "finish", 4),
        ("b", "finish", 3),
        ("c", "finish", 3),
        *((name, "install") for name in "abc"),
    ]


def test_two_threads_open_one_round() -> None:
    """As autograd does where parameters are on the CPU and on a GPU: the second comes while the first opens."""
    round_, reducers, calls = make()
    begun = threading.Event()
    begin = reducers[0].begin

    def slow_begin(**arguments: bool) -> None:
        begin(**arguments)
        if not begun.is_set():
            begun.set()
            second.join(0.1)

    def open_and_be_ready() -> None:
        if begun.wait(20):
            round_.open()
            round_.ready(0)

    reducers[0].begin = slow_begin
    second = threading.Thread(target=open_and_be_ready)
    second.start()
    round_.open()
    second.join(20)
    assert calls == [*((name, "begin", False) for name in "abc"), ("a", "ready", 0)]


@pytest.mark.parametrize("joined", [False, True])
def test_a_missing_gradient_ends_the_round_on_every_rank(joined: bool) -> None:
    round_, reducers, calls = make()
    reducers[0].error = MissingTensorError("w", (1,), 1)
    round_.open(joined=joined)
    round_.close()
    with pytest.raises(MissingTensorError):
        round_.finish()
    assert round_.phase is Phase.LOCAL
    assert calls[-1] == ("a", "finish", 4)  # the others would exchange gradients, and some ranks have ended the round


def test_after_a_deadline_the_round_can_be_finished_again() -> None:
    round_, reducers, calls = make()
    round_.open()
    round_.close()
    reducers[1].error = DeadlineExceededError("late")
    calls.clear()
    with pytest.raises(DeadlineExceededError):
        round_.finish()
    assert round_.phase is Phase.CLOSED
    reducers[1].error = None
    round_.finish()
    assert round_.phase is Phase.SYNCHRONISED
    finished = [("a", "finish", 4), ("b", "finish", 4), ("b", "finish", 4), ("c", "finish", 4)]
    assert calls == [*finished, *((name, "install") for name in "abc")]


def finished(round_: Round) -> None:
    round_.open()
    round_.close()
    round_.finish()


def test_what_outlives_a_round_is_kept_when_the_step_is_taken_and_dropped_when_it_is_left_out() -> None:
    round_, _, calls = make()
    finished(round_)
    calls.clear()
    round_.undo()
    assert calls == [(name, "undo") for name in "abc"]
    assert round_.phase is Phase.LOCAL
    calls.clear()
    finished(round_)
    assert calls[:3] == [(name, "begin", "again") for name in "abc"], "no step was taken since the last round"
    calls.clear()
    round_.commit()
    assert calls == [(name, "commit") for name in "abc"]
    assert round_.phase is Phase.SYNCHRONISED, "the torch optimizer may fail, and the step be repeated"
    round_.end_step()
    calls.clear()
    round_.open()
    assert calls == [(name, "begin", False) for name in "abc"]


def test_a_round_is_abandoned_on_ranks_where_none_is_open_too() -> None:
    round_, reducers, calls = make()
    round_.abandon()
    assert calls == [*((name, "begin", False) for name in "abc"), *((name, "abandon") for name in "abc")]
    calls.clear()
    round_.open()
    calls.clear()
    round_.abandon()
    assert calls == [(name, "abandon") for name in "abc"]
    assert round_.phase is Phase.LOCAL
    reducers[2].skipped = True
    assert round_.skipped
