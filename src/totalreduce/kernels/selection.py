"""Selecting the largest elements of float32 memory, in one pass over it.

Magnitudes are compared as integers: the bits of |x| have the order of |x|, with infinities and NaN above all numbers. A
*bound* is such an integer. The kernels release the GIL, keep no state and are compiled once per machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.kernels.compiled import compiled
from totalreduce.kernels.formats import MAGNITUDE
from totalreduce.kernels.numba_names import int32, int64, uint64
from totalreduce.kernels.plain import selection as plain
from totalreduce.kernels.vectors import LANES, accumulate_lanes, select_lanes, trailing_zeros

__all__ = [
    "BLOCK",
    "INFINITY",
    "LANES",
    "Kth",
    "accumulate",
    "bound_from_sample",
    "count_bins",
    "keep_largest",
    "kth_magnitude",
    "radix_select",
    "sample_stride",
    "select",
]

#: The bits of infinity, which no finite magnitude reaches.
INFINITY = 0x7F800000
#: The number of elements between two checks of the room that is left.
BLOCK = 4096
#: The wanted number of elements that reach the bound of a sample, as a multiple of k.
_CANDIDATES = 1.3
#: The number of elements of a sample that reach its bound, if there are as many.
_SAMPLED = 1000
#: The digits of the radix selection: 2^11 counters fit into the first-level cache.
_DIGITS = ((20, 0x7FF), (9, 0x7FF), (0, 0x1FF))
#: 2^11 bins of 2^11 magnitudes are half an octave.
_NEAR_SHIFT, _NEAR_MASK = 11, 0x7FF


@compiled(plain.accumulate)
def accumulate(
    gradient: Array, residual: Array, scale: float, bound: int, first: int, index: Array, value: Array, count: int
) -> int:
    """Compute ``gradient = gradient * scale + residual`` in place, and list the elements that reach the bound.

    Traffic: 12 bytes per element (two reads, one write) and the lists.

    Args:
        gradient: float32, contiguous; becomes the accumulated gradient.
        residual: float32, of the same size; only read.
        scale: Factor of the gradient.
        bound: Bits of the smallest magnitude to list.
        first: Index of element 0.
        index: int32; gets the indices, ascending.
        value: float32, of the same size; gets the elements.
        count: The number of elements that the lists have already.

    Returns:
        The number of elements that they have now. ``-1 - count`` if they were too short: then they have the first
        elements only, and all elements are accumulated nevertheless.
    """
    n = gradient.size
    full = False
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        if not full and count + (end - begin) > index.size:
            full = True
        if full:
            for i in range(begin, end):
                gradient[i] = gradient[i] * scale + residual[i]
            continue
        vector_end = begin + (end - begin) // LANES * LANES
        for i in range(begin, vector_end, LANES):
            bits = accumulate_lanes(gradient, residual, int64(i), scale, int32(bound))
            count = _append(bits, gradient, i, first, index, value, count)
        if vector_end < end:
            for i in range(vector_end, end):
                gradient[i] = gradient[i] * scale + residual[i]
            count = _select_scalar(gradient, vector_end, end, bound, first, index, value, count)
    return -1 - count if full else count


@compiled(plain.select)
def select(source: Array, bound: int, first: int, index: Array, value: Array, count: int) -> int:
    """List the elements that reach the bound, like ``accumulate``; the memory is only read."""
    n = source.size
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        if count + (end - begin) > index.size:
            return -1 - count
        vector_end = begin + (end - begin) // LANES * LANES
        for i in range(begin, vector_end, LANES):
            bits = select_lanes(source, int64(i), int32(bound))
            count = _append(bits, source, i, first, index, value, count)
        count = _select_scalar(source, vector_end, end, bound, first, index, value, count)
    return count


@compiled()
def _append(bits: int, source: Array, at: int, first: int, index: Array, value: Array, count: int) -> int:
    """Append the elements from ``source[at]`` on whose bits are set."""
    while bits != uint64(0):
        place = at + trailing_zeros(bits)
        index[count], value[count] = first + place, source[place]
        count += 1
        bits &= bits - uint64(1)
    return count


@compiled()
def _select_scalar(
    source: Array, begin: int, end: int, bound: int, first: int, index: Array, value: Array, count: int
) -> int:
    bits = source.view(np.int32)
    for i in range(begin, end):
        if bits[i] & MAGNITUDE >= bound:
            index[count], value[count] = first + i, source[i]
            count += 1
    return count


@compiled(plain.histogram)
def _histogram(values: Array, prefix: int, prefix_shift: int, shift: int, mask: int, counts: Array) -> None:
    bits = values.view(np.int32)
    for i in range(bits.size):
        magnitude = bits[i] & MAGNITUDE
        if magnitude >> prefix_shift == prefix:
            counts[(magnitude >> shift) & mask] += 1


class Kth(NamedTuple):
    """The k-th largest magnitude: its bits, how many magnitudes are above it, and how many equal it."""

    bits: int
    above: int
    equal: int


def kth_magnitude(parts: Sequence[Array], k: int, low: int = 0) -> Kth:
    """Find the k-th largest magnitude. Exact, by three passes of radix selection, or two.

    Args:
        parts: float32 arrays that together have at least k elements.
        k: From 1.
        low: Bits that the k-th magnitude reaches. If it exceeds them by less than half an octave, two passes suffice,
            and no counter is incremented twice in a row.
    """

    def histogram(prefix: int, prefix_shift: int, shift: int, mask: int) -> Array:
        counts = np.zeros(mask + 1, np.int64)
        for part in parts:
            _histogram(part, prefix, prefix_shift, shift, mask, counts)
        return counts

    if low:
        base, counts = low >> _NEAR_SHIFT, np.zeros(_NEAR_MASK + 1, np.int64)
        for part in parts:
            count_bins(part, base << _NEAR_SHIFT, _NEAR_SHIFT, counts)
        nearest, above = _digit(counts, k)
        if nearest < _NEAR_MASK:  # the last bin has no upper end
            counts = histogram(base + nearest, _NEAR_SHIFT, 0, _NEAR_MASK)
            last, between = _digit(counts, k - above)
            return Kth((base + nearest) << _NEAR_SHIFT | last, above + between, int(counts[last]))
    return radix_select(histogram, k)


def sample_stride(num_elements: int, k: int) -> int:
    """Return the distance of the elements of a sample that tells the magnitude of the k largest ones."""
    return max(1, min(k // _SAMPLED, num_elements // _SAMPLED))


def bound_from_sample(sample: Array, num_elements: int, k: int) -> int:
    """Estimate the bits of a magnitude that 1.3 k elements reach, so that nearly always k do.

    Args:
        sample: Some of the elements; see ``sample_stride``.
        num_elements: The number of all elements.
        k: From 1.
    """
    wanted = min(sample.size, int(k * _CANDIDATES / num_elements * sample.size) + 1)
    return max(1, kth_magnitude([sample], wanted).bits)


def radix_select(histogram: Callable[[int, int, int, int], Array], k: int) -> Kth:
    """Find the k-th largest magnitude, digit by digit.

    Args:
        histogram: Called with ``prefix``, ``prefix_shift``, ``shift`` and ``mask``. Returns the counts of the digit
            ``(magnitude >> shift) & mask`` over the magnitudes with ``magnitude >> prefix_shift == prefix``.
        k: From 1, and at most the number of elements.
    """
    prefix, above, equal, prefix_shift = 0, 0, 0, 31
    for shift, mask in _DIGITS:
        counts = histogram(prefix, prefix_shift, shift, mask)
        digit, more = _digit(counts, k - above)
        above, equal = above + more, int(counts[digit])
        prefix, prefix_shift = prefix << (prefix_shift - shift) | digit, shift
    return Kth(prefix, above, equal)


def _digit(counts: Array, k: int) -> tuple[int, int]:
    """Return the bin of the k-th element from the top, and the number of elements in the bins above."""
    from_top = np.cumsum(counts[::-1])
    place = int(np.searchsorted(from_top, k))
    return counts.size - 1 - place, int(from_top[place - 1]) if place else 0


@compiled(plain.keep_largest)
def keep_largest(index: Array, value: Array, bound: int, ties: int) -> int:
    """Keep, in place and in order, elements whose magnitude exceeds the bound, and the first ``ties`` that equal it.

    Returns:
        The number of elements that are left.
    """
    bits = value.view(np.int32)
    kept, left = uint64(0), int64(ties)
    for i in range(index.size):  # without a branch, which could not be predicted
        magnitude = bits[i] & MAGNITUDE
        tie = int64(magnitude == bound) & int64(left > 0)
        index[kept], value[kept] = index[i], value[i]
        kept += uint64(int64(magnitude > bound) | tie)
        left -= tie
    return int(int64(kept))


@compiled(plain.count_bins)
def count_bins(value: Array, low: int, shift: int, counts: Array) -> None:
    """Count magnitudes by their bits: bin b begins at ``low + (b << shift)``.

    Args:
        value: float32.
        low: Magnitudes below are not counted.
        shift: The binary logarithm of a bin's width.
        counts: int64, to which counts are added; the last bin has no upper end.
    """
    bits = value.view(np.int32)
    last = counts.size - 1
    for i in range(bits.size):
        above = int64(bits[i] & MAGNITUDE) - low
        if above >= 0:
            counts[min(above >> shift, last)] += 1
