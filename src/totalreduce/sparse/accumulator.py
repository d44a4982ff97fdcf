"""One bucket's accumulated gradient, lying in as many pieces of memory as torch has made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

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

    def split(self, indices: Array) -> Iterator[tuple[Array, slice, Array]]:
        """For each segment that has some of the ascending indices: it, which of the indices, and those within it."""
        if len(self.segments) == 1:
            yield self.segments[0], slice(0, indices.size), indices
            return
        edges = np.searchsorted(indices, self._starts).tolist()
        for number, (start, segment) in enumerate(self.pieces()):
            chosen = slice(edges[number], edges[number + 1])
            if chosen.start < chosen.stop:
                yield segment, chosen, indices[chosen] - start

    def clear(self) -> None:
        """Set everything to zero."""
        for segment in self.segments:
            segment[...] = 0.0

    def put(self, indices: Array, values: Array | float) -> None:
        """Set elements."""
        for segment, chosen, places in self.split(indices):
            segment[places] = values[chosen] if isinstance(values, np.ndarray) else values

    def add(self, indices: Array, values: Array) -> None:
        """Add to elements; no index twice."""
        for segment, chosen, places in self.split(indices):
            segment[places] += values[chosen]

    def take(self, indices: Array) -> Array:
        """Elements."""
        out = np.empty(indices.size, np.float32)
        for segment, chosen, places in self.split(indices):
            out[chosen] = segment[places]
        return out

    def flat(self) -> Array:
        """A copy of all of it."""
        return np.concatenate([np.empty(0, np.float32), *self.segments])
