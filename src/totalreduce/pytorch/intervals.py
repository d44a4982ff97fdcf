"""Intervals of a parameter's elements, into which buckets and servers' shares are cut."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Interval"]


class Interval(NamedTuple):
    """The elements of a parameter from ``begin`` to ``end`` - 1, in the order of ``reshape(-1)``.

    Attributes:
        parameter: The number of the parameter.
        begin: The first element.
        end: That behind the last one.
    """

    parameter: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.end - self.begin
