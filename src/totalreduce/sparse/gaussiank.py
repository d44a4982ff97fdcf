"""GaussianK: select by a threshold that about k elements would reach if they were normally distributed.

Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning", arXiv:1911.08772. The mean and the
standard deviation give a first threshold. Gradients have heavier tails than a normal distribution, so the threshold is
adjusted until from 3/4 k to 5/4 k elements reach it. Each trial is another pass over the bucket; ``selector`` needs one
pass in all.

The paper multiplies the threshold by 1.02 up to twenty times, which corrects a factor of 1.5 at most. Here it is
bracketed, octave by octave, and then bisected in the bits of the magnitude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, final

import numpy as np

from totalreduce.foundation import checks
from totalreduce.sparse.accumulator import Accumulator
from totalreduce.sparse.candidates import Candidates
from totalreduce.sparse.common import GatheringSession
from totalreduce.sparse.selector import NOTHING, Selection
from totalreduce.sparse.session import BucketShape
from totalreduce.sparse.settings import TopkSettings

__all__ = ["GaussianK", "GaussianKSession"]

#: The first correction of a threshold, in the bits of its magnitude: half an octave. It doubles until the threshold is
#: bracketed.
_STRIDE = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianK(TopkSettings):
    """Settings of GaussianK; see ``TopkSettings`` for the others.

    Attributes:
        passes: The largest number of thresholds that are tried.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "gaussiank"

    passes: int = 20

    def __post_init__(self) -> None:
        TopkSettings.__post_init__(self)
        checks.integer_fields(self, "passes", minimum=1)

    def session(self, shape: BucketShape, rank: int, world_size: int) -> GaussianKSession:
        return GaussianKSession(self, shape, rank, world_size)


@final
class GaussianKSession(GatheringSession[GaussianK]):
    """The session of GaussianK."""

    def _select(self, gradients: Accumulator, residuals: Accumulator, scale: float, k: int) -> Selection:
        checked = super()._select(gradients, residuals, scale, 0)
        if k == 0 or not checked.finite:
            return checked
        least, most = k - k // 4, k + k // 4
        # Too many elements reach ``low``, or it is 0; too few reach ``high``.
        low, high = 0, self._selector.limit
        bound, stride = min(_normal_bound(gradients, k), high - 1), _STRIDE
        for _ in range(self._settings.passes):
            found = self._find(gradients, bound, most)
            if found.complete and least <= found.count <= most:
                return _first(found, most)
            self._selector.rescans += 1
            too_high = found.complete and found.count < least
            low, high, towards = (low, bound, -stride) if too_high else (bound, high, stride)
            if high - low == 1:
                break
            bracketed = low > 0 and high < self._selector.limit
            bound = bound + towards
            if bracketed or not low < bound < high:
                bound = (low + high) // 2
            stride *= 2
        # Many magnitudes are equal, or there were not enough trials: select too few elements, but some.
        found = self._find(gradients, high, most)
        if not found.count:
            found = self._find(gradients, max(low, 1), most)
        return _first(found, k)

    def _find(self, gradients: Accumulator, bound: int, room: int) -> Candidates:
        found = self._selector.workspace.candidates(room)
        gradients.find(bound, found)
        return found


def _first(found: Candidates, count: int) -> Selection:
    count = min(count, found.count)
    if not count:
        return NOTHING
    indices, values = found.index[:count].copy(), found.value[:count].copy()
    return Selection(indices, values, int(np.abs(values).min().view(np.int32)), finite=True)


def _normal_bound(values: Accumulator, k: int) -> int:
    """Return the bits of the magnitude that k normally distributed elements with the same mean and deviation reach."""
    mean, variance = values.moments()
    threshold = abs(mean) - math.sqrt(variance) * NormalDist().inv_cdf(k / (2 * values.num_elements))
    return max(1, int(np.float32(min(threshold, float(np.finfo(np.float32).max))).view(np.int32)))
