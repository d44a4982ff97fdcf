"""Lists of elements that reach a bound: what one pass over the memory leaves for exact selection."""

from __future__ import annotations

from typing import Any, final

import numpy as np

__all__ = ["Array", "Candidates", "Workspace"]

Array = np.ndarray[Any, Any]

#: What ``selection`` needs beyond the last element listed.
_SLACK = 4096


@final
class Candidates:
    """Lists of indices and values.

    Args:
        room: So many are wanted at most.
        index: Memory for that and 4,096 more, int32; new memory where there is none.
        value: float32, as long.

    Attributes:
        index: int32.
        value: float32.
        count: How many there are.
        complete: Whether all are listed; else those up to some element are, as many as there was to be room for.
    """

    def __init__(self, room: int, index: Array | None = None, value: Array | None = None) -> None:
        """Nothing is listed yet."""
        size = room + _SLACK
        self.index = np.empty(size, np.int32) if index is None else index[:size]
        self.value = np.empty(size, np.float32) if value is None else value[:size]
        self.count, self.complete = 0, True

    @property
    def room(self) -> int:
        """For how many more there is room."""
        return self.index.size - _SLACK - self.count

    def add(self, count: int) -> None:
        """Take what a function of ``selection`` has returned, which was given these lists."""
        self.count = count if count >= 0 else -1 - count
        self.complete &= count >= 0

    def append(self, indices: Array, values: Array, *, complete: bool) -> None:
        """Take a list of no more elements than there is room for; it may be all of those, or the first ones."""
        end = self.count + indices.size
        self.index[self.count : end], self.value[self.count : end] = indices, values
        self.count = end
        self.complete &= complete


@final
class Workspace:
    """Memory for the candidates of several buckets, which are chosen from one after the other.

    Kept from step to step, because new memory is a page fault for every 512 candidates; by one workspace and not by
    each bucket, because that would be some per cent of all gradients.
    """

    def __init__(self) -> None:
        """No memory yet."""
        self._kept = Candidates(0)

    def candidates(self, room: int) -> Candidates:
        """Empty lists, in the memory of those that were handed out before."""
        if self._kept.room < room:
            self._kept = Candidates(room)
        return Candidates(room, self._kept.index, self._kept.value)
