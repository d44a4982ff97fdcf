"""The kernels of ``kernels.selection`` in NumPy."""

from __future__ import annotations

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.kernels.formats import MAGNITUDE
from totalreduce.kernels.plain.parts import parts

__all__ = ["accumulate", "count_bins", "histogram", "keep_largest", "select"]


def _magnitudes(values: Array) -> Array:
    """Return integers that grow as the magnitudes of float32 do; infinities and NaN are above all others."""
    return values.view(np.int32) & np.int32(MAGNITUDE)


def accumulate(
    gradient: Array, residual: Array, scale: float, bound: int, first: int, index: Array, value: Array, count: int
) -> int:
    """See ``selection.accumulate``. The lists need no more room than what is listed takes."""
    for part in parts(gradient.size):
        sums = gradient[part]
        np.multiply(sums, np.float32(scale), out=sums)
        np.add(sums, residual[part], out=sums)
    return select(gradient, bound, first, index, value, count)


def select(source: Array, bound: int, first: int, index: Array, value: Array, count: int) -> int:
    """See ``selection.select``."""
    for part in parts(source.size):
        places = np.flatnonzero(_magnitudes(source[part]) >= bound)
        places += part.start
        fitting = places[: index.size - count]
        end = count + fitting.size
        index[count:end], value[count:end] = fitting + first, source[fitting]
        count = end
        if fitting.size < places.size:
            return -1 - count
    return count


def histogram(values: Array, prefix: int, prefix_shift: int, shift: int, mask: int, counts: Array) -> None:
    """See ``selection._histogram``."""
    for part in parts(values.size):
        magnitudes = _magnitudes(values[part])
        digits = (magnitudes[magnitudes >> prefix_shift == prefix] >> shift) & mask
        counts += np.bincount(digits, minlength=counts.size)


def keep_largest(index: Array, value: Array, bound: int, ties: int) -> int:
    """See ``selection.keep_largest``."""
    magnitudes = _magnitudes(value)
    kept = magnitudes > bound
    kept[np.flatnonzero(magnitudes == bound)[: max(0, ties)]] = True
    count = int(np.count_nonzero(kept))
    index[:count], value[:count] = index[kept], value[kept]
    return count


def count_bins(value: Array, low: int, shift: int, counts: Array) -> None:
    """See ``selection.count_bins``."""
    for part in parts(value.size):
        above = _magnitudes(value[part]).astype(np.int64) - low
        bins = np.minimum(above[above >= 0] >> shift, counts.size - 1)
        counts += np.bincount(bins, minlength=counts.size)
