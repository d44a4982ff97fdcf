"""One bucket's accumulated gradient, lying in as many pieces of memory as torch has made of it.

``Accumulator`` is all that methods know of the memory of a bucket. ``HostAccumulator`` is the CPU's; that of
accelerators is in ``device``. Whatever is as large as the bucket stays where it lies; lists of chosen elements are the
host's, always.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import numpy as np

from totalreduce.kernels import scattering, selection
from totalreduce.kernels.selection import Kth
from totalreduce.sparse.candidates import Candidates

__all__ = ["Accumulator", "Array", "HostAccumulator"]

Array = np.ndarray[Any, Any]

#: Elements that are widened to float64 at a time.
_CHUNK = 1 << 16
#: Elements that are looked at first for one that is not zero: as a rule there is one among them.
_LOOK = 4096
#: A bucket of fewer elements may stay in a cache until the optimizer reads it.
_CACHED = 1 << 20


class Accumulator(ABC):
    """float32, in segments. Indices are ascending int32 and count through all segments in their order.

    Attributes:
        num_elements: Of all segments, below 2^31.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: elements of each segment."""
        self._starts: list[int] = np.cumsum([0, *sizes]).tolist()
        self.num_elements = self._starts[-1]

    # -------------------- choosing

    @abstractmethod
    def accumulate(self, residuals: Accumulator, scale: float, bound: int, found: Candidates) -> None:
        """Become ``this * scale + residuals``, and add to the list what reaches a bound: bits of a magnitude.

        Where there is no room for all, the list is not complete, and everything is accumulated all the same.
        """

    @abstractmethod
    def find(self, bound: int, found: Candidates) -> None:
        """Add to the list what reaches a bound, as far as there is room."""

    @abstractmethod
    def kth_magnitude(self, k: int) -> Kth:
        """The k-th largest magnitude, exactly; from 1."""

    @abstractmethod
    def sample(self, stride: int) -> Array:
        """A copy of every so many elements of each segment."""

    @abstractmethod
    def moments(self) -> tuple[float, float]:
        """Mean and variance of the elements."""

    @abstractmethod
    def norm(self) -> float:
        """The root of the sum of squares."""

    @abstractmethod
    def present(self) -> list[bool]:
        """For each segment whether an element is not zero."""

    # -------------------- elements

    @abstractmethod
    def put(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        """Set elements to values times a factor."""

    @abstractmethod
    def add(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        """Add values times a factor to elements; no index twice."""

    @abstractmethod
    def keep_rest(self, indices: Array, values: Array, sent: Array, applied: Array) -> None:
        """Set to ``values - sent`` those elements whose indices were applied, too."""

    @abstractmethod
    def take(self, indices: Array) -> Array:
        """Elements."""

    def erase(self, indices: Array) -> None:
        """Set elements to zero."""
        self.put(indices, np.zeros(indices.size, np.float32))

    # -------------------- everything

    @abstractmethod
    def clear(self) -> None:
        """Set everything to zero."""

    @abstractmethod
    def assign(self, values: Array, factor: float) -> None:
        """Become values times a factor, as many as there are elements."""

    def assign_sparse(self, indices: Array, values: Array, factor: float) -> None:
        """Become zero, but for these elements: values times a factor."""
        self.clear()
        self.put(indices, values, factor)

    @abstractmethod
    def add_all(self, values: Array, factor: float) -> None:
        """Add values times a factor, as many as there are elements."""

    @abstractmethod
    def flat(self) -> Array:
        """A copy of all of it."""

    @abstractmethod
    def on_host(self) -> AbstractContextManager[list[Array]]:
        """The segments as arrays; what is written to them is kept when the block ends."""

    # -------------------- where things are

    def starts(self) -> list[int]:
        """Where each segment begins."""
        return self._starts[:-1]

    def spread(self, indices: Array) -> list[int]:
        """How many of the indices each segment has."""
        edges = np.array(self._starts, np.int32)  # of the same type: else all indices are converted
        return [int(count) for count in np.diff(np.searchsorted(indices, edges))]

    def _split(self, indices: Array) -> Iterator[tuple[int, int, slice]]:
        """For each segment that has some of the indices: its number, where it begins, and which of the indices."""
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
        """See ``Accumulator``."""
        assert isinstance(residuals, HostAccumulator), "residuals lie where the gradients do"
        factor = np.float32(scale)
        for start, gradient, residual in zip(self.starts(), self._segments, residuals._segments, strict=True):
            found.add(
                selection.accumulate(gradient, residual, factor, bound, start, found.index, found.value, found.count)
            )

    def find(self, bound: int, found: Candidates) -> None:
        """See ``Accumulator``."""
        for start, segment in zip(self.starts(), self._segments, strict=True):
            found.add(selection.select(segment, bound, start, found.index, found.value, found.count))
            if not found.complete:
                return

    def kth_magnitude(self, k: int) -> Kth:
        """See ``Accumulator``."""
        return selection.kth_magnitude(self._segments, k)

    def sample(self, stride: int) -> Array:
        """See ``Accumulator``."""
        return np.concatenate([segment[::stride] for segment in self._segments])

    def moments(self) -> tuple[float, float]:
        """See ``Accumulator``."""
        mean = sum(float(chunk.sum()) for chunk in self._chunks()) / self.num_elements
        variance = sum(float(np.square(chunk - mean).sum()) for chunk in self._chunks()) / self.num_elements
        return mean, variance

    def norm(self) -> float:
        """See ``Accumulator``."""
        return math.sqrt(sum(float(np.square(chunk).sum()) for chunk in self._chunks()))

    def present(self) -> list[bool]:
        """See ``Accumulator``."""
        return [_any(segment) for segment in self._segments]

    def put(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        """See ``Accumulator``."""
        for number, start, chosen in self._split(indices):
            scattering.scatter(self._segments[number], start, indices[chosen], values[chosen], np.float32(factor))

    def add(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        """See ``Accumulator``."""
        for number, start, chosen in self._split(indices):
            scattering.scatter_add(self._segments[number], start, indices[chosen], values[chosen], np.float32(factor))

    def keep_rest(self, indices: Array, values: Array, sent: Array, applied: Array) -> None:
        """See ``Accumulator``."""
        for number, start, chosen in self._split(indices):
            segment = self._segments[number]
            scattering.keep_rest(segment, start, indices[chosen], values[chosen], sent[chosen], applied)

    def take(self, indices: Array) -> Array:
        """See ``Accumulator``."""
        out = np.empty(indices.size, np.float32)
        for number, start, chosen in self._split(indices):
            scattering.gather(self._segments[number], start, indices[chosen], out[chosen])
        return out

    def clear(self) -> None:
        """See ``Accumulator``."""
        for segment in self._segments:
            # The C library's does not read what it is about to overwrite: half the time of NumPy's or torch's.
            ctypes.memset(segment.ctypes.data, 0, segment.nbytes)

    def assign(self, values: Array, factor: float) -> None:
        """See ``Accumulator``."""
        for start, segment in zip(self.starts(), self._segments, strict=True):
            np.multiply(values[start : start + segment.size], np.float32(factor), out=segment)

    def assign_sparse(self, indices: Array, values: Array, factor: float) -> None:
        """See ``Accumulator``."""
        if self.num_elements < _CACHED:
            super().assign_sparse(indices, values, factor)
            return
        ends = np.cumsum(self.spread(indices)).tolist()
        for segment, start, begin, end in zip(self._segments, self.starts(), [0, *ends], ends, strict=False):
            scattering.overwrite(segment, start, indices[begin:end], values[begin:end], np.float32(factor))

    def add_all(self, values: Array, factor: float) -> None:
        """See ``Accumulator``."""
        for start, segment in zip(self.starts(), self._segments, strict=True):
            segment[...] += values[start : start + segment.size] * np.float32(factor)

    def flat(self) -> Array:
        """See ``Accumulator``."""
        return np.concatenate([np.empty(0, np.float32), *self._segments])

    @contextlib.contextmanager
    def on_host(self) -> Iterator[list[Array]]:
        """See ``Accumulator``."""
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
