"""Half: float16 or bfloat16, rounded to nearest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np
import torch

from totalreduce.codecs.codec import TOO_LARGE, check_size, words
from totalreduce.foundation import checks
from totalreduce.kernels import coding, quantisation
from totalreduce.kernels.arrays import Array

__all__ = ["Half"]

#: The number of elements that torch converts at a time, below the size at which it starts threads.
_PIECE = 1 << 14
_FLOAT16_MAX = 65504.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Half:
    """Two bytes for each value.

    Attributes:
        dtype: ``"bfloat16"``, with the range of float32 and 8 significant bits; or ``"float16"``, with 11 significant
            bits: values beyond its largest number, 65,504, become this number.

    Raises:
        ConfigurationError: The dtype is another one.
    """

    name: ClassVar[str] = "half"
    has_fixed_size: ClassVar[bool] = True

    dtype: Literal["bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        checks.one_of("dtype", self.dtype, ("bfloat16", "float16"))

    @property
    def is_unbiased(self) -> bool:
        """Rounding errors have no preferred sign; those of small values are small."""
        return True

    def bytes_max(self, count: int) -> int:
        """Return two bytes for each value."""
        return 2 * count

    def encode(self, values: Array, out: Array, *, seed: int = 0, keeps: bool = False) -> int:
        """Round the values."""
        del seed
        if not quantisation.within_limit(values):
            return TOO_LARGE
        size = self.bytes_max(values.size)
        if self.dtype == "bfloat16":
            quantisation.round_halves(values, keeps, out[:size].view(np.uint16))
            return size
        source, target = torch.from_numpy(values), torch.from_numpy(out[:size].view(np.float16))
        for begin in range(0, values.size, _PIECE):
            part, half = source[begin : begin + _PIECE], target[begin : begin + _PIECE]
            half.copy_(part.clamp(-_FLOAT16_MAX, _FLOAT16_MAX))
            if keeps:
                part.sub_(half)
        return size

    def decode(self, coded: Array, out: Array, *, adds: bool = False) -> None:
        """Widen the values."""
        check_size(coded, self.bytes_max(out.size))
        raw = words(coded)
        target = torch.from_numpy(out)
        room = np.empty(min(_PIECE, out.size), np.float32)
        for begin in range(0, out.size, _PIECE):
            part = target[begin : begin + _PIECE]
            if self.dtype == "bfloat16":
                wide = room[: part.numel()]
                coding.widen(raw.view(np.uint16)[begin : begin + _PIECE], wide)
                half = torch.from_numpy(wide)
            else:
                half = torch.from_numpy(raw.view(np.float16)[begin : begin + _PIECE])
            if adds:
                part.add_(half)
            else:
                part.copy_(half)
