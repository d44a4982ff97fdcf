"""Which operations are ready on every rank: one rank's half of the agreement. No thread, socket or clock.

For libraries whose collectives must be called in the same order on all ranks. Source: Horovod's coordination (response
cache, bit vectors, coordinator), with these differences: nobody polls (a cycle is begun by whoever has news, and the
others are drawn in by its first message); bit vectors travel in ceil(log2 P) messages a rank, for every P, because
*and* and *or* may count a vote twice; requests and responses travel along a binomial tree; a list of responses holds
only what is new, since everybody knows what the caches say.

A *cycle* on one rank::

    IDLE ── news here, or a message of the next cycle ──> VOTE
    VOTE     status bits (inverted, so that *and* finds what holds on any rank) and one bit per cached operation
      ├── invalid somewhere ──> INVALID   *or* of what is out of date; every rank erases it
      ├── uncached somewhere ─> GATHER    requests go up the tree, responses come down
      └── else ───────────────> done: what all have hit is carried out, without further messages

Responses come out of ``pop_responses`` in the same order on all ranks. ``next_due`` says when ``tick`` has something to
do. A rank is at most one cycle ahead of another one (it cannot end a cycle without the other's vote), which bounds what
is kept of messages that come early.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from totalreduce.coordination.cache import Lookup, ResponseCache, bits_of
from totalreduce.coordination.config import CoordinationConfig
from totalreduce.coordination.messages import MALFORMED, Kind, decode_bits, decode_json, encode, split
from totalreduce.coordination.requests import Request, Response
from totalreduce.coordination.stall import Pending, Stall, StallInspector
from totalreduce.coordination.table import Allowances, RequestTable, allowance
from totalreduce.foundation.errors import (
    ConfigurationError,
    PeerLost,
    ProtocolError,
    StallError,
    TotalReduceError,
)

__all__ = ["NegotiationCounters", "Negotiator"]

_UNCACHED, _INVALID = 1, 2
_STATUS_BITS = 2
_STATUS = _UNCACHED | _INVALID
#: Requests beyond the cache that one rank sends in one cycle; the rest comes in the next.
_REQUESTS_MAX = 1024
#: The memory that the requests of all ranks may take in one cycle, by ``Request.memory_bytes``: every rank sends its
#: share, and one request at least. It keeps the messages of large groups far below what a channel carries.
_CYCLE_BYTES_MAX = 32 * 1024 * 1024
#: Characters of the reason for which a rank leaves, at most.
_REASON_MAX = 500
#: The longest pause between two cycles that nobody is blocked for, in seconds.
_PAUSE_MAX_S = 0.005
#: Lists of responses are never changed once they are made.
_NONE: list[Response] = []


class _Phase(enum.Enum):
    IDLE = enum.auto()
    VOTE = enum.auto()
    INVALID = enum.auto()
    GATHER = enum.auto()


@dataclass(slots=True)
class NegotiationCounters:
    """What a rank has done; totals."""

    cycles: int = 0
    slow_cycles: int = 0
    """In which requests were gathered."""
    messages: int = 0
    bytes: int = 0
    hits: int = 0
    """Operations that were ready by the cache alone."""
    misses: int = 0
    """Requests sent to rank 0."""
    invalid: int = 0
    """Cache entries that were out of date."""


class _Asked(NamedTuple):
    """What one rank asks for beyond the cache in one cycle."""

    rank: int
    requests: list[Request]
    joins: bool

    def to_wire(self) -> list[Any]:
        """JSON-ready."""
        return [self.rank, [request.to_wire() for request in self.requests], self.joins]

    @classmethod
    def from_wire(cls, fields: Any) -> _Asked:
        """Out of JSON. Raises what ``MALFORMED`` lists, and ``ProtocolError``."""
        rank, requests, joins = fields
        if not isinstance(requests, list) or len(requests) > _REQUESTS_MAX:
            raise ValueError("too many requests")
        return cls(int(rank), [Request.from_wire(request) for request in requests], bool(joins))


@dataclass(slots=True)
class _Cycle:
    """What a rank knows of the cycle under way."""

    begun_at: float
    uncached: list[Request]
    invalid: int
    bits: int  #: The vector so far.
    round: int = 0
    common: int = 0  #: Cached operations that are ready everywhere.
    gathered: bool = False  #: What is uncached here has left.


class Negotiator:
    """One rank of one group. Times are in seconds; the caller sees to it that only one thread is in here.

    Attributes:
        rank: Index in the group; 0 is the coordinator.
        world_size: Ranks of the group.
        cache: Equal on all ranks between cycles.
        counters: What was done.
        joined: Ranks that have no more data; equal on all ranks.
        last_joined: Who joined last, when all have; until the next ``join`` here.
        ended: Why there is no agreement any more.
        outbox: To whom, what: the caller sends it and empties the list.
    """

    def __init__(
        self, rank: int, world_size: int, config: CoordinationConfig, *, ranks: Sequence[int] | None = None
    ) -> None:
        """Make an idle negotiator; ``ranks``: the members as ``PeerLost`` names them, if not by their indices."""
        self._shown_ranks = range(world_size) if ranks is None else ranks
        self.rank, self.world_size, self.config = rank, world_size, config
        self.cache = ResponseCache(config.cache_capacity)
        self.counters = NegotiationCounters()
        self.joined: tuple[int, ...] = ()
        self.last_joined: int | None = None
        self.ended: TotalReduceError | None = None
        self.outbox: list[tuple[int, bytes]] = []
        self._rounds = (world_size - 1).bit_length()
        self._parent = rank & (rank - 1)
        self._children = _children(rank, world_size)
        self._table = RequestTable(world_size)
        self._allowances = Allowances()
        self._stalls = StallInspector(rank, world_size, config)
        self._phase, self._number = _Phase.IDLE, 0
        self._cycle: _Cycle | None = None
        self._early: dict[tuple[int, Kind, int], tuple[int, bytes]] = {}
        self._asked: dict[int, list[_Asked]] = {}  #: By child: the requests of this cycle, its own and those below.
        self._pending: dict[str, Pending] = {}
        self._queue: dict[str, Request] = {}  #: Of what is pending, that which rank 0 does not have.
        self._news = self._hurried = False
        self._news_bytes = 0
        self._joins = self._join_sent = False
        self._departed: dict[int, str] = {}
        self._begun = -1  #: The latest cycle of which a rank has said that it has begun.
        self._hits = 0  #: Bits of the queue, if all of it is in the cache ...
        self._classified = 0  #: ... of this version; -1: it is not.
        self._not_before = 0.0
        self._responses: list[Response] = _NONE
        self._reports: list[Stall] = []
        self._arrivals: list[tuple[str, int]] = []

    # ------------------------------------------------------------------------------------------------- application

    def __contains__(self, name: str) -> bool:
        """Whether the name is pending here."""
        return name in self._pending

    @property
    def has_news(self) -> bool:
        """Whether something was submitted since the last cycle began."""
        return self._news

    @property
    def num_pending(self) -> int:
        """Operations asked for here and not agreed on."""
        return len(self._pending)

    def submit(self, requests: Sequence[Request], now: float, *, where: object = "", num_bytes: int = 0) -> None:
        """Ask for operations; several at once become ready at once. Names must not be pending here.

        Args:
            requests: In this order they are looked at.
            now: The time.
            where: The place in the program, for stall reports; its ``str`` is taken when there is one.
            num_bytes: Of their tensors; from ``config.fusion_bytes`` on nothing is gained by waiting for more.

        Raises:
            ConfigurationError: Too many operations are pending here; nothing was submitted.
        """
        if not self._allowances.take(self.rank, requests):
            raise ConfigurationError(
                f"rank {self.rank} has {len(self._pending)} operations on which the ranks have not agreed yet, and "
                f"{len(requests)} more are too many: at most {allowance()} of one rank may wait. Wait for some of them"
            )
        known = self._classified == self.cache.version
        for request in requests:
            assert request.name not in self._pending, "the caller refuses names in flight"
            self._pending[request.name] = Pending(request, now, where)
            self._queue[request.name] = request
            if known:
                lookup, bit = self.cache.classify(request)
                known = lookup is Lookup.HIT
                self._hits |= known << bit
        if not known:
            self._classified = -1
        self._news_bytes += num_bytes
        if not self._news:
            self._news = True
            self._not_before = max(self._not_before, now + self.config.cycle_s)
        if self._hurried or self._news_bytes >= self.config.fusion_bytes:
            self._run(now)

    def join(self, now: float) -> None:
        """Say that this rank has no more data: it takes part in the others' reductions until all have joined."""
        self._joins, self._join_sent, self.last_joined = True, False, None
        self._news = self._hurried = True
        self._run(now)

    def leave(self, error: TotalReduceError, reason: str) -> None:
        """End the agreement here in good order, and tell the others: what they need this rank for fails (``depart``).

        Args:
            error: What pending operations fail with here.
            reason: Why, in the words in which the others' ``PeerLost`` says it.
        """
        if self.ended is None:
            self._tell_all(encode(Kind.LEAVE, self._number, value=reason[:_REASON_MAX]))
            self.fail(error)

    def hurry(self, now: float) -> None:
        """Somebody is blocked: do not wait for more to come."""
        if self._news:
            self._hurried = True
            self._run(now)

    def pop_responses(self) -> list[Response]:
        """What has been agreed on, in the order in which all ranks carry it out; not to be changed."""
        responses, self._responses = self._responses, _NONE
        return responses

    def pop_stalls(self) -> list[Stall]:
        """Operations that were found to wait too long."""
        reports, self._reports = self._reports, []
        return reports

    def pop_arrivals(self) -> list[tuple[str, int]]:
        """At rank 0: names and the ranks whose requests for them have arrived since the last call, in order."""
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def fail(self, error: TotalReduceError) -> None:
        """There is no agreement any more: a rank is gone, or the group was closed."""
        if self.ended is None:
            self.ended = error
            self._pending.clear()
            self._queue.clear()
            self._asked.clear()
            self._allowances.clear()
            self._table.clear()

    def depart(self, peer: int, reason: str, now: float) -> None:
        """A rank has left in good order. What does not need it any more goes on."""
        self._departed.setdefault(peer, reason)
        if self._cycle is not None and self.ended is None:
            # The rank would have drawn others into this cycle: whoever waits for its vote must know that it has begun.
            self._tell_all(encode(Kind.BEGIN, self._number))
        self._run(now)

    # --------------------------------------------------------------------------------------------------------- time

    def next_due(self) -> float | None:
        """When ``tick`` has something to do."""
        if self.ended is not None:
            return None
        due = self._stalls.next_due(self._pending)
        if self._news and self._phase is _Phase.IDLE and (due is None or self._not_before < due):
            return self._not_before
        return due

    def tick(self, now: float) -> None:
        """Begin a cycle that was put off; look for operations that wait too long."""
        if self.ended is not None:
            return
        self._run(now)
        late = self._stalls.late(self._pending.values(), now)
        if late:
            self._tell_all(encode(Kind.ASK, self._number, value=late))
        self._reports += self._stalls.concluded(self._pending, now, self.joined)
        over = self._stalls.over(self._pending.values(), now)
        if over is not None:
            self._abort(self._stalls.report(over, now, self.joined).error())

    def explain(self, name: str, now: float) -> str:
        """What is known about why an operation is not ready."""
        entry = self._pending.get(name)
        return "it is being carried out" if entry is None else str(self._stalls.report(entry, now, self.joined))

    # ----------------------------------------------------------------------------------------------------- messages

    def receive(self, peer: int, message: bytes, now: float) -> None:
        """A message has come.

        Raises:
            ProtocolError: No correct peer sends this.
        """
        if self.ended is not None:
            return
        kind, cycle, round_, body = split(message)
        if kind is Kind.ASK:
            names = self._stalls.asked(peer, decode_json(body), self._pending, joined=self._joins)
            self._send(peer, encode(Kind.TELL, self._number, value=names))
            # A rank that waits for nothing itself is never due, and is to report that others wait for it.
            self._reports += self._stalls.concluded(self._pending, now, self.joined)
        elif kind is Kind.TELL:
            self._stalls.told(peer, decode_json(body), now)
        elif kind is Kind.ABORT:
            self.fail(_error_from_wire(decode_json(body)))
        elif kind is Kind.LEAVE:
            reason = decode_json(body)
            if not isinstance(reason, str):
                raise ProtocolError(f"rank {peer} leaves as no correct peer does")
            self.depart(peer, reason[:_REASON_MAX], now)
        elif kind is Kind.BEGIN:
            if cycle > self._number + 1:
                raise ProtocolError(f"rank {peer} begins cycle {cycle}; this rank is in {self._number}")
            self._begun = max(self._begun, cycle)
            self._run(now)
        else:
            ahead = cycle - self._number
            idle = self._phase is _Phase.IDLE
            if not 0 <= ahead <= 1 or (ahead and idle) or (kind is not Kind.VOTE and (ahead or idle)):
                raise ProtocolError(f"rank {peer} says {kind.name} in cycle {cycle}; this rank is in {self._number}")
            if not self._may_say(peer, kind, round_):
                raise ProtocolError(f"rank {peer} says {kind.name} in round {round_}, which is another rank's part")
            key = cycle, kind, peer if kind is Kind.REQUESTS else round_
            if key in self._early:
                raise ProtocolError(f"rank {peer} says {kind.name} twice in cycle {cycle}")
            if kind is Kind.REQUESTS:  # read at once, so that the rank that has sent too much is the one refused
                self._asked[peer], body = self._read_requests(peer, body), b""
            self._early[key] = peer, body
            self._run(now)

    def _may_say(self, peer: int, kind: Kind, round_: int) -> bool:
        """Whether a message of a cycle is the peer's to send."""
        if kind is Kind.REQUESTS:
            return peer in self._children
        if kind is Kind.RESPONSES:
            return self.rank > 0 and peer == self._parent and round_ == 0
        return round_ < self._rounds and peer == (self.rank - (1 << round_)) % self.world_size

    def _send(self, peer: int, message: bytes) -> None:
        self.counters.messages += 1
        self.counters.bytes += len(message)
        self.outbox.append((peer, message))

    def _tell_all(self, message: bytes) -> None:
        for peer in range(self.world_size):
            if peer != self.rank:
                self._send(peer, message)

    def _abort(self, error: StallError | PeerLost) -> None:
        """End the agreement everywhere, with the same error."""
        self._tell_all(encode(Kind.ABORT, self._number, value=_error_to_wire(error)))
        self.fail(error)

    def _take(self, kind: Kind, place: int) -> bytes | None:
        """The body of a message of this cycle, if it is here."""
        early = self._early.pop((self._number, kind, place), None)
        return None if early is None else early[1]

    # -------------------------------------------------------------------------------------------------------- cycle

    def _run(self, now: float) -> None:
        """Go as far as what is here allows."""
        going = True
        while going and self.ended is None:
            cycle = self._cycle
            if cycle is None:
                going = self._due(now) and not (self._departed and self._awaited())  # it would not come to an end
                if going:
                    self._begin(now)
                continue
            match self._phase:
                case _Phase.VOTE:
                    going = self._listen(cycle, Kind.VOTE, self._voted)
                case _Phase.INVALID:
                    going = self._listen(cycle, Kind.INVALID, self._invalidated)
                case _Phase.GATHER:
                    going = self._gather(cycle)
                case _Phase.IDLE:  # the cycle is over
                    self._cycle = None
                    self._number += 1
                    self._check_left()
                    # Agreement takes a fifth of the time at most while nobody is blocked.
                    self._not_before = now + min(_PAUSE_MAX_S, 4 * (now - cycle.begun_at))
        if self._departed and self.ended is None:
            gone = next((peer for peer in self._awaited() if peer in self._departed), None)
            if gone is not None:
                self._abort(PeerLost(self._shown_ranks[gone], self._departed[gone]))

    def _check_left(self) -> None:
        """Nothing may be left of cycles that are over: it would draw this rank into new ones for ever."""
        for (number, kind, _), (peer, _) in self._early.items():
            if number < self._number:
                raise ProtocolError(f"rank {peer} says {kind.name} in cycle {number}, which had no such part")

    def _awaited(self) -> list[int]:
        """Whose message this rank waits for."""
        cycle = self._cycle
        if cycle is None:  # what is pending needs one more cycle, and that needs everybody
            return list(range(self.world_size)) if self._pending or self._joins else []
        if self._phase is not _Phase.GATHER:
            return [(self.rank - (1 << cycle.round)) % self.world_size]
        if cycle.gathered:
            return [self._parent]
        return [child for child in self._children if (self._number, Kind.REQUESTS, child) not in self._early]

    def _due(self, now: float) -> bool:
        """Whether the next cycle begins: because of news here, or drawn in by another rank."""
        if self._news and (self._hurried or now >= self._not_before or self._news_bytes >= self.config.fusion_bytes):
            return True
        return bool(self._early) or self._begun >= self._number

    def _begin(self, now: float) -> None:
        """Look at everything that is pending and say what of it the cache knows."""
        if self._classified == self.cache.version:  # in steady training it was all looked up when it was submitted
            hits, invalid, uncached = self._hits, 0, list[Request]()
        else:
            hits, invalid, uncached = self._classify()
        if self._joins:
            hits = self.cache.all_bits
        status = 0
        if uncached or (self._joins and not self._join_sent):
            status |= _UNCACHED
        if invalid:
            status |= _INVALID
        bits = (~status & _STATUS) | ((hits & ~invalid) << _STATUS_BITS)
        self._cycle = _Cycle(now, uncached, invalid, bits)
        self._phase = _Phase.VOTE
        self._news = self._hurried = False
        self._news_bytes = 0
        self.counters.cycles += 1
        self._speak(self._cycle, Kind.VOTE)

    def _classify(self) -> tuple[int, int, list[Request]]:
        """Of the queue: bits that are hit, bits that are out of date, and what rank 0 must be asked for."""
        hits = invalid = 0
        uncached: list[Request] = []
        classify = self.cache.classify
        lookups = [(request, *classify(request)) for request in self._queue.values()]
        # A group of operations is known as a whole or not at all; and it is submitted as a whole, so that all ranks
        # find the same.
        broken = {request.batch for request, lookup, _ in lookups if lookup is not Lookup.HIT} - {None}
        for request, lookup, bit in lookups:
            if lookup is Lookup.HIT and request.batch not in broken:
                hits |= 1 << bit
            else:
                uncached.append(request)
                if lookup is not Lookup.MISS:
                    invalid |= 1 << bit
        self._hits, self._classified = hits, -1 if uncached else self.cache.version
        return hits, invalid, uncached

    def _speak(self, cycle: _Cycle, kind: Kind) -> None:
        """This round's message of a vote: to the rank 2**round further on."""
        if cycle.round < self._rounds:
            peer = (self.rank + (1 << cycle.round)) % self.world_size
            self._send(peer, encode(kind, self._number, cycle.round, bits=cycle.bits))

    def _listen(self, cycle: _Cycle, kind: Kind, done: Callable[[_Cycle], None]) -> bool:
        """Take this round's message of a vote, if it is here; returns whether that led on."""
        if cycle.round == self._rounds:
            done(cycle)
            return True
        body = self._take(kind, cycle.round)
        if body is None:
            return False
        if kind is Kind.VOTE:
            cycle.bits &= decode_bits(body, self.cache.num_bits + _STATUS_BITS)
        else:
            cycle.bits |= decode_bits(body, self.cache.num_bits)
            if cycle.bits & ~self.cache.all_bits:
                raise ProtocolError("operations are out of date that no rank remembers")
        cycle.round += 1
        self._speak(cycle, kind)
        return True

    def _voted(self, cycle: _Cycle) -> None:
        status = ~cycle.bits & _STATUS
        cycle.common = cycle.bits >> _STATUS_BITS
        if status & _INVALID:
            self._phase, cycle.round, cycle.bits = _Phase.INVALID, 0, cycle.invalid
            self._speak(cycle, Kind.INVALID)
        elif status & _UNCACHED:
            self._phase = _Phase.GATHER
        else:
            self._conclude(cycle, ())

    def _invalidated(self, cycle: _Cycle) -> None:
        """What is out of date on some rank is erased on all, and asked for anew by those who thought they knew it."""
        self.counters.invalid += cycle.bits.bit_count()
        erased = [self.cache.peek(bit).name for bit in bits_of(cycle.bits)]
        self.cache.erase(cycle.bits)
        asked = {request.name for request in cycle.uncached}
        cycle.uncached += [self._queue[name] for name in erased if name in self._queue and name not in asked]
        cycle.common &= ~cycle.bits
        self._phase = _Phase.GATHER

    def _gather(self, cycle: _Cycle) -> bool:
        """Requests go up, responses come down; returns whether that led on."""
        if not cycle.gathered:
            keys = [(self._number, Kind.REQUESTS, child) for child in self._children]
            if any(key not in self._early for key in keys):
                return False
            for key in keys:
                del self._early[key]
            asked = [entry for child in self._children for entry in self._asked.pop(child)]
            asked.append(self._ask(cycle))
            cycle.gathered = True
            self.counters.slow_cycles += 1
            if self.rank:
                lists = [entry.to_wire() for entry in asked]
                self._send(self._parent, encode(Kind.REQUESTS, self._number, value=lists))
            else:
                self._answered(cycle, self._coordinate(asked))
                return True
        body = self._take(Kind.RESPONSES, 0)
        if body is None:
            return False
        self._answered(cycle, decode_json(body))
        return True

    def _read_requests(self, child: int, body: bytes) -> list[_Asked]:
        """What a child and the ranks below it ask for: every one of these ranks once, within its allowance.

        A correct child has refused ranks below it that ask for too much, so it is the child that is refused here.
        """
        lists = decode_json(body)
        below = min(child + (child & -child), self.world_size)
        try:
            asked = [_Asked.from_wire(fields) for fields in lists]
            if sorted(entry.rank for entry in asked) != list(range(child, below)):
                raise ValueError(lists)
        except (*MALFORMED, ProtocolError) as cause:
            raise ProtocolError(f"rank {child} sends requests as no correct peer does") from cause
        for entry in asked:
            if not self._allowances.take(entry.rank, entry.requests):
                sender = "" if entry.rank == child else f" (passed on by rank {child})"
                raise ProtocolError(
                    f"rank {entry.rank}{sender} asks for more operations than may wait for the other ranks: at most "
                    f"{allowance()} of one rank"
                )
        return asked

    def _ask(self, cycle: _Cycle) -> _Asked:
        """What this rank asks for beyond the cache."""
        costs = itertools.accumulate(request.memory_bytes for request in cycle.uncached)
        share = _CYCLE_BYTES_MAX // self.world_size
        num_asked = min(max(1, sum(1 for _ in itertools.takewhile(lambda cost: cost <= share, costs))), _REQUESTS_MAX)
        asked = cycle.uncached[:num_asked]
        self._news = self._hurried = self._news or len(cycle.uncached) > num_asked
        self.counters.misses += len(asked)
        for request in asked:
            del self._queue[request.name]
        joins, self._join_sent = self._joins and not self._join_sent, self._joins
        return _Asked(self.rank, asked, joins)

    def _coordinate(self, asked: Iterable[_Asked]) -> list[Any]:
        """Rank 0: what is ready, now that these ask for those."""
        for rank, requests, joins in sorted(asked, key=lambda entry: entry.rank):
            self._table.add(rank, requests)
            self._arrivals += ((request.name, rank) for request in requests)
            if joins:
                self._table.join(rank)
        responses = [response.to_wire() for response in self._table.answer()]
        joined = list(self._table.joined)
        if len(joined) == self.world_size:
            self._table.joined.clear()
        return [responses, joined]

    def _answered(self, cycle: _Cycle, answer: Any) -> None:
        """Pass on what rank 0 says, and do it."""
        try:
            responses, joined = answer
            new = [Response.from_wire(response) for response in responses]
            self.joined = tuple(int(rank) for rank in joined)
            if len(set(self.joined)) != len(self.joined) or not set(self.joined) <= set(range(self.world_size)):
                raise ValueError(joined)
        except MALFORMED as cause:
            raise ProtocolError("a list of responses that no correct peer sends") from cause
        self._check(new)
        message = encode(Kind.RESPONSES, self._number, value=answer)
        for child in self._children:
            self._send(child, message)
        if len(self.joined) == self.world_size:
            self.last_joined, self.joined, self._joins = self.joined[-1], (), False
            cycle.common = 0  # all were ready to lend zeros, and nobody had data
        self._conclude(cycle, new)

    def _check(self, new: Sequence[Response]) -> None:
        """Every response is to something that this rank asked for or lends zeros to, and that is not in the cache."""
        names = [response.name for response in new]
        if len(set(names)) != len(names):
            raise ProtocolError("two responses to one request")
        for name in names:
            if name in self.cache or not (name in self._pending or self._joins):
                raise ProtocolError(f"a response to {name!r}, which rank {self.rank} has not asked rank 0 for")

    def _conclude(self, cycle: _Cycle, new: Iterable[Response]) -> None:
        """Carry out what is ready. The cache is used and filled in the same order on all ranks."""
        if cycle.common:
            responses = self.cache.use(cycle.common)
            self.counters.hits += len(responses)
            if self.joined:
                # As in responses that are new, or they would not be fused with those.
                joined = tuple(sorted(self.joined))
                responses = [response.with_joined(joined) for response in responses]
            self._respond(responses)
        new = list(new)
        for response in new:
            pending = self._pending.get(response.name)
            self.cache.put(response, pending.request if pending else None)
        self._respond(new)
        if not self._queue:
            self._hits, self._classified = 0, self.cache.version
        elif cycle.common:
            self._hits &= ~cycle.common
        self._phase = _Phase.IDLE

    def _respond(self, responses: list[Response]) -> None:
        """Hand over what has been agreed on; the very list, where nothing was left over from before."""
        for response in responses:
            name = response.name
            self._pending.pop(name, None)
            self._queue.pop(name, None)
            self._allowances.answered(name)
        self._responses = self._responses + responses if self._responses else responses


def _children(rank: int, world_size: int) -> list[int]:
    """Of a rank in the binomial tree whose root is 0 and in which a parent is its child without the lowest one-bit."""
    lowest = rank & -rank if rank else 1 << world_size.bit_length()
    children = []
    step = 1
    while step < lowest and rank + step < world_size:
        children.append(rank + step)
        step *= 2
    return children


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
