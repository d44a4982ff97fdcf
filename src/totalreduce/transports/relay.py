"""How a relay takes part in a TCP transport: what it gets of the transport, and what the transport asks of it.

A relay (``relay.relay``) moves messages of large operations on connections of the transport. It knows what these
messages are for, and the transport does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from totalreduce.transports.connection import Connection

__all__ = ["MessageRelay", "RelayPort"]


class RelayPort(NamedTuple):
    """What a relay gets of a transport."""

    epoll_fd: int  #: The epoll object that reports the events of all connections.
    connections: Mapping[int, Connection]  #: All connections, by descriptor.
    routes: Mapping[int, Connection]  #: By peer, the connection by which this rank's other messages leave.
    bulk_routes: Mapping[int, Connection]  #: By peer, the connection by which this rank's bulk leaves.
    events: deque[tuple[int, int]]  #: Gets the events that are for the transport: (descriptor, events).


class MessageRelay(Protocol):
    """What a transport asks of a relay. All methods are called while no other thread changes connections."""

    def is_busy(self) -> bool:
        """Return whether the relay has something to do, or to wait for."""

    def hand_over(self) -> None:
        """Take operations that can be taken now."""

    def reads(self, connection: Connection) -> bool:
        """Whether the relay reads from a connection, and not the transport (``Connection.incoming``)."""

    def is_read_exactly(self, connection: Connection) -> bool:
        """Whether ``Connection.incoming`` may read one message and no byte after it."""

    def sends_by(self, connection: Connection) -> bool:
        """Whether operations of the relay send by a connection."""

    def take_turn(self, connection: Connection) -> bool:
        """Use the turn of ``Connection.outgoing``; return whether it may begin a message now.

        If the relay sends by the connection, too, it has a turn only where its message is the most urgent one, and the
        turn is one message.
        """

    def is_rivals_turn(self, connection: Connection) -> bool:
        """Whether ``take_turn`` returns true as soon as ``Connection.outgoing`` has a message."""

    def keep_rests(self) -> None:
        """Copy what has not left of the messages of operations that have failed."""

    def pump(self, timeout_s: float) -> bool:
        """Move messages; wait for ``timeout_s`` at most if there are none, or until something else has happened.

        Returns whether it could go on after ``settle``.
        """

    def settle(self, now: float) -> list[Connection]:
        """Report what ``pump`` has done; return the connections of which a message is to be read here."""
