"""The mean of what several workers have pushed in one step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.server.table import Rows

__all__ = ["means_of"]

_NOTHING: Array = np.empty(0, np.int64)


def means_of(pushed: Sequence[tuple[Rows, Array]], width: int, num_workers: int) -> list[tuple[Rows, Array]]:
    """Add what was pushed for each row, in the order of the pushes, and divide by the number of workers.

    Args:
        pushed: Rows and their values, one-dimensional.
        width: The number of values of a row.
        num_workers: The number of all workers: one that has not pushed a row counts as having pushed zeros.

    Returns:
        Rows and their means, one-dimensional. No row comes twice.
    """
    if any(rows.listed is not None for rows, _ in pushed):
        totals = [_sum_of_lists(pushed, width)]
    else:
        totals = _sums_of_ranges(pushed, width)
    return [(rows, total / total.dtype.type(num_workers)) for rows, total in totals]


def _sum_of_lists(pushed: Sequence[tuple[Rows, Array]], width: int) -> tuple[Rows, Array]:
    lists = [np.arange(r.begin, r.begin + r.count) if r.listed is None else r.listed for r, _ in pushed]
    rows = np.unique(np.concatenate(lists))
    total = np.zeros((len(rows), width), pushed[0][1].dtype)
    for listed, (_, values) in zip(lists, pushed, strict=True):
        total[np.searchsorted(rows, listed)] += values.reshape(-1, width)
    return Rows(len(rows), 0, rows, _NOTHING), total.reshape(-1)


def _sums_of_ranges(pushed: Sequence[tuple[Rows, Array]], width: int) -> list[tuple[Rows, Array]]:
    """Cut the rows where a range begins or ends. In the usual case all workers have pushed the same ranges."""
    begins = np.array([rows.begin for rows, _ in pushed], np.int64)
    ends = begins + np.array([rows.count for rows, _ in pushed], np.int64)
    cuts = np.unique(np.concatenate([begins, ends]))
    totals = []
    for begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        parts = [
            pushed[place][1][(begin - begins[place]) * width : (end - begins[place]) * width]
            for place in np.flatnonzero((begins <= begin) & (ends >= end)).tolist()
        ]
        if parts:
            total = parts[0].copy()
            for part in parts[1:]:
                total += part
            totals.append((Rows(end - begin, begin, None, _NOTHING), total))
    return totals
