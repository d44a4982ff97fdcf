"""The handle of an operation in flight."""

from __future__ import annotations

from typing import final

import torch

from totalreduce.engine.runner import Handle, Runner

__all__ = ["Work"]


@final
class Work:
    """What ``Group.allreduce`` and its siblings return.

    Keep the tensor's memory untouched until ``done()`` or ``wait()`` says so.
    """

    __slots__ = ("_handle", "_runner", "_tensor", "_timeout_s", "name")

    def __init__(self, runner: Runner, handle: Handle, tensor: torch.Tensor, name: str, timeout_s: float) -> None:
        """Made by ``Group``."""
        self._runner, self._handle, self._tensor = runner, handle, tensor
        self._timeout_s = timeout_s
        self.name = name

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._handle.error else "done"
        return f"<Work {self.name!r} {state}>"

    def done(self) -> bool:
        """Whether the operation has finished, well or not ("payload ready?"). Never blocks."""
        return self._handle.event.is_set()

    def exception(self) -> BaseException | None:
        """The error of a finished operation; ``None`` if it went well or is pending."""
        return self._handle.error

    def wait(self, timeout_s: float | None = None) -> torch.Tensor:
        """Block until the result is in the tensor ("payload needed") and return the tensor.

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
        return self._tensor


def _fresh(error: BaseException) -> BaseException:
    """The error without the traceback of an earlier ``wait`` (which would keep that caller's frames alive)."""
    return error.with_traceback(None)
