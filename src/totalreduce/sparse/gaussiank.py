"""GaussianK: the threshold that k elements would reach if they were normally distributed, corrected until it is near.

Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning", arXiv:1911.08772. The mean and the
standard deviation give a first threshold; gradients have heavier tails than that, so that it is adjusted until from
3/4 k to 5/4 k elements reach it. Each try is another pass over the bucket, where ``selector`` needs one in all.

There, a threshold is multiplied by 1.02 up to twenty times, which corrects a factor of 1.5 at most; here it is
bracketed, octave by octave, and then bisected in the bits of the magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, final

import numpy as np

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.sparse.accumulator import Accumulator, Array
from totalreduce.sparse.gathering import GatheringSession
from totalreduce.sparse.selector import NOTHING, Candidates, Selection
from totalreduce.sparse.session import BucketShape
from totalreduce.sparse.settings import TopkSettings

__all__ = ["GaussianK", "GaussianKSession"]

#: Elements that are widened to float64 at a time.
_CHUNK = 1 << 16
#: The first correction of a threshold, in the bits of its magnitude: half an octave. It is doubled until there is a
#: bracket.
_STRIDE = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianK(TopkSettings):
    """Settings of GaussianK; see ``TopkSettings`` for the others.

    Attributes:
        passes: A threshold is tried so many times, at most.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "gaussiank"

    passes: int = 20

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        TopkSettings.__post_init__(self)
        if self.passes < 1:
            raise ConfigurationError(f"passes is how often a threshold is tried, from 1, not {self.passes}")

    def session(self, shape: BucketShape, rank: int, world_size: int) -> GaussianKSession:
        """The state of one bucket on one rank."""
        return GaussianKSession(self, shape, rank, world_size)


@final
class GaussianKSession(GatheringSession[GaussianK]):
    """See ``session.Session``."""

    def __init__(self, settings: GaussianK, shape: BucketShape, rank: int, world_size: int) -> None:
        """Nothing was exchanged yet."""
        super().__init__(settings, shape, rank, world_size)
        self._found = Candidates()

    def _select(self, gradients: Accumulator, residuals: Accumulator, scale: float, k: int) -> Selection:
        checked = super()._select(gradients, residuals, scale, 0)
        if k == 0 or not checked.finite:
            return checked
        least, most = k - k // 4, k + k // 4
        # Too many reach ``low``, or it is 0; too few reach ``high``.
        low, high = 0, self._selector.limit
        bound, stride = min(_normal_bound(gradients, k), high - 1), _STRIDE
        for _ in range(self._settings.passes):
            self._found.find(gradients, bound, most)
            if self._found.complete and least <= self._found.count <= most:
                return self._first(most)
            self._selector.rescans += 1
            low, high, towards = (low, bound, -stride) if self._is_few(least) else (bound, high, stride)
            if high - low == 1:
                break
            bracketed = low > 0 and high < self._selector.limit
            bound = bound + towards
            if bracketed or not low < bound < high:
                bound = (low + high) // 2
            stride *= 2
        # Many are equal, or there were not tries enough: rather too few, but some.
        self._found.find(gradients, high, most)
        if not self._found.count:
            self._found.find(gradients, max(low, 1), most)
        return self._first(k)

    def _is_few(self, least: int) -> bool:
        return self._found.complete and self._found.count < least

    def _first(self, count: int) -> Selection:
        count = min(count, self._found.count)
        if not count:
            return NOTHING
        indices, values = self._found.index[:count], self._found.value[:count]
        return Selection(indices, values, int(np.abs(values).min().view(np.int32)), finite=True)


def _normal_bound(values: Accumulator, k: int) -> int:
    """Bits of the magnitude that k of so many normally distributed elements with that mean and deviation reach."""
    n = values.num_elements
    mean = sum(float(chunk.sum()) for chunk in _chunks(values)) / n
    variance = sum(float(np.square(chunk - mean).sum()) for chunk in _chunks(values)) / n
    threshold = abs(mean) - math.sqrt(variance) * NormalDist().inv_cdf(k / (2 * n))
    return max(1, int(np.float32(min(threshold, float(np.finfo(np.float32).max))).view(np.int32)))


def _chunks(values: Accumulator) -> Iterator[Array]:
    for segment in values.segments:
        for begin in range(0, segment.size, _CHUNK):
            yield segment[begin : begin + _CHUNK].astype(np.float64)
