"""Messages of cycles that have arrived at a rank, until the rank needs them.

A rank is at most one cycle ahead of another one, because it cannot end a cycle without a vote of every other rank. So
only messages of this cycle and votes of the next one can arrive.
"""

from __future__ import annotations

from typing import Any, final

from totalreduce.coordination.limits import Allowances, RankRequests
from totalreduce.coordination.messages import MALFORMED, Kind, decode_json
from totalreduce.coordination.topology import Topology
from totalreduce.foundation.errors import ProtocolError

__all__ = ["CycleInbox"]


@final
class CycleInbox:
    """The messages of cycles, checked when they arrive.

    Attributes:
        number: The number of this rank's cycle under way, or of the next one.
        is_idle: Whether no cycle is under way on this rank.
    """

    def __init__(self, topology: Topology, allowances: Allowances) -> None:
        self.number, self.is_idle = 0, True
        self._topology, self._allowances = topology, allowances
        #: By cycle, kind, and sender (of requests) or round (of votes): the sender and the body.
        self._messages: dict[tuple[int, Kind, int], tuple[int, Any]] = {}
        self._begun = -1  #: The latest cycle that another rank has announced by ``Kind.BEGIN``.

    def add(self, peer: int, kind: Kind, cycle: int, round_: int, body: bytes) -> None:
        """Keep a message.

        Raises:
            ProtocolError: A correct peer sends no such message.
        """
        ahead = cycle - self.number
        if kind is Kind.BEGIN:
            if ahead > 1:
                raise ProtocolError(f"rank {peer} begins cycle {cycle}; this rank is in {self.number}")
            self._begun = max(self._begun, cycle)
            return
        if not 0 <= ahead <= 1 or (ahead and self.is_idle) or (kind is not Kind.VOTE and (ahead or self.is_idle)):
            raise ProtocolError(f"rank {peer} says {kind.name} in cycle {cycle}; this rank is in {self.number}")
        if not self._may_send(peer, kind, round_):
            raise ProtocolError(f"rank {peer} says {kind.name} in round {round_}, which is another rank's part")
        key = cycle, kind, peer if kind is Kind.REQUESTS else round_
        if key in self._messages:
            raise ProtocolError(f"rank {peer} says {kind.name} twice in cycle {cycle}")
        # Requests are read at once, so that the rank that has sent too many is the one that is refused.
        self._messages[key] = peer, self._read_requests(peer, body) if kind is Kind.REQUESTS else body

    @property
    def has_begun(self) -> bool:
        """Whether another rank has begun this cycle."""
        return bool(self._messages) or self._begun >= self.number

    def take(self, kind: Kind, round_: int = 0) -> bytes | None:
        """Return the body of a message of this cycle and forget the message; ``None`` if it has not arrived."""
        entry = self._messages.pop((self.number, kind, round_), None)
        return None if entry is None else entry[1]

    def missing_children(self) -> list[int]:
        """Return the children in the tree whose requests of this cycle have not arrived."""
        return [child for child in self._topology.children if (self.number, Kind.REQUESTS, child) not in self._messages]

    def take_requests(self) -> list[RankRequests]:
        """Return the requests of this cycle of all ranks below this one, and forget them; all have arrived."""
        parts = [self._messages.pop((self.number, Kind.REQUESTS, child))[1] for child in self._topology.children]
        return [requests for part in parts for requests in part]

    def end_cycle(self) -> None:
        """Note the end of a cycle, of which no message may be left: it would begin cycles without end.

        Raises:
            ProtocolError: There is such a message, which no correct peer has sent.
        """
        self.number, self.is_idle = self.number + 1, True
        for (cycle, kind, _), (peer, _) in self._messages.items():
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
        return round_ < topology.num_rounds and peer == topology.vote_source(round_)

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
