"""Reductions in a planned order, for libraries that need one order: the ranks agree once and not in every step."""

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
from totalreduce.runner.handle import call_all
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["NativeStream", "PlannedReduction", "PlannedReductions"]


class PlannedReductions(Protocol):
    """Reduces the same tensors in every round. Every rank submits each tensor once in each round.

    After the last tensor of a round, the ranks may submit further reductions in one order before they call ``begin``.
    """

    def begin(self) -> None:
        """Begin the next round. The reductions of the last round have ended."""

    def submit(self, index: int, tensor: torch.Tensor, *, op: ReduceOp, priority: int) -> Work:
        """Reduce the tensor with this index in the plan, in place. The indices may come in any order."""

    def close(self) -> None:
        """End the stream: there is no next round."""


@final
class PlannedReduction:
    """One reduction of a round (see ``work.PendingOperation``). A thread that waits for the result completes it."""

    operation = None

    def __init__(self, name: str, round_: int, tensor: torch.Tensor, op: ReduceOp) -> None:
        self.name, self.round, self.tensor, self.op = name, round_, tensor, op  #: Rounds are numbered from 1.
        self.submitted_at = time.monotonic()  #: On the engine's clock, as the other times.
        #: When the library was called: all earlier reductions of the plan were started before.
        self.started_at = 0.0
        self.ended_at = 0.0  #: When a thread saw that the library had ended.
        self.number = -1  #: The number of reductions that the stream had started before.
        self.work: NativeWork | None = None
        self.finished = False
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """Whether the library has ended the reduction."""
        return self.finished or (self.work is not None and self.work.done())

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have the thread that completes the reduction call ``callback``."""
        self._callbacks.append(callback)
        if self.finished:
            self.call_back()

    def call_back(self) -> None:
        """Call the callbacks of ``on_done``."""
        call_all(self._callbacks)


@final
@never_compiled
class NativeStream:
    """``PlannedReductions`` by a native library: reductions start in the order of the plan.

    Args:
        natives: The library, for this stream only; closed with the stream.
        names: The names of the operations, in the order of the plan.
        lost: A function that returns the loss of a rank, or ``None``.
        patience_s: Time-out in seconds of waits that name none.
        reported: A function that is called with each reduction that has ended.
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
        self._started = threading.Condition(self._lock)  #: Notified when a reduction was started.
        self._early: dict[int, PlannedReduction] = {}
        self._next = self._round = self._number = 0

    def begin(self) -> None:
        """Begin the next round."""
        self._home.check()
        with self._lock:
            assert not self._early, "every tensor of the last round was submitted"
            self._next = 0
            self._round += 1

    def submit(self, index: int, tensor: torch.Tensor, *, op: ReduceOp, priority: int) -> Work:  # noqa: ARG002
        """Start a reduction and those that waited for it, or keep it until all earlier tensors of the plan have come.

        Raises:
            GroupClosed: This is a forked child of the process in which the stream was made.
        """
        self._home.check()
        planned = PlannedReduction(self._names[index], self._round, tensor, op)
        with self._lock:
            if self._next == len(self._names):
                self._start(planned)
            else:
                self._early[index] = planned
                while self._next in self._early:
                    self._start(self._early.pop(self._next))
                    self._next += 1
        return Work(self, planned, tensor, planned.name, self._patience_s)

    def wait(self, handle: PlannedReduction, timeout_s: float) -> None:
        """Wait until a reduction has ended (see ``work.Waiter``)."""
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
        """Release the library. In a forked child process this does nothing: the library belongs to the parent."""
        if self._home.is_here:
            self._natives.close()

    def _start(self, planned: PlannedReduction) -> None:
        planned.started_at = time.monotonic()
        planned.number, self._number = self._number, self._number + 1
        planned.work = self._natives.allreduce(planned.tensor, planned.op)
        self._started.notify_all()

    def _has_started(self, planned: PlannedReduction, timeout_s: float) -> bool:
        """Wait until the reduction was started, at most ``timeout_s``; return whether it was."""
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
        handle.call_back()

    def _explain(self, handle: PlannedReduction, timeout_s: float) -> str:
        waited = f"waited {timeout_s:g} s for {handle.name!r} of round {handle.round}"
        if handle.work is None:
            return f"{waited}, which waits for {self._names[self._next]!r}: nobody has submitted that on this rank"
        return f"{waited}: it was started; another rank is late, or does not take part in this round"
