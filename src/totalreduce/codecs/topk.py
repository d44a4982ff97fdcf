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
        kth = selection.kth_magnitude([values], k)
        room = k + kth.equal + selection.LANES * 64
        indices, found = np.empty(room, np.int32), np.empty(room, np.float32)
        count = selection.select(values, max(1, kth.bits), 0, indices, found, 0)
        # Of equal magnitudes those with the smallest indices are sent.
        if count > k:
            count = selection.keep_largest(indices[:count], found[:count], kth.bits, k - kth.above)
        sent = blocks.rounded(found[:count], self.values)
        block = blocks.pack(indices[:count], sent, 0, values.size, self.values)
        out[: block.size] = block
        if keeps:
            scattering.scatter(values, 0, indices[:count], found[:count] - sent, np.float32(1.0))
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
