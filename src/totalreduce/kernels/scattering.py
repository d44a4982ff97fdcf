"""Reads and writes of the elements of dense memory at listed indices. Indices are ascending int32.

The memory is far larger than any cache, so every element is a cache miss; a plain loop has many misses in flight at
once, and NumPy's own indexing has not.
"""

from __future__ import annotations

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.kernels.compiled import compiled
from totalreduce.kernels.numba_names import int64
from totalreduce.kernels.plain import scattering as plain
from totalreduce.kernels.vectors import LANES, fence, stream_lanes

__all__ = ["gather", "keep_rest", "overwrite", "scatter", "scatter_add"]

#: The number of elements that ``overwrite`` prepares in the first-level cache.
_PAGE = 1024
_LINE_BYTES, _WIDTH = 64, 4


@compiled(plain.scatter)
def scatter(target: Array, first: int, index: Array, value: Array, factor: float) -> None:
    """``target[index - first] = value * factor``.

    Args:
        target: float32.
        first: The index of its element 0.
        index: Indices within the target.
        value: float32: their values.
        factor: float32.
    """
    for i in range(index.size):
        target[index[i] - first] = value[i] * factor


@compiled(plain.scatter_add)
def scatter_add(target: Array, first: int, index: Array, value: Array, factor: float) -> None:
    """``target[index - first] += value * factor``; see ``scatter``. No index may come twice."""
    for i in range(index.size):
        target[index[i] - first] += value[i] * factor


@compiled(plain.overwrite)
def overwrite(target: Array, first: int, index: Array, value: Array, factor: float) -> None:
    """``target[index - first] = value * factor``, and zeros everywhere else; see ``scatter``.

    Every line of the memory is written once, bypassing the caches, and none is read: half the time of writing zeros and
    then values. For memory that is much larger than the caches; it is not in them afterwards.
    """
    page = np.zeros(_PAGE, np.float32)
    aligned = min(target.size, (-target.ctypes.data % _LINE_BYTES) // _WIDTH)
    target[:aligned] = 0.0
    i = 0
    while i < index.size and index[i] - first < aligned:
        target[index[i] - first] = value[i] * factor
        i += 1
    end = aligned + (target.size - aligned) // _PAGE * _PAGE
    for begin in range(aligned, end, _PAGE):
        start, before = first + begin, i
        while i < index.size and index[i] - start < _PAGE:
            page[index[i] - start] = value[i] * factor
            i += 1
        for lanes in range(0, _PAGE, LANES):
            stream_lanes(page, int64(lanes), target, int64(begin + lanes))
        for j in range(before, i):
            page[index[j] - start] = 0.0
    fence()
    target[end:] = 0.0
    scatter(target, first, index[i:], value[i:], factor)


@compiled(plain.gather)
def gather(source: Array, first: int, index: Array, out: Array) -> None:
    """``out = source[index - first]``."""
    for i in range(index.size):
        out[i] = source[index[i] - first]


@compiled(plain.keep_rest)
def keep_rest(target: Array, first: int, index: Array, value: Array, sent: Array, applied: Array) -> None:
    """``target[index - first] = value - sent`` for indices that are also in ``applied``."""
    i = j = 0
    while i < index.size and j < applied.size:  # both steps without a branch: which one is taken cannot be predicted
        mine, other = index[i], applied[j]
        if mine == other:
            target[mine - first] = value[i] - sent[i]
        i += mine <= other
        j += other <= mine
