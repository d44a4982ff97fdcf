"""Choosing exactly the k largest elements of residual plus gradient, in one pass over them.

A pass lists the *candidates*: everything that reaches a bound, which the step before has set so that a quarter more
than k do. The k largest of the candidates are then found by radix selection. Where the gradient has jumped and the
candidates are too few or too many, a bound is estimated from a sample, and they are listed again; exact selection over
everything is the last resort (many equal magnitudes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from totalreduce.kernels import selection
from totalreduce.sparse.accumulator import Accumulator, Array

__all__ = ["Selection", "Selector", "sample_bound"]

#: So many times k are candidates, and so many times k have room.
_CANDIDATES = 1.25
_ROOM = 3.0
#: What ``selection`` needs beyond the last element listed.
_SLACK = 4096 + selection.LANES
#: A sample has so many elements above its bound, if there are as many.
_SAMPLED = 1000


@dataclass(frozen=True, slots=True)
class Selection:
    """What was chosen.

    Attributes:
        indices: int32, ascending.
        values: float32, as accumulated.
        bound: Bits of the smallest magnitude among them; 0 where nothing was.
        finite: Whether all elements, chosen or not, are finite; nothing is chosen otherwise.
    """

    indices: Array
    values: Array
    bound: int
    finite: bool


_NONE = Selection(np.empty(0, np.int32), np.empty(0, np.float32), 0, finite=True)
_NOT_FINITE = Selection(np.empty(0, np.int32), np.empty(0, np.float32), 0, finite=False)


@final
class Selector:
    """The threshold of one bucket, from step to step.

    Attributes:
        bound: What the next pass lists; ``None`` before the first one.
        rescans: How often the candidates had to be listed again.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.bound: int | None = None
        self.rescans = 0
        self._index, self._value = np.empty(0, np.int32), np.empty(0, np.float32)

    def accumulate(self, gradients: Accumulator, residuals: Accumulator, scale: float, k: int) -> Selection:
        """``gradients = gradients * scale + residuals`` in place, and choose the k largest that are not zero.

        Of equal magnitudes the first ones are chosen.
        """
        bound = self.bound
        if k == 0:
            bound = selection.INFINITY
        elif bound is None:
            bound = sample_bound([gradients, residuals], scale, k)
        self._make_room(min(int(_ROOM * k), gradients.num_elements) + _SLACK)
        count, complete = 0, True
        for (start, gradient), residual in zip(gradients.pieces(), residuals.segments, strict=True):
            count = selection.accumulate(
                gradient, residual, np.float32(scale), bound, start, self._index, self._value, count
            )
            if count < 0:
                count, complete = -1 - count, False
        if k == 0:
            return _NOT_FINITE if count or not complete else _NONE
        if not complete or count < k:
            self.rescans += 1
            bound = sample_bound([gradients], 1.0, k)
            count, complete = self._list(gradients, bound)
        if not complete or (count < k and bound > 1):
            if selection.kth_magnitude(gradients.segments, 1).bits >= selection.INFINITY:
                return _NOT_FINITE
            exact = selection.kth_magnitude(gradients.segments, k)
            bound = max(exact.bits, 1)
            self._make_room(exact.above + exact.equal + _SLACK)
            count, complete = self._list(gradients, bound)
            assert complete, "there is room for all that reach the exact bound"
        return self._choose(count, min(k, count))

    def _choose(self, count: int, k: int) -> Selection:
        index, value = self._index[:count], self._value[:count]
        if k == 0:
            self.bound = 1
            return _NONE
        if count and not np.isfinite(value).all():
            return _NOT_FINITE
        rank = int(k * _CANDIDATES) + 1
        chosen = selection.kth_magnitude([value], k)
        if count >= rank:
            self.bound = selection.kth_magnitude([value], rank).bits
        else:  # by a fixed share of the magnitude; an eighth of an octave is some 0.9
            self.bound = max(1, chosen.bits - (1 << 20))
        kept = selection.keep_largest(index, value, chosen.bits, k - chosen.above)
        return Selection(index[:kept], value[:kept], chosen.bits, finite=True)

    def _list(self, source: Accumulator, bound: int) -> tuple[int, bool]:
        count = 0
        for start, segment in source.pieces():
            count = selection.select(segment, bound, start, self._index, self._value, count)
            if count < 0:
                return -1 - count, False
        return count, True

    def _make_room(self, room: int) -> None:
        if self._index.size < room:
            self._index, self._value = np.empty(room, np.int32), np.empty(room, np.float32)


def sample_bound(terms: Sequence[Accumulator], scale: float, k: int) -> int:
    """Estimate the bits of a magnitude that a quarter more than the k largest elements reach.

    Args:
        terms: What is to be added up: ``terms[0] * scale`` and the others.
        scale: Factor of the first term.
        k: From 1.
    """
    n = terms[0].num_elements
    stride = max(1, min(k // _SAMPLED, n // _SAMPLED))
    sample = np.concatenate([segment[::stride] for segment in terms[0].segments]) * np.float32(scale)
    for term in terms[1:]:
        sample += np.concatenate([segment[::stride] for segment in term.segments])
    wanted = min(sample.size, int(k * _CANDIDATES / n * sample.size) + 1)
    return max(1, selection.kth_magnitude([sample], wanted).bits)
