"""Messages of cycles that have arrived at a rank, until the rank needs them.

A rank is at most one cycle ahead of another one, because it cannot end a cycle without a vote of every other rank. So
only messages of this cycle and votes of the next one can arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

from totalreduce.coordination.cache import ResponseCache
from totalreduce.coordination.limits import Allowances, RankRequests
from totalreduce.coordination.messages import MALFORMED, STATUS_BITS, Kind, decode_bits, decode_json
from totalreduce.coordination.topology import Topology
from totalreduce.foundation.errors import ProtocolError

__all__ = ["CycleInbox"]


@final
class CycleInbox:
    """The messages of cycles, checked when they arrive."""

    def __init__(self, topology: Topology, allowances: Allowances, cache: ResponseCache) -> None:
        self.number = 0  #: The number of this rank's cycle under way, or of the next one.
        self.is_idle = True  #: Whether no cycle is under way on this rank.
        self._topology, self._allowances, self._cache = topology, allowances, cache
        #: By cycle, kind and sender: the body. A rank sends one vote at most to this rank in a cycle (``Topology``).
        self._messages: dict[tuple[int, Kind, int], Any] = {}
        self._begun = -1  #: The latest cycle that another rank has announced by ``Kind.BEGIN``.

    def add(self, peer: int, kind: Kind, cycle: int, round_: int, body: bytes) -> None:
        """Keep a message. Raises ``ProtocolError``."""
        ahead = cycle - self.number
        if kind is Kind.BEGIN:
            if ahead > 1:
                raise ProtocolError(f"rank {peer} begins cycle {cycle}; this rank is in {self.number}")
            self._begun = max(self._begun, cycle)
            return
        # In a cycle, votes of the next one may come, too. Before a cycle, only its votes may come.
        ahead_max = (1 if kind is Kind.VOTE else 0) - (1 if self.is_idle else 0)
        if not 0 <= ahead <= ahead_max:
            raise ProtocolError(f"rank {peer} says {kind.name} in cycle {cycle}; this rank is in {self.number}")
        if not self._may_send(peer, kind, round_):
            raise ProtocolError(f"rank {peer} says {kind.name} in round {round_}, which is another rank's part")
        key = cycle, kind, peer
        if key in self._messages:
            raise ProtocolError(f"rank {peer} says {kind.name} twice in cycle {cycle}")
        # A message is read at once, so that the error is raised for the rank that has sent it.
        self._messages[key] = self._read(peer, kind, body)

    @property
    def has_begun(self) -> bool:
        """Whether another rank has begun this cycle."""
        return bool(self._messages) or self._begun >= self.number

    def missing(self, kind: Kind, senders: Iterable[int]) -> list[int]:
        """Return the senders of which no message of this kind has arrived in this cycle."""
        return [sender for sender in senders if (self.number, kind, sender) not in self._messages]

    def take(self, kind: Kind, senders: Sequence[int]) -> list[Any] | None:
        """Return the bodies of the senders' messages of this cycle and forget them; ``None`` if one has not arrived.

        The body of ``REQUESTS`` is a list of ``RankRequests``, that of ``RESPONSES`` a JSON value, and others are bits.
        """
        if self.missing(kind, senders):
            return None
        return [self._messages.pop((self.number, kind, sender)) for sender in senders]

    def end_cycle(self) -> None:
        """Note the end of a cycle, of which no message may be left: it would begin cycles without end.

        Raises:
            ProtocolError: There is such a message, which no correct peer has sent.
        """
        self.number, self.is_idle = self.number + 1, True
        for cycle, kind, peer in self._messages:
            if cycle < self.number:
                raise ProtocolError(f"rank {peer} says {kind.name} in cycle {cycle}, which had no such part")

    def clear(self) -> None:
        """Forget all messages."""
        self._messages.clear()

    def _may_send(self, peer: int, kind: Kind, round_: int) -> bool:
        """Return whether a peer can send this message in a cycle."""
        topology = self._topology
        if kind is Kind.REQUESTS:
            return peer in topology.children
        if kind is Kind.RESPONSES:
            return topology.rank > 0 and peer == topology.parent and round_ == 0
        return round_ < topology.num_rounds and peer in topology.vote_sources[round_]

    def _read(self, peer: int, kind: Kind, body: bytes) -> Any:
        """Return the body of a message, checked as far as it is known what is right."""
        if kind is Kind.REQUESTS:
            return self._read_requests(peer, body)
        if kind is Kind.RESPONSES:
            return decode_json(body)
        # A vote of the next cycle may have bits of entries that this rank makes at the end of this cycle.
        bits = decode_bits(body, self._cache.capacity + STATUS_BITS)
        if kind is Kind.INVALID and bits & ~self._cache.all_bits:
            raise ProtocolError(f"rank {peer} says that operations are out of date that no rank remembers")
        return bits

    def _read_requests(self, child: int, body: bytes) -> list[RankRequests]:
        """Read the requests of a child and of all ranks below it, and charge these ranks with them.

        A correct child refuses excessive requests of the ranks below it, so the error is about the child.
        """
        lists = decode_json(body)
        try:
            requests = [RankRequests.from_wire(fields) for fields in lists]
            if sorted(each.rank for each in requests) != list(self._topology.subtree(child)):
                raise ValueError(lists)
        except (*MALFORMED, ProtocolError) as cause:
            raise ProtocolError(f"rank {child} sends requests as no correct peer does") from cause
        for each in requests:
            self._allowances.charge_peer(child, each)
        return requests
