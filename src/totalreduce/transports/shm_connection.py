"""An established connection to another rank of this host: a ring in each direction, and the signs of its life."""

from __future__ import annotations

import socket
from typing import final

from totalreduce.transports.liveness import Pulse
from totalreduce.transports.shm_memory import OWNER, Mapping, Outbox
from totalreduce.transports.shm_pool import StagingPool
from totalreduce.transports.shm_rings import IncomingRing, OutgoingRing
from totalreduce.transports.shm_waiting import Doorbell

__all__ = ["ShmConnection"]


@final
class ShmConnection:
    """The rings, the bell and the socket that this rank shares with one peer."""

    def __init__(
        self,
        peer: int,
        indices: tuple[int, int],
        sock: socket.socket,
        bell_fd: int,
        outbox: Outbox,
        mapping: Mapping,
        pool: StagingPool,
        now: float,
    ) -> None:
        """Take over a socket and the peer's bell.

        ``indices`` are those of this rank and of the peer in the layout; ``outbox`` is this rank's memory, with
        ``pool`` in it, and ``mapping`` the peer's.
        """
        self.peer = peer  #: Rank of the peer.
        self.sock = sock  #: The Unix socket. It is open and silent for as long as both processes live.
        self.ended: str | None = None  #: Why the socket has ended; ``None`` while it is open.
        self.ended_at = 0.0  #: When that was seen, in seconds.
        #: Whether operations need the peer that are carried out without messages (``Boards.rely_on``).
        self.relied_on = False
        self.pulse = Pulse(now)  #: When the peer's heartbeat was last seen to move.
        self.mapping = mapping  #: The peer's memory.
        self._words = mapping.words
        self.bell = Doorbell(bell_fd, self._words, outbox.fences)  #: The peer's bell.
        self.outgoing = OutgoingRing(peer, indices, outbox, mapping, pool, self.bell)  #: The ring to the peer.
        self.incoming = IncomingRing(peer, indices, outbox, mapping, self.bell)  #: The ring from the peer.
        self._beat = self._words[OWNER.beat]

    @property
    def used(self) -> bool:
        """Whether a message was ever exchanged, or operations need the peer."""
        return self.relied_on or self.outgoing.published > 0 or self.incoming.consumed > 0

    @property
    def wants_room(self) -> bool:
        """Whether a message waits until the peer has read something. Any thread."""
        return self.outgoing.blocked or bool(self.outgoing.loans.lent)

    @property
    def has_work(self) -> bool:
        """Whether ``progress`` could move a message now. Any thread."""
        outgoing = self.outgoing
        return self.incoming.has_news or (outgoing.blocked and outgoing.has_room) or outgoing.loans.returned

    @property
    def cpu(self) -> int:
        """Number of the processor on which the peer last waited, plus one; 0 if it has not waited yet."""
        return self._words[OWNER.processor]

    def take_pulse(self, now: float) -> None:
        """Note whether the peer's heartbeat has moved."""
        beat = self._words[OWNER.beat]
        if beat != self._beat:
            self._beat, self.pulse.heard_at = beat, now

    def close(self) -> None:
        """Close the socket and the bell, and take back what was lent. Leases of the peer's memory stay readable."""
        self.outgoing.close()
        self.sock.close()
        self.bell.close()
