"""Threads in which the callbacks of users run, and the deadlines of operations for which no thread waits.

The thread that finishes an operation is the one that moves messages. The callback of a future (``then``) may compute
for long, or wait for another operation, so futures are completed in threads of their own. A callback that waits keeps
its thread, and what it waits for may need another one: if all threads are busy for a moment, more of them are started.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import final

from totalreduce.foundation.forking import HomeProcess
from totalreduce.groups.calling import Unknown, surroundings

__all__ = ["Callbacks"]

_log = logging.getLogger(__name__)

#: Threads that are started at once.
_THREADS = 32
#: If none of them has taken a call for so long, all of them may wait for operations whose futures complete only when a
#: queued call has run, or whose counterparts on other ranks are queued there: every queued call gets a thread.
_BUSY_S = 0.02
#: Callbacks that may wait at the same time.
_THREADS_MAX = 2048
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
        self._taken = 0  #: Calls that threads have taken from the queue.
        self._busy = threading.Event()  #: Set when calls are queued for which no thread was started.
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
                return
            must_wait = self._threads >= _THREADS
            if must_wait:
                self._start_clock()
        if must_wait:
            self._busy.set()
        else:
            self._start_thread()

    def watch(self, key: int, deadline: float, function: Callable[[], None]) -> None:
        """Call a short ``function`` at ``deadline`` of the monotonic clock, unless ``forget`` comes first."""
        self._home.check()
        with self._changed:
            self._deadlines[key] = (deadline, function)
            self._start_clock()

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

    def _start_thread(self) -> None:
        with self._changed:
            self._threads += 1
        try:
            threading.Thread(target=self._work, name=f"{self._name}-callbacks", daemon=True).start()
        except RuntimeError:  # the system allows no more threads: the clock tries again
            with self._changed:
                self._threads -= 1
                self._start_clock()
            self._busy.set()

    def _start_clock(self) -> None:
        if self._clock is None and not self._closed:
            clock = threading.Thread(target=self._look, name=f"{self._name}-deadlines", daemon=True)
            with suppress(RuntimeError):  # the next call tries again
                clock.start()
                self._clock = clock

    def _work(self) -> None:
        # A callback that runs here and is not followed (``futures``) runs at another time on each rank.
        surroundings.set(Unknown())
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
                self._taken += 1
            try:
                function()
            except Exception:
                _log.exception("a callback failed")

    def _look(self) -> None:
        taken = 0
        while not self._closed:
            if self._busy.wait(_TICK_S):
                time.sleep(_BUSY_S)
            now = time.monotonic()
            with self._changed:
                due = [key for key, (deadline, _) in self._deadlines.items() if deadline <= now]
                functions = [self._deadlines.pop(key)[1] for key in due]
                wanted = len(self._queue) if self._taken == taken else 0
                wanted = min(wanted, _THREADS_MAX - self._threads)
                taken = self._taken
                if not self._queue:
                    self._busy.clear()
            for _ in range(wanted):
                self._start_thread()
            for function in functions:
                function()
