"""Ranks that have joined, which have no more data, and ranks that have left, which take part no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

__all__ = ["Departure", "Membership"]


class Departure(NamedTuple):
    """What one rank knows of a rank that has left."""

    reason: str  #: The reason for which it has left.
    at: float  #: The time when this rank learned of it, in seconds.
    #: How many of the operations on which the ranks have agreed it has carried out, from the first one; ``None``: it
    #: has not said so.
    carried_out: int | None = None


@final
class Membership:
    """The ranks that have joined or left, as far as one rank knows."""

    def __init__(self) -> None:
        #: Ranks that have joined, in the order in which rank 0 heard of it; equal on all ranks between cycles.
        self.joined: tuple[int, ...] = ()
        #: The rank that joined last, once all ranks have joined; ``None`` again after the next ``join`` of this rank.
        self.last_joined: int | None = None
        self.is_joining = False  #: Whether this rank has joined, and some rank has not.
        self.departed: dict[int, Departure] = {}  #: The ranks that have left.
        self._is_announced = False

    @property
    def must_announce(self) -> bool:
        """Whether this rank has joined, and rank 0 does not know it."""
        return self.is_joining and not self._is_announced

    def join(self) -> None:
        """Note that this rank has no more data."""
        self.is_joining, self._is_announced, self.last_joined = True, False, None

    def announce(self) -> bool:
        """Return whether the requests of this cycle must tell rank 0 that this rank has joined; note that they do."""
        announces = self.must_announce
        self._is_announced = self.is_joining
        return announces

    def update(self, joined: Sequence[int], world_size: int) -> bool:
        """Take over the joined ranks that rank 0 announces. Return whether all ranks have joined.

        Raises:
            ValueError: These are not different ranks of the group.
        """
        self.joined = tuple(int(rank) for rank in joined)
        if len(set(self.joined)) != len(self.joined) or not set(self.joined) <= set(range(world_size)):
            raise ValueError(joined)
        if len(self.joined) < world_size:
            return False
        self.last_joined, self.joined, self.is_joining = self.joined[-1], (), False
        return True
