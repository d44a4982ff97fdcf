"""Numbers by id in 12 bytes each, for tables of millions: how often names were submitted that are not in use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import final

import numpy as np

from totalreduce.kernels.arrays import Array

__all__ = ["Counts"]


@final
class Counts:
    """A table of numbers below 2**32 by id, an integer below 2**64. An entry takes 12 bytes.

    The ids are sorted. A hash table was rejected: its arrays would be larger, and could only be made anew by a loop in
    Python. Here entries come by thousands at once and are merged, and a search in a million takes some microseconds.
    """

    __slots__ = ("_counts", "_ids", "_keys")

    def __init__(self) -> None:
        """Begin without entries."""
        self._ids: Array = np.empty(0, np.uint64)
        self._counts: Array = np.empty(0, np.uint32)
        self._keys = self._ids.data  #: The ids as Python's integers.

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._keys)

    def get(self, op_id: int) -> int | None:
        """Return the number of an id; ``None`` if it has no entry."""
        place = bisect_left(self._keys, op_id)
        return int(self._counts[place]) if place < len(self._keys) and self._keys[place] == op_id else None

    def update(self, counts: Mapping[int, int]) -> None:
        """Make or replace entries."""
        ids = np.fromiter(counts.keys(), np.uint64, len(counts))
        numbers = np.fromiter(counts.values(), np.uint32, len(counts))
        order = np.argsort(ids)
        ids, numbers = ids[order], numbers[order]
        places = np.searchsorted(self._ids, ids)
        is_known = np.zeros(len(ids), bool)
        inside = places < len(self._ids)
        is_known[inside] = self._ids[places[inside]] == ids[inside]
        self._counts[places[is_known]] = numbers[is_known]
        is_new = ~is_known
        self._ids = np.insert(self._ids, places[is_new], ids[is_new])
        self._counts = np.insert(self._counts, places[is_new], numbers[is_new])
        self._keys = self._ids.data
