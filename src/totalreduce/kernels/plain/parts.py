"""How the kernels in NumPy divide memory: intermediate results of a part stay in the second-level cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

__all__ = ["PART", "parts"]

#: The number of elements of a part.
PART: Final = 1 << 15


def parts(size: int, step: int = PART) -> Iterator[slice]:
    """Return the parts of memory with ``size`` elements; ``step``: their length, without that of the last one."""
    return (slice(begin, min(begin + step, size)) for begin in range(0, size, step))
