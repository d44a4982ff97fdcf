"""Lists of elements that reach a bound: what one pass over the memory leaves for exact selection."""

from __future__ import annotations

from typing import Any, final

import numpy as np

__all__ = ["Array", "Candidates"]

Array = np.ndarray[Any, Any]

#: What ``selection`` needs beyond the last element listed.
_SLACK = 4096


@final
class Candidates:
    """Lists of indices and values.

    Args:
        room: So many are wanted at most.

    Attributes:
        index: int32.
        value: float32.
        count: How many there are.
        complete: Whether all are listed; else those up to some element are, as many as there was to be room for.
    """

    def __init__(self, room: int) -> None:
        """Nothing is listed yet."""
        self.index, self.value = np.empty(room + _SLACK, np.int32), np.empty(room + _SLACK, np.float32)
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
