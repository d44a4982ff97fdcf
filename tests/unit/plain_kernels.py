"""The reference of the compiled kernels, in plain NumPy: functions with the same names, arguments and results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from totalreduce.kernels.coding import PIECE
from totalreduce.kernels.selection import Kth

__all__ = [
    "accumulate",
    "count_bins",
    "decode_gaps",
    "encode_gaps",
    "found_in",
    "gather",
    "keep_largest",
    "keep_rest",
    "kth_magnitude",
    "round_values",
    "scatter",
    "scatter_add",
    "select",
    "sum_sparse",
    "widen",
]

Array = np.ndarray[Any, Any]

_EXPONENT = 0x7F800000


def _magnitudes(values: Array) -> Array:
    """As integers, which grow as |x| does; infinities and NaN above everything."""
    return values.view(np.int32) & 0x7FFFFFFF


def accumulate(
    gradient: Array, residual: Array, scale: float, bound: int, first: int, index: Array, value: Array, count: int
) -> int:
    """See ``selection.accumulate``. Here the lists need no more room than what is listed takes."""
    with np.errstate(over="ignore", invalid="ignore"):
        gradient[...] = gradient * np.float32(scale) + residual
    return select(gradient, bound, first, index, value, count)


def select(source: Array, bound: int, first: int, index: Array, value: Array, count: int) -> int:
    """See ``selection.select``."""
    places = np.flatnonzero(_magnitudes(source) >= bound)
    fitting = places[: index.size - count]
    end = count + fitting.size
    index[count:end], value[count:end] = fitting + first, source[fitting]
    return end if fitting.size == places.size else -1 - end


def kth_magnitude(parts: Sequence[Array], k: int) -> Kth:
    """See ``selection.kth_magnitude``."""
    magnitudes = np.concatenate([_magnitudes(part) for part in parts])
    kth = int(np.sort(magnitudes)[::-1][k - 1])
    return Kth(kth, int((magnitudes > kth).sum()), int((magnitudes == kth).sum()))


def keep_largest(index: Array, value: Array, bound: int, ties: int) -> int:
    """See ``selection.keep_largest``."""
    magnitudes = _magnitudes(value)
    equal = magnitudes == bound
    kept = (magnitudes > bound) | (equal & (np.cumsum(equal) <= ties))
    count = int(kept.sum())
    index[:count], value[:count] = index[kept], value[kept]
    return count


def count_bins(value: Array, low: int, shift: int, counts: Array) -> None:
    """See ``selection.count_bins``."""
    above = _magnitudes(value).astype(np.int64) - low
    bins = np.minimum(above[above >= 0] >> shift, counts.size - 1)
    counts += np.bincount(bins, minlength=counts.size)


def encode_gaps(index: Array, first: int, parameter: int, out: Array) -> int:
    """See ``coding.encode_gaps``."""
    bits: list[int] = []
    gaps = [place - before - 1 for before, place in pairwise([first - 1, *index.tolist()])]
    for begin in range(0, len(gaps), PIECE):
        piece = gaps[begin : begin + PIECE]
        lengths = [sum((gap >> low) + 1 + low for gap in piece) for low in range(31)]
        # The shortest one; of several the one that is nearest to the last.
        parameter = min((length, abs(low - parameter), low) for low, length in enumerate(lengths))[2]
        bits += _binary(parameter, 5)
        for gap in piece:
            bits += [0] * (gap >> parameter) + [1] + _binary(gap, parameter)
    packed = np.packbits(np.array(bits, np.uint8), bitorder="little")
    out[: packed.size] = packed
    return packed.size


def _binary(number: int, digits: int) -> list[int]:
    return [number >> position & 1 for position in range(digits)]


def decode_gaps(coded: Array, first: int, end: int, index: Array) -> int:
    """See ``coding.decode_gaps``."""
    bits = np.unpackbits(coded, bitorder="little").tolist()
    expected, at, parameter = first, 0, 0
    for i in range(index.size):
        if i % PIECE == 0:
            parameter, at = _number(bits[at : at + 5]), at + 5
        one = next((position for position in range(at, len(bits)) if bits[position]), len(bits))
        place = expected + ((one - at) << parameter) + _number(bits[one + 1 : one + 1 + parameter])
        at = one + 1 + parameter
        if at > len(bits) or parameter > 30 or place >= end:
            return -1
        index[i] = place
        expected = place + 1
    return (at + 7) // 8


def _number(binary: list[int]) -> int:
    return sum(bit << position for position, bit in enumerate(binary))


def round_values(values: Array) -> None:
    """See ``coding.round_values``: the nearer neighbour, the even one of two that are as near; never infinity."""
    bits = values.view(np.uint32).astype(np.uint64)
    below = bits >> 16 << 16
    rest = bits - below
    odd = below >> 16 & 1
    up = (rest > 0x8000) | ((rest == 0x8000) & (odd == 1))
    above = below + 0x10000
    values.view(np.uint32)[...] = np.where(up & (above & _EXPONENT != _EXPONENT), above, below)


def widen(halves: Array, out: Array) -> None:
    """See ``coding.widen``."""
    out[...] = (halves.astype(np.uint32) << 16).view(np.float32)


def sum_sparse(index: Array, value: Array, bounds: Array, out_index: Array, out_value: Array) -> int:
    """See ``merging.sum_sparse``."""
    edges = bounds.tolist()
    sums: dict[int, np.float32] = {}
    for begin, end in pairwise(edges):
        for i, x in zip(index[begin:end].tolist(), value[begin:end], strict=True):
            sums[i] = sums.get(i, np.float32(0.0)) + x
    ordered = sorted(sums)
    out_index[: len(sums)] = ordered
    out_value[: len(sums)] = [sums[i] for i in ordered]
    return len(sums)


def found_in(index: Array, other: Array) -> Array:
    """See ``merging.found_in``."""
    return np.isin(index, other)


def scatter(target: Array, first: int, index: Array, value: Array, factor: float) -> None:
    """See ``scattering.scatter``."""
    target[index - first] = value * np.float32(factor)


def overwrite(target: Array, first: int, index: Array, value: Array, factor: float) -> None:
    """See ``scattering.overwrite``."""
    target[...] = 0.0
    scatter(target, first, index, value, factor)


def scatter_add(target: Array, first: int, index: Array, value: Array, factor: float) -> None:
    """See ``scattering.scatter_add``."""
    target[index - first] += value * np.float32(factor)


def gather(source: Array, first: int, index: Array, out: Array) -> None:
    """See ``scattering.gather``."""
    out[...] = source[index - first]


def keep_rest(target: Array, first: int, index: Array, value: Array, sent: Array, applied: Array) -> None:
    """See ``scattering.keep_rest``."""
    both = found_in(index, applied)
    target[index[both] - first] = (value - sent)[both]
