"""Which server has which keys: ranges of keys, placed by consistent hashing.

Karger et al., "Consistent Hashing and Random Trees", STOC 1997. Servers are on a ring at the hashes of their virtual
nodes. A range belongs to the server whose virtual node follows the range's place on the ring. When a server comes, only
ranges move that it gets; when it goes, only those that it had. All ranks compute the same layout.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, final

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
    """The ranges of keys, and their servers.

    Attributes:
        num_keys: Keys are the integers from 0 to ``num_keys`` - 1.
        servers: The ranks of the servers, ascending.
        begins: int64: the first key of each range, ascending, and ``num_keys``.
        owners: int64: the server of each range, as a rank.
    """

    def __init__(self, num_keys: int, servers: Sequence[int]) -> None:
        """Place the ranges.

        Raises:
            ConfigurationError: There is no server, or one comes twice; or the number of keys is not from 1 to 2^40.
        """
        self.num_keys = checks.integer("num_keys", num_keys, minimum=1, maximum=NUM_KEYS_MAX)
        self.servers = tuple(sorted(servers))
        if not self.servers or len(set(self.servers)) != len(self.servers):
            raise ConfigurationError(f"a parameter server needs different ranks as servers, not {list(servers)}")
        count = min(NUM_RANGES, self.num_keys)
        begins = [balanced_range(self.num_keys, count, index)[0] for index in range(count)]
        self.begins: Array = np.array([*begins, self.num_keys], np.int64)
        nodes = sorted((_place(f"server {s}, {node}"), s) for s in self.servers for node in range(_VIRTUAL_NODES))
        self._places, self._nodes = [place for place, _ in nodes], [server for _, server in nodes]
        # Evenly spaced places in a pseudo-random order: hashed places would be less even.
        order = sorted(range(count), key=lambda index: _place(f"range {index}"))
        self._range_places = [0] * count
        for position, index in enumerate(order):
            self._range_places[index] = (position << 64) // count
        self.owners: Array = np.array([self.successors(index, 1)[0] for index in range(count)], np.int64)

    @property
    def num_ranges(self) -> int:
        """The number of ranges."""
        return len(self.owners)

    def ranges_of(self, server: int) -> list[int]:
        """Return the ranges of a server, ascending."""
        return [int(index) for index in np.flatnonzero(self.owners == server)]

    def successors(self, index: int, count: int) -> list[int]:
        """Return the next ``count`` servers on the ring, the range's own first; fewer if there are not as many."""
        found: list[int] = []
        first = bisect_left(self._places, self._range_places[index])
        for step in range(len(self._nodes)):
            server = self._nodes[(first + step) % len(self._nodes)]
            if server not in found:
                found.append(server)
                if len(found) == count:
                    break
        return found

    def split_keys(self, keys: Array) -> Iterator[tuple[int, Array | slice]]:
        """Yield servers, and the positions of their keys in a list of ascending keys; a slice, if it is all of them."""
        if len(self.servers) == 1:
            yield self.servers[0], slice(0, len(keys))
            return
        owners = np.repeat(self.owners, np.diff(np.searchsorted(keys, self.begins)))
        for server in self.servers:
            positions = np.flatnonzero(owners == server)
            if len(positions):
                yield server, positions

    def split_range(self, begin: int, end: int) -> Iterator[tuple[int, Array]]:
        """Yield servers, and int64 of shape (n, 2): the parts ``[first, last)`` of ``[begin, end)`` that they have.

        Parts that touch are one part.
        """
        bounds = np.clip(self.begins, begin, end)
        for server in self.servers:
            mine = self.owners == server
            parts = np.stack([bounds[:-1][mine], bounds[1:][mine]], axis=1)
            parts = parts[parts[:, 0] < parts[:, 1]]
            if len(parts):
                apart = parts[1:, 0] != parts[:-1, 1]
                yield server, np.stack([parts[np.r_[True, apart], 0], parts[np.r_[apart, True], 1]], axis=1)


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
