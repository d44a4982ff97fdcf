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
from totalreduce.tensors.staging import StagedHandle

__all__ = ["PendingOperation", "Waiter", "Work", "host_copy_of", "operation_of", "when_all_done"]


class PendingOperation(Protocol):
    """An operation in flight of the engine or of a native library."""

    @property
    def done(self) -> bool:
        """Whether the operation has ended, with or without an error."""

    @property
    def error(self) -> BaseException | None:
        """The error of a failed operation; ``None`` otherwise."""

    @property
    def operation(self) -> Operation | None:
        """The engine's record of the operation; ``None`` for an operation of a native library."""

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when the operation has ended."""


class Waiter(Protocol):
    """Waits for operations: the runner, or a part of ``native/``."""

    def wait(self, handle: Any, timeout_s: float) -> None:
        """Wait until the operation has ended. Raises ``DeadlineExceededError``: it has not ended in time."""


@final
@never_compiled
class Work:
    """The handle that ``Group.allreduce`` and the other collectives return.

    The program must not use the tensor's memory before ``done()`` is true or ``wait()`` has returned.
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
        """Make the handle. ``wait`` returns ``result`` or calls it; ``ranks`` are the members of the group."""
        self._waiter, self._handle, self._result = waiter, handle, result
        self._ranks, self._timeout_s = ranks, timeout_s
        self.name = name

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._handle.error else "done"
        return f"<Work {self.name!r} {state}>"

    def done(self) -> bool:
        """Return whether the operation has ended, with or without an error. Never blocks."""
        return self._handle.done

    def exception(self) -> BaseException | None:
        """Return the error of an operation that has failed; ``None`` if it went well or is pending."""
        return self._handle.error

    @property
    def source(self) -> int | None:
        """The rank that has sent a received message; ``None`` before it is known, and for collectives."""
        operation = self._handle.operation
        if operation is None or operation.signature.kind is not OpKind.SEND_RECV:
            return None
        return self._ranks.index(operation.ranks[0])

    def on_done(self, callback: Callable[[Work], None]) -> None:
        """Have ``callback(work)`` called when the operation has ended, or at once if it has.

        The thread that moves messages, or the caller's, runs it. So it must be short and must not wait.
        """
        self._handle.on_done(lambda: callback(self))

    def wait(self, timeout_s: float | None = None) -> torch.Tensor:
        """Block until the result is there, and return its tensor.

        This is the tensor that the program has passed for the result. If it has passed a list or nothing, it is an
        empty tensor. Meanwhile the operation overtakes operations for which no thread waits, here and on the other
        ranks.

        Args:
            timeout_s: Seconds; ``None``: the time-out of the operation or of the group.

        Raises:
            ConfigurationError: ``timeout_s`` is negative, not finite, or no number.
            DeadlineExceededError: The result is not there in time. The operation goes on, and ``wait`` may be called
                again.
            MismatchError: Ranks submitted different operations under this name.
            PeerLost: A rank is lost.
            GroupClosed: The group was closed meanwhile.
            TotalReduceError: The program gave the tensor other memory while the operation was in flight.
        """
        patience_s = self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s, or_zero=True)
        self._waiter.wait(self._handle, patience_s)
        error = self._handle.error
        if error is not None:
            raise error.with_traceback(None)  # an earlier traceback would keep the frames of its caller alive
        result = self._result() if callable(self._result) else self._result
        return result if result is not None else torch.empty(0, dtype=torch.float32, device="cpu")


def operation_of(work: Work) -> Operation | None:
    """Return the engine's operation of a handle; ``None`` before it is known, and for a native library."""
    return work._handle.operation


def host_copy_of(work: Work) -> torch.Tensor | None:
    """Return the host memory from which the result of one tensor on an accelerator is copied, after ``wait``.

    ``None``: there is none. The next operation may overwrite it.
    """
    handle = work._handle
    return handle.tensors.first if isinstance(handle, StagedHandle) and handle.tensors is not None else None


def when_all_done(works: Sequence[Work], callback: Callable[[], None], *, or_failed: bool = False) -> None:
    """Call ``callback`` when the last operation has ended, in the thread that finds its end; at once without any.

    With ``or_failed`` also when the first one has failed: others may then never end. It is called once in any case.
    """
    lock, pending = threading.Lock(), len(works)

    def one_done(work: Work) -> None:
        nonlocal pending
        with lock:
            if not pending:
                return
            pending = 0 if or_failed and work.exception() is not None else pending - 1
            is_last = pending == 0
        if is_last:
            callback()

    for work in works:
        work.on_done(one_done)
    if not works:
        callback()
