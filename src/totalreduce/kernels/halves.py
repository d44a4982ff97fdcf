"""Elements of the half types, for compiled functions: Numba knows their bits only, as unsigned integers.

Numba compiles these functions into ``exchange_code`` and ``relay_code``. A bfloat16 is the upper half of a float32. The
conversions of float16 use no instruction that only some processors have; every loop over them has vector instructions.
They are those of F. Giesen, "Half-precision floating-point conversions" (2012), without branches. What is not a number
stays so, and quiet; its other bits are not those of every processor, which differ themselves.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types, uint16, uint32
from numba.extending import intrinsic

__all__ = ["rounded_to_bfloat16", "rounded_to_float16", "widened_bfloat16", "widened_float16"]

_NOT_A_NUMBER = 0x7FC0
#: The bits of a float32: the sign, infinity, and 2 to the -14, the least normal float16.
_SIGN, _INFINITY, _LEAST_NORMAL = 0x80000000, 0x7F800000, 113 << 23
#: 2 to the 16, from which on no float16 is finite, as bits of a float32; bits of a float16.
_TOO_LARGE, _HALF_INFINITY, _HALF_QUIET = 143 << 23, 0x7C00, 0x7E00
#: One half, as bits: its last bit is worth as much as that of the subnormal float16.
_ONE_HALF = 126 << 23


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
def widened_bfloat16(half: Any) -> Any:
    """Return the float32 of the bits of a bfloat16."""
    return _float_of(uint32(half) << uint32(16))


@njit(error_model="numpy", _nrt=False)  # type: ignore[untyped-decorator]
def rounded_to_bfloat16(number: Any) -> Any:
    """Return the bits of the bfloat16 that is nearest to a float32, the even one of two; of all NaN the same one."""
    bits = _bits_of(number)
    nearest = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)
    return uint16(nearest) if number == number else uint16(_NOT_A_NUMBER)  # noqa: PLR0124  (false if not a number)


@njit(error_model="numpy", _nrt=False)  # type: ignore[untyped-decorator]
def widened_float16(half: Any) -> Any:
    """Return the float32 of the bits of a float16."""
    bits = uint32(half)
    magnitude = (bits & uint32(0x7FFF)) << uint32(13)
    exponent = magnitude & uint32(_HALF_INFINITY << 13)
    normal = magnitude + uint32((127 - 15) << 23)
    special = normal + uint32((128 - 16) << 23)  # infinity, or not a number
    subnormal = _bits_of(_float_of(normal + uint32(1 << 23)) - _float_of(uint32(_LEAST_NORMAL)))
    wide = special if exponent == uint32(_HALF_INFINITY << 13) else normal
    wide = subnormal if exponent == uint32(0) else wide
    return _float_of(wide | ((bits & uint32(0x8000)) << uint32(16)))


@njit(error_model="numpy", _nrt=False)  # type: ignore[untyped-decorator]
def rounded_to_float16(number: Any) -> Any:
    """Return the bits of the float16 that is nearest to a float32, the even one of two."""
    bits = _bits_of(number)
    magnitude = bits & uint32(~_SIGN & 0xFFFFFFFF)
    odd = (magnitude >> uint32(13)) & uint32(1)
    normal = (magnitude - uint32((127 - 15) << 23) + uint32(0xFFF) + odd) >> uint32(13)
    subnormal = _bits_of(_float_of(magnitude) + _float_of(uint32(_ONE_HALF))) - uint32(_ONE_HALF)
    quiet = uint32(_HALF_QUIET) | ((magnitude >> uint32(13)) & uint32(0x3FF))
    special = quiet if magnitude > uint32(_INFINITY) else uint32(_HALF_INFINITY)
    half = subnormal if magnitude < uint32(_LEAST_NORMAL) else normal
    half = special if magnitude >= uint32(_TOO_LARGE) else half
    return uint16(half | ((bits >> uint32(16)) & uint32(0x8000)))
