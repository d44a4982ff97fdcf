"""Reading and writing the elements of dense memory that a list names. Indices are ascending int32.

The memory is far larger than any cache, so every element is a miss; a plain loop keeps many of them under way at once,
which NumPy's own indexing does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

__all__ = ["Array", "gather", "keep_rest", "scatter", "scatter_add"]

Array = np.ndarray[Any, Any]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def scatter(target: Array, first: int, index: Array, value: Array, factor: float) -> None:
    """``target[index - first] = value * factor``.

    Args:
        target: float32.
        first: The index of its element 0.
        index: Within the target.
        value: float32, as long.
        factor: float32.
    """
    for i in range(index.size):
        target[index[i] - first] = value[i] * factor


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def scatter_add(target: Array, first: int, index: Array, value: Array, factor: float) -> None:
    """``target[index - first] += value * factor``; see ``scatter``. No index twice."""
    for i in range(index.size):
        target[index[i] - first] += value[i] * factor


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def gather(source: Array, first: int, index: Array, out: Array) -> None:
    """``out = source[index - first]``."""
    for i in range(index.size):
        out[i] = source[index[i] - first]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def keep_rest(target: Array, first: int, index: Array, value: Array, sent: Array, applied: Array) -> None:
    """``target[index - first] = value - sent`` for those of ``index`` that ``applied`` has, too."""
    i = j = 0
    while i < index.size and j < applied.size:  # both steps without a branch: which one is taken cannot be predicted
        mine, other = index[i], applied[j]
        if mine == other:
            target[mine - first] = value[i] - sent[i]
        i += mine <= other
        j += other <= mine
