"""The values of the keys of one shard, and the state of its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.kernels import updates
from totalreduce.kernels.arrays import Array
from totalreduce.server.layout import Layout
from totalreduce.server.messages import NO_RATE
from totalreduce.server.optimizers import Optimizer

__all__ = ["Initial", "Rows", "Table"]

#: The value with which all elements begin; or a function of keys, int64 of shape (n,), to values of shape (n, width).
Initial = float | Callable[[Array], Array]
_NO_LIST: Array = np.empty(0, np.int64)
#: The number of keys for which the initial values are asked at a time.
_KEYS_AT_A_TIME = 1 << 20


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """Where some keys are in a table.

    Attributes:
        count: Their number.
        begin: The first row, of keys that are a range.
        listed: int64: the row of each key, of keys that are a list; ``None`` for a range.
    """

    count: int
    begin: int
    listed: Array | None


class Table:
    """Values and optimizer of one shard. The rows are those of its keys, in ascending order.

    Attributes:
        values: The values, one-dimensional: ``width`` for each row.
        states: The arrays of the optimizer's state.
        ranges: The ranges of the layout that the table has, ascending.
        version: The number of updates.
    """

    def __init__(
        self,
        layout: Layout,
        shard: int,
        *,
        width: int,
        dtype: np.dtype[np.floating],
        optimizer: Optimizer,
        initial: Initial = 0.0,
    ) -> None:
        """Make the values of a shard's ranges.

        Raises:
            ConfigurationError: The function ``initial`` returns values of another shape.
        """
        self._width, self._optimizer = width, optimizer
        #: The learning rate of the last push, and the optimizer with this one.
        self._at_rate: tuple[float, Optimizer] | None = None
        self.ranges, self.version = layout.ranges_of(shard), 0
        self._begins, self._ends = layout.begins[:-1][self.ranges], layout.begins[1:][self.ranges]
        #: The row of the first key of each range, and the number of rows.
        self._offsets: Array = np.concatenate([[0], np.cumsum(self._ends - self._begins)]).astype(np.int64)
        num_rows = int(self._offsets[-1])
        # Memory of zeros is not taken before it is used.
        self.values: Array = np.zeros(num_rows * width, dtype)
        self.states = tuple(np.zeros(num_rows * (1 if kind.is_per_key else width), dtype) for kind in optimizer.states)
        for state, kind in zip(self.states, optimizer.states, strict=True):
            if kind.initial:
                state.fill(kind.initial)
        if callable(initial):
            self._fill(initial)
        elif initial:
            self.values.fill(initial)

    def _fill(self, initial: Callable[[Array], Array]) -> None:
        for begin, end, offset in zip(self._begins, self._ends, self._offsets, strict=False):
            for first in range(int(begin), int(end), _KEYS_AT_A_TIME):
                keys = np.arange(first, min(first + _KEYS_AT_A_TIME, int(end)))
                found, row = np.asarray(initial(keys)), int(offset) + first - int(begin)
                if found.size != keys.size * self._width:
                    raise ConfigurationError(
                        f"initial returns values of shape {found.shape} for {keys.size} keys; "
                        f"expected is ({keys.size}, {self._width})"
                    )
                self.values[row * self._width : (row + keys.size) * self._width] = found.reshape(-1)

    def load(self, values: Array, states: Sequence[Array], version: int) -> None:
        """Go on with the values, the state and the version of another table of the same keys. Nothing is copied.

        Raises:
            ProtocolError: They have another shape or type.
        """
        mine, theirs = (self.values, *self.states), (values, *states)
        if [(a.shape, a.dtype) for a in mine] != [(a.shape, a.dtype) for a in theirs]:
            raise ProtocolError("the values of a shard that another server sends have another shape or type")
        self.values, self.states, self.version = values, tuple(states), version

    def find_keys(self, keys: Array) -> Rows:
        """Return where listed keys are.

        Raises:
            ProtocolError: The keys are not ascending, or one is not in the table.
        """
        rows = np.empty(keys.size, np.int64)
        wrong = updates.locate(keys, self._begins, self._ends, self._offsets, rows)
        if wrong >= 0:
            raise ProtocolError(
                f"key {keys[wrong]}, at position {wrong} of a list, is not ascending, or of another shard"
            )
        return Rows(keys.size, 0, rows)

    def find_range(self, begin: int, end: int) -> Rows:
        """Return where those keys of ``[begin, end)`` are that the table has."""
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._begins, end, side="left"))
        if first >= last:
            return Rows(0, 0, None)
        first_row = int(self._offsets[first]) + max(0, begin - int(self._begins[first]))
        last_row = int(self._offsets[last]) - max(0, int(self._ends[last - 1]) - end)
        return Rows(last_row - first_row, first_row, None)

    def keys_at(self, rows: Array) -> Array:
        """Return the keys of some rows; the inverse of ``find_keys``."""
        ranges = np.searchsorted(self._offsets, rows, side="right") - 1
        return self._begins[ranges] + rows - self._offsets[ranges]

    def push(self, rows: Rows, gradients: Array, lr: float = NO_RATE) -> None:
        """Apply what was pushed for some rows, one-dimensional, with this learning rate."""
        self.version += 1
        if self._at_rate is None or self._at_rate[0] != lr:
            self._at_rate = lr, self._optimizer if lr == NO_RATE else self._optimizer.at_rate(lr)
        optimizer = self._at_rate[1]
        values, states, listed = self.values, self.states, rows.listed
        if listed is None:
            if not rows.count:
                return
            part, num_rows = slice(rows.begin, rows.begin + rows.count), len(values) // self._width
            states = tuple(state.reshape(num_rows, -1)[part].reshape(-1) for state in states)
            values, listed = values.reshape(num_rows, -1)[part].reshape(-1), _NO_LIST
        optimizer.update(values, states, listed, self._width, gradients)

    def assign(self, rows: Rows, values: Array) -> None:
        """Set the values of some rows, one-dimensional. The state of the optimizer stays."""
        self.version += 1
        part = slice(rows.begin, rows.begin + rows.count) if rows.listed is None else rows.listed
        self.values.reshape(-1, self._width)[part] = values.reshape(-1, self._width)

    def pull(self, rows: Rows) -> Array:
        """Return a copy of the values of some rows, one-dimensional."""
        if rows.listed is None:
            return self.values[rows.begin * self._width : (rows.begin + rows.count) * self._width].copy()
        out = np.empty(rows.count * self._width, self.values.dtype)
        updates.read(self.values, rows.listed, self._width, out)
        return out
