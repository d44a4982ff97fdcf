"""The kernels of ``kernels.scattering`` in NumPy."""

from __future__ import annotations

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.kernels.plain.merging import found_in

__all__ = ["gather", "keep_rest", "overwrite", "scatter", "scatter_add"]


def scatter(target: Array, first: int, index: Array, value: Array, factor: float) -> None:
    """See ``scattering.scatter``."""
    target[index - first] = value * np.float32(factor)


def scatter_add(target: Array, first: int, index: Array, value: Array, factor: float) -> None:
    """See ``scattering.scatter_add``."""
    target[index - first] += value * np.float32(factor)


def overwrite(target: Array, first: int, index: Array, value: Array, factor: float) -> None:
    """See ``scattering.overwrite``."""
    target[:] = 0.0
    scatter(target, first, index, value, factor)


def gather(source: Array, first: int, index: Array, out: Array) -> None:
    """See ``scattering.gather``."""
    out[:] = source[index - first]


def keep_rest(target: Array, first: int, index: Array, value: Array, sent: Array, applied: Array) -> None:
    """See ``scattering.keep_rest``."""
    both = np.flatnonzero(found_in(index, applied))
    target[index[both] - first] = value[both] - sent[both]
