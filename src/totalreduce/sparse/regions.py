"""Regions: a bucket is cut into one region per rank, which adds up the selected elements of all ranks there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from totalreduce.codecs import blocks
from totalreduce.kernels import merging
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.common import TopkSession
from totalreduce.sparse.settings import TopkSettings

__all__ = ["RegionSession", "reduce_region", "to_owners"]

S = TypeVar("S", bound=TopkSettings)


class RegionSession(TopkSession[S]):
    """The session of a method that reduces regions. A region's owner knows its applied elements before the others."""

    def _keep_own(self, cuts: Sequence[int], applied: Array, cut_off: Array) -> None:
        """Make the gradients in this rank's region the residual; ``cut_off``: rounding errors of the applied sums."""
        self._keep_rest(cuts[self._rank], cuts[self._rank + 1], applied)
        self._gradients.add(applied, cut_off)

    def _keep_others(self, cuts: Sequence[int], applied: Array) -> None:
        """Make the gradients in the other ranks' regions the residual."""
        self._keep_rest(0, cuts[self._rank], applied)
        self._keep_rest(cuts[self._rank + 1], self._num_elements, applied)

    def _keep_rest(self, begin: int, end: int, applied: Array) -> None:
        """Between two indices, leave only the rounding errors of elements that were selected here and applied."""
        low, high = np.searchsorted(self._selection.indices, np.array((begin, end), np.int32))
        first, last = np.searchsorted(applied, np.array((begin, end), np.int32))
        values = self._selection.values[low:high]
        sent = blocks.rounded(values, self._settings.values)
        self._gradients.keep_rest(self._selection.indices[low:high], values, sent, applied[first:last])


def to_owners(indices: Array, values: Array, cuts: Sequence[int], rank: int, kind: blocks.ValueKind) -> list[Array]:
    """Cut a list into one block for each region's owner; the block for this rank is empty."""
    edges = np.searchsorted(indices, np.array(cuts, np.int32)).tolist()
    parts = []
    for owner in range(len(cuts) - 1):
        own = slice(edges[owner], edges[owner + 1])
        if owner == rank:  # it need not travel
            parts.append(np.empty(0, np.uint8))
        else:
            parts.append(blocks.pack(indices[own], values[own], cuts[owner], cuts[owner + 1], kind))
    return parts


def reduce_region(
    received: Sequence[Array], indices: Array, values: Array, cuts: Sequence[int], rank: int
) -> tuple[Array, Array]:
    """Add up the blocks that ``to_owners`` has made on all ranks, in the order of the ranks; the own part is a list."""
    begin, end = cuts[rank], cuts[rank + 1]
    low, high = np.searchsorted(indices, np.array((begin, end), np.int32)).tolist()
    own = indices[low:high], values[low:high]
    lists = [own if source == rank else block for source, block in enumerate(received)]
    return merging.add_up(*blocks.unpack_all(lists, [(begin, end)] * len(lists)))
