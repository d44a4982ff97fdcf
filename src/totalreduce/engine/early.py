"""What is known of operations that are not active here: other ranks are ahead, or behind, or said what stays true.

Every table is bounded, because peers make it grow; the oldest entry goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from totalreduce.engine.layout import Expectation
from totalreduce.foundation.errors import MismatchError, PeerLost

__all__ = ["REMEMBERED_MAX", "BoundedTable", "EarlyNews"]

#: Entries of every table, at most, if nothing else is said.
REMEMBERED_MAX = 65_536
#: Operations that ended here before others began, at most; each takes some hundred bytes.
_ENDED_MAX = 16_384

K = TypeVar("K")
V = TypeVar("V")
_Key = tuple[int, int]


class BoundedTable(OrderedDict[K, V], Generic[K, V]):
    """A dictionary that forgets its oldest entry when it is full."""

    def __init__(self, entries_max: int | None = None) -> None:
        """Start empty."""
        super().__init__()
        self._entries_max = REMEMBERED_MAX if entries_max is None else entries_max

    def __setitem__(self, key: K, value: V) -> None:
        """Remember."""
        super().__setitem__(key, value)
        if len(self) > self._entries_max:
            self.popitem(last=False)


class EarlyNews:
    """The tables, by operation key (id, iteration) if nothing else is said.

    Attributes:
        posted: Peers that have submitted it.
        requested: Peers that want to know when it is submitted here.
        poisoned: Why it fails as soon as it is submitted here.
        urgent: Somebody is blocked on it.
        described: By peer: the signature under which it submitted it.
        ended: What it was here; it went well, and others may begin it yet.
        names: By operation id: its name.
        descriptions: By peer and operation id: the signature it last described there, and what that is, for people.
    """

    __slots__ = ("described", "descriptions", "ended", "names", "poisoned", "posted", "requested", "urgent")

    def __init__(self) -> None:
        """Know nothing."""
        self.posted: BoundedTable[_Key, set[int]] = BoundedTable()
        self.requested: BoundedTable[_Key, set[int]] = BoundedTable()
        self.poisoned: BoundedTable[_Key, MismatchError | PeerLost] = BoundedTable()
        self.urgent: BoundedTable[_Key, bool] = BoundedTable()
        self.described: BoundedTable[_Key, dict[int, bytes]] = BoundedTable()
        self.ended: BoundedTable[_Key, Expectation] = BoundedTable(_ENDED_MAX)
        self.names: BoundedTable[int, str] = BoundedTable()
        self.descriptions: BoundedTable[tuple[int, int], tuple[bytes, str]] = BoundedTable()
