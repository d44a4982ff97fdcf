"""Structures of 64-bit words, which Python and compiled functions use in the same memory."""

from __future__ import annotations

from typing import Final

__all__ = ["CACHE_LINE_WORDS", "Structure"]

#: Words of a cache line.
CACHE_LINE_WORDS: Final = 8


class Structure:
    """Words that lie one after the other. A subclass declares them: ``name: int = 1``, for how many words it has.

    In an instance, the attribute of a name is the number of its first word. Numba compiles it as a constant
    (``atomics``).
    """

    def __init__(self, unit: int = 1) -> None:
        """``unit``: by how much a number grows with each word; 8, where the numbers are offsets in bytes."""
        self.num_words = 0  #: The length of the structure.
        for name in type(self).__annotations__:
            setattr(self, name, unit * self.num_words)
            self.num_words += getattr(type(self), name)
