"""The interface between the engine and a transport: a ``Transport`` does the I/O, an ``Endpoint`` supplies messages.

The transport asks for the next message of a peer only when it can send it, so the most urgent message is chosen at the
last moment. It never queues more than the message that is leaving.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from totalreduce.foundation.header import Header

__all__ = ["Boards", "Delivery", "Endpoint", "Lease", "Outgoing", "Transport", "TransportCounters"]


Made = TypeVar("Made")


class Outgoing(Protocol):
    """A message on its way out."""

    @property
    def header(self) -> bytes:
        """The packed header."""

    @property
    def body(self) -> memoryview | None:
        """The body; it is read when it leaves."""

    @property
    def share_key(self) -> Hashable:
        """Equal for messages with the same bytes to several peers; a transport that stages bodies copies them once."""


class Delivery(Protocol):
    """The destination of an arriving body. ``view`` may be replaced by one of equal length while the body arrives."""

    @property
    def view(self) -> memoryview:
        """Memory exactly as long as the body."""

    @property
    def lease(self) -> Lease | None:
        """The lease that the endpoint has taken: nothing is to be copied."""


class Lease(Protocol):
    """A body that lies in memory of the transport, shared with the sender, until ``release``.

    An endpoint may take it as the delivery's ``view`` instead of having it copied, and calls ``release`` when it has
    read it. ``Delivery.lease`` is this object if the endpoint has taken it, and ``None`` otherwise.
    """

    @property
    def body(self) -> memoryview:
        """The bytes, read-only."""

    @property
    def may_be_kept(self) -> bool:
        """Whether it may be kept until other messages have come, or only for a computation that can begin now."""

    def release(self) -> None:
        """Give the memory back to the sender. Any thread; once."""


class Endpoint(Protocol):
    """The user of a transport. All methods are called from within ``Transport.progress`` and return quickly."""

    def ready_peers(self, *, bulk: bool = False) -> Collection[int]:
        """Return the peers for which ``next_message`` may have a message."""

    def next_message(self, peer: int, *, bulk: bool = False) -> Outgoing | None:
        """Return the next message for ``peer``, or ``None``.

        ``bulk``: the next one of those that leave by the connection for bulk, if ``peer`` has one
        (``Transport.bulk_peers``); otherwise the next one of all others.
        """

    def message_sent(self, message: Outgoing) -> None:
        """Note that a message has left; its memory is free."""

    def may_receive(self) -> bool:
        """Whether a message may be accepted now. If not, the transport leaves it unread."""

    def accept(self, peer: int, header: Header, lease: Lease | None = None) -> Delivery:
        """Return the destination of a body. Raises ``ProtocolError`` if no correct peer sends this header.

        With a ``lease`` the body has arrived already: the transport copies it to ``Delivery.view``, unless the endpoint
        takes the lease.
        """

    def delivered(self, delivery: Delivery) -> None:
        """Note that the body is complete."""

    def peer_lost(self, peer: int, reason: str) -> None:
        """Note that the peer died, froze, was cut off or violated the protocol."""


class Boards(Protocol):
    """The memories of the ranks of one host. Every rank writes to its own one, and all others can read it."""

    #: The ranks of the host, this rank included.
    members: Collection[int]
    #: Where the part begins that no transport uses, and its length.
    board_at: int
    board_bytes: int
    #: Where the word is whose lowest bit says whether the rank sleeps.
    sleep_at: int
    #: The numbers of the processes whose memory this rank can read, by rank (Linux's ``process_vm_readv``).
    processes: Mapping[int, int]

    def memories(self) -> Mapping[int, memoryview]:
        """Return the whole memory of this rank, and of every rank of the host that is connected, by rank."""

    def rely_on(self, peers: Collection[int]) -> None:
        """Note that operations need these ranks, although no message may ever be exchanged: their end is a loss."""

    def offset_of(self, body: memoryview) -> int:
        """Return where in this rank's memory a tensor's bytes lie; 0 if they do not lie there."""

    def let_read(self, peers: Collection[int], address: int, num_bytes: int) -> bool:
        """Return whether other ranks have this process's number and can read this memory of it, which is not shared."""

    def ring(self, peer: int) -> None:
        """Wake a rank that sleeps, to see what was written before. Any thread."""

    def expel(self, peer: int, reason: str) -> None:
        """End the connection to a rank that has written what no correct rank writes. For the thread that progresses."""

    def watch(self, has_changed: Callable[[], bool]) -> None:
        """Have ``wait`` end when ``has_changed`` returns true, which another rank causes before it rings."""


