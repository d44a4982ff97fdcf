"""The table of requests on rank 0: an operation is ready when all ranks have asked for it.

Only requests that the response caches do not know pass through the table. ``limits.py`` bounds its memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from totalreduce.coordination.limits import RankRequests
from totalreduce.coordination.requests import Disagreement, Request, Response, respond

__all__ = ["RequestTable"]


@final
class RequestTable:
    """Requests by name and rank. Deterministic: operations are answered in the order in which they became ready."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._requests: dict[str, dict[int, Request]] = {}
        self._joined: list[int] = []  #: Ranks without data, in the order in which they said so.
        self._arrivals: list[tuple[str, int]] = []

    def __len__(self) -> int:
        """Return the number of operations that are not ready."""
        return len(self._requests)

    def process(self, requests: Iterable[RankRequests]) -> list[Any]:
        """Take in the requests of one cycle; return the answer to all ranks: responses, and the ranks that joined."""
        for rank, new, joins in sorted(requests, key=lambda each: each.rank):
            self.add(rank, new)
            self._arrivals += ((request.name, rank) for request in new)
            if joins and rank not in self._joined:
                self._joined.append(rank)
        responses = [response.to_wire() for response in self.answer()]
        joined = list(self._joined)
        if len(joined) == self._world_size:
            self._joined.clear()
        return [responses, joined]

    def add(self, rank: int, requests: Iterable[Request]) -> None:
        """Take in the requests of a rank."""
        for request in requests:
            self._requests.setdefault(request.name, {})[rank] = request

    def answer(self) -> list[Response]:
        """Take out the operations that are ready and respond to them. A group of operations is ready as a whole."""
        ready = [name for name, requests in self._requests.items() if self._is_ready(requests)]
        members: dict[tuple[str, int], list[str]] = {}
        for name in ready:
            for batch in {request.batch for request in self._requests[name].values()} - {None}:
                assert batch is not None
                members.setdefault(batch, []).append(name)
        waiting = {name for batch, names in members.items() if len(names) < batch[1] for name in names}
        # If ranks put a name into different groups, it completes none of them. It is answered with its own error.
        disputed = {name for name in waiting if len({request.batch for request in self._requests[name].values()}) > 1}
        return _all_or_nothing(
            [
                respond(self._requests.pop(name), self._world_size, self._joined)
                for name in ready
                if name not in waiting or name in disputed
            ]
        )

    def pop_arrivals(self) -> list[tuple[str, int]]:
        """Return names and the ranks whose requests for them have arrived since the last call, in order."""
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def clear(self) -> None:
        """Forget all requests."""
        self._requests.clear()

    def _is_ready(self, requests: dict[int, Request]) -> bool:
        return len(requests) + sum(rank not in requests for rank in self._joined) >= self._world_size


def _all_or_nothing(responses: list[Response]) -> list[Response]:
    """Give all members of a group of operations the error of one of them."""
    errors: dict[tuple[str, int], Disagreement] = {}
    for response in responses:
        if response.error is not None and response.request.batch is not None:
            errors.setdefault(response.request.batch, response.error)
    return [
        Response(response.request, error=errors[response.request.batch], joined=response.joined)
        if response.request.batch in errors
        else response
        for response in responses
    ]
