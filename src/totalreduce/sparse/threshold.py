"""The magnitude that k elements of all ranks reach: a radix search with one small allgather per digit."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, final

import numpy as np

from totalreduce.kernels import selection
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allgather, Allreduce

__all__ = ["GlobalThreshold", "bits_of", "magnitude"]

#: Number of bins of a histogram, and the binary logarithm of their width. 128 bins of 2^16 are an octave, and each is
#: 0.5 % of a magnitude, or about 2 % of a count; 256 bins of 2^23 are all octaves.
_FINE = (128, 16)
_COARSE = (256, 23)
#: The histograms of up to this number of ranks are gathered, which also gives the number of elements of each rank.
_GATHERED_RANKS = 8
_MAGNITUDE = 0x7FFFFFFF


def magnitude(bits: int) -> float:
    """Return the float32 with these bits."""
    return float(np.array(bits, np.int32).view(np.float32))


def bits_of(value: float) -> int:
    """Return the bits of a number, rounded to float32."""
    return int(np.array(value, np.float32).view(np.int32))


@final
class GlobalThreshold:
    """The threshold of one bucket, equal on all ranks, from step to step."""

    def __init__(self) -> None:
        self.bound = 0  #: The last threshold; 0 at the beginning. The next search begins there.

    def agree(
        self, values: Array, k: int, world_size: int, *, fresh: bool
    ) -> Generator[Action, Any, tuple[int, Array]]:
        """Find the bound which a number of elements of all ranks reach that is as near to k as possible.

        Without ``fresh`` the last bound is used, if there is one, and the elements are only counted.

        Returns:
            The bound, and the number of elements of each rank that reach it.
        """
        if k == 0:
            return _MAGNITUDE, np.zeros(world_size, np.int64)
        if self.bound and not fresh:
            return self.bound, (yield from _counted(values, self.bound, world_size))
        reached, counts, low = _NOTHING, None, 0
        if self.bound:
            low = max(1, self.bound - (_FINE[0] // 2 << _FINE[1]))
            reached, counts = yield from _reached(values, low, _FINE, world_size)
        if not reached.size or not reached[-1] < k <= reached[0]:
            # Search from the beginning: first the octave, and then within it.
            octaves, _ = yield from _reached(values, 1, _COARSE, world_size)
            low = 1 + (max(0, int((octaves >= k).sum()) - 1) << _COARSE[1])
            reached, counts = yield from _reached(values, low, _FINE, world_size)
        # Never a bound that no element reaches: if more than 2 k are equal, this step and the next would apply nothing.
        best = int(np.abs(reached[: max(1, np.count_nonzero(reached))] - k).argmin())
        # Of bounds with the same count, take the highest.
        best += int((reached[best:] == reached[best]).sum()) - 1
        self.bound = low + (best << _FINE[1])
        if counts is None:
            return self.bound, (yield from _counted(values, self.bound, world_size))
        return self.bound, counts[:, best]


_NOTHING = np.empty(0, np.int64)


def _counted(values: Array, bound: int, world_size: int) -> Generator[Action, Any, Array]:
    count = np.array([((values.view(np.int32) & _MAGNITUDE) >= bound).sum()], np.uint32)
    gathered = yield Allgather(count.view(np.uint8), [count.nbytes] * world_size)
    return np.concatenate(gathered).view(np.uint32).astype(np.int64)


def _reached(
    values: Array, low: int, window: tuple[int, int], world_size: int
) -> Generator[Action, Any, tuple[Array, Array | None]]:
    """Return the number of elements that reach each bound ``low + (bin << shift)``: of all ranks, and of each."""
    num_bins, shift = window
    counts = np.zeros(num_bins, np.int64)
    selection.count_bins(values, low, shift, counts)
    counts = counts[::-1].cumsum()[::-1]
    if world_size > _GATHERED_RANKS:
        total = yield Allreduce(np.ascontiguousarray(counts, np.int64))
        return total, None
    own = counts.astype(np.uint32)
    gathered = yield Allgather(own.view(np.uint8), [own.nbytes] * world_size)
    by_rank = np.stack(gathered).view(np.uint32).astype(np.int64)
    return by_rank.sum(axis=0), by_rank
