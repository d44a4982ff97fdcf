"""From samples to figures: medians with distribution-free intervals. Pure, standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and the interval that holds the true median with 95 % confidence."""

    median: float  #: The figure, in the unit of its samples.
    low: float  #: Lower end of the interval.
    high: float  #: Upper end of the interval.
    num_samples: int  #: With fewer than six the interval is the whole range and promises less than 95 %.


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least ``share`` of all samples do not exceed (nearest rank)."""
    if not samples or not 0 < share <= 1:
        raise ValueError(f"percentile needs samples and a share in (0, 1], not {len(samples)} and {share}")
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def estimate(samples: Sequence[float]) -> Estimate:
    """Median and 95 % interval from order statistics (binomial, no assumption about the distribution)."""
    if not samples:
        raise ValueError("an estimate needs at least one sample")
    ordered = sorted(samples)
    count = len(ordered)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    outside = _samples_outside(count)
    return Estimate(middle, ordered[outside], ordered[count - 1 - outside], count)


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return of every sample the largest one of any rank."""
    return [max(samples) for samples in zip(*ranks, strict=True)]


def ratio_estimate(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Estimate of the ratio, sample by sample: both were taken in the same round and share its disturbances."""
    return estimate([above / below for above, below in zip(numerators, denominators, strict=True)])


def _samples_outside(count: int) -> int:
    """How many samples may be left out at either end so that the rest still covers the median with 95 %."""
    tail, outside = 0.5**count, 0
    while tail <= 0.025:
        outside += 1
        tail += math.comb(count, outside) * 0.5**count
    return max(0, outside - 1)
