"""The handle of an operation in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

import torch

from totalreduce.engine.runner import Handle, Runner
from totalreduce.foundation.types import OpKind

if TYPE_CHECKING:
    from totalreduce.groups.group import Group

__all__ = ["Work"]


@final
class Work:
    """What ``Group.allreduce`` and its siblings return.

    Keep the tensor's memory untouched until ``done()`` or ``wait()`` says so.
    """

    __slots__ = ("_group", "_handle", "_result", "_runner", "_timeout_s", "name")

    def __init__(
        self, group: Group, runner: Runner, handle: Handle, result: torch.Tensor | None, name: str, timeout_s: float
    ) -> None:
        """Made by ``Group``."""
        self._group, self._runner, self._handle, self._result = group, runner, handle, result
        self._timeout_s = timeout_s
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
        return self._group.ranks.index(operation.ranks[0])

    def on_done(self, callback: Callable[[Work], None]) -> None:
        """Have ``callback(work)`` called when the operation is done, well or not; at once if it is.

        It runs in the thread that moves messages (or in the caller's): it must be short and must not wait.
        """
        self._handle.on_done(lambda: callback(self))

    def wait(self, timeout_s: float | None = None) -> torch.Tensor:
        """Block until the result is there ("payload needed") and return its tensor.

        That is the tensor which ``Group``'s method was given for the result; where it was given a list, or nothing, an
        empty tensor.

        The operation overtakes everything nobody waits for, here and on the other ranks.

        Args:
            timeout_s: Seconds; ``None``: the operation's or the group's time-out.

        Raises:
            DeadlineExceededError: Not finished in time; it goes on, and ``wait`` may be called again.
            MismatchError: Ranks submitted different operations under this name.
            PeerLost: A rank is gone.
            GroupClosed: The group was closed meanwhile.
        """
        self._runner.wait(self._handle, self._timeout_s if timeout_s is None else timeout_s)
        error = self._handle.error
        if error is not None:
            raise _fresh(error)
        return self._result if self._result is not None else torch.empty(0)


def _fresh(error: BaseException) -> BaseException:
    """The error without the traceback of an earlier ``wait`` (which would keep that caller's frames alive)."""
    return error.with_traceback(None)
