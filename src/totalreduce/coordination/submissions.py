"""The operations that one rank has submitted and on which the ranks have not agreed, and when to negotiate them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from totalreduce.coordination.cache import Lookup, ResponseCache
from totalreduce.coordination.config import CoordinationConfig
from totalreduce.coordination.limits import Allowances, allowance
from totalreduce.coordination.requests import Request, Response
from totalreduce.coordination.stall import WaitingOperation
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["CycleTimer", "Submissions"]

#: The longest pause between two cycles while no caller is blocked, in seconds.
_PAUSE_MAX_S = 0.005


@final
class Submissions:
    """The operations that one rank has submitted, until the ranks have agreed on them."""

    def __init__(self, rank: int, cache: ResponseCache) -> None:
        self.cache = cache  #: The response cache.
        self.allowances = Allowances()  #: The account of requests without a response.
        self._rank = rank
        #: By name, the oldest first: operations on which the ranks have not agreed.
        self.waiting: dict[str, WaitingOperation] = {}
        self.unsent: dict[str, Request] = {}  #: By name: the requests of these operations that rank 0 does not have.
        #: The bits of the unsent requests in this version of the cache; the version is -1 if the cache lacks some.
        self._hits = self._hits_version = 0

    def add(self, requests: Sequence[Request], now: float, where: object) -> None:
        """Note that this rank has submitted operations (see ``Negotiator.submit``). Raises ``ConfigurationError``."""
        if not self.allowances.take(self._rank, requests):
            raise ConfigurationError(
                f"rank {self._rank} has {len(self.waiting)} operations on which the ranks have not agreed yet, and "
                f"{len(requests)} more are too many: at most {allowance()} of one rank may wait. Wait for some of them"
            )
        known = self._hits_version == self.cache.version
        for request in requests:
            assert request.name not in self.waiting, "the caller refuses names in flight"
            self.waiting[request.name] = WaitingOperation(request, now, where)
            self.unsent[request.name] = request
            if known:
                lookup, bit = self.cache.classify(request)
                known = lookup is Lookup.HIT
                self._hits |= known << bit
        if not known:
            self._hits_version = -1

    def classify(self) -> tuple[int, int, list[Request]]:
        """Look the unsent requests up in the cache.

        Returns:
            The bits of the requests that the cache has, the bits of entries that are out of date, and the requests that
            rank 0 must get.
        """
        if self._hits_version == self.cache.version:  # in steady training, ``add`` has looked all of them up
            return self._hits, 0, []
        hits = invalid = 0
        uncached: list[Request] = []
        classify = self.cache.classify
        lookups = [(request, *classify(request)) for request in self.unsent.values()]
        # A batch of operations counts as cached only if all of it is. Every rank submits the whole batch, so all ranks
        # find the same.
        incomplete = {request.batch for request, lookup, _ in lookups if lookup is not Lookup.HIT} - {None}
        for request, lookup, bit in lookups:
            if lookup is Lookup.HIT and request.batch not in incomplete:
                hits |= 1 << bit
            else:
                uncached.append(request)
                if lookup is not Lookup.MISS:
                    invalid |= 1 << bit
        self._hits, self._hits_version = hits, -1 if uncached else self.cache.version
        return hits, invalid, uncached

    def send(self, requests: Iterable[Request]) -> None:
        """Note that rank 0 gets these requests."""
        for request in requests:
            del self.unsent[request.name]

    def agree(self, responses: Iterable[Response]) -> None:
        """Forget the operations of these responses."""
        waiting, unsent = self.waiting, self.unsent
        for response in responses:
            name = response.request.name
            waiting.pop(name, None)
            unsent.pop(name, None)
            self.allowances.give_back(name)

    def end_cycle(self, carried_out: int) -> None:
        """Note that a cycle has ended in which the cached operations with these bits were carried out."""
        if not self.unsent:
            self._hits, self._hits_version = 0, self.cache.version
        elif carried_out:
            self._hits &= ~carried_out

    def clear(self) -> None:
        """Forget everything."""
        self.waiting.clear()
        self.unsent.clear()
        self.allowances.clear()


@final
class CycleTimer:
    """Decides when this rank begins a cycle for its own operations.

    Operations are collected for ``CoordinationConfig.cycle_s``, so that they share a cycle. A cycle begins at once when
    a caller is blocked, or when the collected tensors fill a fusion buffer.
    """

    def __init__(self, config: CoordinationConfig) -> None:
        self._config = config
        self.has_news = False  #: Whether this rank has something to say since the last cycle began.
        self._is_urgent = False
        self._num_bytes = 0
        self._not_before = 0.0

    @property
    def due_at(self) -> float | None:
        """The time of the next cycle; ``None`` if there is no news."""
        return self._not_before if self.has_news else None

    def is_due(self, now: float) -> bool:
        """Return whether a cycle is to begin."""
        return self.has_news and (
            self._is_urgent or now >= self._not_before or self._num_bytes >= self._config.fusion_bytes
        )

    def submitted(self, num_bytes: int, now: float) -> bool:
        """Note new operations with tensors of ``num_bytes``. Return whether their cycle begins at once."""
        self._num_bytes += num_bytes
        if not self.has_news:
            self.has_news = True
            self._not_before = max(self._not_before, now + self._config.cycle_s)
        return self._is_urgent or self._num_bytes >= self._config.fusion_bytes

    def hurry(self) -> bool:
        """Begin the next cycle at once if there is news; return whether there is."""
        self._is_urgent = self.has_news
        return self.has_news

    def require_cycle(self) -> None:
        """Begin the next cycle at once, also without new operations."""
        self.has_news = self._is_urgent = True

    def begin_cycle(self) -> None:
        """Note that a cycle has begun, which covers all news."""
        self.has_news = self._is_urgent = False
        self._num_bytes = 0

    def end_cycle(self, begun_at: float, now: float) -> None:
        """Put the next cycle off, so that agreement takes a fifth of the time at most while no caller is blocked."""
        self._not_before = now + min(_PAUSE_MAX_S, 4 * (now - begun_at))
