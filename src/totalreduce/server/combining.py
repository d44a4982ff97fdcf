"""The mean of what several workers have pushed in one step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.server.table import Rows

__all__ = ["means_of"]


def means_of(
    pushed: Sequence[tuple[Rows, Array, float]], width: int, num_workers: int
) -> list[tuple[Rows, Array, float]]:
    """Add what was pushed for each row, in the order of the pushes, and divide by the number of all workers.

    A worker that has not pushed a row counts as having pushed zeros.

    Returns:
        Rows, their means, one-dimensional, and the learning rate of the first push of these rows. No row comes twice.
    """
    if any(rows.listed is not None for rows, *_ in pushed):
        totals = _sums_of_lists(pushed, width)
    else:
        totals = _sums_of_ranges(pushed, width)
    return [(rows, total / total.dtype.type(num_workers), lr) for rows, total, lr in totals]


def _sums_of_lists(pushed: Sequence[tuple[Rows, Array, float]], width: int) -> list[tuple[Rows, Array, float]]:
    """Add all, and divide the rows by the learning rate of their first push. In the usual case all have the same."""
    lists = [np.arange(r.begin, r.begin + r.count) if r.listed is None else r.listed for r, *_ in pushed]
    rows = np.unique(np.concatenate(lists))
    total, rates = np.zeros((len(rows), width), pushed[0][1].dtype), np.empty(len(rows))
    places = [np.searchsorted(rows, listed) for listed in lists]
    for where, (_, values, _) in zip(places, pushed, strict=True):
        total[where] += values.reshape(-1, width)
    for where, (*_, lr) in reversed(list(zip(places, pushed, strict=True))):
        rates[where] = lr
    sums = []
    for lr in np.unique(rates).tolist():
        chosen = rates == lr
        sums.append((Rows(int(chosen.sum()), 0, rows[chosen]), total[chosen].reshape(-1), lr))
    return sums


def _sums_of_ranges(pushed: Sequence[tuple[Rows, Array, float]], width: int) -> list[tuple[Rows, Array, float]]:
    """Cut the rows where a range begins or ends. In the usual case all workers have pushed the same ranges."""
    begins = np.array([rows.begin for rows, *_ in pushed], np.int64)
    ends = begins + np.array([rows.count for rows, *_ in pushed], np.int64)
    cuts = np.unique(np.concatenate([begins, ends]))
    totals = []
    for begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        places = np.flatnonzero((begins <= begin) & (ends >= end)).tolist()
        parts = [pushed[n][1][(begin - begins[n]) * width : (end - begins[n]) * width] for n in places]
        if parts:
            total = parts[0].copy()
            for part in parts[1:]:
                total += part
            totals.append((Rows(end - begin, begin, None), total, pushed[places[0]][2]))
    return totals
