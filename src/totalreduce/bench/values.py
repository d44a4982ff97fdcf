"""Inputs whose every element and rank differs, and the closed form of their sum.

Element ``i`` of rank ``r`` is ``(i mod P + 1) (r + 1)`` with a prime ``P``, so the sum over ``n`` ranks is
``(i mod P + 1) n (n + 1) / 2``. A chunk in the wrong place, a contribution lost and one added twice all show.
"""

from __future__ import annotations

import torch

from totalreduce.foundation.errors import TotalReduceError

#: The largest sum should be exact in the type's significand; primes, so that no chunk boundary is a multiple.
_PERIODS = {
    **dict.fromkeys((torch.float64, torch.float32, torch.int64, torch.int32), 8191),
    **dict.fromkeys((torch.float16, torch.bfloat16), 31),
}
_ROWS_PER_CHECK = 512


class WrongResultError(TotalReduceError):
    """An operation of a benchmark gave a wrong result: there is no figure to report."""


def dtype_by_name(name: str) -> torch.dtype:
    """Return ``torch.float32`` for ``float32``; only types whose sums can be checked."""
    known = {str(dtype).removeprefix("torch."): dtype for dtype in _PERIODS}
    if name not in known:
        raise WrongResultError(f"the benchmark cannot check sums of dtype {name!r}; choose one of {', '.join(known)}")
    return known[name]


def fill(flat: torch.Tensor, *, rank: int) -> None:
    """Write this rank's values into a contiguous one-dimensional tensor."""
    fill_multiple(flat, rank + 1)


def fill_multiple(flat: torch.Tensor, factor: int) -> None:
    """Write the pattern times a factor into a contiguous one-dimensional tensor."""
    pattern = (_pattern(flat.dtype) * factor).to(flat.dtype)
    whole, tail = _rows(flat)
    whole.copy_(pattern.expand_as(whole))
    tail.copy_(pattern[: len(tail)])


def check(flat: torch.Tensor, *, world_size: int, times: int = 1, what: str) -> None:
    """Compare with the closed form after ``times`` allreduces (sum) in place of the same tensor.

    Each further allreduce multiplies by the world size, because all ranks then hold the same.
    """
    factor = world_size * (world_size + 1) // 2 * world_size ** (times - 1)
    check_multiple(flat, factor, additions=world_size * times, what=what)


def check_multiple(flat: torch.Tensor, factor: int, *, additions: int = 1, what: str) -> None:
    """Compare with the pattern times a factor, reached by so many additions."""
    expected = _pattern(flat.dtype) * factor
    tolerance = _tolerance(flat.dtype, int(expected[-1]), additions)
    whole, tail = _rows(flat)
    for begin in range(0, len(whole), _ROWS_PER_CHECK):
        _require(whole[begin : begin + _ROWS_PER_CHECK], begin * len(expected), expected, tolerance, what)
    if len(tail):
        _require(tail, whole.numel(), expected[: len(tail)], tolerance, what)


def _pattern(dtype: torch.dtype) -> torch.Tensor:
    """One period, exact: float64 for floating types, int64 for integers."""
    exact = torch.float64 if dtype.is_floating_point else torch.int64
    return torch.arange(1, _PERIODS[dtype] + 1, dtype=exact)


def _rows(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    period = _PERIODS[flat.dtype]
    count = len(flat) // period
    return flat[: count * period].view(count, period), flat[count * period :]


def _tolerance(dtype: torch.dtype, largest: int, additions: int) -> float:
    """Relative error allowed: none while the sums fit the significand, else one rounding per addition."""
    if not dtype.is_floating_point:
        return 0.0
    epsilon = torch.finfo(dtype).eps
    return 0.0 if largest <= 2 / epsilon else additions * epsilon


def _right(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Element by element, compared in float64 where rounding is allowed; NaN is never right."""
    if tolerance == 0.0:
        return found == expected.to(found.dtype)
    wanted = expected.double()
    return (found.double() - wanted).abs() <= wanted * tolerance


def _require(found: torch.Tensor, offset: int, expected: torch.Tensor, tolerance: float, what: str) -> None:
    right = _right(found, expected, tolerance)
    if bool(right.all()):
        return
    first = int(torch.argmin(right.reshape(-1).to(torch.uint8)))
    raise WrongResultError(
        f"{what}: element {offset + first} is {found.reshape(-1)[first].item()}, not "
        f"{expected[first % len(expected)].item()}. Please report this as a bug "
        "together with the command."
    )
