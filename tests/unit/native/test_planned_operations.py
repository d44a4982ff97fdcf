"""Reductions in a planned order: what a wait does until they are started, and what a forked child may do."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch

from totalreduce.foundation.errors import DeadlineExceededError, GroupClosed, PeerLost, TotalReduceError
from totalreduce.foundation.types import ReduceOp
from totalreduce.native import planned
from totalreduce.native.planned import NativeStream
from totalreduce.tensors.work import Work


class Doubling:
    """A library of a job with one rank, whose reductions double their tensors at once."""

    def __init__(self) -> None:
        self.started: list[torch.Tensor] = []
        self.closed = False

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> Any:
        assert op is ReduceOp.SUM
        self.started.append(tensor.mul_(2))
        return self

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


def stream(natives: Any, lost: list[TotalReduceError]) -> NativeStream:
    made = NativeStream(natives, ["a", "b"], lost=lambda: lost[0] if lost else None, patience_s=20.0)
    made.begin()
    return made


def submit(made: NativeStream, place: int, number: float) -> Work:
    return made.submit(place, torch.full((2,), number), op=ReduceOp.SUM, priority=0)


def test_a_wait_is_woken_when_the_reduction_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sleep(seconds: float) -> None:
        raise AssertionError(f"a wait has slept for {seconds} s instead of waiting for an event")

    made = stream(Doubling(), [])
    monkeypatch.setattr(planned.time, "sleep", no_sleep)
    monkeypatch.setattr(planned, "LOOK_S", 10.0)
    late, results, woken = submit(made, 1, 3.0), [], []

    def wait() -> None:
        results.append(late.wait().tolist())
        woken.append(time.monotonic())

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(0.2)
    assert not late.done()
    begin = time.monotonic()
    assert submit(made, 0, 1.0).wait().tolist() == [2.0, 2.0]
    waiter.join(5.0)
    assert results == [[6.0, 6.0]]
    assert woken[0] - begin < 5.0


def test_a_wait_for_what_is_not_started_ends_when_a_rank_is_lost_or_the_time_is_over() -> None:
    lost: list[TotalReduceError] = []
    made = stream(Doubling(), lost)
    late = submit(made, 1, 3.0)
    with pytest.raises(DeadlineExceededError, match="'b' of round 1, which waits for 'a'"):
        late.wait(timeout_s=0.05)
    lost.append(PeerLost(3, "it has gone"))
    with pytest.raises(PeerLost, match="rank 3"):
        late.wait()


def test_a_forked_child_cannot_use_the_stream() -> None:
    natives = Doubling()
    made = stream(natives, [])
    first = submit(made, 1, 1.0)
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        for call in (made.begin, lambda: submit(made, 0, 1.0), lambda: first.wait(timeout_s=5.0)):
            try:
                call()
                said.append("nothing")
            except GroupClosed as error:
                said.append("stream of planned reductions" if "stream of planned" in str(error) else str(error))
            except BaseException as error:
                said.append(repr(error))
        made.close()
        os.write(theirs, "|".join([*said, str(natives.closed), str(len(natives.started))]).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        assert pipe.read().split("|") == ["stream of planned reductions"] * 3 + ["False", "0"]
    os.waitpid(pid, 0)
    assert submit(made, 0, 5.0).wait().tolist() == [10.0, 10.0]
    assert first.wait().tolist() == [2.0, 2.0]
    made.close()
    assert natives.closed
