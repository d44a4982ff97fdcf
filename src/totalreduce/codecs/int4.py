"""Int4: half a byte for each value, and a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from totalreduce.codecs.codec import BLOCK_MAX, TOO_LARGE, BlockCodec
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.kernels import quantisation
from totalreduce.kernels.arrays import Array

__all__ = ["Int4"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Int4(BlockCodec):
    """Integers from -7 to 7: 4.25 bits for each value with blocks of 128.

    Attributes:
        block: The number of elements that share a scale; even.
        stochastic: Round at random, so that errors cancel out without error feedback.

    Raises:
        ConfigurationError: The block is empty or odd.
    """

    name: ClassVar[str] = "int4"

    block: int = 128
    stochastic: bool = False

    def __post_init__(self) -> None:
        checks.integer_fields(self, "block", minimum=2, maximum=BLOCK_MAX)
        if self.block % 2:
            raise ConfigurationError(f"block must be even, not {self.block}: two integers share a byte")

    @property
    def is_unbiased(self) -> bool:
        """Whether values are rounded at random."""
        return self.stochastic

    def encode(self, values: Array, out: Array, *, seed: int = 0, keeps: bool = False) -> int:
        """Write scales and integers."""
        scales, codes = self._split(out, values.size)
        is_coded = quantisation.encode_nibbles(values, self.block, seed, self.stochastic, keeps, scales, codes)
        return self.bytes_max(values.size) if is_coded else TOO_LARGE

    def decode(self, coded: Array, out: Array, *, adds: bool = False) -> None:
        """Multiply the integers with their scales."""
        scales, codes = self._parts(coded, out.size)
        quantisation.decode_nibbles(scales, codes, self.block, adds, out)

    def _code_bytes(self, count: int) -> int:
        return (count + 1) // 2
