"""The numbers of element types and reductions in the words of compiled functions (``exchange``, ``relay``)."""

from __future__ import annotations

from typing import Final

from totalreduce.foundation.types import DType, ReduceOp

__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "INT32",
    "INT64",
    "KINDS",
    "MAX",
    "MIN",
    "PRODUCT",
    "REDUCTIONS",
    "SUM",
    "has_code",
]

SUM, MIN, MAX, PRODUCT = 1, 3, 4, 5
#: Sums of the half types are float32, and are rounded once. Of floats there are no minima and maxima.
FLOAT32, FLOAT64, INT32, INT64, BFLOAT16, FLOAT16 = 0, 1, 2, 3, 4, 5
#: By element type, and by reduction: the numbers that stand for them.
KINDS: Final = {
    DType.FLOAT32: FLOAT32,
    DType.FLOAT64: FLOAT64,
    DType.BFLOAT16: BFLOAT16,
    DType.FLOAT16: FLOAT16,
    DType.INT32: INT32,
    DType.INT64: INT64,
}
REDUCTIONS: Final = {
    ReduceOp.SUM: SUM,
    ReduceOp.AVG: SUM,
    ReduceOp.PRODUCT: PRODUCT,
    ReduceOp.MIN: MIN,
    ReduceOp.MAX: MAX,
}
_OF_FLOATS: Final = frozenset({ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT})
_OF_INTEGERS: Final = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX})


def has_code(dtype: DType, reduction: ReduceOp) -> bool:
    """Return whether ``elements`` has code for a reduction of an element type."""
    return dtype in KINDS and reduction in (_OF_FLOATS if dtype.is_floating_point else _OF_INTEGERS)
