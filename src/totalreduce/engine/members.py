"""The ranks of a group as this rank knows them: which one was lost, which ones have left, and who is told of it."""

from __future__ import annotations

from collections.abc import Sequence

from totalreduce.engine.control import LossNotice
from totalreduce.engine.outbox import NO_KEY, Outbox
from totalreduce.foundation.errors import GroupClosed, PeerLost
from totalreduce.foundation.header import Frame

__all__ = ["Members"]


class Members:
    """Ranks that are gone.

    Attributes:
        everybody: All ranks of the group.
        lost: The first rank that was lost, with the reason. It ends the group.
        departed: By rank: why it has closed the group in good order. Operations that do not need it go on.
        unreachable: The departed ranks whose connections have ended: nothing reaches them, and nothing comes.
        closed: Whether this rank has closed the group.
    """

    __slots__ = ("_outbox", "_rank", "closed", "departed", "everybody", "lost", "unreachable")

    def __init__(self, rank: int, world_size: int, outbox: Outbox) -> None:
        """Begin with every rank present."""
        self._rank, self._outbox = rank, outbox
        self.everybody = tuple(range(world_size))
        self.lost: PeerLost | None = None
        self.departed: dict[int, str] = {}
        self.unreachable: set[int] = set()
        self.closed = False

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.everybody)

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

    def tell_of_loss(self, notice: LossNotice, ranks: Sequence[int], key: tuple[int, int] = NO_KEY) -> None:
        """Tell ranks that a rank is lost: to one operation, if there is a key, else to the group.

        This rank and ranks that have left are passed over.
        """
        body = notice.encode()
        for other in ranks:
            if other != self._rank and other not in self.departed:
                self._outbox.control(other, Frame.LOST, key=key, body=body)
