"""What other ranks have said of operations that are not active here: they are ahead, or this rank has finished.

Every peer has an allowance for what is kept of its frames. A peer that is so far ahead that the allowance is used up is
refused: to forget what it said could leave it waiting for ever. Names and descriptions are for messages to people;
there the oldest ones are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from totalreduce.engine.layout import Expectation
from totalreduce.foundation.errors import MismatchError, PeerLost, ProtocolError

__all__ = ["BoundedTable", "EarlyNews", "News"]

#: What may be kept of one peer's frames, by the costs below.
_PEER_BYTES_MAX = 32 * 1024 * 1024
#: What an entry costs besides its strings: measured, and rounded up.
_ENTRY_COST = 1024
#: Names and descriptions, each.
_TEXT_BYTES_MAX = 4 * 1024 * 1024
#: Operations that ended here before others began, at most; each takes some hundred bytes.
_ENDED_MAX = 16_384

K = TypeVar("K")
V = TypeVar("V")
_Key = tuple[int, int]


class BoundedTable(OrderedDict[K, V], Generic[K, V]):
    """A dictionary that forgets its oldest entries when it is full."""

    def __init__(self, maximum: int, cost: Callable[[V], int] = lambda _: 1) -> None:
        """``maximum``: sum of the values' costs; by default the number of entries."""
        super().__init__()
        self._maximum, self._cost = maximum, cost
        self.total = 0

    def __setitem__(self, key: K, value: V) -> None:
        """Remember."""
        if key in self:
            self.total -= self._cost(self[key])
        super().__setitem__(key, value)
        self.total += self._cost(value)
        while self.total > self._maximum:
            self.total -= self._cost(self.popitem(last=False)[1])

    def __delitem__(self, key: K) -> None:
        """Forget."""
        self.total -= self._cost(self[key])
        super().__delitem__(key)


class News:
    """What was said of one operation before it was submitted here.

    Attributes:
        posted: Peers that have submitted it.
        requested: Peers that want to know when it is submitted here.
        described: By peer: the signature under which it submitted the operation.
        poison: Why the operation fails as soon as it is submitted here.
        urgent: Whether somebody is blocked on it.
        reported_s: By peer: how long it had waited for the operation when that was last reported here, in seconds.
    """

    __slots__ = ("costs", "described", "poison", "posted", "reported_s", "requested", "urgent")

    def __init__(self) -> None:
        """Nothing."""
        self.posted: set[int] | tuple[()] = ()
        self.requested: set[int] | tuple[()] = ()
        self.described: dict[int, bytes] = {}
        self.poison: MismatchError | PeerLost | None = None
        self.urgent = False
        self.reported_s: dict[int, float] = {}
        self.costs: dict[int, int] = {}


#: Of an operation of which nothing was said; never changed.
_NO_NEWS = News()


class EarlyNews:
    """What was said of operations that are not active here, by operation key (id, iteration).

    Attributes:
        ended: What operations were that ended here well; others may begin them yet.
        names: By operation id: its name.
        descriptions: By peer and operation id: the signature that the peer last described there, and what that is, for
            people.
    """

    __slots__ = ("_news", "_spent", "descriptions", "ended", "names")

    def __init__(self) -> None:
        """Know nothing."""
        self._news: dict[_Key, News] = {}
        self._spent: dict[int, int] = {}
        self.ended: BoundedTable[_Key, Expectation] = BoundedTable(_ENDED_MAX)
        self.names: BoundedTable[int, str] = BoundedTable(_TEXT_BYTES_MAX, lambda name: _ENTRY_COST + len(name))
        self.descriptions: BoundedTable[tuple[int, int], tuple[bytes, str]] = BoundedTable(
            _TEXT_BYTES_MAX, lambda value: _ENTRY_COST + len(value[1])
        )

    def of(self, key: _Key) -> News:
        """What was said of an operation; not to be changed."""
        return self._news.get(key, _NO_NEWS)

    def claim(self, key: _Key) -> News:
        """What was said of an operation, which is submitted now: it is forgotten here."""
        news = self._news.pop(key, None)
        if news is None:
            return _NO_NEWS
        for peer, cost in news.costs.items():
            self._spent[peer] -= cost
        return news

    def note_posted(self, peer: int, key: _Key) -> None:
        """The peer has submitted the operation. Raises ``ProtocolError`` as all of these do: see ``_charged``."""
        news = self._charged(peer, key)
        if isinstance(news.posted, tuple):
            news.posted = set()
        news.posted.add(peer)

    def note_requested(self, peer: int, key: _Key) -> None:
        """The peer wants to know when the operation is submitted here."""
        news = self._charged(peer, key)
        if isinstance(news.requested, tuple):
            news.requested = set()
        news.requested.add(peer)

    def note_described(self, peer: int, key: _Key, signature: bytes) -> None:
        """The peer has submitted the operation under this signature."""
        self._charged(peer, key).described[peer] = signature

    def note_urgent(self, peer: int, key: _Key) -> None:
        """Somebody is blocked on the operation, as the peer's message says."""
        self._charged(peer, key).urgent = True

    def note_report(self, peer: int, key: _Key, waited_s: float) -> bool:
        """The peer has waited so long for the operation. Returns whether that is to be reported: at doubled times."""
        news = self._charged(peer, key)
        if waited_s < 2 * news.reported_s.get(peer, 0.0):
            return False
        news.reported_s[peer] = waited_s
        return True

    def note_poison(self, peer: int, key: _Key, error: MismatchError | PeerLost) -> None:
        """The operation fails as soon as it is submitted here, as the peer has said."""
        news = self._charged(peer, key, len(str(error)) + 2 * _ENTRY_COST if self.of(key).poison is None else 0)
        if news.poison is None:
            news.poison = error
        news.described.clear()

    def _charged(self, peer: int, key: _Key, extra: int = 0) -> News:
        """The entry of an operation, at the cost of the peer that speaks of it.

        Raises:
            ProtocolError: The peer's allowance is used up.
        """
        news = self._news.get(key)
        cost = extra if news is not None and peer in news.costs else extra + _ENTRY_COST
        if cost:
            spent = self._spent.get(peer, 0) + cost
            if spent > _PEER_BYTES_MAX:
                raise ProtocolError(
                    f"rank {peer} has spoken of too many operations that were not submitted here: "
                    f"{_PEER_BYTES_MAX >> 20} MiB are kept of that"
                )
            self._spent[peer] = spent
        if news is None:
            news = self._news[key] = News()
        if cost:
            news.costs[peer] = news.costs.get(peer, 0) + cost
        return news
