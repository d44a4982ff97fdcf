"""Limits on the requests of one rank, and these requests on their way to rank 0.

The table of rank 0 takes as much memory as the ranks ask for. Therefore the requests without a response are limited for
each rank, and so are the requests that a rank sends in one cycle.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

from totalreduce.coordination.requests import Request
from totalreduce.foundation.errors import ProtocolError

__all__ = ["Allowances", "RankRequests", "allowance", "requests_of_cycle"]

#: Requests of one rank without a response: several times the number of tensors of the largest models.
_PENDING_MAX: Final = 32_768
#: The memory of these requests at rank 0, by ``Request.memory_bytes``.
_PENDING_BYTES_MAX: Final = 40 * 1024 * 1024
#: Requests that one rank sends in one cycle; the others follow in the next cycles.
_REQUESTS_MAX: Final = 1024
#: The memory that the requests of all ranks may take in one cycle, by ``Request.memory_bytes``: every rank sends its
#: share, and one request at least. It keeps the messages of large groups far below the limit of a channel.
_CYCLE_BYTES_MAX: Final = 32 * 1024 * 1024


class RankRequests(NamedTuple):
    """The requests that one rank sends to rank 0 in one cycle."""

    rank: int
    requests: list[Request]
    joins: bool  #: Whether the rank announces that it has no more data.

    def to_wire(self) -> list[Any]:
        """Return a JSON-ready form."""
        return [self.rank, [request.to_wire() for request in self.requests], self.joins]

    @classmethod
    def from_wire(cls, fields: Any) -> RankRequests:
        """Read the form that ``to_wire`` returns.

        Raises:
            ProtocolError: A request has no form that a correct peer sends.
            Exception: One of ``MALFORMED``: another field has no such form.
        """
        rank, requests, joins = fields
        if not isinstance(requests, list) or len(requests) > _REQUESTS_MAX:
            raise ValueError("too many requests")
        return cls(int(rank), [Request.from_wire(request) for request in requests], bool(joins))


def requests_of_cycle(requests: Sequence[Request], world_size: int) -> Sequence[Request]:
    """Return the first requests, as many as one of ``world_size`` ranks may send in one cycle."""
    costs = itertools.accumulate(request.memory_bytes for request in requests)
    share = _CYCLE_BYTES_MAX // world_size
    count = sum(1 for _ in itertools.takewhile(lambda cost: cost <= share, costs))
    return requests[: min(max(1, count), _REQUESTS_MAX)]


def allowance() -> str:
    """Return the limit of one rank in words, for error messages."""
    return f"{_PENDING_MAX} operations, or {_PENDING_BYTES_MAX >> 20} MiB of requests"


@final
class Allowances:
    """An account of the requests that have no response yet: their number and memory for each rank.

    Every rank keeps the account of itself and of the ranks below it in the tree along which requests travel. Requests
    cost the same on all ranks, so a correct rank refuses excessive requests and never passes them on.
    """

    def __init__(self) -> None:
        self._costs: dict[str, dict[int, tuple[int, int]]] = {}  #: By name and rank.
        self._spent: dict[int, tuple[int, int]] = {}

    def take(self, rank: int, requests: Sequence[Request]) -> bool:
        """Charge a rank with requests. Return ``False``, and charge nothing, if they exceed the rank's allowance."""
        entries, num_bytes = self._spent.get(rank, (0, 0))
        costs = [request.memory_bytes for request in requests]
        entries, num_bytes = entries + len(costs), num_bytes + sum(costs)
        if entries > _PENDING_MAX or num_bytes > _PENDING_BYTES_MAX:
            return False
        self._spent[rank] = entries, num_bytes
        for request, cost in zip(requests, costs, strict=True):
            ranks = self._costs.setdefault(request.name, {})
            times, before = ranks.get(rank, (0, 0))
            ranks[rank] = times + 1, before + cost
        return True

    def charge_peer(self, child: int, requests: RankRequests) -> None:
        """Charge a rank with requests that a child in the tree has sent or passed on. Raises ``ProtocolError``."""
        if not self.take(requests.rank, requests.requests):
            passed_on = "" if requests.rank == child else f" (passed on by rank {child})"
            raise ProtocolError(
                f"rank {requests.rank}{passed_on} asks for more operations than may wait for the other ranks: at most "
                f"{allowance()} of one rank"
            )

    def give_back(self, name: str) -> None:
        """Give the cost of an operation back to all ranks that have asked for it: the operation has a response."""
        costs = self._costs.pop(name, None)
        if costs is None:
            return
        for rank, (times, cost) in costs.items():
            entries, num_bytes = self._spent[rank]
            self._spent[rank] = entries - times, num_bytes - cost

    def clear(self) -> None:
        """Forget all requests."""
        self._costs.clear()
        self._spent.clear()
