"""The kernels of ``kernels.merging`` in NumPy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from totalreduce.kernels.arrays import Array

__all__ = ["found_in", "sum_sparse"]


def sum_sparse(index: Array, value: Array, bounds: Array, out_index: Array, out_value: Array) -> int:
    """See ``merging.sum_sparse``."""
    different = np.sort(index, kind="stable")
    different = different[np.flatnonzero(np.diff(different, prepend=np.int32(-1)))]
    count = int(different.size)
    out_index[:count] = different
    sums = out_value[:count]
    sums[:] = 0.0
    for begin, end in pairwise(bounds.tolist()):  # no index is twice in one list
        sums[np.searchsorted(different, index[begin:end])] += value[begin:end]
    return count


def found_in(index: Array, other: Array) -> Array:
    """See ``merging.found_in``."""
    if not other.size:
        return np.zeros(index.size, np.bool_)
    places = np.minimum(np.searchsorted(other, index), other.size - 1)
    found: Array = other[places] == index
    return found
