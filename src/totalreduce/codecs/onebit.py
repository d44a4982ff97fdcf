"""OneBit: the sign of each value, and for each block the mean of the values with either sign.

Seide, Fu, Droppo, Li and Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs", Interspeech 2014. They take the means of the columns of matrices; here blocks have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from totalreduce.codecs.codec import BLOCK_MAX, TOO_LARGE, BlockCodec
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.kernels import quantisation
from totalreduce.kernels.arrays import Array
from totalreduce.kernels.vectors import LANES

__all__ = ["OneBit"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OneBit(BlockCodec):
    """A bit for each value: 1.125 bits with blocks of 512. Only with error feedback.

    Attributes:
        block: The number of elements that share means: a multiple of 64.

    Raises:
        ConfigurationError: The block is another number.
    """

    name: ClassVar[str] = "onebit"
    _scales_per_block: ClassVar[int] = 2

    block: int = 512

    def __post_init__(self) -> None:
        checks.integer_fields(self, "block", minimum=LANES, maximum=BLOCK_MAX)
        if self.block % LANES:
            raise ConfigurationError(f"block must be a multiple of {LANES}, not {self.block}")

    @property
    def is_unbiased(self) -> bool:
        """Signs are not."""
        return False

    def encode(self, values: Array, out: Array, *, seed: int = 0, keeps: bool = False) -> int:
        """Write means and signs."""
        del seed
        means, codes = self._split(out, values.size)
        is_coded = quantisation.encode_signs(values, self.block, keeps, means, codes)
        return self.bytes_max(values.size) if is_coded else TOO_LARGE

    def decode(self, coded: Array, out: Array, *, adds: bool = False) -> None:
        """Write the mean of each value's sign."""
        means, codes = self._parts(coded, out.size)
        quantisation.decode_signs(means, codes, self.block, adds, out)

    def _code_bytes(self, count: int) -> int:
        return 8 * -(-count // LANES)
