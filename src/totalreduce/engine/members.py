"""The ranks of a group as this rank knows them: which one was lost, and which ones have left."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from totalreduce.engine.control import LossNotice
from totalreduce.foundation.errors import GroupClosed, PeerLost

__all__ = ["Members"]

#: How long the last messages of a rank are awaited whose departure another rank has reported, in seconds.
_LAST_MESSAGES_S = 2.0


class Members:
    """Ranks that are gone.

    Attributes:
        everybody: All ranks of the group.
        verdict: The rank that was lost first as far as this rank knows, with the reason. It ends the group as soon as
            the other ranks have been told (``Telling``).
        lost: The same as an error. It is set when the group has ended.
        departed: By rank: why it has closed the group in good order. Operations that do not need it go on. Messages of
            some of these ranks may still arrive (see ``silent``).
        unreachable: The departed ranks whose connections have ended: nothing reaches them, and nothing comes.
        closed: Whether this rank has closed the group.
    """

    __slots__ = ("_rank", "_reported", "closed", "departed", "everybody", "lost", "unreachable", "verdict")

    def __init__(self, rank: int, world_size: int) -> None:
        """Begin with every rank present."""
        self._rank = rank
        self.everybody = tuple(range(world_size))
        self.verdict: LossNotice | None = None
        self.lost: PeerLost | None = None
        self.departed: dict[int, str] = {}
        #: Departed ranks of which only another rank's report is known: the time until which their messages are awaited.
        self._reported: dict[int, float] = {}
        self.unreachable: set[int] = set()
        self.closed = False

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.everybody)

    @property
    def have_ended(self) -> bool:
        """Whether this rank has closed the group, or a rank is lost: nothing more is exchanged."""
        return self.closed or self.lost is not None

    def check_usable(self) -> None:
        """Raise an error if nothing can be submitted any more.

        Raises:
            GroupClosed: This rank has closed the group.
            PeerLost: A rank was lost.
        """
        if self.closed:
            raise GroupClosed(f"rank {self._rank} has closed the group; make a new one with init()")
        if self.lost is not None:
            raise PeerLost(self.lost.rank, self.lost.reason)

    def depart(self, peer: int, reason: str) -> None:
        """Note that a rank has departed and that all its messages have arrived."""
        self.departed.setdefault(peer, reason)  # another rank may already have reported this departure
        self._reported.pop(peer, None)

    def depart_by_report(self, peer: int, reason: str, now: float) -> None:
        """Note that a rank has departed, as another rank says.

        Messages and the GOODBYE of the departed rank may still be on their way to this rank. They are awaited for a
        limited time, because a departed rank sends no GOODBYE to ranks to which it has no connection.
        """
        if peer not in self.departed:
            self.departed[peer] = reason
            self._reported[peer] = now + _LAST_MESSAGES_S

    def silent(self) -> AbstractSet[int]:
        """Return the departed ranks from which no message comes any more."""
        return self.departed.keys() - self._reported.keys() if self._reported else self.departed.keys()

    def overdue(self, now: float, arriving: AbstractSet[int]) -> list[int]:
        """Return the departed ranks whose last messages were awaited long enough.

        ``arriving``: ranks of which a message is being received: these are awaited further.
        """
        for peer in arriving & self._reported.keys():
            self._reported[peer] = now + _LAST_MESSAGES_S
        return [peer for peer, until in self._reported.items() if now >= until]

    def others(self, ranks: Sequence[int]) -> list[int]:
        """Return these ranks without this rank and without those that have departed."""
        return [rank for rank in ranks if rank != self._rank and rank not in self.departed]
