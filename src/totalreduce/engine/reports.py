"""Stall reports that wait to be logged: those of the engine, and those of protocols that live beside it."""

from __future__ import annotations

from typing import Final, Protocol

from totalreduce.engine.counters import Counters
from totalreduce.foundation.observer import Observer

__all__ = ["Report", "Reports"]

#: Reports that nobody has fetched, at most; later ones are counted and shown to the observers only.
_REPORTS_MAX: Final = 1000


class Report(Protocol):
    """A report that names the ranks that keep others waiting. Its ``str`` is a line for the log."""

    def as_dict(self) -> dict[str, object]:
        """Return the report in a form that JSON can hold."""


class Reports:
    """Reports that were made and not fetched."""

    __slots__ = ("_counters", "_observers", "_waiting")

    def __init__(self, counters: Counters, observers: list[Observer]) -> None:
        """``observers`` may be added to later."""
        self._counters, self._observers = counters, observers
        self._waiting: list[Report] = []

    def publish(self, report: Report, now: float) -> None:
        """Show a report to the observers, and keep it until it is fetched."""
        self._counters.stalls += 1
        if len(self._waiting) < _REPORTS_MAX:
            self._waiting.append(report)
        for observer in self._observers:
            observer.stalled(report.as_dict(), now)

    def pop(self) -> list[Report]:
        """Return the reports that were published since the last call."""
        reports, self._waiting = self._waiting, []
        return reports
