"""The kernels of ``kernels.updates`` in NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.kernels.plain.parts import PART, parts

__all__ = ["adagrad", "adam", "add", "first_wrong", "ftrl", "locate", "momentum", "read"]


def first_wrong(keys: Array, begin: int, end: int) -> int:
    """See ``updates.first_wrong``."""
    return _first((keys <= _predecessors(keys, begin - 1)) | (keys >= end))


def _predecessors(keys: Array, first: int) -> Array:
    return np.concatenate([np.array([first], keys.dtype), keys[:-1]])[: keys.size]


def _first(wrong: Array) -> int:
    """Return the position of the first true element; -1 if there is none."""
    return int(wrong.argmax()) if wrong.any() else -1


def locate(keys: Array, begins: Array, ends: Array, offsets: Array, rows: Array) -> int:
    """See ``updates.locate``."""
    if not ends.size:
        return 0 if keys.size else -1
    places = np.searchsorted(ends, keys, side="right")
    is_behind = places == ends.size
    places[is_behind] = 0
    rows[:] = keys - begins[places] + offsets[places]
    return _first(is_behind | (keys < begins[places]) | (keys <= _predecessors(keys, -1)))


def _rows(rows: Array, width: int, gradients: Array) -> Iterator[tuple[slice | Array, Array]]:
    """Return some rows of the table at a time, and their gradients, of the shape (rows, width)."""
    of_rows = gradients[: gradients.size // width * width].reshape(-1, width)
    for part in parts(len(of_rows), max(1, PART // width)):
        yield (rows[part] if rows.size else part), of_rows[part]


def read(values: Array, rows: Array, width: int, out: Array) -> None:
    """See ``updates.read``."""
    out[: rows.size * width].reshape(-1, width)[...] = values.reshape(-1, width)[rows]


def add(values: Array, rows: Array, width: int, gradients: Array, factor: float) -> None:
    """See ``updates.add``."""
    table = values.reshape(-1, width)
    for some, gradient in _rows(rows, width, gradients):
        table[some] += factor * gradient


def momentum(values: Array, moments: Array, rows: Array, width: int, gradients: Array, lr: float, decay: float) -> None:
    """See ``updates.momentum``."""
    table, states = values.reshape(-1, width), moments.reshape(-1, width)
    for some, gradient in _rows(rows, width, gradients):
        moment = decay * states[some] + gradient
        states[some] = moment
        table[some] -= lr * moment


def adagrad(values: Array, sums: Array, rows: Array, width: int, gradients: Array, lr: float, eps: float) -> None:
    """See ``updates.adagrad``."""
    table, states = values.reshape(-1, width), sums.reshape(-1, width)
    for some, gradient in _rows(rows, width, gradients):
        total = states[some] + gradient * gradient
        states[some] = total
        table[some] -= lr * gradient / (np.sqrt(total) + eps)


def adam(
    values: Array,
    means: Array,
    squares: Array,
    counts: Array,
    rows: Array,
    width: int,
    gradients: Array,
    lr: float,
    decay1: float,
    decay2: float,
    eps: float,
) -> None:
    """See ``updates.adam``."""
    table, firsts, seconds = (array.reshape(-1, width) for array in (values, means, squares))
    log1, log2 = math.log(decay1) if decay1 > 0 else -math.inf, math.log(decay2)
    for some, given in _rows(rows, width, gradients):
        counted = counts[some].astype(np.float64) + 1.0
        counts[some] = counted
        # The functions of the C library, which compiled code calls: NumPy's own differ in the last bit.
        different, places = np.unique(counted, return_inverse=True)
        scale = np.array([lr / (1.0 - math.exp(count * log1)) for count in different.tolist()])
        root = np.array([1.0 / math.sqrt(1.0 - math.exp(count * log2)) for count in different.tolist()])
        gradient = given.astype(np.float64)
        mean = decay1 * firsts[some].astype(np.float64) + (1.0 - decay1) * gradient
        square = decay2 * seconds[some].astype(np.float64) + (1.0 - decay2) * gradient * gradient
        firsts[some], seconds[some] = mean, square
        change = scale[places, None] * mean / (np.sqrt(square) * root[places, None] + eps)
        table[some] = table[some].astype(np.float64) - change


def ftrl(
    values: Array,
    residues: Array,
    sums: Array,
    rows: Array,
    width: int,
    gradients: Array,
    alpha: float,
    beta: float,
    l1: float,
    l2: float,
) -> None:
    """See ``updates.ftrl``."""
    table, states, totals = (array.reshape(-1, width) for array in (values, residues, sums))
    for some, gradient in _rows(rows, width, gradients):
        before = totals[some]
        total = before + gradient * gradient
        root = np.sqrt(total)
        change = (root - np.sqrt(before)).astype(np.float64) / alpha * table[some].astype(np.float64)
        residue = (states[some] + gradient).astype(np.float64) - change
        states[some], totals[some] = residue, total
        shrunk = np.where(residue > 0, residue - l1, residue + l1)
        new = -shrunk / ((beta + root.astype(np.float64)) / alpha + l2)
        table[some] = np.where(np.abs(residue) <= l1, 0.0, new)
