"""The coordinator's table: who has asked for what, and what is ready because everybody has.

Only rank 0 of a group has one, and only requests that the caches do not know pass through it. What a rank may ask for
before it is answered is bounded (``Allowances``): the table of rank 0 takes as much memory as the ranks ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from totalreduce.coordination.requests import Disagreement, Request, Response, respond

__all__ = ["Allowances", "RequestTable", "allowance"]

#: Operations that one rank may have asked for without an answer: several times the tensors of the largest models.
_PENDING_MAX: Final = 32_768
#: The memory that the requests of one rank may take at rank 0 meanwhile, by ``Request.memory_bytes``.
_PENDING_BYTES_MAX: Final = 40 * 1024 * 1024


def allowance() -> str:
    """The bound in words, for error messages."""
    return f"{_PENDING_MAX} operations, or {_PENDING_BYTES_MAX >> 20} MiB of requests"


class Allowances:
    """What ranks have asked for and have had no answer to: entries and bytes of each rank.

    Every rank keeps the account of itself and of the ranks below it in the tree along which requests travel. Charges
    and answers are the same everywhere, so a correct rank refuses what is too much before it could pass it on.
    """

    def __init__(self) -> None:
        """Nobody has asked for anything."""
        self._costs: dict[str, dict[int, tuple[int, int]]] = {}  #: By name and rank.
        self._spent: dict[int, tuple[int, int]] = {}

    def take(self, rank: int, requests: Sequence[Request]) -> bool:
        """Charge a rank with requests. Returns ``False``, and charges nothing, if they exceed the rank's allowance."""
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

    def answered(self, name: str) -> None:
        """The operation was answered: what it cost is given back to everybody who has asked for it."""
        for rank, (times, cost) in self._costs.pop(name, {}).items():
            entries, num_bytes = self._spent[rank]
            self._spent[rank] = entries - times, num_bytes - cost

    def clear(self) -> None:
        """Forget everything."""
        self._costs.clear()
        self._spent.clear()


class RequestTable:
    """Requests by name and rank. Deterministic: what is ready is answered in the order it became ready."""

    def __init__(self, world_size: int) -> None:
        """Make an empty table."""
        self._world_size = world_size
        self._asked: dict[str, dict[int, Request]] = {}
        self.joined: list[int] = []  #: Ranks without data, in the order they said so.

    def __len__(self) -> int:
        """Names that somebody waits for."""
        return len(self._asked)

    def add(self, rank: int, requests: Iterable[Request]) -> None:
        """Note what a rank asks for."""
        for request in requests:
            self._asked.setdefault(request.name, {})[rank] = request

    def clear(self) -> None:
        """Forget everything."""
        self._asked.clear()

    def join(self, rank: int) -> None:
        """Note that a rank has no more data."""
        if rank not in self.joined:
            self.joined.append(rank)

    def answer(self) -> list[Response]:
        """Take out what is ready and say what to do about it. Groups of operations are ready as a whole."""
        ready = [name for name, asked in self._asked.items() if self._complete(asked)]
        members: dict[tuple[str, int], list[str]] = {}
        for name in ready:
            for batch in {request.batch for request in self._asked[name].values()} - {None}:
                assert batch is not None
                members.setdefault(batch, []).append(name)
        waiting = {name for batch, names in members.items() if len(names) < batch[1] for name in names}
        # A name that the ranks put into different groups can make none of them complete: it is an error by itself.
        disputed = {name for name in waiting if len({request.batch for request in self._asked[name].values()}) > 1}
        return _all_or_nothing(
            [
                respond(self._asked.pop(name), self._world_size, self.joined)
                for name in ready
                if name not in waiting or name in disputed
            ]
        )

    def _complete(self, asked: dict[int, Request]) -> bool:
        return len(asked) + sum(rank not in asked for rank in self.joined) >= self._world_size


def _all_or_nothing(responses: list[Response]) -> list[Response]:
    """What is wrong with one member of a group is wrong with all of them."""
    wrong: dict[tuple[str, int], Disagreement] = {}
    for response in responses:
        if response.error is not None and response.request.batch is not None:
            wrong.setdefault(response.request.batch, response.error)
    return [
        Response(response.request, error=wrong[response.request.batch], joined=response.joined)
        if response.request.batch in wrong
        else response
        for response in responses
    ]
