"""Element-wise arithmetic at addresses, for functions that Numba compiles into machine code (``machine_code``).

``exchange_code`` (ranks of one host) and ``relay_code`` (messages over TCP) compile these functions into their own. The
results have the bits that ``reduction.combine`` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import float32, float64, njit

from totalreduce.kernels.atomics import float32_at, float64_at, int32_at, int64_at, uint16_at
from totalreduce.kernels.element_types import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, INT32, MAX, MIN, SUM
from totalreduce.kernels.halves import rounded_to_bfloat16, rounded_to_float16, widened_bfloat16, widened_float16

__all__ = ["average", "combine", "compiled", "is_half", "round_off", "widen"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function when another one that calls it is compiled. A division by zero raises nothing."""
    made: F = njit(error_model="numpy", _nrt=False)(function)
    return made


@compiled
def _combine_floats(reduction: Any, into: Any, other: Any, count: Any) -> None:
    if reduction == SUM:
        for i in range(count):
            into[i] = into[i] + other[i]
    else:
        for i in range(count):
            into[i] = into[i] * other[i]


@compiled
def _combine_integers(reduction: Any, into: Any, other: Any, count: Any) -> None:
    if reduction == MIN:
        for i in range(count):
            into[i] = min(into[i], other[i])
    elif reduction == MAX:
        for i in range(count):
            into[i] = max(into[i], other[i])
    else:
        _combine_floats(reduction, into, other, count)


@compiled
def _combine_halves(kind: Any, reduction: Any, into: Any, halves: Any, count: Any) -> None:
    """Combine bfloat16 or float16 into float32."""
    if kind == BFLOAT16 and reduction == SUM:
        for i in range(count):
            into[i] = into[i] + widened_bfloat16(halves[i])
    elif kind == BFLOAT16:
        for i in range(count):
            into[i] = into[i] * widened_bfloat16(halves[i])
    elif reduction == SUM:
        for i in range(count):
            into[i] = into[i] + widened_float16(halves[i])
    else:
        for i in range(count):
            into[i] = into[i] * widened_float16(halves[i])


@compiled
def is_half(kind: Any) -> Any:
    """Return whether elements of a type have 16 bits, and their sums 32."""
    return kind in (BFLOAT16, FLOAT16)


@compiled
def combine(kind: Any, reduction: Any, into: Any, other: Any, count: Any) -> None:
    """Combine ``count`` elements at the address ``other`` into those at ``into``; sums of half types are float32."""
    if kind == FLOAT32:
        _combine_floats(reduction, float32_at(into), float32_at(other), count)
    elif kind == FLOAT64:
        _combine_floats(reduction, float64_at(into), float64_at(other), count)
    elif is_half(kind):
        _combine_halves(kind, reduction, float32_at(into), uint16_at(other), count)
    elif kind == INT32:
        _combine_integers(reduction, int32_at(into), int32_at(other), count)
    else:
        _combine_integers(reduction, int64_at(into), int64_at(other), count)


@compiled
def _divide(values: Any, divisor: Any, count: Any) -> None:
    for i in range(count):
        values[i] = values[i] / divisor


@compiled
def average(kind: Any, divisor: Any, sums: Any, count: Any) -> None:
    """Divide ``count`` sums at the address ``sums`` by ``divisor``, if that is not 1: there are no integer averages."""
    if divisor != 1:
        if kind == FLOAT64:
            _divide(float64_at(sums), float64(divisor), count)
        else:
            _divide(float32_at(sums), float32(divisor), count)


@compiled
def widen(kind: Any, into: Any, halves: Any, count: Any) -> None:
    """Convert ``count`` elements of a half type to float32. The other arguments are addresses."""
    wide, narrow = float32_at(into), uint16_at(halves)
    if kind == BFLOAT16:
        for i in range(count):
            wide[i] = widened_bfloat16(narrow[i])
    else:
        for i in range(count):
            wide[i] = widened_float16(narrow[i])


@compiled
def round_off(kind: Any, into: Any, sums: Any, count: Any) -> None:
    """Convert ``count`` float32 to a half type. The other arguments are addresses."""
    narrow, wide = uint16_at(into), float32_at(sums)
    if kind == BFLOAT16:
        for i in range(count):
            narrow[i] = rounded_to_bfloat16(wide[i])
    else:
        for i in range(count):
            narrow[i] = rounded_to_float16(wide[i])
