"""The response cache: the responses on which the ranks have agreed before, with one bit for each.

The caches of all ranks have the same entries with the same bits in the same order of use. Nobody compares them: entries
are made of responses that all ranks have, and are used and erased by messages that all ranks have. ``classify`` looks a
request up, which only this rank has, and therefore does not change the order of use.

Source: Horovod's response cache (LRU, the new entry inherits the bit of the evicted one).
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator

from totalreduce.coordination.requests import Request, Response

__all__ = ["Lookup", "ResponseCache", "bits_of"]


class Lookup(enum.Enum):
    """The result of looking a request up."""

    HIT = enum.auto()
    MISS = enum.auto()
    INVALID = enum.auto()  #: The cache has the name, but with another description


def bits_of(mask: int) -> Iterator[int]:
    """Return the positions of the one-bits, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class ResponseCache:
    """An LRU cache whose entries have bits. Deterministic: equal calls make equal caches."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  #: The largest number of entries; 0 switches the cache off.
        #: By name, least recently used first: bit and response.
        self._entries: OrderedDict[str, tuple[int, Response]] = OrderedDict()
        self._names: dict[int, str] = {}
        self._free: list[int] = []  #: Bits of erased entries, descending: the lowest is used first.
        #: By name: this rank's request when the entry was made, which may differ from those of other ranks.
        self._own: dict[str, Request] = {}
        #: The number of changes of the entries. As long as it is equal, ``classify`` returns the same.
        self.version = 0
        self._last_use: tuple[int, list[Response]] = (0, [])

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        """Return whether there is an entry of this name."""
        return name in self._entries

    @property
    def num_bits(self) -> int:
        """The length of bit vectors; equal on all ranks."""
        return len(self._names) + len(self._free)

    @property
    def all_bits(self) -> int:
        """One bit for every entry."""
        return sum(1 << bit for bit in self._names)

    def snapshot(self) -> list[tuple[str, int]]:
        """Return names and bits, least recently used first. They are equal on all ranks."""
        return [(name, bit) for name, (bit, _) in self._entries.items()]

    def classify(self, request: Request) -> tuple[Lookup, int]:
        """Look a request up; return the bit of its name, too (0 if there is none). Changes nothing."""
        entry = self._entries.get(request.name)
        if entry is None:
            return Lookup.MISS, 0
        bit, response = entry
        known = self._own.get(request.name)
        # A rank that had joined when the entry was made has no request of its own: the common part must be equal.
        same = request == known if known is not None else request.common == response.request.common
        return (Lookup.HIT if same else Lookup.INVALID), bit

    def use(self, mask: int) -> list[Response]:
        """Return the responses of entries that all ranks have hit, in the order of bits, and note their use.

        Training steps use the same entries again and again, so the last result is kept.
        """
        if mask != self._last_use[0]:
            names = [self._names[bit] for bit in bits_of(mask)]
            for name in names:
                self._entries.move_to_end(name)
            self._last_use = mask, [self._entries[name][1] for name in names]
        return self._last_use[1]

    def peek(self, bit: int) -> Response:
        """Return the response of an entry without noting a use."""
        return self._entries[self._names[bit]][1]

    def put(self, response: Response, own: Request | None) -> None:
        """Remember a response that all ranks have; ``own`` is this rank's request."""
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
        """Erase entries that are out of date on some rank."""
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
