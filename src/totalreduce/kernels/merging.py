"""Addition of sparse vectors, and membership of their indices. Indices are ascending int32."""

from __future__ import annotations

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.kernels.compiled import compiled
from totalreduce.kernels.numba_names import int32, int64, uint64
from totalreduce.kernels.plain import merging as plain
from totalreduce.kernels.vectors import trailing_zeros

__all__ = ["add_up", "found_in", "sum_sparse"]

#: The number of indices that are added up at a time: 128 KiB of sums stay in the second-level cache.
_BLOCK = 1 << 15


@compiled()
def _sum_two(index: Array, value: Array, bounds: Array, out_index: Array, out_value: Array) -> int:
    """Merge two vectors, without branches that cannot be predicted."""
    zero = np.float32(0.0)
    factors = np.array([0.0, 1.0], np.float32)  # in memory, because LLVM turns the number of a comparison into a branch
    one = uint64(1)  # positions are unsigned: a signed one might count from the end, which takes a comparison each time
    i, i_end, j_end, num_out = uint64(bounds[0]), uint64(bounds[1]), uint64(bounds[2]), uint64(0)
    j = i_end
    while i < i_end and j < j_end:
        mine, other = index[i], index[j]
        step_mine, step_other = uint64(mine <= other), uint64(other <= mine)
        out_index[num_out] = min(mine, other)
        out_value[num_out] = (value[i] * factors[step_mine] + value[j] * factors[step_other]) + zero
        i, j, num_out = i + step_mine, j + step_other, num_out + one
    for rest, end in ((i, i_end), (j, j_end)):
        for at in range(rest, end):
            out_index[num_out], out_value[num_out] = index[at], value[at] + zero
            num_out += one
    return int(int64(num_out))


@compiled(plain.sum_sparse)
def sum_sparse(index: Array, value: Array, bounds: Array, out_index: Array, out_value: Array) -> int:
    """Add sparse vectors; the elements of one index are added in the order of the vectors.

    Args:
        index: int32: the lists of all vectors, one after the other, each ascending.
        value: float32: the values, finite.
        bounds: int64: the beginning of each list, and the end of the last one.
        out_index: int32, with room for the elements of all lists.
        out_value: float32, likewise.

    Returns:
        The number of different indices.
    """
    num_lists = bounds.size - 1
    if num_lists == 2:
        return int(_sum_two(index, value, bounds, out_index, out_value))
    at = bounds[:num_lists].copy()
    sums = np.zeros(_BLOCK, np.float32)
    touched = np.zeros(_BLOCK // 64, np.uint64)
    num_out, one, lowest = uint64(0), uint64(1), uint64(63)  # positions are unsigned: see ``_sum_two``
    while True:
        begin = np.int64(1) << 40
        for j in range(num_lists):
            if at[j] < bounds[j + 1]:
                begin = min(begin, np.int64(index[at[j]]))
        if begin == np.int64(1) << 40:
            return int(int64(num_out))
        for j in range(num_lists):
            i, end = uint64(at[j]), uint64(bounds[j + 1])
            while i < end and index[i] - begin < _BLOCK:
                place = uint64(index[i] - begin)
                sums[place] += value[i]
                touched[place >> uint64(6)] |= one << (place & lowest)
                i += one
            at[j] = i
        for word in range(touched.size):
            bits = touched[word]
            if bits == uint64(0):
                continue
            touched[word] = uint64(0)
            first = uint64(word * 64)
            while bits != uint64(0):
                place = first + uint64(trailing_zeros(bits))
                out_index[num_out], out_value[num_out] = int32(begin + int64(place)), sums[place]
                num_out += one
                bits &= bits - one
            for place in range(first, first + uint64(64)):
                sums[place] = np.float32(0.0)


@compiled(plain.found_in)
def found_in(index: Array, other: Array) -> Array:
    """Return for each index whether ``other`` has it; both are ascending."""
    found = np.zeros(index.size, np.bool_)
    j = 0
    for i in range(index.size):
        while j < other.size and other[j] < index[i]:
            j += 1
        found[i] = j < other.size and other[j] == index[i]
    return found


def add_up(index: Array, value: Array, bounds: Array) -> tuple[Array, Array]:
    """Return the sum of sparse vectors; see ``sum_sparse``."""
    out_index, out_value = np.empty_like(index), np.empty_like(value)
    count = sum_sparse(index, value, bounds, out_index, out_value)
    return out_index[:count], out_value[:count]
