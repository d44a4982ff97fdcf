"""Checks of settings and arguments, made once where a user's value enters the library.

Every function returns the value in the type that the rest of the library expects, or raises a ``ConfigurationError``
that names the value. ``bool`` is no number here: ``priority=True`` is a mistake. NumPy's and torch's scalars are.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import ReduceOp

__all__ = [
    "NAME_BYTES_MAX",
    "SECONDS_MAX",
    "did_you_mean",
    "first_difference",
    "integer",
    "integer_fields",
    "listed",
    "one_of",
    "operation_name",
    "priority",
    "rank_in",
    "ranks_in",
    "real_field",
    "real_number",
    "reduction",
    "seconds",
    "seconds_fields",
]

#: The longest name of an operation, in UTF-8 bytes.
NAME_BYTES_MAX: Final = 1024
#: What other libraries call a reduction.
_OTHER_WORDS: Final = {"mean": "AVG", "average": "AVG", "add": "SUM", "prod": "PRODUCT", "mul": "PRODUCT"}
#: The longest time, some thirty years. System calls and Python's functions allow little more.
SECONDS_MAX: Final = 1e9


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """Return `` (did you mean 'topka'?)`` for a word that resembles a known one; otherwise an empty string."""
    names = {name.lower(): name for name in known}
    nearest = difflib.get_close_matches(word.lower(), names, n=1) if isinstance(word, str) else []
    return f" (did you mean {names[nearest[0]]!r}?)" if nearest else ""


def listed(words: Iterable[object], conjunction: str) -> str:
    """Return ``a, b and c``; there is at least one word."""
    *others, last = map(str, words)
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def first_difference(theirs: Sequence[str], mine: Sequence[str]) -> tuple[str, str] | None:
    """Return the first lines in which two descriptions differ, or ``None``; "nothing" stands for a missing line."""
    for there, here in itertools.zip_longest(theirs, mine, fillvalue="nothing"):
        if there != here:
            return there, here
    return None


def integer(name: str, value: Any, *, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return an integer from ``minimum`` to ``maximum``, both included; ``16.0`` is none."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ConfigurationError(f"{name} must be a whole number, not {value!r}") from None
    _check_bounds(name, number, minimum, maximum)
    return number


def rank_limits(least: int, num_workers: int, most: int) -> None:
    """Check the smallest and the largest number of ranks of a job that begins with ``num_workers`` ranks."""
    if not 1 <= least <= num_workers:
        raise ConfigurationError(f"--min-ranks must be from 1 to the number of workers, {num_workers}, not {least}")
    if most < num_workers:
        raise ConfigurationError(f"--max-ranks must be at least the number of workers, {num_workers}, not {most}")


def real_number(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    unit: str = "",
) -> float:
    """Return a finite number from ``minimum`` to ``maximum``, or between ``above`` and ``below``, both excluded."""
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor with several elements
        number = math.nan
    if not math.isfinite(number):
        raise ConfigurationError(f"{name} must be a finite number{f' of {unit}' if unit else ''}, not {value!r}")
    if above is not None and number <= above:
        words = "positive" if above == 0 else f"above {above:g}"
        raise ConfigurationError(f"{name} must be {words}, not {value!r}")
    if below is not None and number >= below:
        raise ConfigurationError(f"{name} must be below {below:g}, not {value!r}")
    _check_bounds(name, number, minimum, maximum)
    return number


def seconds(name: str, value: Any, *, or_zero: bool = False) -> float:
    """Return a time in seconds: positive (or zero, if ``or_zero``), and at most ``SECONDS_MAX``."""
    if or_zero:
        return real_number(name, value, minimum=0, maximum=SECONDS_MAX, unit="seconds")
    return real_number(name, value, above=0, maximum=SECONDS_MAX, unit="seconds")


def one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    """Check that a setting has one of the values in ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        nearest = did_you_mean(value, allowed)
        raise ConfigurationError(f"{name} is {listed(map(repr, allowed), 'or')}, not {value!r}{nearest}")


