"""The two sides of moving bytes: a ``Transport`` does the I/O, an ``Endpoint`` says what and where.

The transport pulls: it asks for the next message of a peer only when the wire can take it, so the most urgent message
is chosen at the last moment. It never queues more than the message that is leaving.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Protocol

from totalreduce.foundation.header import Header

__all__ = ["Delivery", "Endpoint", "Outgoing", "Transport", "TransportCounters"]


class Outgoing(Protocol):
    """A message on its way out."""

    @property
    def header(self) -> bytes:
        """The packed header."""

    @property
    def body(self) -> memoryview | None:
        """The body; read when it leaves."""


class Delivery(Protocol):
    """Where an arriving body goes. ``view`` may be replaced by one of the same length while the body arrives."""

    @property
    def view(self) -> memoryview:
        """Exactly as long as the body."""


class Endpoint(Protocol):
    """Who uses a transport. All methods are called from within ``Transport.progress`` and return quickly."""

    def ready_peers(self) -> Collection[int]:
        """Peers for which ``next_message`` may have something."""

    def next_message(self, peer: int) -> Outgoing | None:
        """The next message for ``peer``, or ``None``."""

    def message_sent(self, message: Outgoing) -> None:
        """The message has left; its memory is free."""

    def may_receive(self) -> bool:
        """Whether a message may be accepted now; if not, the transport leaves it unread."""

    def accept(self, peer: int, header: Header) -> Delivery:
        """Where does the body go? Raises ``ProtocolError`` if no correct peer sends this."""

    def delivered(self, delivery: Delivery) -> None:
        """The body is complete."""

    def peer_lost(self, peer: int, reason: str) -> None:
        """The peer died, froze, was cut off or talks nonsense."""


class TransportCounters:
    """What a transport counts."""

    __slots__ = ("connections", "heartbeats_sent", "refused_connections")

    def __init__(self) -> None:
        """Start at zero."""
        self.connections = 0
        self.refused_connections = 0
        self.heartbeats_sent = 0


class Transport(ABC):
    """Moves messages between the ranks of one group."""

    rank: int
    world_size: int
    counters: TransportCounters

    @abstractmethod
    def attach(self, endpoint: Endpoint) -> None:
        """Say who asks and answers; once, before the first ``progress``."""

    @abstractmethod
    def progress(self) -> bool:
        """Move what can be moved without waiting; returns whether more can be moved. One thread at a time."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Wait until ``progress`` may have something to do, at most ``timeout_s``. Any thread, at any time."""

    @abstractmethod
    def wake(self) -> None:
        """End a ``wait``, from any thread."""

    @abstractmethod
    def connected_peers(self) -> Collection[int]:
        """Peers that something was exchanged with."""

    @abstractmethod
    def idle(self) -> bool:
        """Whether no message is half-way out."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Let what was sent arrive, then end all connections, within ``timeout_s``."""

    @property
    @abstractmethod
    def ranks_per_host(self) -> int:
        """How many ranks share this machine's cores (a guess is enough)."""
