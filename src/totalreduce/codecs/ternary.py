"""Ternary: -1, 0 or 1 times the largest magnitude of a block, at random, so that the expected value is the value.

Wen, Xu, Yan, Wu, Wang, Chen and Li, "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning",
NeurIPS 2017, with blocks instead of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from totalreduce.codecs.codec import BLOCK_MAX, TOO_LARGE, BlockCodec
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.kernels import quantisation
from totalreduce.kernels.arrays import Array
from totalreduce.kernels.formats import TRITS

__all__ = ["Ternary"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Ternary(BlockCodec):
    """Five values in a byte: 1.65 bits for each value with blocks of 640.

    Attributes:
        block: The number of elements that share a scale: a multiple of 5.

    Raises:
        ConfigurationError: The block is another number.
    """

    name: ClassVar[str] = "ternary"

    block: int = 640

    def __post_init__(self) -> None:
        checks.integer_fields(self, "block", minimum=TRITS, maximum=BLOCK_MAX)
        if self.block % TRITS:
            raise ConfigurationError(f"block must be a multiple of {TRITS}, not {self.block}")

    @property
    def is_unbiased(self) -> bool:
        """Values are rounded at random."""
        return True

    def encode(self, values: Array, out: Array, *, seed: int = 0, keeps: bool = False) -> int:
        """Write scales and ternary digits."""
        scales, codes = self._split(out, values.size)
        is_coded = quantisation.encode_trits(values, self.block, seed, keeps, scales, codes)
        return self.bytes_max(values.size) if is_coded else TOO_LARGE

    def decode(self, coded: Array, out: Array, *, adds: bool = False) -> None:
        """Multiply the digits with their scales."""
        scales, codes = self._parts(coded, out.size)
        if not quantisation.decode_trits(scales, codes, self.block, adds, out):
            raise ProtocolError("a byte in the code is above 242, and has no five ternary digits")

    def _code_bytes(self, count: int) -> int:
        return -(-count // self.block) * (self.block // TRITS)
