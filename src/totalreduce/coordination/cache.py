"""The response cache: what all ranks have agreed on before, as one bit each.

Every rank has the same entries with the same bits in the same order of use, by construction: entries are made of
responses that all ranks have, in their order; they are used and erased only by what all ranks know. Nobody compares
the caches. What a rank *asks* is looked up without touching the order (``classify``): only it knows that.

Source: Horovod's response cache (LRU, the new entry inherits the bit of the evicted one).
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator

from totalreduce.coordination.requests import Request, Response

__all__ = ["Lookup", "ResponseCache", "bits_of"]


class Lookup(enum.Enum):
    """What the cache says about a request."""

    HIT = enum.auto()
    MISS = enum.auto()
    INVALID = enum.auto()
    """The name is known, and something about it has changed."""


def bits_of(mask: int) -> Iterator[int]:
    """Positions of the ones, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class ResponseCache:
    """An LRU cache whose entries have bits. Deterministic: equal calls make equal caches.

    Attributes:
        capacity: Entries at most; 0 switches it off.
        version: Counts changes of the entries, not of the order of use; while it stays, ``classify`` says the same.
    """

    def __init__(self, capacity: int) -> None:
        """Make an empty cache."""
        self.capacity = capacity
        #: By name, least recently used first: bit and response.
        self._entries: OrderedDict[str, tuple[int, Response]] = OrderedDict()
        self._names: dict[int, str] = {}
        self._free: list[int] = []  #: Bits of erased entries, descending: the lowest is used first.
        #: By name: what this rank asked when the entry was made, where ranks may ask differently.
        self._own: dict[str, Request] = {}
        self.version = 0
        self._last_use: tuple[int, list[Response]] = (0, [])

    def __len__(self) -> int:
        """Entries."""
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        """Whether there is an entry of this name."""
        return name in self._entries

    @property
    def num_bits(self) -> int:
        """How long a bit vector must be; equal on all ranks."""
        return len(self._names) + len(self._free)

    @property
    def all_bits(self) -> int:
        """One bit for every entry."""
        return sum(1 << bit for bit in self._names)

    def snapshot(self) -> list[tuple[str, int]]:
        """Names and bits, least recently used first: what must be equal on all ranks."""
        return [(name, bit) for name, (bit, _) in self._entries.items()]

    def classify(self, request: Request) -> tuple[Lookup, int]:
        """What is known of a request, and the bit of its name (0 if there is none). Changes nothing."""
        entry = self._entries.get(request.name)
        if entry is None:
            return Lookup.MISS, 0
        bit, response = entry
        known = self._own.get(request.name)
        # A rank that had joined when the entry was made never asked: it is held to what all have in common.
        same = request == known if known is not None else request.common == response.request.common
        return (Lookup.HIT if same else Lookup.INVALID), bit

    def use(self, mask: int) -> list[Response]:
        """The responses of entries that all ranks have hit, in the order of bits; they become the most recently used.

        Steps of training use the same entries again and again, which costs next to nothing.
        """
        if mask != self._last_use[0]:
            names = [self._names[bit] for bit in bits_of(mask)]
            for name in names:
                self._entries.move_to_end(name)
            self._last_use = mask, [self._entries[name][1] for name in names]
        return self._last_use[1]

    def peek(self, bit: int) -> Response:
        """The response of an entry, which is not used by that."""
        return self._entries[self._names[bit]][1]

    def put(self, response: Response, own: Request | None) -> None:
        """Remember a response that all ranks have; ``own``: what this rank asked for."""
        if not self.capacity or response.error is not None or response.joined or not response.request.cached:
            return
        name = response.name
        self._changed()
        assert name not in self._entries, "a known name is hit, or erased before it is agreed on again"
        if len(self._entries) >= self.capacity:
            evicted, (bit, _) = self._entries.popitem(last=False)
            self._own.pop(evicted, None)
        elif self._free:
            bit = self._free.pop()
        else:
            bit = len(self._names)
        self._entries[name] = bit, response
        self._names[bit] = name
        if own is not None:
            self._own[name] = own

    def erase(self, mask: int) -> None:
        """Forget entries that are invalid on some rank."""
        self._changed()
        for bit in bits_of(mask):
            name = self._names.pop(bit)
            del self._entries[name]
            self._own.pop(name, None)
            self._free.append(bit)
        self._free.sort(reverse=True)

    def _changed(self) -> None:
        self.version += 1
        self._last_use = 0, []
