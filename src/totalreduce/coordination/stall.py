"""Finds out which ranks keep others waiting: a rank whose operation is late asks all other ranks about it.

A rank that is asked about an operation which it has not submitted learns that it keeps another rank waiting. So every
rank reports a stall, also a rank that is not blocked itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.coordination.messages import MALFORMED
from totalreduce.coordination.requests import Request
from totalreduce.foundation.errors import ProtocolError, StallError

__all__ = ["Stall", "StallInspector", "WaitingOperation"]

#: Seconds to wait for answers.
_ANSWER_S = 1.0
#: Names in one question at most. If more operations are late, they have a common cause.
_NAMES_MAX = 64


@dataclass(slots=True)
class WaitingOperation:
    """An operation that this rank has submitted and on which the ranks have not agreed."""

    request: Request  #: The description that the other ranks get.
    since: float  #: Time of the submission.
    where: object  #: The line of the program, as ``str`` shows it.


@dataclass(frozen=True, slots=True)
class Stall:
    """A report of an operation that is late."""

    tensor: str  #: The name of the operation.
    waited_s: float  #: Seconds since this rank, or the rank that asks, has submitted it.
    missing: tuple[int, ...]  #: Ranks that have not submitted it.
    silent: tuple[int, ...]  #: Ranks that have not answered.
    where: str  #: The line of the program that submitted it.

    def error(self) -> StallError:
        """Return the exception that ends the agreement."""
        return StallError(self.tensor, self.missing or self.silent, self.waited_s, self.where)

    def __str__(self) -> str:
        """Return one sentence for the log."""
        parts = [f"tensor {self.tensor!r} has been waiting for {self.waited_s:.1f} s"]
        if self.missing:
            parts.append(f"not submitted by rank(s) {', '.join(map(str, self.missing))}")
        if self.silent:
            parts.append(f"no answer from rank(s) {', '.join(map(str, self.silent))}")
        if self.where:
            parts.append(f"submitted at {self.where}")
        return "; ".join(parts)

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready form."""
        return {
            "tensor": self.tensor,
            "waited_s": self.waited_s,
            "missing": list(self.missing),
            "silent": list(self.silent),
            "where": self.where,
        }


@dataclass(slots=True)
class _Inquiry:
    """A question to all other ranks."""

    asked_at: float  #: Time of the question.
    names: list[str]  #: The late operations.
    answered: set[int] = field(default_factory=set)  #: Ranks that have answered.
    submitted: dict[str, set[int]] = field(default_factory=dict)  #: By name: ranks that have submitted the operation.


class StallInspector:
    """Decides when to ask, and reads the answers. The negotiator sends questions and answers."""

    def __init__(self, rank: int, world_size: int, config: CoordinationConfig) -> None:
        self._rank, self._world_size = rank, world_size
        self._warning_s, self._abort_s = config.stall_warning_s, config.stall_abort_s
        self._inquiry: _Inquiry | None = None
        self._next_question = 0.0
        #: By name: the ranks that were missing, and the silent ones, when this rank asked last.
        self._missing: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        #: Operations that another rank waits for, and this one has not submitted.
        self._late_here: dict[str, Stall] = {}

    def next_due(self, waiting: Mapping[str, WaitingOperation]) -> float | None:
        """Return the time at which there may be something to do."""
        # The operations wait in the order of submission, so the first one is the oldest.
        oldest = next((entry.since for entry in waiting.values()), None)
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

    def questions(self, waiting: Iterable[WaitingOperation], now: float) -> list[list[Any]]:
        """Return a question for the other ranks: late operations with their times in seconds; usually none."""
        if self._warning_s <= 0 or self._inquiry is not None or now < self._next_question:
            return []
        late = [entry for entry in waiting if now >= entry.since + self._warning_s][:_NAMES_MAX]
        if not late:
            return []
        # The next question comes after twice the time, because a log must not fill with one stall; but in time for the
        # error that ends the agreement to name the missing ranks.
        self._next_question = now + max(self._warning_s, now - late[0].since)
        last = late[0].since + self._abort_s - 2 * _ANSWER_S
        if self._abort_s > 0 and now < last:
            self._next_question = min(self._next_question, last)
        self._inquiry = _Inquiry(now, [entry.request.name for entry in late])
        return [[entry.request.name, round(now - entry.since, 3), str(entry.where)] for entry in late]

    def answer(self, peer: int, question: Any, waiting: Mapping[str, WaitingOperation], *, joined: bool) -> list[str]:
        """Return the names of a peer's question that this rank has submitted, and note the others for a report."""
        try:
            entries = [(str(name), float(waited_s), str(where)) for name, waited_s, where in question][:_NAMES_MAX]
        except MALFORMED as cause:
            raise ProtocolError(f"rank {peer} asks what no correct peer asks") from cause
        for name, waited_s, where in entries:
            if name not in waiting and not joined:
                self._late_here.setdefault(name, Stall(name, waited_s, (self._rank,), (), where))
        return [name for name, _, _ in entries if name in waiting]

    def receive_answer(self, peer: int, names: Any, now: float) -> None:
        """Note a peer's answer."""
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ProtocolError(f"rank {peer} tells what no correct peer tells")
        if self._inquiry is None:
            return
        self._inquiry.answered.add(peer)
        for name in set(names).intersection(self._inquiry.names):
            self._inquiry.submitted.setdefault(name, set()).add(peer)
        if len(self._inquiry.answered) == self._world_size - 1:
            self._inquiry.asked_at = now - _ANSWER_S

    def take_reports(self, waiting: Mapping[str, WaitingOperation], now: float, joined: tuple[int, ...]) -> list[Stall]:
        """Return reports, when all answers have come or enough time has passed."""
        reports = list(self._late_here.values())
        self._late_here.clear()
        inquiry = self._inquiry
        if inquiry is None or now < inquiry.asked_at + _ANSWER_S:
            return reports
        self._inquiry = None
        self._missing.clear()
        others = set(range(self._world_size)) - {self._rank} - set(joined)
        for name in inquiry.names:
            if name in waiting:
                answered = inquiry.answered & others
                missing = answered - inquiry.submitted.get(name, set())
                self._missing[name] = tuple(sorted(missing)), tuple(sorted(others - answered))
                reports.append(self.report(waiting[name], now, joined))
        return reports

    def expired(self, waiting: Iterable[WaitingOperation], now: float) -> WaitingOperation | None:
        """Return an operation that has waited so long that the agreement ends; ``None`` if there is none."""
        if self._abort_s <= 0:
            return None
        return next((entry for entry in waiting if now >= entry.since + self._abort_s), None)

    def report(self, operation: WaitingOperation, now: float, joined: tuple[int, ...]) -> Stall:
        """Return a report of a late operation."""
        others = tuple(rank for rank in range(self._world_size) if rank != self._rank and rank not in joined)
        missing, silent = self._missing.get(operation.request.name, ((), others))
        return Stall(operation.request.name, now - operation.since, missing, silent, str(operation.where))
