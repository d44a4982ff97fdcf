"""Finds out which operations are ready on every rank: one rank's half of the agreement. No thread, socket or clock.

Libraries need it whose collectives must be called in the same order on all ranks. Source: Horovod's coordination
(response cache, bit vectors, coordinator), with these differences. No rank polls: a rank with news begins a cycle, and
its first message draws the others in. Bit vectors travel in ceil(log4 P) rounds for every number of ranks P, because
*and* and *or* may count a vote twice. Requests and responses travel along a binomial tree. A list of responses
holds new ones only, since every rank has the cached ones.

``Negotiator`` is the interface. Its parts are plain objects: the cycles (``cycle.py``), this rank's operations and the
time of the next cycle (``submissions.py``), messages that have arrived (``inbox.py``), limits on requests
(``limits.py``), rank 0's table of requests (``table.py``), ranks that have joined or left (``membership.py``), the
response cache (``cache.py``), and operations that wait too long (``stall.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from totalreduce.coordination.cache import ResponseCache
from totalreduce.coordination.config import CoordinationConfig
from totalreduce.coordination.cycle import Cycles
from totalreduce.coordination.membership import Departure, Membership
from totalreduce.coordination.messages import MALFORMED, Kind, decode_json, encode, split
from totalreduce.coordination.requests import Request
from totalreduce.coordination.sender import Sender
from totalreduce.coordination.stall import Stall, StallInspector
from totalreduce.coordination.submissions import CycleTimer, Submissions
from totalreduce.coordination.topology import Topology
from totalreduce.foundation.errors import PeerLost, ProtocolError, StallError, TotalReduceError

__all__ = ["Negotiator"]

#: Characters of the reason for which a rank leaves, at most.
_REASON_MAX = 500


@final
class Negotiator:
    """One rank of one group. Times are in seconds; the caller sees to it that only one thread is in here."""

    def __init__(
        self, rank: int, world_size: int, config: CoordinationConfig, *, ranks: Sequence[int] | None = None
    ) -> None:
        """Make an idle negotiator; ``ranks``: the members as ``PeerLost`` names them, if not by their indices."""
        self._shown_ranks = range(world_size) if ranks is None else ranks
        self.rank = rank  #: Index of this rank in the group.
        self.cache = ResponseCache(config.cache_capacity)  #: The response cache; equal on all ranks between cycles.
        #: The operations of this rank on which the ranks have not agreed.
        self.submissions = Submissions(rank, self.cache)
        self.timer = CycleTimer(config)  #: Decides when this rank begins a cycle.
        self.membership = Membership()  #: Ranks that have joined or left.
        self._sender = Sender(rank, world_size)
        #: The cycles; ``cycles.pop_responses`` returns the operations on which the ranks have agreed.
        self.cycles = Cycles(Topology(rank, world_size), self.submissions, self.timer, self.membership, self._sender)
        self.counters = self._sender.counters  #: The work of this rank so far.
        #: Messages, each with the rank that gets it. The caller sends them and empties the list.
        self.outbox = self._sender.outbox
        self.ended: TotalReduceError | None = None  #: The reason why there is no agreement any more; ``None`` before.
        self._stalls = StallInspector(rank, world_size, config)
        self._reports: list[Stall] = []

    # ------------------------------------------------------------------------------------------------- application

    def submit(self, requests: Sequence[Request], now: float, *, where: object = "", num_bytes: int = 0) -> bool:
        """Ask for operations; several at once become ready at once. Their names must not be pending on this rank.

        Args:
            requests: The operations, in the order in which rank 0 looks at them.
            now: The time.
            where: The line of the program, for stall reports, which call ``str`` on it.
            num_bytes: Size of their tensors. From ``config.fusion_bytes`` on, nothing is gained by waiting for more.

        Returns:
            Whether a cycle has begun or gone on, so that there may be messages and responses.

        Raises:
            ConfigurationError: Too many operations of this rank are pending; nothing was submitted.
        """
        self.submissions.add(requests, now, where)
        runs = self.timer.submitted(num_bytes, now)
        if runs:
            self._run(now)
        return runs

    def join(self, now: float) -> None:
        """Say that this rank has no more data: it takes part in the others' reductions until all have joined."""
        self.membership.join()
        self.timer.require_cycle()
        self._run(now)

    def leave(self, error: TotalReduceError, reason: str, carried_out: int) -> None:
        """End the agreement on this rank in good order, and tell the others (see ``depart``).

        Args:
            error: The error of the pending operations on this rank.
            reason: The reason that ``PeerLost`` gives on the other ranks.
            carried_out: How many of the operations on which the ranks have agreed this rank has carried out, from the
                first one. It carries no others out, so they fail on the other ranks.
        """
        if self.ended is None:
            value = [reason[:_REASON_MAX], carried_out]
            self._sender.send_to_all(encode(Kind.LEAVE, self.cycles.inbox.number, value=value))
            self.fail(error)

    def abort(self, error: TotalReduceError, reason: str) -> None:
        """End the agreement on all ranks, because this rank can carry no more operations out.

        Args:
            error: The error of the pending operations on this rank; on all ranks, if it is a ``PeerLost``.
            reason: The reason of the ``PeerLost`` that names this rank on the other ranks.
        """
        if self.ended is None:
            own = PeerLost(self._shown_ranks[self.rank], reason[:_REASON_MAX])
            self._abort(error if isinstance(error, PeerLost) else own, here=error)

    def hurry(self, now: float) -> None:
        """A caller waits for an operation, so the next cycle begins at once."""
        if self.timer.hurry():
            self._run(now)

    def pop_stalls(self) -> list[Stall]:
        """Return new reports of operations that wait too long."""
        reports, self._reports = self._reports, []
        return reports

    def fail(self, error: TotalReduceError) -> None:
        """End the agreement on this rank: a rank is lost, or the group was closed."""
        if self.ended is None:
            self.ended = error
            self.submissions.clear()
            self.cycles.clear()

    def depart(self, peer: int, reason: str, now: float, carried_out: int | None = None) -> None:
        """Note that a rank has left in good order. Operations that do not need it go on.

        The agreement ends if the ranks have agreed on more operations than the rank has ``carried_out``: a library
        cannot finish the others. ``None``: the rank has not said how many it has carried out.
        """
        self.membership.departed.setdefault(peer, Departure(reason, now, carried_out))
        if not self.cycles.inbox.is_idle and self.ended is None:
            # Other ranks may not know of this cycle yet, because the rank that has left passes no votes on.
            self._sender.send_to_all(encode(Kind.BEGIN, self.cycles.inbox.number))
        self._run(now)

    # --------------------------------------------------------------------------------------------------------- time

    def next_due(self) -> float | None:
        """Return the time of the next ``tick``; ``None``: not before something else has happened."""
        if self.ended is not None:
            return None
        due = self._stalls.next_due(self.submissions.waiting)
        cycle_due = self.timer.due_at if self.cycles.inbox.is_idle else None
        return min((each for each in (due, cycle_due) if each is not None), default=None)

    def tick(self, now: float) -> None:
        """Begin a cycle that was put off; look for operations that wait too long."""
        if self.ended is not None:
            return
        self._run(now)
        waiting = self.submissions.waiting
        question = self._stalls.questions(waiting.values(), now)
        if question:
            self._sender.send_to_all(encode(Kind.QUESTION, self.cycles.inbox.number, value=question))
        self._report_stalls(now)
        expired = self._stalls.expired(waiting.values(), now)
        if expired is not None:
            self._abort(self._stalls.report(expired, now, self.membership.joined).error())

    def explain(self, name: str, now: float) -> str:
        """Say why an operation is not ready."""
        operation = self.submissions.waiting.get(name)
        return (
            "it is being carried out"
            if operation is None
            else str(self._stalls.report(operation, now, self.membership.joined))
        )

    # ----------------------------------------------------------------------------------------------------- messages

    def receive(self, peer: int, message: bytes, now: float) -> None:
        """Read a message of another rank. Raises ``ProtocolError``."""
        if self.ended is not None:
            return
        kind, cycle, round_, body = split(message)
        match kind:
            case Kind.QUESTION:
                waiting, joins = self.submissions.waiting, self.membership.is_joining
                names = self._stalls.answer(peer, decode_json(body), waiting, joined=joins)
                self._sender.send(peer, encode(Kind.ANSWER, self.cycles.inbox.number, value=names))
                # A rank that waits for nothing has no ``tick``, and is to report that others wait for it.
                self._report_stalls(now)
            case Kind.ANSWER:
                self._stalls.receive_answer(peer, decode_json(body), now)
            case Kind.ABORT:
                self.fail(_error_from_wire(decode_json(body)))
            case Kind.LEAVE:
                match decode_json(body):
                    case [str(reason), int(carried_out)]:
                        self.depart(peer, reason[:_REASON_MAX], now, carried_out)
                    case _:
                        raise ProtocolError(f"rank {peer} leaves as no correct peer does")
            case _:
                self.cycles.inbox.add(peer, kind, cycle, round_, body)
                self._run(now)

    def _run(self, now: float) -> None:
        """Go on with cycles, and end the agreement if they need a rank that has left."""
        if self.ended is not None:
            return
        self.cycles.run(now)
        if not self.membership.departed:
            return
        awaited, agreed = self.cycles.awaited_ranks(), self.cycles.agreed
        for peer, departure in self.membership.departed.items():
            if peer in awaited or (departure.carried_out is not None and departure.carried_out < agreed):
                self._abort(PeerLost(self._shown_ranks[peer], departure.reason))
                return

    def _report_stalls(self, now: float) -> None:
        self._reports += self._stalls.take_reports(self.submissions.waiting, now, self.membership.joined)

    def _abort(self, error: StallError | PeerLost, *, here: TotalReduceError | None = None) -> None:
        """End the agreement on all ranks, with the same error, or with the error ``here`` on this rank."""
        self._sender.send_to_all(encode(Kind.ABORT, self.cycles.inbox.number, value=_error_to_wire(error)))
        self.fail(here or error)


def _error_to_wire(error: StallError | PeerLost) -> list[Any]:
    if isinstance(error, StallError):
        return ["stall", error.tensor, error.ranks, error.waited_s, error.where]
    return ["lost", error.rank, error.reason]


def _error_from_wire(fields: Any) -> StallError | PeerLost:
    try:
        match fields:
            case ["stall", tensor, ranks, waited_s, where]:
                return StallError(str(tensor), tuple(map(int, ranks)), float(waited_s), str(where))
            case ["lost", rank, reason]:
                return PeerLost(int(rank), str(reason))
            case _:
                raise ValueError(fields)
    except MALFORMED as cause:
        raise ProtocolError("an error report that no correct peer sends") from cause