def reduction(op: Any) -> ReduceOp:
    """Return a reduction.

    Those of torch are refused by their type: they equal their numbers, which mean other reductions here.
    """
    if isinstance(op, int):
        with contextlib.suppress(ValueError):
            return ReduceOp(op)
    names = {known.name.lower(): known.name for known in ReduceOp if known is not ReduceOp.NONE}
    word = str(getattr(op, "name", op)).lower()  # torch's own ReduceOp has a name, too
    nearest = difflib.get_close_matches(word, [*names, *_OTHER_WORDS], n=1)
    hint = f": write tr.ReduceOp.{(names | _OTHER_WORDS)[nearest[0]]}" if nearest else ""
    raise ConfigurationError(f"op={op!r} is no reduction{hint}; there are ReduceOp's {', '.join(names.values())}")


def priority(value: Any) -> int:
    """Return a priority: a signed integer of 32 bits; smaller is more urgent."""
    number = value if type(value) is int else integer("priority", value)  # a call less for every operation
    if not -(2**31) <= number < 2**31:
        raise ConfigurationError(f"priority {number} does not fit into 32 bits")
    return number


def operation_name(value: Any) -> str:
    """Return the name of an operation: a string that UTF-8 encodes in at most ``NAME_BYTES_MAX`` bytes."""
    if not isinstance(value, str):
        raise ConfigurationError(f"the name of an operation is a string, not {type(value).__name__} ({value!a:.60})")
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"the name {value!a:.60} of an operation cannot be encoded as UTF-8: {error.reason}, at character "
            f"{error.start}"
        ) from None
    if num_bytes > NAME_BYTES_MAX:
        raise ConfigurationError(f"the name {value[:40]!r}... is longer than {NAME_BYTES_MAX} bytes: {num_bytes}")
    return value


def rank_in(name: str, value: Any, world_size: int) -> int:
    """Return a rank of a group of ``world_size`` ranks."""
    rank = integer(name, value)
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"{name} {rank} is no rank of a group of {world_size}")
    return rank


def ranks_in(values: Iterable[Any], world_size: int) -> tuple[int, ...]:
    """Return different ranks of a group of ``world_size`` ranks."""
    ranks = tuple(integer("a rank", value) for value in values)
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < world_size for rank in ranks):
        raise ConfigurationError(f"{list(ranks)} are not different ranks of a group of {world_size}")
    return ranks


def integer_fields(settings: Any, *names: str, minimum: int | None = None, maximum: int | None = None) -> None:
    """Check these fields of a frozen dataclass with ``integer``, and make each an ``int``."""
    for name in names:
        object.__setattr__(settings, name, integer(name, getattr(settings, name), minimum=minimum, maximum=maximum))


def seconds_fields(settings: Any, *names: str, or_zero: bool = False) -> None:
    """Check these fields of a frozen dataclass with ``seconds``, and make each a ``float``."""
    for name in names:
        object.__setattr__(settings, name, seconds(name, getattr(settings, name), or_zero=or_zero))


def real_field(settings: Any, name: str, **bounds: Any) -> None:
    """Check this field of a frozen dataclass with ``real_number``, and make it a ``float``."""
    object.__setattr__(settings, name, real_number(name, getattr(settings, name), **bounds))


def _check_bounds(name: str, number: float, minimum: float | None, maximum: float | None) -> None:
    below = minimum is not None and number < minimum
    if not below and (maximum is None or number <= maximum):
        return
    if minimum is not None and maximum is not None:
        raise ConfigurationError(f"{name} must be from {minimum:.15g} to {maximum:.15g}, not {number}")
    words = f"at least {minimum:.15g}" if below else f"at most {maximum:.15g}"
    raise ConfigurationError(f"{name} must be {words}, not {number}")
