"""Reductions in a planned order: for libraries that need one order, without an agreement in every step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch

from totalreduce.foundation.errors import DeadlineExceededError, PeerLost, TotalReduceError
from totalreduce.foundation.forking import HomeProcess
from totalreduce.foundation.types import ReduceOp
from totalreduce.native.collectives import NativeCollectives, NativeWork
from totalreduce.native.failures import LOOK_S, find_lost_rank
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["NativeStream", "PlannedReduction", "PlannedReductions"]


class PlannedReductions(Protocol):
    """Reduces the same tensors in every round. Every rank submits each tensor once in each round.

    Between the end of a round and ``begin`` further reductions may follow, in the same order on all ranks.
    """

    def begin(self) -> None:
        """Begin the next round; the reductions of the last round are done."""

    def submit(self, place: int, tensor: torch.Tensor, *, op: ReduceOp, priority: int) -> Work:
        """Reduce the tensor that has this place in the plan, in place; places may come in any order."""

    def close(self) -> None:
        """End the stream: there is no next round."""


@final
class PlannedReduction:
    """One reduction of a round (see ``work.PendingOperation``). The thread that asks for the result completes it.

    Attributes:
        name: The operation's name.
        round: Number of the round, from 1.
        number: How many reductions of the stream were started before.
        submitted_at: Time of the submission, like the other times on the engine's clock, in seconds.
        started_at: Time when the library was called, after all earlier places of the plan.
        ended_at: Time when a thread saw that it was done.
    """

    operation = None

    def __init__(self, name: str, round_: int, tensor: torch.Tensor, op: ReduceOp) -> None:
        self.name, self.round, self.tensor, self.op = name, round_, tensor, op
        self.submitted_at = time.monotonic()
        self.started_at = self.ended_at = 0.0
        self.number = -1
        self.work: NativeWork | None = None
        self.finished = False
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """Whether it has ended; the library is asked."""
        return self.finished or (self.work is not None and self.work.done())

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called by the thread that finds that it is done."""
        self._callbacks.append(callback)
        if self.finished:
            self.tell()

    def tell(self) -> None:
        """Call the callbacks of ``on_done``."""
        while self._callbacks:
            self._callbacks.pop(0)()


@final
@never_compiled
class NativeStream:
    """``PlannedReductions`` by a native library: started in the order of the plan, whatever order they come in.

    Args:
        natives: The library, for this stream only; closed with it.
        names: Of the operations, by place.
        lost: Returns the loss of a rank, if one is lost.
        patience_s: Time-out in seconds of waits that name none.
        reported: Called with each reduction that is done.
    """

    def __init__(
        self,
        natives: NativeCollectives,
        names: Sequence[str],
        *,
        lost: Callable[[], TotalReduceError | None],
        patience_s: float,
        reported: Callable[[PlannedReduction], None] | None = None,
    ) -> None:
        self._natives, self._names, self._lost, self._patience_s = natives, names, lost, patience_s
        self._reported = reported
        self._home = HomeProcess("the stream of planned reductions")
        self._lock = threading.Lock()  # hooks run in threads of autograd's
        self._started = threading.Condition(self._lock)  #: Notified of every reduction that was started.
        self._early: dict[int, PlannedReduction] = {}
        self._next = self._round = self._number = 0

    def begin(self) -> None:
        """Begin the next round."""
        self._home.check()
        with self._lock:
            assert not self._early, "every place of the last round was submitted"
            self._next = 0
            self._round += 1

    def submit(self, place: int, tensor: torch.Tensor, *, op: ReduceOp, priority: int) -> Work:  # noqa: ARG002
        """Start a reduction and those that waited for it, or keep it until all earlier places have come.

        Raises:
            GroupClosed: This is a forked child of the process in which the stream was made.
        """
        self._home.check()
        planned = PlannedReduction(self._names[place], self._round, tensor, op)
        with self._lock:
            if self._next == len(self._names):
                self._start(planned)
            else:
                self._early[place] = planned
                while self._next in self._early:
                    self._start(self._early.pop(self._next))
                    self._next += 1
        return Work(self, planned, tensor, planned.name, self._patience_s)

    def wait(self, handle: PlannedReduction, timeout_s: float) -> None:
        """See ``work.Waiter``."""
        if handle.finished:
            return
        self._home.check()
        deadline = time.monotonic() + timeout_s
        while not handle.finished:
            left_s = deadline - time.monotonic()
            error: BaseException | None = None
            ended = False
            try:
                if self._has_started(handle, min(LOOK_S, max(left_s, 0.0))):
                    assert handle.work is not None
                    ended = handle.work.wait(min(LOOK_S, max(left_s, 1e-3)))
            except TotalReduceError as failure:
                ended, error = True, failure
            lost = self._lost()
            if not ended and lost is not None:
                ended, error = True, lost
            if ended:
                self._finish(handle, error)
            elif left_s <= 0:
                raise DeadlineExceededError(self._explain(handle, timeout_s))

    def close(self) -> None:
        """Release the library. In a forked child this does nothing: the library is the parent's."""
        if self._home.is_here:
            self._natives.close()

    def _start(self, planned: PlannedReduction) -> None:
        planned.started_at = time.monotonic()
        planned.number, self._number = self._number, self._number + 1
        planned.work = self._natives.allreduce(planned.tensor, planned.op)
        self._started.notify_all()

    def _has_started(self, planned: PlannedReduction, timeout_s: float) -> bool:
        """Wait until the reduction was started, at most so long; returns whether it was."""
        if planned.work is None:
            with self._lock:
                self._started.wait_for(lambda: planned.work is not None, timeout_s)
        return planned.work is not None

    def _finish(self, handle: PlannedReduction, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, PeerLost):
            error = find_lost_rank(error, self._lost)
        handle.error, handle.ended_at, handle.finished = error, time.monotonic(), True
        if self._reported is not None:
            self._reported(handle)
        handle.tell()

    def _explain(self, handle: PlannedReduction, timeout_s: float) -> str:
        waited = f"waited {timeout_s:g} s for {handle.name!r} of round {handle.round}"
        if handle.work is None:
            return f"{waited}, which waits for {self._names[self._next]!r}: nobody has submitted that on this rank"
        return f"{waited}: it was started; another rank is late, or does not take part in this round"