class TransportCounters:
    """Counters of a transport."""

    __slots__ = ("connections", "heartbeats_sent", "refused_connections")

    def __init__(self) -> None:
        self.connections = 0
        self.refused_connections = 0
        self.heartbeats_sent = 0


class Transport(ABC):
    """Moves messages between the ranks of one group."""

    rank: int
    world_size: int
    counters: TransportCounters
    #: The memories of the ranks of this host; ``None`` if they share none.
    boards: Boards | None = None
    #: The peers to which the messages of large operations have a connection of their own, so that no other message
    #: waits behind them. Messages on the two connections to a peer may overtake each other.
    bulk_peers: Collection[int] = ()
    _hosts: Sequence[int] | None = None
    _endpoint: Endpoint | None = None

    @property
    def hosts(self) -> Sequence[int]:
        """Number of the host of every rank, by rank; without ``set_hosts`` one host has all ranks."""
        return (0,) * self.world_size if self._hosts is None else self._hosts

    def set_hosts(self, hosts: Sequence[int]) -> None:
        """Set which ranks share a host; see ``hosts``."""
        assert len(hosts) == self.world_size
        self._hosts = tuple(hosts)

    def allocate(self, num_bytes: int) -> np.ndarray[Any, Any] | None:  # noqa: ARG002  (see the docstring)
        """Return ``num_bytes`` of dtype uint8 from which messages leave faster than from other memory. Any thread.

        Returns ``None`` if there is no such memory, or not enough. It is free again when the array is deleted.
        """
        return None

    def attach(self, endpoint: Endpoint) -> None:
        """Set the endpoint; once, before the first ``progress``."""
        self._endpoint = endpoint

    def use_relay(self, make: Callable[[Any], Made]) -> Made | None:  # noqa: ARG002  (see the docstring)
        """Have a relay move the messages of large operations; at most once, before the first ``progress``.

        ``make``: makes the relay (``transports.relay.MessageRelay``) for a ``RelayPort``. Returns the relay; ``None``:
        this transport uses none.
        """
        return None

    @abstractmethod
    def progress(self) -> bool:
        """Move all messages that can be moved without waiting; returns whether more can be. One thread at a time."""

    @abstractmethod
    def wait(self, timeout_s: float, *, eager: bool = False) -> None:
        """Wait until ``progress`` may have something to do, at most ``timeout_s``. Any thread, at any time.

        A transport may go on with messages that are half-way out meanwhile.

        ``eager``: this process has nothing else to do, so processor time may be spent to end the wait sooner.
        """

    @abstractmethod
    def wake(self) -> None:
        """End a ``wait``, from any thread."""

    @abstractmethod
    def connected_peers(self) -> Collection[int]:
        """Return the peers with which something was exchanged."""

    @abstractmethod
    def idle(self) -> bool:
        """Whether no message has left in part."""

    def keep_rests(self, is_withdrawn: Callable[[Outgoing], bool]) -> bool:  # noqa: ARG002  (see the docstring)
        """Read the program's memory no more for messages of operations that have failed, and that are half-way out.

        What has not left of such a body is copied, so that the program may change its tensor, and the receiver gets the
        bytes as they were. For the thread that calls ``progress``, after it.

        ``is_withdrawn``: whether the operation of a message has failed. Returns whether no memory of such a message is
        read any more. If not, because a library or another rank reads it, the caller asks again later.
        """
        return True

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Let all sent messages arrive, then end all connections, within ``timeout_s``."""

    def let_go(self) -> None:
        """Close the descriptors of connections, in a forked child; see ``foundation.forking``."""
        return

    @property
    @abstractmethod
    def ranks_per_host(self) -> int:
        """How many ranks share this machine's cores (a guess is enough)."""
