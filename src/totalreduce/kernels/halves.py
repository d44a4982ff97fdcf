"""Elements of the type bfloat16, for compiled functions: Numba knows their bits only, as unsigned integers.

Numba compiles these functions into ``exchange_code``. A bfloat16 is the upper half of a float32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types, uint16, uint32
from numba.extending import intrinsic

__all__ = ["rounded", "widened"]

_NOT_A_NUMBER = 0x7FC0


@intrinsic  # type: ignore[untyped-decorator]
def _float_of(_typing: Any, _bits: Any) -> Any:
    """Return the float32 with these bits."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _bits_of(_typing: Any, _number: Any) -> Any:
    """Return the bits of a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@njit(error_model="numpy", _nrt=False)  # type: ignore[untyped-decorator]
def widened(half: Any) -> Any:
    """Return the float32 of the bits of a bfloat16."""
    return _float_of(uint32(half) << uint32(16))


@njit(error_model="numpy", _nrt=False)  # type: ignore[untyped-decorator]
def rounded(number: Any) -> Any:
    """Return the bits of the bfloat16 that is nearest to a float32, the even one of two; of all NaN the same one."""
    bits = _bits_of(number)
    nearest = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)
    return uint16(nearest) if number == number else uint16(_NOT_A_NUMBER)  # noqa: PLR0124  (false if not a number)
