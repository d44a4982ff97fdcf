"""The numbers of formats: compiled kernels and their twins in NumPy (``plain``) write the same bytes."""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = [
    "LIMIT",
    "LIMIT_BITS",
    "MAGNITUDE",
    "ONE_24TH",
    "PARAMETER_BITS",
    "PARAMETER_MAX",
    "PIECE",
    "ROUNDING",
    "TINY",
    "TRITS",
]

#: The bits of a float32 without its sign.
MAGNITUDE: Final = 0x7FFFFFFF
#: The number of indices that share a number of low bits (``coding``), the length of that number, and its largest value.
PIECE: Final = 128
PARAMETER_BITS: Final = 5
PARAMETER_MAX: Final = 30
#: The number of ternary digits in a byte: 3 to the fifth is 243.
TRITS: Final = 5
#: The largest magnitude that can be encoded: sums of a block must stay finite.
LIMIT: Final = np.float32(1e30)
LIMIT_BITS: Final = int(LIMIT.view(np.int32))
#: Blocks whose largest magnitude is smaller count as zeros: the inverse of their scale might be infinite.
TINY: Final = np.float32(1e-30)
#: To add and subtract 1.5 times 2^23 rounds a float32 below 2^22 to the nearest integer, the even one of two.
ROUNDING: Final = np.float32(12582912.0)
ONE_24TH: Final = np.float32(1.0 / (1 << 24))
