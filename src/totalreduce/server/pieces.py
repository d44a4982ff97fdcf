"""The parts of a call: which of the caller's elements belong to one request, how they are read, and how written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np

from totalreduce.kernels.arrays import Array

__all__ = ["Places", "cut_parts", "cut_positions"]


@final
class Places:
    """Rows of a caller's array of shape (n, width).

    Attributes:
        count: Their number.
        begin: The first key, of a range.
        end: The end, of a range.
    """

    __slots__ = ("_origin", "_parts", "_positions", "begin", "count", "end")

    def __init__(self, positions: Array | slice | None, parts: Array | None = None, origin: int = 0) -> None:
        """``positions`` of keys in a list; or ``parts``, int64 of shape (n, 2), of a range from ``origin`` on."""
        self._positions, self._parts, self._origin = positions, parts, origin
        self.begin = self.end = 0
        if parts is not None:
            self.begin, self.end = int(parts[0, 0]), int(parts[-1, 1])
            self.count = int((parts[:, 1] - parts[:, 0]).sum())
            if len(parts) == 1:
                self._positions = slice(self.begin - origin, self.end - origin)
        elif isinstance(positions, slice):
            self.count = positions.stop - positions.start
        else:
            assert positions is not None
            self.count = len(positions)

    def in_table(self, keys: Array | None) -> Places:
        """Return the rows of the same keys in an array with a row for each key of the table.

        Args:
            keys: The list of which these are positions; ``None``: they are parts of a range.
        """
        return Places(None, self._parts) if keys is None else Places(self.take(keys))

    @property
    def listed(self) -> Array:
        """The keys of parts of a range, int64."""
        assert self._parts is not None
        return np.concatenate([np.arange(begin, end) for begin, end in self._parts])

    def among(self, chosen: Array, keys: Array | None) -> Places:
        """Return the positions in ``chosen``, a list of ascending keys of the call, of those that belong to this piece.

        ``keys``: as for ``in_table``.
        """
        if keys is None:
            assert self._parts is not None
            bounds = np.searchsorted(chosen, self._parts)
            positions = np.concatenate([np.arange(begin, end) for begin, end in bounds])
        else:
            mine = self.take(keys)
            positions = np.searchsorted(chosen, mine)
            positions = positions[np.take(chosen, positions, mode="clip") == mine] if len(chosen) else positions[:0]
        if len(positions) and positions[-1] - positions[0] == len(positions) - 1:
            return Places(slice(int(positions[0]), int(positions[-1]) + 1))
        return Places(positions)

    def take(self, rows: Array) -> Array:
        """Return the rows, without a copy if they lie together."""
        if isinstance(self._positions, slice):
            return rows[self._positions]
        if self._positions is not None:
            return np.take(rows, self._positions, axis=0)
        assert self._parts is not None
        return np.concatenate([rows[begin:end] for begin, end in self._parts - self._origin])

    def memory(self, rows: Array) -> Array | None:
        """Return the memory of the rows, one-dimensional; ``None`` if they do not lie together."""
        return rows[self._positions].reshape(-1) if isinstance(self._positions, slice) else None

    def put(self, rows: Array, new: Array) -> None:
        """Write the rows; ``new`` has shape (count, width)."""
        if self._positions is not None:
            rows[self._positions] = new
            return
        assert self._parts is not None
        at = 0
        for begin, end in self._parts - self._origin:
            rows[begin:end] = new[at : at + end - begin]
            at += end - begin


def cut_positions(positions: Array | slice, count_max: int) -> Iterator[Places]:
    """Cut keys of a list so that no piece has more than ``count_max``."""
    if isinstance(positions, slice):
        for begin in range(positions.start, positions.stop, count_max):
            yield Places(slice(begin, min(begin + count_max, positions.stop)))
        return
    for begin in range(0, len(positions), count_max):
        yield Places(positions[begin : begin + count_max])


def cut_parts(parts: Array, origin: int, count_max: int) -> Iterator[Places]:
    """Cut parts of a range that begins at ``origin``, likewise."""
    ends = np.cumsum(parts[:, 1] - parts[:, 0])
    for begin in range(0, int(ends[-1]), count_max):
        end = min(begin + count_max, int(ends[-1]))
        first, last = int(np.searchsorted(ends, begin, side="right")), int(np.searchsorted(ends, end, side="left"))
        piece = parts[first : last + 1].copy()
        piece[0, 0] = piece[0, 1] - (ends[first] - begin)
        piece[-1, 1] -= ends[last] - end
        yield Places(None, piece, origin)
