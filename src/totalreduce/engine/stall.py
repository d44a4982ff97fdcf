"""The stall watch: who has not submitted what.

No rank sees more than its neighbours, so a rank whose operation is late asks every peer "have you submitted this?" and
makes one report out of the answers. A peer that is asked about an operation it has never submitted learns in the same
moment that it keeps somebody waiting, and reports too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from totalreduce.engine.operation import Operation

__all__ = ["StallReport", "StallWatch"]

#: How long answers are waited for before the report is made without them.
_ANSWER_S = 1.0
#: About so many late operations the peers are asked in one round, at most; the others' turn is in the next one.
_LATE_MAX = 64

_Key = tuple[int, int]


@dataclass(slots=True)
class _Inquiry:
    """Answers collected so far about one operation."""

    asked_at: float
    warn: bool
    answers: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)

    def answered(self, peer: int, *, submitted: bool, progress: str) -> None:
        """Note one answer."""
        self.answers[peer] = progress
        if not submitted and peer not in self.missing:
            self.missing.append(peer)


@dataclass(frozen=True, slots=True)
class StallReport:
    """One operation that is late.

    Attributes:
        tensor: Name of the operation.
        iteration: How often the name had been submitted before.
        waited_s: Seconds since it was submitted here; where this rank is the late one, since the asking rank did.
        missing: Ranks that never submitted it.
        progress: What each rank that has submitted it says about its progress.
        silent: Ranks that did not answer.
    """

    tensor: str
    iteration: int
    waited_s: float
    missing: tuple[int, ...]
    progress: dict[int, str]
    silent: tuple[int, ...]

    def __str__(self) -> str:
        """One sentence for the log."""
        parts = [f"tensor {self.tensor!r} (iteration {self.iteration}) has been pending for {self.waited_s:.1f} s"]
        if self.missing:
            parts.append(f"never submitted by rank(s) {', '.join(map(str, self.missing))}")
        if self.silent:
            parts.append(f"no answer from rank(s) {', '.join(map(str, self.silent))}")
        if self.progress:
            parts.append("; ".join(f"rank {rank}: {text}" for rank, text in sorted(self.progress.items())))
        return "; ".join(parts)

    def as_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {
            "tensor": self.tensor,
            "iteration": self.iteration,
            "waited_s": self.waited_s,
            "missing": list(self.missing),
            "silent": list(self.silent),
            "progress": {str(rank): text for rank, text in self.progress.items()},
        }


class StallWatch:
    """Who asks whom, when, and what came of it. The engine carries questions and answers."""

    def __init__(self, rank: int, warning_s: float) -> None:
        """``warning_s``: an operation is late after so many seconds; 0: never."""
        self._rank, self._warning_s = rank, warning_s
        self._inquiries: dict[_Key, _Inquiry] = {}
        self._next_warning: dict[_Key, float] = {}

    def late(self, active: Iterable[Operation], now: float) -> list[Operation]:
        """Operations about which the peers are to be asked now."""
        if self._warning_s <= 0:
            return []
        found = []
        for operation in active:
            if now >= self._next_warning.get(operation.key, operation.submitted_at + self._warning_s):
                # The next warning comes after twice the time: a log must not fill with one stall.
                self._next_warning[operation.key] = now + max(self._warning_s, now - operation.submitted_at)
                found.append(operation)
                if len(found) == _LATE_MAX:
                    break
        return found

    def begin(self, key: _Key, now: float, *, warn: bool) -> bool:
        """Note that the peers are asked; ``False``: they have been. ``warn``: a report is made of the answers."""
        inquiry = self._inquiries.get(key)
        if inquiry is not None:
            inquiry.warn = inquiry.warn or warn
            return False
        self._inquiries[key] = _Inquiry(now, warn)
        return True

    def answered(self, key: _Key, peer: int, *, submitted: bool, progress: str) -> None:
        """A peer has answered."""
        inquiry = self._inquiries.get(key)
        if inquiry is not None:
            inquiry.answered(peer, submitted=submitted, progress=progress)

    def concluded(self, active: Mapping[_Key, Operation], now: float) -> list[StallReport]:
        """Reports of inquiries that have all answers, or have waited long enough for them."""
        reports = []
        for key, inquiry in list(self._inquiries.items()):
            operation = active[key]
            complete = len(inquiry.answers) == len(operation.ranks) - 1 or now >= inquiry.asked_at + _ANSWER_S
            if complete and inquiry.warn:
                del self._inquiries[key]
                reports.append(self._report(operation, inquiry, now))
            elif now >= inquiry.asked_at + 10 * _ANSWER_S:
                del self._inquiries[key]  # kept a while for ``explain``
        return reports

    def explain(self, operation: Operation, now: float) -> str:
        """What is known about why an operation is not done."""
        inquiry = self._inquiries.get(operation.key)
        if inquiry is not None and inquiry.answers:
            return str(self._report(operation, inquiry, now))
        return f"{operation.progress()}; no answer from the other ranks yet"

    def forget(self, key: _Key) -> None:
        """The operation has finished."""
        self._next_warning.pop(key, None)
        self._inquiries.pop(key, None)

    def _report(self, operation: Operation, inquiry: _Inquiry, now: float) -> StallReport:
        others = set(operation.ranks) - {self._rank} - set(inquiry.answers)
        progress = {rank: text for rank, text in inquiry.answers.items() if rank not in inquiry.missing}
        progress[self._rank] = operation.progress()
        return StallReport(
            operation.name,
            operation.key[1],
            now - operation.submitted_at,
            tuple(sorted(inquiry.missing)),
            progress,
            tuple(sorted(others)),
        )
