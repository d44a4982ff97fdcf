"""The two sides of moving bytes: a ``Transport`` does the I/O, an ``Endpoint`` says what and where.

The transport pulls: it asks for the next message of a peer only when the wire can take it, so the most urgent message
is chosen at the last moment. It never queues more than the message that is leaving.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from totalreduce.foundation.header import Header

__all__ = ["Delivery", "Endpoint", "Lease", "Outgoing", "Transport", "TransportCounters"]


class Outgoing(Protocol):
    """A message on its way out."""

    @property
    def header(self) -> bytes:
        """The packed header."""

    @property
    def body(self) -> memoryview | None:
        """The body; read when it leaves."""

    @property
    def share_key(self) -> Hashable:
        """Equal for messages with the same bytes to several peers; a transport that stages bodies copies them once."""


class Delivery(Protocol):
    """Where an arriving body goes. ``view`` may be replaced by one of the same length while the body arrives."""

    @property
    def view(self) -> memoryview:
        """Exactly as long as the body."""

    @property
    def lease(self) -> Lease | None:
        """The lease that was taken: nothing is to be copied."""


class Lease(Protocol):
    """A body that lies in memory of the transport (shared with the sender), for as long as nobody gives it back.

    An endpoint may take it as the delivery's ``view`` instead of having it copied, and calls ``release`` when it has
    read it; then, and only then, ``Delivery.lease`` is this object.
    """

    @property
    def body(self) -> memoryview:
        """The bytes, read only."""

    @property
    def may_be_kept(self) -> bool:
        """Whether it may be kept until other messages have come; if not, only for a computation that can begin now."""

    def release(self) -> None:
        """The memory is free again. Any thread; once."""


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

    def accept(self, peer: int, header: Header, lease: Lease | None = None) -> Delivery:
        """Where does the body go? Raises ``ProtocolError`` if no correct peer sends this.

        With a ``lease`` the body is here already: the transport copies it to ``Delivery.view``, unless the answer is
        that the endpoint takes the lease.
        """

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
    _hosts: Sequence[int] | None = None

    @property
    def hosts(self) -> Sequence[int]:
        """Number of the host of every rank, by rank; unless somebody has said otherwise, one host has all of them."""
        return (0,) * self.world_size if self._hosts is None else self._hosts

    def place(self, hosts: Sequence[int]) -> None:
        """Say which ranks share a host (see ``hosts``); whoever made the transport knows."""
        assert len(hosts) == self.world_size
        self._hosts = tuple(hosts)

    def allocate(self, num_bytes: int) -> np.ndarray[Any, Any] | None:  # noqa: ARG002  (see the docstring)
        """Memory of ``num_bytes`` bytes, of dtype uint8, that messages leave faster than other memory; any thread.

        ``None`` where there is none, or not enough. It is the transport's again when the array has gone.
        """
        return None

    @abstractmethod
    def attach(self, endpoint: Endpoint) -> None:
        """Say who asks and answers; once, before the first ``progress``."""

    @abstractmethod
    def progress(self) -> bool:
        """Move what can be moved without waiting; returns whether more can be moved. One thread at a time."""

    @abstractmethod
    def wait(self, timeout_s: float, *, eager: bool = False) -> None:
        """Wait until ``progress`` may have something to do, at most ``timeout_s``. Any thread, at any time.

        Args:
            timeout_s: In seconds.
            eager: This process has nothing else to do: a shorter wait may cost processor time.
        """

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

    def let_go(self) -> None:
        """Close the descriptors of connections, in a forked child; see ``foundation.forking``."""
        return

    @property
    @abstractmethod
    def ranks_per_host(self) -> int:
        """How many ranks share this machine's cores (a guess is enough)."""
