"""Candidates: the elements that one pass over the memory lists for exact selection, because they reach a bound."""

from __future__ import annotations

from typing import final

import numpy as np

from totalreduce.kernels.arrays import Array

__all__ = ["Candidates", "Workspace"]

#: The room that the kernels of ``selection`` need beyond the last listed element.
_SLACK = 4096


@final
class Candidates:
    """Lists of at most ``room`` indices and values, in given memory for 4,096 more, or in new memory."""

    def __init__(self, room: int, index: Array | None = None, value: Array | None = None) -> None:
        size = room + _SLACK
        self.index = np.empty(size, np.int32) if index is None else index[:size]  #: int32.
        self.value = np.empty(size, np.float32) if value is None else value[:size]  #: float32.
        self.count = 0  #: The number of listed elements.
        #: Whether all elements that reach the bound are listed; otherwise only the first ones are.
        self.complete = True

    @property
    def room(self) -> int:
        """The number of elements that can still be listed."""
        return self.index.size - _SLACK - self.count

    def add(self, count: int) -> None:
        """Take the result of a kernel of ``selection`` that has appended to these lists."""
        self.count = count if count >= 0 else -1 - count
        self.complete &= count >= 0

    def append(self, indices: Array, values: Array, *, complete: bool) -> None:
        """Append elements, for which there is room; ``complete``: they are all that reach the bound."""
        end = self.count + indices.size
        self.index[self.count : end], self.value[self.count : end] = indices, values
        self.count = end
        self.complete &= complete


@final
class Workspace:
    """Memory for the candidates of several buckets, from which elements are selected one bucket after the other.

    The memory is kept from step to step, because new memory costs a page fault for every 512 candidates. The buckets
    share one workspace, because memory for each would be some per cent of all gradients.
    """

    def __init__(self) -> None:
        self._kept = Candidates(0)

    def candidates(self, room: int) -> Candidates:
        """Return empty lists, in the memory of the lists that were returned before."""
        if self._kept.room < room:
            self._kept = Candidates(room)
        return Candidates(room, self._kept.index, self._kept.value)
