"""Cycles: the rounds of messages in which the ranks find out which operations are ready on all of them.

A cycle of one rank::

    (idle) ── news here, or a message of the next cycle ──> VOTE
    VOTE     one bit per cached operation, and status bits. *and* combines all; status bits are inverted before
      ├── invalid on some rank ──> INVALID   *or* of the entries that are out of date; every rank erases them
      ├── uncached on some rank ─> GATHER    requests go up the tree, responses come down
      └── else ──────────────────> OVER      operations that all ranks have are carried out without further messages

INVALID is followed by GATHER, and GATHER by OVER.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from totalreduce.coordination.cache import bits_of
from totalreduce.coordination.inbox import CycleInbox
from totalreduce.coordination.limits import RankRequests, requests_of_cycle
from totalreduce.coordination.membership import Membership
from totalreduce.coordination.messages import MALFORMED, STATUS_BITS, Kind, encode
from totalreduce.coordination.requests import Request, Response
from totalreduce.coordination.sender import Sender
from totalreduce.coordination.submissions import CycleTimer, Submissions
from totalreduce.coordination.table import RequestTable
from totalreduce.coordination.topology import Topology
from totalreduce.foundation.errors import ProtocolError

__all__ = ["Cycles"]

_UNCACHED, _INVALID = 1, 2
_STATUS = _UNCACHED | _INVALID
#: Lists of responses are never changed once they are made.
_NONE: list[Response] = []


class _Phase(enum.Enum):
    VOTE = enum.auto()
    INVALID = enum.auto()
    GATHER = enum.auto()
    OVER = enum.auto()


@dataclass(slots=True)
class _Cycle:
    """The cycle under way."""

    begun_at: float  #: The time of its beginning.
    uncached: list[Request]  #: Requests of this rank that rank 0 must get.
    invalid: int  #: Bits of the cache entries that are out of date on this rank.
    bits: int  #: The vector of the vote, as far as it is combined.
    phase: _Phase = _Phase.VOTE
    round: int = 0  #: The round of the vote.
    ready: int = 0  #: Bits of the cached operations that are ready on all ranks.
    has_sent_requests: bool = False  #: Whether this rank has sent its requests, and waits for the responses.


@final
class Cycles:
    """The cycles of one rank, one after the other."""

    def __init__(
        self, topology: Topology, submissions: Submissions, timer: CycleTimer, membership: Membership, sender: Sender
    ) -> None:
        self._topology, self._submissions, self._timer = topology, submissions, timer
        self._membership, self._sender = membership, sender
        self._cache, self._counters = submissions.cache, sender.counters
        #: Messages of cycles that have arrived, and the number of the cycle.
        self.inbox = CycleInbox(topology, submissions.allowances, submissions.cache)
        self.table = RequestTable(topology.world_size)  #: On rank 0: the requests that wait for other ranks.
        self._cycle: _Cycle | None = None
        self._responses = _NONE
        #: The number of operations on which the ranks have agreed so far. Equal on all ranks between cycles.
        self.agreed = 0

    def pop_responses(self) -> list[Response]:
        """Return the new responses, in the order in which all ranks carry them out; not to be changed."""
        responses, self._responses = self._responses, _NONE
        return responses

    def awaited_ranks(self) -> Sequence[int]:
        """Return the ranks whose messages this rank needs next."""
        cycle = self._cycle
        if cycle is None:  # a waiting operation needs another cycle, in which all ranks take part
            is_waiting = self._submissions.waiting or self._membership.is_joining
            return range(self._topology.world_size) if is_waiting else ()
        if cycle.phase is not _Phase.GATHER:
            kind = Kind.VOTE if cycle.phase is _Phase.VOTE else Kind.INVALID
            return self.inbox.missing(kind, self._topology.vote_sources[cycle.round])
        if cycle.has_sent_requests:
            return (self._topology.parent,)
        return self.inbox.missing(Kind.REQUESTS, self._topology.children)

    def run(self, now: float) -> None:
        """Begin cycles that are due, and go on with them as far as messages have arrived."""
        goes_on = True
        while goes_on:
            cycle = self._cycle
            if cycle is None:
                goes_on = self._is_due(now)
                if goes_on:
                    self._begin(now)
            elif cycle.phase is _Phase.OVER:
                self._cycle = None
                self.inbox.end_cycle()
                self._timer.end_cycle(cycle.begun_at, now)
            else:
                goes_on = self._gather(cycle) if cycle.phase is _Phase.GATHER else self._vote(cycle)

    def clear(self) -> None:
        """Forget all requests: there is no agreement any more."""
        self.inbox.clear()
        self.table.clear()

    # ------------------------------------------------------------------------------------------------------- votes

    def _is_due(self, now: float) -> bool:
        """Return whether the next cycle begins, by this rank or because another rank has begun it."""
        if self._membership.departed and self.awaited_ranks():
            return False  # the cycle could not end without the rank that has left
        return self._timer.is_due(now) or self.inbox.has_begun

    def _begin(self, now: float) -> None:
        hits, invalid, uncached = self._submissions.classify()
        if self._membership.is_joining:
            hits = self._cache.all_bits
        status = 0
        if uncached or self._membership.must_announce:
            status |= _UNCACHED
        if invalid:
            status |= _INVALID
        bits = (~status & _STATUS) | ((hits & ~invalid) << STATUS_BITS)
        self._cycle = _Cycle(now, uncached, invalid, bits)
        self.inbox.is_idle = False
        self._timer.begin_cycle()
        self._counters.cycles += 1
        self._send_vote(self._cycle, Kind.VOTE)

    def _send_vote(self, cycle: _Cycle, kind: Kind) -> None:
        """Send the messages of this round of a vote."""
        if cycle.round < self._topology.num_rounds:
            message = encode(kind, self.inbox.number, cycle.round, bits=cycle.bits)
            for peer in self._topology.vote_targets[cycle.round]:
                self._sender.send(peer, message)

    def _vote(self, cycle: _Cycle) -> bool:
        """Combine the vector with this round's messages. Return ``False`` if one of them has not arrived."""
        is_first = cycle.phase is _Phase.VOTE
        if cycle.round == self._topology.num_rounds:
            if is_first:
                self._end_vote(cycle)
            else:
                self._erase(cycle)
            return True
        kind = Kind.VOTE if is_first else Kind.INVALID
        votes = self.inbox.take(kind, self._topology.vote_sources[cycle.round])
        if votes is None:
            return False
        cycle.bits = functools.reduce(operator.and_ if is_first else operator.or_, votes, cycle.bits)
        cycle.round += 1
        self._send_vote(cycle, kind)
        return True

    def _end_vote(self, cycle: _Cycle) -> None:
        """Read the result of the first vote."""
        status = ~cycle.bits & _STATUS
        cycle.ready = cycle.bits >> STATUS_BITS
        if status & _INVALID:
            cycle.phase, cycle.round, cycle.bits = _Phase.INVALID, 0, cycle.invalid
            self._send_vote(cycle, Kind.INVALID)
        elif status & _UNCACHED:
            cycle.phase = _Phase.GATHER
        else:
            self._conclude(cycle, [])

    def _erase(self, cycle: _Cycle) -> None:
        """Erase the entries that are out of date on some rank. Requests that have hit one of them go to rank 0."""
        self._counters.invalid += cycle.bits.bit_count()
        erased = [self._cache.peek(bit).name for bit in bits_of(cycle.bits)]
        self._cache.erase(cycle.bits)
        known = {request.name for request in cycle.uncached}
        unsent = self._submissions.unsent
        cycle.uncached += [unsent[name] for name in erased if name in unsent and name not in known]
        cycle.ready &= ~cycle.bits
        cycle.phase = _Phase.GATHER

    # -------------------------------------------------------------------------------------- requests and responses

    def _gather(self, cycle: _Cycle) -> bool:
        """Send requests up and responses down the tree. Return ``False`` if the next message has not arrived."""
        if not cycle.has_sent_requests:
            below = self.inbox.take(Kind.REQUESTS, self._topology.children)
            if below is None:
                return False
            requests = [*itertools.chain.from_iterable(below), self._own_requests(cycle)]
            cycle.has_sent_requests = True
            self._counters.slow_cycles += 1
            if not self._topology.rank:
                self._take_answer(cycle, self.table.process(requests))
                return True
            message = encode(Kind.REQUESTS, self.inbox.number, value=[each.to_wire() for each in requests])
            self._sender.send(self._topology.parent, message)
        answers = self.inbox.take(Kind.RESPONSES, (self._topology.parent,))
        if answers is None:
            return False
        self._take_answer(cycle, answers[0])
        return True

    def _own_requests(self, cycle: _Cycle) -> RankRequests:
        """Return the requests that this rank sends in this cycle."""
        requests = requests_of_cycle(cycle.uncached, self._topology.world_size)
        have_all_room = len(requests) == len(cycle.uncached)
        if self._timer.has_news or not have_all_room:  # what is left over goes with the next cycle
            self._timer.require_cycle()
        self._counters.misses += len(requests)
        self._submissions.send(requests)
        return RankRequests(self._topology.rank, list(requests), self._membership.announce())

    def _take_answer(self, cycle: _Cycle, answer: Any) -> None:
        """Check the answer of rank 0, pass it on, and carry it out."""
        lends = self._membership.is_joining
        try:
            responses, joined = answer
            new = [Response.from_wire(response) for response in responses]
            all_have_joined = self._membership.update(joined, self._topology.world_size)
        except MALFORMED as cause:
            raise ProtocolError("a list of responses that no correct peer sends") from cause
        self._check(new, lends=lends)
        message = encode(Kind.RESPONSES, self.inbox.number, value=answer)
        for child in self._topology.children:
            self._sender.send(child, message)
        if all_have_joined:
            cycle.ready = 0  # all ranks were ready to lend zeros, and no rank had data
        self._conclude(cycle, new)

    def _check(self, new: Sequence[Response], *, lends: bool) -> None:
        """Check that this rank waits for the operation of every response, or takes part with zeros (``lends``)."""
        names = [response.name for response in new]
        if len(set(names)) != len(names):
            raise ProtocolError("two responses to one request")
        for name in names:
            if name in self._cache or not (lends or name in self._submissions.waiting):
                raise ProtocolError(
                    f"a response to {name!r}, which rank {self._topology.rank} has not asked rank 0 for"
                )

    def _conclude(self, cycle: _Cycle, new: list[Response]) -> None:
        """End a cycle. The cache is used and filled in the same order on all ranks."""
        if cycle.ready:
            responses = self._cache.use(cycle.ready)
            self._counters.hits += len(responses)
            joined = tuple(sorted(self._membership.joined))
            if joined:  # new responses have the joined ranks, too; otherwise the two would not be fused
                responses = [response.with_joined(joined) for response in responses]
            self._respond(responses)
        for response in new:
            operation = self._submissions.waiting.get(response.name)
            self._cache.put(response, operation.request if operation else None)
        self._respond(new)
        self._submissions.end_cycle(cycle.ready)
        cycle.phase = _Phase.OVER

    def _respond(self, responses: list[Response]) -> None:
        """Hand responses over. If no others wait, hand the list itself: the executor keeps how it was fused last."""
        self._submissions.agree(responses)
        self.agreed += len(responses)
        self._responses = self._responses + responses if self._responses else responses
