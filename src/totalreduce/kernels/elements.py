"""Element-wise arithmetic at addresses, for functions that Numba compiles into machine code (``machine_code``).

``exchange_code`` (ranks of one host) and ``relay_code`` (messages over TCP) compile these functions into their own. The
results have the bits that ``reduction.combine`` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import float32, float64, njit

from totalreduce.kernels.atomics import float32_at, float64_at, int32_at, int64_at, uint16_at
from totalreduce.kernels.element_types import BFLOAT16, FLOAT32, FLOAT64, INT32, MAX, MIN, SUM
from totalreduce.kernels.halves import rounded, widened

__all__ = ["average", "combine", "compiled", "round_off", "widen"]

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
def _combine_halves(reduction: Any, into: Any, halves: Any, count: Any) -> None:
    """Combine bfloat16 into float32."""
    if reduction == SUM:
        for i in range(count):
            into[i] = into[i] + widened(halves[i])
    else:
        for i in range(count):
            into[i] = into[i] * widened(halves[i])


@compiled
def combine(kind: Any, reduction: Any, into: Any, other: Any, count: Any) -> None:
    """Combine ``count`` elements at the address ``other`` into those at ``into``; sums of bfloat16 are float32."""
    if kind == FLOAT32:
        _combine_floats(reduction, float32_at(into), float32_at(other), count)
    elif kind == FLOAT64:
        _combine_floats(reduction, float64_at(into), float64_at(other), count)
    elif kind == BFLOAT16:
        _combine_halves(reduction, float32_at(into), uint16_at(other), count)
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
def widen(into: Any, halves: Any, count: Any) -> None:
    """Convert bfloat16 to float32. Both arguments are pointers."""
    for i in range(count):
        into[i] = widened(halves[i])


@compiled
def round_off(into: Any, sums: Any, count: Any) -> None:
    """Convert float32 to bfloat16. Both arguments are pointers."""
    for i in range(count):
        into[i] = rounded(sums[i])
