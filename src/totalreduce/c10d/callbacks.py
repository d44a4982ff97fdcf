"""Threads in which the callbacks of users run, and the deadlines of operations for which no thread waits.

The thread that finishes an operation is the one that moves messages. The callback of a future (``then``) may compute
for long, or wait for another operation, so futures are completed in threads of their own.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from typing import final

from totalreduce.foundation.forking import HomeProcess

__all__ = ["Callbacks"]

_log = logging.getLogger(__name__)

#: A callback may wait for an operation whose own callback has to run first, so one thread would not do.
_THREADS_MAX = 32
#: A thread without work ends after so long.
_IDLE_S = 10.0
#: The time between two looks at the deadlines.
_TICK_S = 0.25


@final
class Callbacks:
    """A few threads that are started and end with the work, and one that checks the deadlines."""

    def __init__(self, name: str) -> None:
        """Begin without a thread; ``name`` is a part of the threads' names."""
        self._name = name
        self._home = HomeProcess(f"the process group of {name!r}")
        self._changed = threading.Condition()
        self._queue: collections.deque[Callable[[], None]] = collections.deque()
        self._idle = 0
        self._threads = 0
        self._closed = False
        self._clock: threading.Thread | None = None
        self._deadlines: dict[int, tuple[float, Callable[[], None]]] = {}

    def run(self, function: Callable[[], None]) -> None:
        """Call ``function`` soon in another thread. Raises ``GroupClosed`` in a forked child, as ``watch`` does."""
        self._home.check()
        with self._changed:
            self._queue.append(function)
            if self._idle >= len(self._queue):
                self._changed.notify()
            elif self._threads < _THREADS_MAX:
                self._threads += 1
                threading.Thread(target=self._work, name=f"{self._name}-callbacks", daemon=True).start()

    def watch(self, key: int, deadline: float, function: Callable[[], None]) -> None:
        """Call a short ``function`` at ``deadline`` of the monotonic clock, unless ``forget`` comes first."""
        self._home.check()
        with self._changed:
            self._deadlines[key] = (deadline, function)
            if self._clock is None and not self._closed:
                self._clock = threading.Thread(target=self._look, name=f"{self._name}-deadlines", daemon=True)
                self._clock.start()

    def forget(self, key: int) -> None:
        """Undo ``watch`` with this key."""
        with self._changed:
            self._deadlines.pop(key, None)

    def close(self) -> None:
        """Let the threads end after the queued calls. In a forked child this does nothing."""
        if not self._home.is_here:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue and not self._closed:
                    self._idle += 1
                    self._changed.wait(_IDLE_S)
                    self._idle -= 1
                if not self._queue:
                    self._threads -= 1
                    return
                function = self._queue.popleft()
            try:
                function()
            except Exception:
                _log.exception("a callback failed")

    def _look(self) -> None:
        while not self._closed:
            time.sleep(_TICK_S)
            now = time.monotonic()
            with self._changed:
                due = [key for key, (deadline, _) in self._deadlines.items() if deadline <= now]
                functions = [self._deadlines.pop(key)[1] for key in due]
            for function in functions:
                function()
