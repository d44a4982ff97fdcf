"""The coordinator's table: who has asked for what, and what is ready because everybody has.

Only rank 0 of a group has one, and only requests that the caches do not know pass through it.
"""

from __future__ import annotations

from collections.abc import Iterable

from totalreduce.coordination.requests import Disagreement, Request, Response, respond

__all__ = ["RequestTable"]


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
