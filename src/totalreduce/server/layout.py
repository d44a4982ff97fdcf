"""Which shard has which keys: ranges of keys, placed by consistent hashing with bounded loads.

Karger et al., "Consistent Hashing and Random Trees", STOC 1997; Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing
with Bounded Loads", SODA 2018. Shards are on a ring at the hashes of their virtual nodes. A range belongs to the shard
of the first virtual node behind the range's place on the ring whose shard has room; shards have room for equal numbers
of ranges. With one shard more or less, few other ranges move than those that it gets or had. All ranks compute the same
layout. Which servers hold a shard is another question (``placement``).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, Self, final

import numpy as np

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.partition import balanced_range
from totalreduce.kernels.arrays import Array

__all__ = ["NUM_KEYS_MAX", "NUM_RANGES", "Layout"]

#: The number of ranges, if there are as many keys.
NUM_RANGES: Final = 1024
#: Keys are signed integers of 64 bits; so is every product of a key and a width.
NUM_KEYS_MAX: Final = 1 << 40
_VIRTUAL_NODES: Final = 512


@final
class Layout:
    """The ranges of keys, and their shards.

    Attributes:
        num_keys: Keys are the integers from 0 to ``num_keys`` - 1.
        shards: The numbers of the shards, ascending.
        begins: int64: the first key of each range, ascending, and ``num_keys``.
        owners: int64: the shard of each range.
    """

    def __init__(self, num_keys: int, shards: Sequence[int]) -> None:
        """Place the ranges.

        Raises:
            ConfigurationError: There is no shard, or one comes twice; or the number of keys is not from 1 to 2^40.
        """
        self.num_keys = checks.integer("num_keys", num_keys, minimum=1, maximum=NUM_KEYS_MAX)
        self.shards = tuple(sorted(shards))
        if not self.shards or len(set(self.shards)) != len(self.shards):
            raise ConfigurationError(f"a parameter server needs different shards, not {list(shards)}")
        count = min(NUM_RANGES, self.num_keys)
        begins = [balanced_range(self.num_keys, count, index)[0] for index in range(count)]
        self.begins: Array = np.array([*begins, self.num_keys], np.int64)
        nodes = sorted((_place(f"shard {s}, {node}"), s) for s in self.shards for node in range(_VIRTUAL_NODES))
        places = [place for place, _ in nodes]
        # Evenly spaced places in a pseudo-random order: hashed places would be less even.
        order = sorted(range(count), key=lambda index: _place(f"range {index}"))
        self.owners: Array = np.empty(count, np.int64)
        least, left = divmod(count, len(self.shards))
        room = {shard: least + (place < left) for place, shard in enumerate(self.shards)}
        for position, index in enumerate(order):
            node = bisect_left(places, (position << 64) // count) % len(nodes)
            while not room[nodes[node][1]]:
                node = (node + 1) % len(nodes)
            self.owners[index] = nodes[node][1]
            room[nodes[node][1]] -= 1

    @classmethod
    def of_ranges(cls, begins: Sequence[int], owners: Sequence[int]) -> Self:
        """Return the layout of ranges that begin at these keys, ascending, and of these shards.

        ``begins`` ends with the number of keys.
        """
        layout = cls.__new__(cls)
        layout.num_keys, layout.shards = begins[-1], tuple(sorted(set(owners)))
        layout.begins, layout.owners = np.array(begins, np.int64), np.array(owners, np.int64)
        return layout

    @property
    def digest(self) -> str:
        """A digest of the places of all ranges. Layouts with the same digest have the same keys in each shard."""
        return hashlib.blake2b(self.owners.tobytes(), digest_size=16).hexdigest()

    @property
    def num_ranges(self) -> int:
        """The number of ranges."""
        return len(self.owners)

    def ranges_of(self, shard: int) -> list[int]:
        """Return the ranges of a shard, ascending."""
        return [int(index) for index in np.flatnonzero(self.owners == shard)]

    def split_keys(self, keys: Array) -> Iterator[tuple[int, Array | slice]]:
        """Yield shards, and the positions of their keys in a list of ascending keys; a slice, if it is all of them."""
        if len(self.shards) == 1:
            yield self.shards[0], slice(0, len(keys))
            return
        owners = np.repeat(self.owners, np.diff(np.searchsorted(keys, self.begins)))
        for shard in self.shards:
            positions = np.flatnonzero(owners == shard)
            if len(positions):
                yield shard, positions

    def split_range(self, begin: int, end: int) -> Iterator[tuple[int, Array]]:
        """Yield shards, and int64 of shape (n, 2): the parts ``[first, last)`` of ``[begin, end)`` that they have.

        Parts that touch are one part.
        """
        bounds = np.clip(self.begins, begin, end)
        for shard in self.shards:
            mine = self.owners == shard
            parts = np.stack([bounds[:-1][mine], bounds[1:][mine]], axis=1)
            parts = parts[parts[:, 0] < parts[:, 1]]
            if len(parts):
                apart = parts[1:, 0] != parts[:-1, 1]
                yield shard, np.stack([parts[np.r_[True, apart], 0], parts[np.r_[apart, True], 1]], axis=1)


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
