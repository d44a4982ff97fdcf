"""The handle of a submitted operation: the submitter waits for it, and the runner completes it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Protocol, final

from totalreduce.engine.operation import Operation
from totalreduce.engine.submission import Submission
from totalreduce.fastlane.lane import LaneCarriage

__all__ = ["Begun", "End", "Handle", "call_all"]


def call_all(callbacks: list[Callable[[], None]]) -> None:
    """Call callbacks in order and take them out of the list, from which another thread may take some, too."""
    while True:
        try:
            callback = callbacks.pop(0)
        except IndexError:
            return
        callback()


class End(Protocol):
    """Ends what an operation uses."""

    def __call__(self, *, well: bool) -> None:
        """``well``: the operation has ended without an error. An exception becomes the error of the operation."""


@final
class Handle:
    """A submitted operation as its submitter sees it."""

    __slots__ = ("_callbacks", "_end", "begun", "done", "error", "operation", "waits_for")

    def __init__(self, end: End | None = None, waits_for: str = "") -> None:
        """Make the handle of an operation that is about to be submitted.

        ``end`` is called once when the operation has ended, in the thread that finds the end, before waiting threads
        and callbacks learn of it.
        """
        self.done = False  #: Whether the operation has ended, well or not.
        self.error: BaseException | None = None  #: The error with which it failed.
        #: The engine's operation; ``None`` for a receive from anybody, until a message has come, and for an operation
        #: that the engine has not adopted.
        self.operation: Operation | None = None
        #: The operation, if it has begun in the fast lane and the engine does not know it.
        self.begun: Begun | None = None
        self.waits_for = waits_for  #: What it waits for while there is no operation, for messages.
        self._end = end
        self._callbacks: list[Callable[[], None]] = []

    def complete(self, error: BaseException | None) -> None:
        """End the operation. Called once, by the runner."""
        end = self._end
        self._end = self.begun = None  # the handle may live long, and must not keep the memory of tensors as long
        if end is not None:
            try:
                end(well=error is None)
            except Exception as failure:
                error = failure
        self.error = error
        self.done = True
        if self._callbacks:  # a callback that is added from now on is called by the thread that adds it
            call_all(self._callbacks)

    def wait(self, timeout_s: float) -> bool:
        """Block until the operation has ended, for at most ``timeout_s`` seconds; returns whether it has."""
        if not self.done:
            sleep = threading.Lock()
            sleep.acquire()
            self._callbacks.insert(0, sleep.release)  # first, because a callback of the program may raise an exception
            if not self.done:
                sleep.acquire(timeout=max(0.0, timeout_s))
            with contextlib.suppress(ValueError):  # ``release`` was called, and so taken out of the list
                self._callbacks.remove(sleep.release)
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


@final
class Begun:
    """An operation that has begun in the fast lane and that the engine does not know."""

    __slots__ = ("_end", "_handle", "carriage", "key", "submission")

    def __init__(self, submission: Submission, key: tuple[int, int], carriage: LaneCarriage, end: End | None) -> None:
        """``end``: what its handle calls at its end."""
        self.submission = submission  #: The operation as it was submitted.
        self.key = key
        self.carriage = carriage  #: What the fast lane keeps of it.
        self._end = end
        self._handle: Handle | None = None

    def handle(self) -> Handle:
        """Return the handle; make it when it is needed first. Called under the lock."""
        handle = self._handle
        if handle is None:
            handle = self._handle = Handle(self._end)
            handle.begun = self
        return handle
