"""The steps of the training that uses an engine, and how long each of its threads was blocked in waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

__all__ = ["Figure", "Meter", "StepTotals"]

#: Threads whose waits are known, at most. Python uses the ids of ended threads again, so few programs have so many.
_THREADS_MAX = 1024

#: A figure of something that belongs to a training: a number or a name.
Figure = int | float | str


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What was counted of the steps of a training."""

    steps: int = 0  #: The number of steps that have ended.
    #: The number of these steps whose begin is known: all but the first of each thread that trains.
    timed_steps: int = 0
    step_s: float = 0.0  #: The seconds of all timed steps, each from the end of the step before it.
    #: The part of these seconds in which the thread that trains was blocked and waited for other ranks.
    exposed_s: float = 0.0
    ended_at: float = 0.0  #: When the last step has ended, by ``time.monotonic``.


@final
class Meter:
    """Counts steps and waits. Any thread may read it; waits and ends of steps are noted by the threads that train."""

    __slots__ = ("_blocked_s", "_clock", "_last", "sources", "totals", "watchers")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds."""
        self._clock = clock
        self.totals = StepTotals()  #: What was counted so far.
        #: By name: functions that return figures of what belongs to the training, such as a sparse method. They are
        #: called about once a second, by another thread than the one that trains.
        self.sources: dict[str, Callable[[], Mapping[str, Figure]]] = {}
        #: Are called with the totals when a step has ended, in the thread that trains.
        self.watchers: list[Callable[[StepTotals], None]] = []
        self._blocked_s: dict[int, float] = {}  #: By thread.
        self._last: tuple[int, float, float] | None = None  #: The last end of a step: thread, time, blocked seconds.

    def blocked(self, seconds: float) -> None:
        """Note that the calling thread was blocked for so many seconds."""
        thread = threading.get_ident()
        if len(self._blocked_s) >= _THREADS_MAX and thread not in self._blocked_s:
            self._blocked_s.clear()
        self._blocked_s[thread] = self._blocked_s.get(thread, 0.0) + seconds

    def end_step(self, *, elsewhere_s: float = 0.0) -> None:
        """Note that a step of the training has ended in the calling thread.

        Args:
            elsewhere_s: How long the training has waited for other ranks in all its steps so far, in waits that
                ``blocked`` has not noted.
        """
        now, thread, totals = self._clock(), threading.get_ident(), self.totals
        blocked_s = self._blocked_s.get(thread, 0.0) + elsewhere_s
        timed, step_s, exposed_s = 0, 0.0, 0.0
        if self._last is not None and self._last[0] == thread:
            timed, step_s = 1, now - self._last[1]
            exposed_s = min(step_s, max(0.0, blocked_s - self._last[2]))
        self._last = (thread, now, blocked_s)
        self.totals = StepTotals(
            totals.steps + 1, totals.timed_steps + timed, totals.step_s + step_s, totals.exposed_s + exposed_s, now
        )
        for watcher in list(self.watchers):
            watcher(self.totals)

    def go_on(self, other: Meter) -> None:
        """Go on with what another meter has counted: its engine belongs to an earlier group of the same training."""
        self.totals, self.sources, self.watchers = other.totals, other.sources, other.watchers

    def begin_at(self, steps: int) -> None:
        """Set the number of steps that the training has taken. The next step is not timed."""
        self.totals, self._last = replace(self.totals, steps=steps), None
