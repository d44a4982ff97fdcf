"""The stall watch: it finds out which ranks have not submitted an operation that others wait for.

A rank hears only from its neighbours in a schedule. So a rank whose operation is late asks every peer whether it has
submitted the operation (STATUS_REQUEST), and makes one report of the answers (STATUS_REPLY). A peer that has not
submitted the operation learns from the question that it keeps the other rank waiting, and makes a report, too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from totalreduce.engine.control import MessageFacts, StatusReply, StatusRequest
from totalreduce.engine.members import Members
from totalreduce.engine.operation import Operation
from totalreduce.engine.outbox import Outbox
from totalreduce.engine.reports import Reports
from totalreduce.engine.signatures import SignatureExchange
from totalreduce.engine.table import OperationTable
from totalreduce.foundation.call_names import in_words
from totalreduce.foundation.header import Frame
from totalreduce.foundation.types import OpKind

__all__ = ["StallReport", "StallWatch"]

#: The seconds after which the report is made without the answers that have not come.
_ANSWER_S = 1.0
#: The number of late operations about which the peers are asked in one call of ``tick``; the others follow later.
_LATE_MAX = 64
#: Of operations in flight, so many are watched, the oldest ones: the look at them takes 0.1 ms.
_WATCHED_MAX = 1024

_Key = tuple[int, int]


@dataclass(slots=True)
class _Inquiry:
    """The answers about one operation that have come so far."""

    asked_at: float
    warn: bool
    answers: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)

    def answered(self, peer: int, *, submitted: bool, progress: str) -> None:
        """Note the answer of a peer."""
        self.answers[peer] = progress
        if not submitted and peer not in self.missing:
            self.missing.append(peer)


@dataclass(frozen=True, slots=True)
class StallReport:
    """One operation that is late.

    Attributes:
        tensor: The name of the operation.
        iteration: How often the name had been submitted before.
        waited_s: The seconds since the operation was submitted here, or, if this rank is the late one, since the
            asking rank submitted it.
        missing: The ranks that have not submitted it.
        progress: By rank that has submitted it: its progress in words.
        silent: The ranks that have not answered.
        op_id: The id of the operation.
        message: What is sent, if it is a message between two ranks.
    """

    tensor: str
    iteration: int
    waited_s: float
    missing: tuple[int, ...]
    progress: dict[int, str]
    silent: tuple[int, ...]
    op_id: int = 0
    message: MessageFacts | None = None

    def __str__(self) -> str:
        """Return a sentence for the log."""
        parts = [f"{self._subject()} has been pending for {self.waited_s:.1f} s"]
        if self.message is not None:
            parts += [self.message.missing(rank) for rank in self.missing]
        elif self.missing:
            parts.append(f"never submitted by rank(s) {', '.join(map(str, self.missing))}")
        if self.silent:
            parts.append(f"no answer from rank(s) {', '.join(map(str, self.silent))}")
        if self.progress:
            parts.append("; ".join(f"rank {rank}: {text}" for rank, text in sorted(self.progress.items())))
        return "; ".join(parts)

    def _subject(self) -> str:
        words = in_words(self.tensor)
        if self.message is not None:
            after = f", after {self.iteration} earlier ones" if self.iteration else ""
            return f"{words} ({self.message.size}{after})"
        return f"{words} (iteration {self.iteration})" if words != self.tensor else words

    def as_dict(self) -> dict[str, object]:
        """Return the report in a form that JSON can hold."""
        message = {} if self.message is None else {"message": self.message._asdict()}
        return {
            **message,
            "tensor": self.tensor,
            "iteration": self.iteration,
            "waited_s": self.waited_s,
            "missing": list(self.missing),
            "silent": list(self.silent),
            "progress": {str(rank): text for rank, text in self.progress.items()},
        }


class StallWatch:
    """Asks the peers about operations that are late, answers their questions, and publishes reports."""

    __slots__ = (
        "_inquiries",
        "_members",
        "_next_warning",
        "_outbox",
        "_rank",
        "_reports",
        "_signatures",
        "_table",
        "_warning_s",
    )

    def __init__(
        self,
        rank: int,
        warning_s: float,
        table: OperationTable,
        outbox: Outbox,
        members: Members,
        signatures: SignatureExchange,
        reports: Reports,
    ) -> None:
        """``warning_s``: an operation is late after so many seconds; 0: never."""
        self._rank, self._warning_s, self._table = rank, warning_s, table
        self._outbox, self._members, self._signatures, self._reports = outbox, members, signatures, reports
        self._inquiries: dict[_Key, _Inquiry] = {}
        self._next_warning: dict[_Key, float] = {}
        outbox.writers[Frame.STATUS_REPLY] = self._write_reply

    def tick(self, now: float) -> None:
        """Ask about operations that have become late, and report those whose answers are there."""
        for operation in self._late(now):
            self.inquire(operation, now, warn=True)
        for report in self._concluded(now):
            self._reports.publish(report, now)

    def inquire(self, operation: Operation, now: float, *, warn: bool = False) -> None:
        """Ask every peer whether it has submitted the operation; ``warn``: publish a report of the answers."""
        key = operation.key
        inquiry = self._inquiries.get(key)
        if inquiry is not None:  # the peers have been asked
            inquiry.warn = inquiry.warn or warn
            return
        self._inquiries[key] = _Inquiry(now, warn)
        self._signatures.describe_late([operation])
        body = StatusRequest(operation.name, now - operation.submitted_at, _message_facts(operation)).encode()
        for peer in operation.ranks:
            # A departed rank, too: if its GOODBYE cannot come, the transport reports that it is not reachable.
            if peer != self._rank and peer not in self._members.unreachable:
                self._outbox.control(peer, Frame.STATUS_REQUEST, key=key, body=body)

    def explain(self, operation: Operation, now: float) -> str:
        """Return what is known about why the operation has not ended, for the message of a deadline error."""
        inquiry = self._inquiries.get(operation.key)
        if inquiry is not None and inquiry.answers:
            return str(self._report(operation, inquiry, now))
        return f"{operation.progress()}; no answer from the other ranks yet"

    def forget(self, key: _Key) -> None:
        """The operation has ended."""
        self._next_warning.pop(key, None)
        self._inquiries.pop(key, None)

    def on_request(self, peer: int, key: _Key, request: StatusRequest, now: float) -> None:
        """Handle a STATUS_REQUEST frame: answer it, and report if this rank keeps the peer waiting."""
        self._outbox.answer(peer, Frame.STATUS_REPLY, key)
        if self._table.was_submitted(key) or not request.waited_s >= self._warning_s > 0:
            return
        if self._table.early.note_report(peer, key, request.waited_s):
            progress = {peer: "waiting for this rank"}
            report = StallReport(
                request.name, key[1], request.waited_s, (self._rank,), progress, (), key[0], request.message
            )
            self._reports.publish(report, now)

    def on_reply(self, peer: int, key: _Key, reply: StatusReply) -> None:
        """Handle a STATUS_REPLY frame."""
        inquiry = self._inquiries.get(key)
        if inquiry is not None:
            inquiry.answered(peer, submitted=reply.submitted, progress=reply.progress)

    def _write_reply(self, _peer: int, key: _Key) -> tuple[_Key, bytes]:
        operation, submitted = self._table.active.get(key), self._table.was_submitted(key)
        progress = operation.progress() if operation is not None else "done" if submitted else "not submitted"
        return key, StatusReply(submitted, progress).encode()

    def _late(self, now: float) -> list[Operation]:
        """Return operations about which the peers are to be asked now."""
        found: list[Operation] = []
        if self._warning_s <= 0:
            return found
        for operation in itertools.islice(self._table.active.values(), _WATCHED_MAX):
            if now >= self._next_warning.get(operation.key, operation.submitted_at + self._warning_s):
                # The next warning comes after twice the time: a log must not fill with one stall.
                self._next_warning[operation.key] = now + max(self._warning_s, now - operation.submitted_at)
                found.append(operation)
                if len(found) == _LATE_MAX:
                    break
        return found

    def _concluded(self, now: float) -> list[StallReport]:
        """Return reports of the inquiries that have all answers, or have waited long enough for them."""
        reports = []
        for key, inquiry in list(self._inquiries.items()):
            operation = self._table.active[key]
            complete = len(inquiry.answers) == len(operation.ranks) - 1 or now >= inquiry.asked_at + _ANSWER_S
            if complete and inquiry.warn:
                del self._inquiries[key]
                reports.append(self._report(operation, inquiry, now))
            elif now >= inquiry.asked_at + 10 * _ANSWER_S:
                del self._inquiries[key]  # it was kept for a while for ``explain``
        return reports

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
            operation.key[0],
            _message_facts(operation),
        )


def _message_facts(operation: Operation) -> MessageFacts | None:
    if operation.signature.kind is not OpKind.SEND_RECV:
        return None
    dtype, num_bytes = operation.layout.dtype, operation.layout.num_bytes
    source, target = operation.ranks
    size = f"{num_bytes // dtype.itemsize} elements of {dtype.name.lower()}, {num_bytes} bytes"
    return MessageFacts(source, target, size)
