"""Gradients for the benchmarks of sparse methods, and how they are cut into buckets; needs NumPy."""

from __future__ import annotations

from typing import final

import numpy as np

from totalreduce.kernels.arrays import Array

_SEED = 11
#: Size of the gradient that all ranks have in common, beside noise of their own of size 1.
_SIGNAL = 0.1
_ROW = 64
_POOL = 2


@final
class GradientSource:
    """Gradients that differ in every element, step and rank, made of a few arrays of noise.

    Args:
        num_elements: Of each.
        distribution: See ``methods.DistributionOption``.
        rank: Ranks have noise of their own, and a tenth as much in common.
    """

    def __init__(self, num_elements: int, distribution: str, rank: int) -> None:
        self._rank, self._distribution = rank, distribution
        generators = [np.random.default_rng([_SEED, rank, number]) for number in range(_POOL)]
        self._pool = [_noise(generator, num_elements, distribution) for generator in generators]
        self._signal = _noise(np.random.default_rng([_SEED]), num_elements, distribution)
        self._signal *= np.float32(_SIGNAL)

    def write(self, out: Array, step: int) -> None:
        """The gradient of a step; equal for equal steps."""
        generator = np.random.default_rng([_SEED, self._rank, _POOL, step])
        noise = self._pool[int(generator.integers(_POOL))]
        sign = np.float32(generator.choice([-1.0, 1.0]))
        turn = int(generator.integers(noise.size))
        np.multiply(noise[turn:], sign, out=out[: noise.size - turn])
        np.multiply(noise[:turn], sign, out=out[noise.size - turn :])
        out += self._signal
        if self._distribution == "embedding":
            rows = np.arange(-(-out.size // _ROW))
            # As words of a text are: the first hundredth of the rows is always there, row r with a chance of 1 / r.
            absent = generator.random(rows.size) * (rows + 1) > max(1.0, rows.size / 100)
            whole = out.size // _ROW * _ROW
            out[:whole].reshape(-1, _ROW)[absent[: whole // _ROW]] = 0.0
            if whole < out.size and absent[-1]:
                out[whole:] = 0.0


def _noise(generator: np.random.Generator, num_elements: int, distribution: str) -> Array:
    if distribution == "normal":
        return generator.standard_normal(num_elements, dtype=np.float32)
    return generator.standard_t(3, num_elements).astype(np.float32)
