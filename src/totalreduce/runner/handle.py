"""The handle of a submitted operation: the submitter waits for it, and the runner completes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self, final

from totalreduce.engine.operation import Operation

__all__ = ["Handle", "call_all"]


def call_all(callbacks: list[Callable[[], None]]) -> None:
    """Call callbacks in order and take them out of the list, from which another thread may take some, too."""
    while True:
        try:
            callback = callbacks.pop(0)
        except IndexError:
            return
        callback()


@final
class Handle:
    """A submitted operation as its submitter sees it.

    Attributes:
        done: Whether the operation has ended, well or not.
        error: The error with which it failed.
        operation: The engine's operation; ``None`` for a receive from anybody, until a message has come, and for an
            operation that the engine has not adopted (``runner.repeated``).
    """

    __slots__ = ("_callbacks", "_finish", "_gate", "_release", "done", "error", "operation")

    def __init__(self, finish: Callable[[], None] | None = None, release: Callable[[], None] | None = None) -> None:
        """Make the handle of an operation that is about to be submitted.

        ``finish`` is called when the operation has ended well; an error that it raises becomes that of the operation.
        ``release`` is called in any case, after it. Both are called in the thread that finds the end, before waiting
        threads and callbacks learn of it.
        """
        self.done = False
        self.error: BaseException | None = None
        self.operation: Operation | None = None
        self._finish, self._release = finish, release
        self._callbacks: list[Callable[[], None]] = []
        # This lock is held until the operation has ended. An Event would make three objects for every operation.
        self._gate = threading.Lock()
        self._gate.acquire()

    def complete(self, error: BaseException | None) -> None:
        """End the operation. Called once, by the runner."""
        finish, release = self._finish, self._release
        self._finish = self._release = None
        if error is None and finish is not None:
            try:
                finish()
            except Exception as failure:
                error = failure
        if release is not None:
            release()
        self.error = error
        self.done = True
        self._gate.release()
        if self._callbacks:  # a callback that is added from now on is called by the thread that adds it
            call_all(self._callbacks)

    def __enter__(self) -> Self:
        """Begin to submit the operation."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        """Release what the operation uses if it was not submitted, because of an error."""
        if kind is not None and self._release is not None:
            self._release()

    def wait(self, timeout_s: float) -> bool:
        """Block until the operation has ended, for at most ``timeout_s`` seconds; returns whether it has."""
        if not self.done and self._gate.acquire(timeout=max(0.0, timeout_s)):
            self._gate.release()
        return self.done

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called by the thread that finds the end of the operation; at once if it has ended."""
        self._callbacks.append(callback)
        if self.done:
            try:
                self._callbacks.remove(callback)
            except ValueError:
                return  # another thread is calling it
            callback()
