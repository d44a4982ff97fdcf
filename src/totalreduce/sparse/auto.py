"""Which buckets are worth compressing, and how: measured at start on the ranks, cores and links that will do it.

A model of costs would have to know what else the cores do and what the wire really carries. So a bucket of each size is
sent both ways a few times: whole, and by each candidate method, with gradients of normal distribution. A bucket is
compressed where that takes at most nine tenths of the time; what is sent whole goes the usual way and costs nothing
more. The ranks' times are averaged, so that all decide alike, and nothing changes during training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import numpy as np

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.sparse.accumulator import HostAccumulator
from totalreduce.sparse.carrier import Carrier
from totalreduce.sparse.methods import METHODS
from totalreduce.sparse.rounds import SparseRounds
from totalreduce.sparse.session import BucketShape, Method, Session
from totalreduce.sparse.settings import DensitySettings

__all__ = ["Auto", "Choice", "choose"]

_ROUNDS = 5
_WARMUP = 2
_TIMEOUT_S = 120.0
#: Compression has to be worth its trouble, and a measurement is not exact.
_WORTHWHILE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Auto(DensitySettings):
    """Compress the buckets for which that is measured to be faster; see ``DensitySettings``.

    Attributes:
        methods: Names of the methods that are tried.

    Raises:
        ConfigurationError: There is no such method.
    """

    name: ClassVar[str] = "auto"

    methods: tuple[str, ...] = ("oktopk", "topka")

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        DensitySettings.__post_init__(self)
        for name in self.methods:
            if name not in METHODS or name in ("dense", "powersgd"):
                raise ConfigurationError(f"{name!r} is no method that tr.Auto can try; there are {', '.join(METHODS)}")

    def candidates(self) -> list[Method]:
        """The methods, with this density."""
        settings = {
            "density": self.density,
            "warmup_steps": self.warmup_steps,
            "warmup_density": self.warmup_density,
        }
        return [METHODS[name](**settings) for name in self.methods]

    def session(self, shape: BucketShape, rank: int, world_size: int) -> Session:  # noqa: ARG002
        """Not before something was chosen: see ``choose``."""
        raise ConfigurationError("tr.Auto has to be resolved by measurement first: see totalreduce.sparse.auto.choose")


@dataclass(frozen=True, slots=True)
class Choice:
    """What was measured for buckets of one size, and decided.

    Attributes:
        num_elements: Of the bucket.
        method: How to compress it; ``None``: send it whole.
        dense_s: Seconds to send it whole.
        sparse_s: Seconds by each candidate, by name.
    """

    num_elements: int
    method: Method | None
    dense_s: float
    sparse_s: dict[str, float]

    def describe(self) -> str:
        """One line for people."""
        tried = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in self.sparse_s.items())
        decided = "sent whole" if self.method is None else f"compressed by {self.method.name}"
        return f"{self.num_elements:,} elements: {decided} (whole {self.dense_s * 1e3:.1f} ms, {tried})"


def choose(
    settings: Auto,
    shapes: Sequence[BucketShape],
    carrier: Carrier,
    dense: Callable[[int], float],
    average: Callable[[Sequence[float]], Sequence[float]],
) -> list[Choice]:
    """Measure and decide, for each bucket. Collective.

    Args:
        settings: What to try.
        shapes: Of the buckets, equal on all ranks.
        carrier: The ranks.
        dense: Reduces so many float32 over the ranks and returns how many seconds that took. Collective.
        average: Averages numbers over the ranks. Collective.

    Returns:
        By bucket; buckets of about the same size share a measurement.
    """
    measured: dict[int, Choice] = {}
    choices = []
    for shape in shapes:
        size = shape.num_elements
        key = size.bit_length()
        if key not in measured:
            measured[key] = _measure(settings, size, carrier, dense, average)
        choices.append(measured[key])
    return choices


def _measure(
    settings: Auto,
    size: int,
    carrier: Carrier,
    dense: Callable[[int], float],
    average: Callable[[Sequence[float]], Sequence[float]],
) -> Choice:
    methods = settings.candidates()
    samples: list[list[float]] = [[] for _ in range(1 + len(methods))]
    shape = BucketShape(((size,),))
    runs = [_Trial(method, shape, carrier) for method in methods]
    try:
        for number in range(_WARMUP + _ROUNDS):  # in turns, so that a slow moment meets all of them
            taken = [dense(size), *(run.seconds() for run in runs)]
            if number >= _WARMUP:
                for sample, seconds in zip(samples, taken, strict=True):
                    sample.append(seconds)
    finally:
        for run in runs:
            run.rounds.close()
    whole, *sparse = average([median(sample) for sample in samples])
    best = min(range(len(methods)), key=sparse.__getitem__)
    worthwhile = sparse[best] <= _WORTHWHILE * whole
    names = [method.name for method in methods]
    return Choice(size, methods[best] if worthwhile else None, whole, dict(zip(names, sparse, strict=True)))


class _Trial:
    """One method on made-up gradients."""

    def __init__(self, method: Method, shape: BucketShape, carrier: Carrier) -> None:
        self.rounds = SparseRounds([method], [shape], carrier)
        generator = np.random.default_rng(carrier.rank)
        self._draws = [generator.standard_normal(shape.num_elements, np.float32) for _ in range(2)]
        self._residual = np.zeros(shape.num_elements, np.float32)
        self._number = 0

    def seconds(self) -> float:
        self._number += 1
        gradient = np.roll(self._draws[self._number % 2], 7919 * self._number)
        begin = time.monotonic()
        self.rounds.start(0, HostAccumulator([gradient]), HostAccumulator([self._residual]), present=[True])
        updates = self.rounds.finish(_TIMEOUT_S)
        assert updates is not None, "made-up gradients are finite"
        updates[0].write_to(HostAccumulator([self._residual]), 1.0)
        seconds = time.monotonic() - begin
        self._residual = gradient
        return seconds
