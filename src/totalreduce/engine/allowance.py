"""What each peer may have here, in bytes: as much as every other one, and no more before some of it is returned.

A sender counts what it has used of its allowance at a peer, and what the peer has returned (CREDIT). The receiver
counts the same here. So a correct peer never exceeds its allowance, and a peer that does is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

__all__ = ["Allowance"]


@final
class Allowance:
    """The receiver's account of what its peers have here.

    Attributes:
        share: The bytes that each peer may have here.
        on_credit: Called with a peer when a part of its allowance has become free.
    """

    __slots__ = ("_owed", "_used", "on_credit", "share")

    def __init__(self, share: int) -> None:
        """Begin with nothing used."""
        self.share = share
        self.on_credit: Callable[[int], None] = lambda _: None
        self._used: dict[int, int] = {}  #: By peer: the bytes that it has here.
        self._owed: dict[int, int] = {}  #: By peer: the bytes that are free again, and were not returned to it.

    def used(self, peer: int) -> int:
        """Return the bytes that a peer has here."""
        return self._used.get(peer, 0)

    def take(self, peer: int, cost: int) -> bool:
        """Note that a peer has further bytes here. Return ``False`` and note nothing if it would have too many."""
        used = self._used.get(peer, 0) + cost
        if used > self.share:
            return False
        self._used[peer] = used
        return True

    def free(self, peer: int, cost: int) -> None:
        """Note that bytes of a peer are free."""
        self._used[peer] -= cost
        self.owe(peer, cost)

    def owe(self, peer: int, cost: int) -> None:
        """Note that a peer has used a part of its allowance for something that took no memory here."""
        self._owed[peer] = self._owed.get(peer, 0) + cost
        self.on_credit(peer)

    def is_due(self, peer: int) -> bool:
        """Return whether what is owed to a peer is to be returned now: it is a quarter of the allowance."""
        return self._owed.get(peer, 0) >= self.share // 4

    def take_credit(self, peer: int) -> int:
        """Return the bytes that are owed to a peer. The caller returns them to the peer."""
        return self._owed.pop(peer, 0)
