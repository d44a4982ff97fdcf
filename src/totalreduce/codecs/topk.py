"""Topk: the largest values, and their indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np

from totalreduce.codecs import blocks
from totalreduce.codecs.codec import TOO_LARGE
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ProtocolError
from totalreduce.kernels import quantisation, scattering, selection
from totalreduce.kernels.arrays import Array

__all__ = ["Topk"]

#: The room for elements that reach the bound of a sample, as a multiple of k.
_ROOM = 3


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Topk:
    """The values of the largest magnitude. Only with error feedback.

    Attributes:
        density: The share of the values that is sent, above 0, at most 1; at least one value.
        values: ``"bfloat16"``: values are rounded; or ``"float32"``.

    Raises:
        ConfigurationError: A value is out of range.
    """

    name: ClassVar[str] = "topk"
    has_fixed_size: ClassVar[bool] = False

    density: float = 0.01
    values: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        checks.real_field(self, "density", above=0, maximum=1)
        checks.one_of("values", self.values, ("bfloat16", "float32"))

    @property
    def is_unbiased(self) -> bool:
        """Most values are not sent."""
        return False

    def bytes_max(self, count: int) -> int:
        """Return the largest size of a block with that share of the values."""
        return blocks.block_bytes_max(self._num_sent(count), count, self.values)

    def encode(self, values: Array, out: Array, *, seed: int = 0, keeps: bool = False) -> int:
        """Write a block of indices and values."""
        del seed
        if not quantisation.within_limit(values):
            return TOO_LARGE
        k = self._num_sent(values.size)
        if not k:
            return 0
        indices, found = _largest(values, k)
        sent = blocks.rounded(found, self.values)
        block = blocks.pack(indices, sent, 0, values.size, self.values)
        out[: block.size] = block
        if keeps:
            scattering.scatter(values, 0, indices, found - sent, np.float32(1.0))
        return block.size

    def decode(self, coded: Array, out: Array, *, adds: bool = False) -> None:
        """Write the values at their indices, and zeros elsewhere."""
        indices, values = blocks.unpack(coded, 0, out.size)
        if values.size != indices.size or not np.isfinite(values).all():
            raise ProtocolError("a block has indices without values, or values that are not finite")
        if adds:
            scattering.scatter_add(out, 0, indices, values, np.float32(1.0))
        else:
            out[:] = 0.0
            scattering.scatter(out, 0, indices, values, np.float32(1.0))

    def _num_sent(self, count: int) -> int:
        return min(count, max(1, round(self.density * count)))


def _largest(values: Array, k: int) -> tuple[Array, Array]:
    """Return the indices and the values of the k largest magnitudes; fewer if others are zero.

    Of equal magnitudes those with the smallest indices are taken. A sample tells a bound that usually a few more than k
    elements reach: one pass lists them, and the rest is done with the list. Otherwise the bound is found exactly, by
    three passes.
    """
    bound = selection.bound_from_sample(values[:: selection.sample_stride(values.size, k)].copy(), values.size, k)
    indices, found = _listed(values, bound, _ROOM * k)
    if found.size < k:
        exact = selection.kth_magnitude([values], k)
        bound = max(1, exact.bits)
        indices, found = _listed(values, bound, exact.above + exact.equal)
    if found.size > k:
        kth = selection.kth_magnitude([found], k, bound)
        count = selection.keep_largest(indices, found, kth.bits, k - kth.above)
        indices, found = indices[:count], found[:count]
    return indices, found


def _listed(values: Array, bound: int, most: int) -> tuple[Array, Array]:
    """Return the indices and values of the elements that reach a bound; nothing if they are more than ``most``."""
    room = min(most, values.size) + selection.BLOCK
    indices, found = np.empty(room, np.int32), np.empty(room, np.float32)
    count = max(0, selection.select(values, bound, 0, indices, found, 0))
    return indices[:count], found[:count]
