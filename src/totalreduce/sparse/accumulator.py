"""One bucket's accumulated gradient, lying in as many pieces of memory as torch has made of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from totalreduce.kernels import scattering

__all__ = ["Accumulator", "Array"]

Array = np.ndarray[Any, Any]


class Accumulator:
    """Indices count through all segments in their order.

    Attributes:
        segments: float32, contiguous, one-dimensional.
        num_elements: Of all segments, below 2^31.
    """

    def __init__(self, segments: Sequence[Array]) -> None:
        """Nothing is copied."""
        self.segments = list(segments)
        self._starts = np.cumsum([0, *(segment.size for segment in segments)])
        self.num_elements = int(self._starts[-1])

    def pieces(self) -> Iterator[tuple[int, Array]]:
        """Where each segment begins, and the segment."""
        yield from zip(self._starts[:-1].tolist(), self.segments, strict=True)

    def clear(self) -> None:
        """Set everything to zero."""
        for segment in self.segments:
            # The C library's does not read what it is about to overwrite: half the time of NumPy's or torch's.
            ctypes.memset(segment.ctypes.data, 0, segment.nbytes)

    def put(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        """Set elements to values times a factor."""
        for start, segment, chosen in self._split(indices):
            scattering.scatter(segment, start, indices[chosen], values[chosen], np.float32(factor))

    def add(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        """Add values times a factor to elements; no index twice."""
        for start, segment, chosen in self._split(indices):
            scattering.scatter_add(segment, start, indices[chosen], values[chosen], np.float32(factor))

    def erase(self, indices: Array) -> None:
        """Set elements to zero."""
        self.put(indices, np.zeros(indices.size, np.float32))

    def keep_rest(self, indices: Array, values: Array, sent: Array, applied: Array) -> None:
        """Set to ``values - sent`` those elements whose indices were applied, too."""
        for start, segment, chosen in self._split(indices):
            scattering.keep_rest(segment, start, indices[chosen], values[chosen], sent[chosen], applied)

    def take(self, indices: Array) -> Array:
        """Elements."""
        out = np.empty(indices.size, np.float32)
        for start, segment, chosen in self._split(indices):
            scattering.gather(segment, start, indices[chosen], out[chosen])
        return out

    def spread(self, indices: Array) -> list[int]:
        """How many of the ascending indices each segment has."""
        return [int(count) for count in np.diff(np.searchsorted(indices, self._starts))]

    def _split(self, indices: Array) -> Iterator[tuple[int, Array, slice]]:
        """For each segment that has some of the ascending indices: where it begins, it, and which of the indices."""
        end = 0
        for (start, segment), count in zip(self.pieces(), self.spread(indices), strict=True):
            begin, end = end, end + count
            if count:
                yield start, segment, slice(begin, end)

    def flat(self) -> Array:
        """A copy of all of it."""
        return np.concatenate([np.empty(0, np.float32), *self.segments])
