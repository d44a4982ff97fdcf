"""Int8: a byte for each value, and a scale for each block.

QSGD (Alistarh et al., NeurIPS 2017) with the largest magnitude of a block as its scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from totalreduce.codecs.codec import BLOCK_MAX, TOO_LARGE, BlockCodec
from totalreduce.foundation import checks
from totalreduce.kernels import quantisation
from totalreduce.kernels.arrays import Array

__all__ = ["Int8"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Int8(BlockCodec):
    """Integers from -127 to 127: 8.125 bits for each value with blocks of 256.

    Attributes:
        block: The number of elements that share a scale.
        stochastic: Round at random, so that errors cancel out without error feedback.

    Raises:
        ConfigurationError: The block is empty.
    """

    name: ClassVar[str] = "int8"

    block: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        checks.integer_fields(self, "block", minimum=1, maximum=BLOCK_MAX)

    @property
    def is_unbiased(self) -> bool:
        """Whether values are rounded at random."""
        return self.stochastic

    def encode(self, values: Array, out: Array, *, seed: int = 0, keeps: bool = False) -> int:
        """Write scales and integers."""
        scales, codes = self._split(out, values.size)
        integers = codes.view(np.int8)
        is_coded = quantisation.encode_bytes(values, self.block, seed, self.stochastic, keeps, scales, integers)
        return self.bytes_max(values.size) if is_coded else TOO_LARGE

    def decode(self, coded: Array, out: Array, *, adds: bool = False) -> None:
        """Multiply the integers with their scales."""
        scales, codes = self._parts(coded, out.size)
        quantisation.decode_bytes(scales, codes.view(np.int8), self.block, adds, out)

    def _code_bytes(self, count: int) -> int:
        return count
