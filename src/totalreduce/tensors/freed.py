"""Memory that the program has freed, and that the C library keeps for later."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["give_back_freed_memory"]


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """Return glibc's ``malloc_trim``; ``None`` with another C library."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim


def give_back_freed_memory() -> None:
    """Give the system what this process has freed and the C library keeps.

    It keeps blocks of up to 32 MiB if memory behind them is in use. That is well if such blocks are needed again, and
    takes page faults otherwise, so this function is for what will not come again. It takes some 0.1 ms for each MiB.
    """
    trim = _trim()
    if trim is not None:
        trim(0)
