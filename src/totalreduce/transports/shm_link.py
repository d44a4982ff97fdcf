"""One peer of this host: the ring to it, the ring from it, its bell, and whether it lives."""

from __future__ import annotations

import socket
from typing import final

from totalreduce.transports.liveness import Pulse
from totalreduce.transports.shm_memory import BEAT_WORD, CPU_WORD, Fences, Layout, Mapping, Outbox
from totalreduce.transports.shm_pool import StagingPool
from totalreduce.transports.shm_rings import IncomingRing, OutgoingRing
from totalreduce.transports.shm_sleep import Doorbell

__all__ = ["Link"]


@final
class Link:
    """An established connection.

    Attributes:
        peer: Rank.
        sock: The Unix socket, open and silent for as long as both live.
        ended: How it ended, if it has.
        outgoing: The ring to the peer.
        incoming: The ring from the peer.
        pulse: When the peer's heartbeat was last seen to move.
    """

    def __init__(
        self,
        peer: int,
        indices: tuple[int, int],
        sock: socket.socket,
        bell_fd: int,
        memories: tuple[Outbox, Mapping],
        layout: Layout,
        pool: StagingPool,
        fences: Fences,
        now: float,
    ) -> None:
        """Take over a socket and the peer's bell; for the rest see ``OutgoingRing``."""
        self.peer, self.sock = peer, sock
        self.ended: str | None = None
        self.pulse = Pulse(now)
        self._words = memories[1].words
        self._bell = Doorbell(bell_fd, self._words, fences)
        self.outgoing = OutgoingRing(peer, indices, memories, layout, pool, self._bell)
        self.incoming = IncomingRing(peer, indices, memories, layout, self._bell)
        self._beat = self._words[BEAT_WORD]

    @property
    def used(self) -> bool:
        """Whether anything was ever exchanged."""
        return self.outgoing.published > 0 or self.incoming.consumed > 0

    @property
    def wants_room(self) -> bool:
        """Whether something waits until the peer has read something. Any thread."""
        return self.outgoing.blocked or self.outgoing.lends

    @property
    def has_something(self) -> bool:
        """Whether ``progress`` could move something by now. Any thread."""
        outgoing = self.outgoing
        return self.incoming.has_news or (outgoing.blocked and outgoing.has_room) or outgoing.repaid

    @property
    def cpu(self) -> int:
        """Number of the processor that the peer last waited on, plus one; 0 if it never said."""
        return self._words[CPU_WORD]

    def take_pulse(self, now: float) -> None:
        """Note whether the peer's heartbeat has moved."""
        beat = self._words[BEAT_WORD]
        if beat != self._beat:
            self._beat, self.pulse.heard_at = beat, now

    def close(self) -> None:
        """Close the socket and the bell, take back what was lent. Leases stay readable."""
        self.outgoing.close()
        self.sock.close()
        self._bell.close()
