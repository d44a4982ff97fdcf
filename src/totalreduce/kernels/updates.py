"""Updates of rows of a table by optimizers, and reads of rows. Rows are ascending, without duplicates.

A row has ``width`` values. All functions take values and state of a table, and gradients of listed rows. Without a list
(an empty one) gradients are those of all rows, in order. The table is far larger than any cache; a plain loop has many
cache misses in flight at once.
"""

from __future__ import annotations

import math

from totalreduce.kernels.arrays import Array
from totalreduce.kernels.compiled import compiled
from totalreduce.kernels.numba_names import int64
from totalreduce.kernels.plain import updates as plain
from totalreduce.kernels.vectors import prefetch

__all__ = ["adagrad", "adam", "add", "first_wrong", "ftrl", "locate", "momentum", "read"]


@compiled(plain.first_wrong)
def first_wrong(keys: Array, begin: int, end: int) -> int:
    """Return the position of the first key that is not in ``[begin, end)`` or not above its predecessor; else -1."""
    before = begin - 1
    for i in range(keys.size):
        if keys[i] <= before or keys[i] >= end:
            return i
        before = keys[i]
    return -1


#: The kernels prefetch the cache lines of the row that is this many positions ahead. An update with a root or a
#: division in it is too long for the processor to find the misses of the next rows by itself: without this, Adam took
#: three times as long.
_AHEAD = 16


@compiled(plain.locate)
def locate(keys: Array, begins: Array, ends: Array, offsets: Array, rows: Array) -> int:
    """Find the rows of keys in a table that has some ranges of keys.

    Args:
        keys: Should be ascending, without duplicates, and in the ranges.
        begins: int64: the first key of each range, ascending.
        ends: int64: the key behind each range.
        offsets: int64: the row of each first key.
        rows: int64: takes the row of each key.

    Returns:
        The position of the first key that is not as it should be; else -1.
    """
    place, before = 0, -1
    for i in range(keys.size):
        key = keys[i]
        while place < ends.size and key >= ends[place]:
            place += 1
        if place == ends.size or key < begins[place] or key <= before:
            return i
        rows[i] = key - begins[place] + offsets[place]
        before = key
    return -1


@compiled(plain.read)
def read(values: Array, rows: Array, width: int, out: Array) -> None:
    """``out = values`` of listed rows."""
    for i in range(rows.size):
        row = rows[i] * width
        for j in range(width):
            out[i * width + j] = values[row + j]


@compiled(plain.add)
def add(values: Array, rows: Array, width: int, gradients: Array, factor: float) -> None:
    """``values += factor * gradients``; the factor has the type of the values."""
    for i in range(gradients.size // width):
        row = (rows[i] if rows.size else i) * width
        for j in range(width):
            values[row + j] += factor * gradients[i * width + j]


@compiled(plain.momentum)
def momentum(values: Array, moments: Array, rows: Array, width: int, gradients: Array, lr: float, decay: float) -> None:
    """``moments = decay * moments + gradients; values -= lr * moments``, as ``torch.optim.SGD`` does."""
    for i in range(gradients.size // width):
        row = (rows[i] if rows.size else i) * width
        for j in range(width):
            moment = decay * moments[row + j] + gradients[i * width + j]
            moments[row + j] = moment
            values[row + j] -= lr * moment


@compiled(plain.adagrad)
def adagrad(values: Array, sums: Array, rows: Array, width: int, gradients: Array, lr: float, eps: float) -> None:
    """Duchi, Hazan and Singer, JMLR 2011; eps is outside of the root, as in ``torch.optim.Adagrad``."""
    for i in range(gradients.size // width):
        if i + _AHEAD < rows.size:
            ahead = int64(rows[i + _AHEAD])
            prefetch(values, ahead * width)
            prefetch(sums, ahead * width)
        row = (rows[i] if rows.size else i) * width
        for j in range(width):
            gradient = gradients[i * width + j]
            total = sums[row + j] + gradient * gradient
            sums[row + j] = total
            values[row + j] -= lr * gradient / (math.sqrt(total) + eps)


@compiled(plain.adam)
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
    """Kingma and Ba, ICLR 2015. ``counts``: the number of updates of each row, on which the bias corrections depend.

    The scalars are float64.
    """
    log1, log2 = math.log(decay1) if decay1 > 0 else -math.inf, math.log(decay2)
    for i in range(gradients.size // width):
        if i + _AHEAD < rows.size:
            ahead = int64(rows[i + _AHEAD])
            prefetch(values, ahead * width)
            prefetch(means, ahead * width)
            prefetch(squares, ahead * width)
            prefetch(counts, ahead)
        place = rows[i] if rows.size else i
        count = counts[place] + 1
        counts[place] = count
        scale = lr / (1.0 - math.exp(count * log1))
        root = 1.0 / math.sqrt(1.0 - math.exp(count * log2))
        for j in range(place * width, (place + 1) * width):
            gradient = gradients[(i - place) * width + j]
            mean = decay1 * means[j] + (1.0 - decay1) * gradient
            square = decay2 * squares[j] + (1.0 - decay2) * gradient * gradient
            means[j], squares[j] = mean, square
            values[j] -= scale * mean / (math.sqrt(square) * root + eps)


@compiled(plain.ftrl)
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
    """FTRL-Proximal: McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, algorithm 1.

    ``residues`` are its z, ``sums`` its n. The scalars are float64.
    """
    for i in range(gradients.size // width):
        if i + _AHEAD < rows.size:
            ahead = int64(rows[i + _AHEAD])
            prefetch(values, ahead * width)
            prefetch(residues, ahead * width)
            prefetch(sums, ahead * width)
        row = (rows[i] if rows.size else i) * width
        for j in range(width):
            gradient = gradients[i * width + j]
            before = sums[row + j]
            total = before + gradient * gradient
            root = math.sqrt(total)
            residue = residues[row + j] + gradient - (root - math.sqrt(before)) / alpha * values[row + j]
            residues[row + j], sums[row + j] = residue, total
            if abs(residue) <= l1:
                values[row + j] = 0.0
            else:
                shrunk = residue - l1 if residue > 0 else residue + l1
                values[row + j] = -shrunk / ((beta + root) / alpha + l2)
