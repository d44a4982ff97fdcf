"""``tr.Auto``: measure at start which buckets are worth compressing, and by which method.

A model of costs would have to know the other work of the cores and the real speed of the links. So a bucket of each
size is exchanged a few times as a dense allreduce and by each candidate method, with gradients of normal distribution.
A bucket is compressed if that takes at most nine tenths of the time; otherwise it is reduced like any dense bucket. The
ranks' times are averaged, so that all ranks decide alike, and nothing changes during training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import numpy as np

from totalreduce.foundation.checks import did_you_mean
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.sparse.accumulator import HostAccumulator
from totalreduce.sparse.actions import Carrier
from totalreduce.sparse.methods import METHODS
from totalreduce.sparse.rounds import SparseRounds
from totalreduce.sparse.session import BucketShape, Method, Session
from totalreduce.sparse.settings import DensitySettings

__all__ = ["Auto", "Choice", "choose", "decide"]

_ROUNDS = 5
_WARMUP = 2
_TIMEOUT_S = 120.0
#: The share of the dense time that compression may take: a measurement is not exact.
_WORTHWHILE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Auto(DensitySettings):
    """Compress the buckets for which measurements show that it is faster; see ``DensitySettings``.

    Attributes:
        methods: Names of the methods that are tried.

    Raises:
        ConfigurationError: There is no such method.
    """

    name: ClassVar[str] = "auto"

    methods: tuple[str, ...] = ("oktopk", "topka")

    def __post_init__(self) -> None:
        DensitySettings.__post_init__(self)
        for name in self.methods:
            if name not in METHODS or name in ("dense", "powersgd"):
                nearest = did_you_mean(name, METHODS)
                raise ConfigurationError(
                    f"{name!r} is no method that tr.Auto can try{nearest}; there are {', '.join(METHODS)}"
                )

    def candidates(self) -> list[Method]:
        """Return the methods, with this density."""
        settings = {
            "density": self.density,
            "warmup_steps": self.warmup_steps,
            "warmup_density": self.warmup_density,
        }
        return [METHODS[name](**settings) for name in self.methods]

    def session(self, shape: BucketShape, rank: int, world_size: int) -> Session:  # noqa: ARG002
        """Refuse: ``choose`` decides on a method first."""
        raise ConfigurationError("tr.Auto has to be resolved by measurement first: see totalreduce.sparse.auto.choose")


@dataclass(frozen=True, slots=True)
class Choice:
    """The measurement of buckets of one size, and the decision."""

    num_elements: int  #: The number of elements of the bucket.
    method: Method | None  #: The method that compresses the bucket; ``None``: it is not compressed.
    dense_s: float  #: Seconds of a dense allreduce.
    sparse_s: dict[str, float]  #: Seconds of each candidate, by name.

    def describe(self) -> str:
        """Return one line for a log."""
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

    ``dense`` reduces a number of float32 over the ranks and returns the seconds that it took, and ``average`` averages
    numbers over the ranks; both are collective.

    Returns:
        The decision for each bucket; buckets of about the same size share a measurement.
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
        for number in range(_WARMUP + _ROUNDS):  # in turns, so that a slow moment hits all candidates
            taken = [dense(size), *(run.seconds() for run in runs)]
            if number >= _WARMUP:
                for sample, seconds in zip(samples, taken, strict=True):
                    sample.append(seconds)
    finally:
        for run in runs:
            run.rounds.close()
    dense_s, *sparse = average([median(sample) for sample in samples])
    return decide(size, methods, dense_s, sparse)


def decide(size: int, methods: Sequence[Method], dense_s: float, sparse_s: Sequence[float]) -> Choice:
    """Return the decision for buckets of one size."""
    best = min(range(len(methods)), key=sparse_s.__getitem__)
    worthwhile = sparse_s[best] <= _WORTHWHILE * dense_s
    names = [method.name for method in methods]
    return Choice(size, methods[best] if worthwhile else None, dense_s, dict(zip(names, sparse_s, strict=True)))


class _Trial:
    """Exchanges of one method with artificial gradients."""

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
        assert updates is not None, "artificial gradients are finite"
        updates[0].write_to(HostAccumulator([self._residual]), 1.0)
        seconds = time.monotonic() - begin
        self._residual = gradient
        return seconds
