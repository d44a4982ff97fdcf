"""Plain: float32, without loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from totalreduce.codecs.codec import TOO_LARGE, check_size, words
from totalreduce.kernels import quantisation
from totalreduce.kernels.arrays import Array

__all__ = ["Plain"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """A codec without settings: the reference of the others."""

    name: ClassVar[str] = "plain"
    has_fixed_size: ClassVar[bool] = True

    @property
    def is_unbiased(self) -> bool:
        """Nothing is lost."""
        return True

    def bytes_max(self, count: int) -> int:
        """Return four bytes for each value."""
        return 4 * count

    def encode(self, values: Array, out: Array, *, seed: int = 0, keeps: bool = False) -> int:
        """Copy the values."""
        del seed
        if not quantisation.within_limit(values):
            return TOO_LARGE
        out[: values.nbytes].view(np.float32)[:] = values
        if keeps:
            values[:] = 0.0
        return values.nbytes

    def decode(self, coded: Array, out: Array, *, adds: bool = False) -> None:
        """Copy the values back, or add them."""
        check_size(coded, out.nbytes)
        values = words(coded).view(np.float32)
        if adds:
            np.add(out, values, out=out)
        else:
            out[:] = values
