"""The handle of an operation in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import torch

from totalreduce.engine.operation import Operation
from totalreduce.foundation import checks
from totalreduce.foundation.types import OpKind
from totalreduce.tensors.compilation import never_compiled

__all__ = ["PendingOperation", "Waiter", "Work", "when_all_done"]


class PendingOperation(Protocol):
    """An operation in flight, carried out by the engine or by a native library."""

    @property
    def done(self) -> bool:
        """Whether it has finished, with or without an error."""

    @property
    def error(self) -> BaseException | None:
        """The error of a failed operation; ``None`` otherwise."""

    @property
    def operation(self) -> Operation | None:
        """The engine's record of it; ``None`` for an operation of a native library."""

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when it has finished."""


class Waiter(Protocol):
    """Waits for operations: the runner, or a part of ``native/``."""

    def wait(self, handle: Any, timeout_s: float) -> None:
        """Wait until it has finished.

        Raises:
            DeadlineExceededError: It has not.
        """


@final
@never_compiled
class Work:
    """The handle that ``Group.allreduce`` and the other collectives return.

    The tensor's memory must stay untouched until ``done()`` is true or ``wait()`` has returned.
    """

    __slots__ = ("_handle", "_ranks", "_result", "_timeout_s", "_waiter", "name")

    def __init__(
        self,
        waiter: Waiter,
        handle: PendingOperation,
        result: torch.Tensor | Callable[[], torch.Tensor | None] | None,
        name: str,
        timeout_s: float,
        *,
        ranks: Sequence[int] = (),
    ) -> None:
        """Made by the library. ``wait`` returns or calls ``result``; ``ranks`` are the members of the group."""
        self._waiter, self._handle, self._result = waiter, handle, result
        self._ranks, self._timeout_s = ranks, timeout_s
        self.name = name

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._handle.error else "done"
        return f"<Work {self.name!r} {state}>"

    def done(self) -> bool:
        """Whether the operation has finished, well or not ("payload ready?"). Never blocks."""
        return self._handle.done

    def exception(self) -> BaseException | None:
        """The error of a finished operation; ``None`` if it went well or is pending."""
        return self._handle.error

    @property
    def source(self) -> int | None:
        """The rank that a received message came from; ``None`` before it is known, and for collectives."""
        operation = self._handle.operation
        if operation is None or operation.signature.kind is not OpKind.SEND_RECV:
            return None
        return self._ranks.index(operation.ranks[0])

    def on_done(self, callback: Callable[[Work], None]) -> None:
        """Have ``callback(work)`` called when the operation is done, well or not; at once if it is.

        It runs in the thread that moves messages (or in the caller's): it must be short and must not wait.
        """
        self._handle.on_done(lambda: callback(self))

    def wait(self, timeout_s: float | None = None) -> torch.Tensor:
        """Block until the result is there ("payload needed") and return its tensor.

        That is the tensor which ``Group``'s method was given for the result; where it was given a list, or nothing, an
        empty tensor.

        The operation overtakes all operations for which no thread waits, here and on the other ranks.

        Args:
            timeout_s: Seconds; ``None``: the operation's or the group's time-out.

        Raises:
            ConfigurationError: ``timeout_s`` is negative, not finite, or no number.
            DeadlineExceededError: Not finished in time; it goes on, and ``wait`` may be called again.
            MismatchError: Ranks submitted different operations under this name.
            PeerLost: A rank is gone.
            GroupClosed: The group was closed meanwhile.
            TotalReduceError: The tensor was given other memory while the operation was in flight.
        """
        patience_s = self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s, or_zero=True)
        self._waiter.wait(self._handle, patience_s)
        error = self._handle.error
        if error is not None:
            raise _fresh(error)
        result = self._result() if callable(self._result) else self._result
        return result if result is not None else torch.empty(0)


def when_all_done(works: Sequence[Work], callback: Callable[[], None]) -> None:
    """Call ``callback`` when the last operation has ended, in the thread that finds its end; at once without any."""
    lock, pending = threading.Lock(), len(works)

    def one_done(_: Work) -> None:
        nonlocal pending
        with lock:
            pending -= 1
            last = pending == 0
        if last:
            callback()

    for work in works:
        work.on_done(one_done)
    if not works:
        callback()


def _fresh(error: BaseException) -> BaseException:
    """The error without the traceback of an earlier ``wait`` (which would keep that caller's frames alive)."""
    return error.with_traceback(None)
