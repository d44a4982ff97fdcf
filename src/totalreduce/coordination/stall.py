"""Who keeps whom waiting, found out beside the votes: a rank whose operation is late asks every other one.

Every rank watches what *it* waits for, and a rank that is asked about something it has not submitted learns in the same
moment that it keeps others waiting. So every rank has a report, whichever of them is blocked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.coordination.messages import MALFORMED
from totalreduce.coordination.requests import Request
from totalreduce.foundation.errors import ProtocolError, StallError

__all__ = ["Pending", "Stall", "StallInspector"]

#: How long answers are waited for.
_ANSWER_S = 1.0
#: Names in one question at most; where more are late, one cause has them all.
_NAMES_MAX = 64


@dataclass(slots=True)
class Pending:
    """An operation that this rank waits for: the request, since when, and the place in the program (as ``str``)."""

    request: Request
    since: float
    where: object


@dataclass(frozen=True, slots=True)
class Stall:
    """One operation that is late.

    Attributes:
        tensor: Its name.
        waited_s: Seconds since it was submitted here, or by the rank that asks.
        missing: Ranks that have not submitted it.
        silent: Ranks that did not say.
        where: Where it was submitted.
    """

    tensor: str
    waited_s: float
    missing: tuple[int, ...]
    silent: tuple[int, ...]
    where: str

    def error(self) -> StallError:
        """The exception that ends it."""
        return StallError(self.tensor, self.missing or self.silent, self.waited_s, self.where)

    def __str__(self) -> str:
        """One sentence for the log."""
        parts = [f"tensor {self.tensor!r} has been waiting for {self.waited_s:.1f} s"]
        if self.missing:
            parts.append(f"not submitted by rank(s) {', '.join(map(str, self.missing))}")
        if self.silent:
            parts.append(f"no answer from rank(s) {', '.join(map(str, self.silent))}")
        if self.where:
            parts.append(f"submitted at {self.where}")
        return "; ".join(parts)

    def as_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {
            "tensor": self.tensor,
            "waited_s": self.waited_s,
            "missing": list(self.missing),
            "silent": list(self.silent),
            "where": self.where,
        }


@dataclass(slots=True)
class _Inquiry:
    """Questions that are out."""

    asked_at: float
    names: list[str]
    answered: set[int] = field(default_factory=set)
    submitted: dict[str, set[int]] = field(default_factory=dict)


class StallInspector:
    """When to ask, and what came of it. The negotiator carries questions and answers."""

    def __init__(self, rank: int, world_size: int, config: CoordinationConfig) -> None:
        """Nothing is late yet."""
        self._rank, self._world_size = rank, world_size
        self._warning_s, self._abort_s = config.stall_warning_s, config.stall_abort_s
        self._inquiry: _Inquiry | None = None
        self._next_question = 0.0
        #: By name: ranks that were missing when last asked.
        self._missing: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._told_of: dict[str, Stall] = {}

    def next_due(self, pending: Mapping[str, Pending]) -> float | None:
        """When there may be something to do."""
        # Names are pending in the order of submission, so the first one is the oldest.
        oldest = next((entry.since for entry in pending.values()), None)
        if oldest is None:
            return None
        due = []
        if self._warning_s > 0:
            due.append(max(oldest + self._warning_s, self._next_question))
        if self._abort_s > 0:
            due.append(oldest + self._abort_s)
        if self._inquiry is not None:
            due.append(self._inquiry.asked_at + _ANSWER_S)
        return min(due, default=None)

    def late(self, pending: Iterable[Pending], now: float) -> list[list[Any]]:
        """Names to ask the others about, with the seconds they have waited; usually none."""
        if self._warning_s <= 0 or self._inquiry is not None or now < self._next_question:
            return []
        late = [entry for entry in pending if now >= entry.since + self._warning_s][:_NAMES_MAX]
        if not late:
            return []
        # The next question comes after twice the time: a log must not fill with one stall.
        self._next_question = now + max(self._warning_s, now - late[0].since)
        last = late[0].since + self._abort_s - 2 * _ANSWER_S
        if self._abort_s > 0 and now < last:  # but who ends it must know whom he waits for
            self._next_question = min(self._next_question, last)
        self._inquiry = _Inquiry(now, [entry.request.name for entry in late])
        return [[entry.request.name, round(now - entry.since, 3), str(entry.where)] for entry in late]

    def asked(self, peer: int, question: Any, pending: Mapping[str, Pending], *, joined: bool) -> list[str]:
        """A peer waits: which of its names are pending here? Of the others this rank has a report of its own."""
        try:
            entries = [(str(name), float(waited_s), str(where)) for name, waited_s, where in question][:_NAMES_MAX]
        except MALFORMED as cause:
            raise ProtocolError(f"rank {peer} asks what no correct peer asks") from cause
        for name, waited_s, where in entries:
            if name not in pending and not joined:
                self._told_of.setdefault(name, Stall(name, waited_s, (self._rank,), (), where))
        return [name for name, _, _ in entries if name in pending]

    def told(self, peer: int, names: Any, now: float) -> None:
        """A peer has answered."""
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ProtocolError(f"rank {peer} tells what no correct peer tells")
        if self._inquiry is None:
            return
        self._inquiry.answered.add(peer)
        for name in set(names).intersection(self._inquiry.names):
            self._inquiry.submitted.setdefault(name, set()).add(peer)
        if len(self._inquiry.answered) == self._world_size - 1:
            self._inquiry.asked_at = now - _ANSWER_S

    def concluded(self, pending: Mapping[str, Pending], now: float, joined: tuple[int, ...]) -> list[Stall]:
        """Reports, when the answers are here or have been waited for long enough."""
        reports = list(self._told_of.values())
        self._told_of.clear()
        inquiry = self._inquiry
        if inquiry is None or now < inquiry.asked_at + _ANSWER_S:
            return reports
        self._inquiry = None
        self._missing.clear()
        others = set(range(self._world_size)) - {self._rank} - set(joined)
        for name in inquiry.names:
            if name in pending:
                answered = inquiry.answered & others
                missing = answered - inquiry.submitted.get(name, set())
                self._missing[name] = tuple(sorted(missing)), tuple(sorted(others - answered))
                reports.append(self.report(pending[name], now, joined))
        return reports

    def over(self, pending: Iterable[Pending], now: float) -> Pending | None:
        """An operation that has waited too long to go on."""
        if self._abort_s <= 0:
            return None
        return next((entry for entry in pending if now >= entry.since + self._abort_s), None)

    def report(self, entry: Pending, now: float, joined: tuple[int, ...]) -> Stall:
        """What is known about an operation that is late."""
        everybody = tuple(rank for rank in range(self._world_size) if rank != self._rank and rank not in joined)
        missing, silent = self._missing.get(entry.request.name, ((), everybody))
        return Stall(entry.request.name, now - entry.since, missing, silent, str(entry.where))
