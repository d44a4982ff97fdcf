"""Select exactly the k largest elements of residual plus gradient, in one pass over them.

The pass lists the *candidates*: all elements that reach a bound, which the step before has chosen so that about 1.3 k
elements reach it. Radix selection finds the k largest of them. If the gradient has changed so much that there are too
few or too many candidates, a bound is estimated from a sample, and the candidates are listed again. Exact selection
over all elements is the last resort (many equal magnitudes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from totalreduce.kernels import selection
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.accumulator import Accumulator
from totalreduce.sparse.candidates import Candidates, Workspace
from totalreduce.sparse.threshold import bits_of, magnitude

__all__ = ["NOTHING", "NOT_FINITE", "Selection", "Selector", "sample_bound"]

#: The wanted number of candidates, and the room for them, as multiples of k.
_CANDIDATES = 1.3
_ROOM = 3.0
_MAGNITUDE = 0x7FFFFFFF
#: With fewer candidates than this multiple of k the slope of the distribution's tail is unknown; then it is taken to be
#: that of a normal distribution at a density of 1 %.
_CERTAIN = 1.02
_STEEP = 8.0
#: Limits of the assumed change of the threshold from step to step.
_DRIFT = (0.8, 1.25)


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected elements."""

    indices: Array  #: int32, ascending.
    values: Array  #: float32, as accumulated.
    bound: int  #: Bits of the smallest magnitude among them; 0 without elements.
    #: Whether all elements, selected or not, are finite, and so small that no sum over the ranks overflows; otherwise
    #: nothing is selected.
    finite: bool


NOTHING = Selection(np.empty(0, np.int32), np.empty(0, np.float32), 0, finite=True)
NOT_FINITE = Selection(np.empty(0, np.int32), np.empty(0, np.float32), 0, finite=False)


@final
class Selector:
    """The threshold of one bucket, from step to step."""

    def __init__(self, world_size: int = 1) -> None:
        """Begin without a bound. A sum over ``world_size`` ranks must not overflow, even after rounding to bfloat16."""
        self.bound: int | None = None  #: The bound of the next pass; ``None`` before the first one.
        #: Bits of the smallest magnitude that counts as not finite.
        self.limit = int((np.finfo(np.float32).max / np.float32(2 * world_size)).view(np.int32))
        self.rescans = 0  #: The number of times that candidates were listed again.
        self.workspace = Workspace()  #: Memory for candidates; selectors that never work at the same time may share it.
        self._last = 0.0

    def accumulate(self, gradients: Accumulator, residuals: Accumulator, scale: float, k: int) -> Selection:
        """Compute ``gradients = gradients * scale + residuals`` in place, and select the k largest that are not zero.

        Of equal magnitudes the first ones are selected.
        """
        bound = self.bound
        if k == 0:
            bound = self.limit
        elif bound is None:
            bound = sample_bound([gradients, residuals], scale, k)
        room = min(int(_ROOM * k), gradients.num_elements)
        found = self.workspace.candidates(room)
        gradients.accumulate(residuals, scale, bound, found)
        if k == 0:
            return NOT_FINITE if found.count or not found.complete else NOTHING
        if not found.complete or found.count < k:
            self.rescans += 1
            bound = sample_bound([gradients], 1.0, k)
            found = self.workspace.candidates(room)
            gradients.find(bound, found)
        if not found.complete or (found.count < k and bound > 1):
            if gradients.kth_magnitude(1).bits >= self.limit:
                return NOT_FINITE
            exact = gradients.kth_magnitude(k)
            bound = max(exact.bits, 1)
            found = Candidates(exact.above + exact.equal)
            gradients.find(bound, found)
            assert found.complete, "there is room for all that reach the exact bound"
        return self._choose(found, min(k, found.count), bound)

    def _choose(self, found: Candidates, k: int, bound: int) -> Selection:
        count = found.count
        index, value = found.index[:count], found.value[:count]
        if k == 0:
            self.bound = 1
            return NOTHING
        if (value.view(np.int32) & _MAGNITUDE).max() >= self.limit:
            return NOT_FINITE
        chosen = selection.kth_magnitude([value], k, bound)
        self.bound = self._next_bound(bound, chosen.bits, count / k)
        kept = selection.keep_largest(index, value, chosen.bits, k - chosen.above)
        return Selection(index[:kept].copy(), value[:kept].copy(), chosen.bits, finite=True)

    def _next_bound(self, bound: int, chosen: int, surplus: float) -> int:
        """Estimate the bound that ``_CANDIDATES`` times k elements will reach in the next step.

        Two points of the distribution's tail are known: the numbers of elements that reach the bound, and the k-th
        magnitude. Between them the number falls as a power of the magnitude. The tail is assumed to move as much as it
        did since the last step.
        """
        low, high = magnitude(bound), magnitude(chosen)
        drift, self._last = high / self._last if self._last else 1.0, high
        steepness = math.log(surplus) / math.log(high / low) if surplus > _CERTAIN and high > low else _STEEP
        step = _CANDIDATES ** (-1.0 / max(steepness, 1.0))
        return max(1, bits_of(high * step * min(max(drift, _DRIFT[0]), _DRIFT[1])))


def sample_bound(terms: Sequence[Accumulator], scale: float, k: int) -> int:
    """Estimate from a sample the bits of a magnitude that 1.3 k elements reach."""
    n = terms[0].num_elements
    stride = selection.sample_stride(n, k)
    with np.errstate(over="ignore", invalid="ignore"):  # the pass finds elements that are not finite
        sample = terms[0].sample(stride) * np.float32(scale)
        for term in terms[1:]:
            sample += term.sample(stride)
    return selection.bound_from_sample(sample, n, k)
