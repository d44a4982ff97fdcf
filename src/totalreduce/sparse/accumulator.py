"""The memory of one bucket's accumulated gradient, which consists of one segment per parameter.

``Accumulator`` is the interface through which methods use this memory. ``HostAccumulator`` is for the CPU, and
``device`` has the one for accelerators. Arrays as large as the bucket stay in its memory; lists of selected elements
are always in host memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import final

import numpy as np

from totalreduce.kernels import scattering, selection
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.candidates import Candidates

__all__ = ["Accumulator", "HostAccumulator"]

#: Elements that are widened to float64 at a time.
_CHUNK = 1 << 16
#: Elements that are searched first for one that is not zero: usually there is one among them.
_LOOK = 4096
#: A bucket of fewer elements may stay in a cache until the optimizer reads it.
_CACHED = 1 << 20


class Accumulator(ABC):
    """float32, in segments. Indices are ascending int32 and count through all segments in their order."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: the number of elements of each segment."""
        self._starts: list[int] = np.cumsum([0, *sizes]).tolist()
        self.num_elements = self._starts[-1]  #: The number of elements of all segments, below 2^31.

    @abstractmethod
    def accumulate(self, residuals: Accumulator, scale: float, bound: int, found: Candidates) -> None:
        """Become ``this * scale + residuals``, and list the elements that reach a bound (bits of a magnitude).

        If the lists have no room for all of them, ``found`` is not complete; all elements are accumulated nevertheless.
        """

    @abstractmethod
    def find(self, bound: int, found: Candidates) -> None:
        """List the elements that reach a bound, as far as there is room."""

    @abstractmethod
    def kth_magnitude(self, k: int) -> selection.Kth:
        """Return the k-th largest magnitude, exactly; ``k`` from 1."""

    @abstractmethod
    def sample(self, stride: int) -> Array:
        """Return a copy of every ``stride``-th element of each segment."""

    @abstractmethod
    def moments(self) -> tuple[float, float]:
        """Return the mean and the variance of the elements."""

    @abstractmethod
    def norm(self) -> float:
        """Return the Euclidean norm."""

    @abstractmethod
    def present(self) -> list[bool]:
        """Return for each segment whether an element is not zero."""

    @abstractmethod
    def put(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        """Set elements to values times a factor."""

    @abstractmethod
    def add(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        """Add values times a factor to elements; no index may come twice."""

    @abstractmethod
    def keep_rest(self, indices: Array, values: Array, sent: Array, applied: Array) -> None:
        """Set those elements to ``values - sent`` whose indices are also among ``applied``."""

    @abstractmethod
    def take(self, indices: Array) -> Array:
        """Return a copy of elements."""

    def erase(self, indices: Array) -> None:
        """Set elements to zero."""
        self.put(indices, np.zeros(indices.size, np.float32))

    @abstractmethod
    def clear(self) -> None:
        """Set all elements to zero."""

    @abstractmethod
    def assign(self, values: Array, factor: float) -> None:
        """Set all elements to values times a factor."""

    def assign_sparse(self, indices: Array, values: Array, factor: float) -> None:
        """Set these elements to values times a factor, and all others to zero."""
        self.clear()
        self.put(indices, values, factor)

    @abstractmethod
    def add_all(self, values: Array, factor: float) -> None:
        """Add values times a factor to all elements."""

    @abstractmethod
    def flat(self) -> Array:
        """Return a copy of all elements."""

    @abstractmethod
    def on_host(self) -> AbstractContextManager[list[Array]]:
        """Give the segments as arrays; changes to them are kept when the block ends."""

    def starts(self) -> list[int]:
        """Return the index of each segment's first element."""
        return self._starts[:-1]

    def spread(self, indices: Array) -> list[int]:
        """Return how many of the indices lie in each segment."""
        edges = np.array(self._starts, np.int32)  # of the same type: else all indices are converted
        return [int(count) for count in np.diff(np.searchsorted(indices, edges))]

    def _split(self, indices: Array) -> Iterator[tuple[int, int, slice]]:
        """Yield number, first index and slice of the indices for each segment with some of the indices."""
        end = 0
        for number, count in enumerate(self.spread(indices)):
            begin, end = end, end + count
            if count:
                yield number, self._starts[number], slice(begin, end)


@final
class HostAccumulator(Accumulator):
    """In the CPU's memory."""

    def __init__(self, segments: Sequence[Array]) -> None:
        """Segments are float32, contiguous, one-dimensional; nothing is copied."""
        super().__init__([segment.size for segment in segments])
        self._segments = list(segments)

    def accumulate(self, residuals: Accumulator, scale: float, bound: int, found: Candidates) -> None:
        assert isinstance(residuals, HostAccumulator), "residuals lie where the gradients do"
        factor = np.float32(scale)
        for start, gradient, residual in zip(self.starts(), self._segments, residuals._segments, strict=True):
            found.add(
                selection.accumulate(gradient, residual, factor, bound, start, found.index, found.value, found.count)
            )

    def find(self, bound: int, found: Candidates) -> None:
        for start, segment in zip(self.starts(), self._segments, strict=True):
            found.add(selection.select(segment, bound, start, found.index, found.value, found.count))
            if not found.complete:
                return

    def kth_magnitude(self, k: int) -> selection.Kth:
        return selection.kth_magnitude(self._segments, k)

    def sample(self, stride: int) -> Array:
        return np.concatenate([segment[::stride] for segment in self._segments])

    def moments(self) -> tuple[float, float]:
        mean = sum(float(chunk.sum()) for chunk in self._chunks()) / self.num_elements
        variance = sum(float(np.square(chunk - mean).sum()) for chunk in self._chunks()) / self.num_elements
        return mean, variance

    def norm(self) -> float:
        return math.sqrt(sum(float(np.square(chunk).sum()) for chunk in self._chunks()))

    def present(self) -> list[bool]:
        return [_any(segment) for segment in self._segments]

    def put(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        for number, start, chosen in self._split(indices):
            scattering.scatter(self._segments[number], start, indices[chosen], values[chosen], np.float32(factor))

    def add(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        for number, start, chosen in self._split(indices):
            scattering.scatter_add(self._segments[number], start, indices[chosen], values[chosen], np.float32(factor))

    def keep_rest(self, indices: Array, values: Array, sent: Array, applied: Array) -> None:
        for number, start, chosen in self._split(indices):
            segment = self._segments[number]
            scattering.keep_rest(segment, start, indices[chosen], values[chosen], sent[chosen], applied)

    def take(self, indices: Array) -> Array:
        out = np.empty(indices.size, np.float32)
        for number, start, chosen in self._split(indices):
            scattering.gather(self._segments[number], start, indices[chosen], out[chosen])
        return out

    def clear(self) -> None:
        for segment in self._segments:
            # memset does not read the memory that it overwrites: half the time of NumPy's or torch's fill.
            ctypes.memset(segment.ctypes.data, 0, segment.nbytes)

    def assign(self, values: Array, factor: float) -> None:
        for start, segment in zip(self.starts(), self._segments, strict=True):
            np.multiply(values[start : start + segment.size], np.float32(factor), out=segment)

    def assign_sparse(self, indices: Array, values: Array, factor: float) -> None:
        if self.num_elements < _CACHED:
            super().assign_sparse(indices, values, factor)
            return
        ends = np.cumsum(self.spread(indices)).tolist()
        for segment, start, begin, end in zip(self._segments, self.starts(), [0, *ends], ends, strict=False):
            scattering.overwrite(segment, start, indices[begin:end], values[begin:end], np.float32(factor))

    def add_all(self, values: Array, factor: float) -> None:
        for start, segment in zip(self.starts(), self._segments, strict=True):
            segment[...] += values[start : start + segment.size] * np.float32(factor)

    def flat(self) -> Array:
        return np.concatenate([np.empty(0, np.float32), *self._segments])

    @contextlib.contextmanager
    def on_host(self) -> Iterator[list[Array]]:
        yield self._segments

    def _chunks(self) -> Iterator[Array]:
        for segment in self._segments:
            for begin in range(0, segment.size, _CHUNK):
                yield segment[begin : begin + _CHUNK].astype(np.float64)


def _any(segment: Array) -> bool:
    begin, size = 0, _LOOK
    while begin < segment.size:
        if segment[begin : begin + size].any():
            return True
        begin, size = begin + size, 4 * size
    return False
