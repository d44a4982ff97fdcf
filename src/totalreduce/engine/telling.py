"""What the other ranks are told before this rank's program gets an error.

A program may end its process as soon as it gets an error, and the other ranks would take that end for the cause.
Therefore an error that other ranks must learn of reaches the program only when the transport has taken the frames that
tell them. Then these frames precede the end of each connection.

Only ranks that are connected with this rank are waited for, because no other rank notices the end of this one. A rank
that does not read delays the error for a limited time.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final, final

from totalreduce.engine.entries import Entries
from totalreduce.engine.members import Members
from totalreduce.engine.operation import Operation
from totalreduce.engine.outbox import NO_KEY, Outbox
from totalreduce.foundation.header import Frame

__all__ = ["Telling"]

#: How long an error waits for ranks that do not read, in seconds; longer by the time between two calls of ``proceed``.
_PATIENCE_S: Final = 0.25

#: What happens on this rank when the others have been told, with the time in seconds.
_Action = Callable[[float], None]


@final
class Telling:
    """The frames that tell other ranks of an error, and what waits until they have left.

    Attributes:
        connected: Returns the ranks that notice the end of this process, because they are connected with it.
    """

    __slots__ = ("_actions", "_entries", "_members", "_outbox", "_rank", "_untold", "connected")

    def __init__(self, rank: int, outbox: Outbox, entries: Entries, members: Members) -> None:
        """Begin with nothing to tell, and without connected ranks."""
        self._rank, self._outbox, self._entries, self._members = rank, outbox, entries, members
        self.connected: Callable[[], Collection[int]] = lambda: ()
        #: By connected rank: how many frames the transport has not taken.
        self._untold: Counter[int] = Counter()
        #: What waits, and until when at most; in the order of the calls.
        self._actions: list[tuple[float, _Action]] = []

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to wait for."""
        return not self._untold

    def tell(
        self,
        ranks: Sequence[int],
        frame: Frame,
        body: bytes,
        key: tuple[int, int] = NO_KEY,
        operation: Operation | None = None,
    ) -> None:
        """Send a frame to ranks, but not to this one and those that have departed.

        Args:
            ranks: The ranks.
            frame: The frame.
            body: The body of the frame.
            key: The key of the operation that the frame is about, of which a rank may have to make an entry
                (``Entries``). Without it the frame is about the group.
            operation: The operation; ``None`` if it failed before it was begun.
        """
        connected = self.connected()
        for peer in self._members.others(ranks):
            on_sent = None
            if peer in connected:
                self._untold[peer] += 1
                on_sent = functools.partial(self._sent, peer)
            if key == NO_KEY:
                self._outbox.control(peer, frame, body=body, on_sent=on_sent)
            else:
                self._entries.tell(peer, frame, key, operation, body=body, on_sent=on_sent)

    def then(self, action: _Action, now: float) -> None:
        """Call ``action`` when the ranks have been told: now, or by ``proceed``."""
        self._actions.append((now + _PATIENCE_S, action))
        self.proceed(now)

    def forget(self, peer: int, now: float) -> None:
        """Do not wait for a rank that is gone."""
        del self._untold[peer]
        self.proceed(now)

    def proceed(self, now: float) -> None:
        """Carry out what waits, if it need not wait longer."""
        if self._actions and now >= self._actions[0][0]:
            self._untold.clear()
        while self._actions and not self._untold:
            self._actions.pop(0)[1](now)

    def _sent(self, peer: int) -> None:
        if peer in self._untold:  # otherwise it is not waited for any more
            self._untold[peer] -= 1
            if not self._untold[peer]:
                del self._untold[peer]
