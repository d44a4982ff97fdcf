"""Shared memory between the ranks of one host: messages are staged in the sender's memory and read there.

* ``shm_memory.py`` describes the memory, ``shm_pool.py`` the pieces in which bodies wait, ``shm_rings.py`` the transfer
  of messages, ``shm_waiting.py`` how a rank sleeps and is woken, ``shm_meeting.py`` how two ranks meet,
  ``shm_connection.py`` what they share afterwards, and ``shm_reads.py`` which of them can read each other's process.
* A message is copied once, when it is taken; then its memory is the sender's again. The receiver may compute from the
  staged body directly (``base.Lease``). A message is taken only if it can be staged, whatever its length.
* The end of the connection to a peer is a crash. What the dead rank had published is read first, and what the others
  have published, for they may say why it has ended. A heartbeat that stands still is a frozen process. Time in which
  this rank itself did not look does not count.

See docs/design/0004-shared-memory.md.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, final

import numpy as np

from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.errors import ProtocolError
from totalreduce.transports.base import Endpoint, Outgoing, Transport, TransportCounters
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.liveness import Liveness
from totalreduce.transports.shm_boards import ShmBoards
from totalreduce.transports.shm_connection import ShmConnection
from totalreduce.transports.shm_meeting import Meetings, listen
from totalreduce.transports.shm_memory import OWNER, Outbox, OutboxLayout, shm_available
from totalreduce.transports.shm_pool import StagingPool
from totalreduce.transports.shm_reads import ProcessReads
from totalreduce.transports.shm_waiting import Sleep

__all__ = ["ShmTransport", "listen", "reserved_bytes", "shm_available"]

#: The time between two looks at the sockets while messages move without a pause.
_LOOK_S = 0.005
#: How long messages of other ranks are read before the end of a connection counts as the loss of the peer.
_VERDICT_S = 0.2
_POOL_BYTES, _BODY_BYTES_MAX = 16 * 1024 * 1024, 1024 * 1024


def reserved_bytes(local_ranks: int, board_bytes: int) -> int:
    """Return how much memory each of so many ranks of a host reserves; see ``ShmTransport``."""
    return OutboxLayout.choose(local_ranks, _BODY_BYTES_MAX, _POOL_BYTES, board_bytes).total_bytes


@final
class ShmTransport(Transport):
    """One rank's shared memory. One thread at a time except for ``wait`` and ``wake``."""

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str | None],
        listener: socket.socket,
        identity: JobIdentity,
        config: TcpConfig,
        *,
        max_body_bytes: int = _BODY_BYTES_MAX,
        pool_bytes: int = _POOL_BYTES,
        board_bytes: int = 0,
        process_reads: bool = False,
    ) -> None:
        """Take over a listening socket.

        Args:
            rank: This rank.
            addresses: By rank, where the ranks of this host listen; ``None`` for the others.
            listener: From ``listen``; its address is already known to the others.
            identity: The membership that a peer must prove.
            config: Heartbeats and deadlines.
            max_body_bytes: Bodies up to this, and a quarter of the pool, travel in one piece; equal on all ranks.
            pool_bytes: About how much may be staged; equal on all ranks.
            board_bytes: Length of the board of each rank (see ``boards``); equal on all ranks.
            process_reads: Whether this rank reads the processes of other ranks, and lets them read its own.

        Raises:
            ConfigurationError: There is no shared memory; the message says why.
        """
        self.rank, self.world_size = rank, len(addresses)
        self.counters = TransportCounters()
        members = [member for member, address in enumerate(addresses) if address is not None]
        self._index = {member: index for index, member in enumerate(members)}
        self._outbox = Outbox(OutboxLayout.choose(len(members), max_body_bytes, pool_bytes, board_bytes))
        self._pool = StagingPool(self._outbox)
        self._sleep = Sleep(rank, self._outbox, spins=(os.cpu_count() or 1) >= len(members))
        self._meetings = Meetings(
            *(rank, addresses, listener, identity, config),
            *(self._outbox, self._sleep.fd, self._sleep.epoll, self.counters),
        )
        reads = ProcessReads(rank, self._index[rank], self._outbox, allowed=process_reads)
        self.boards = self._memories = ShmBoards(rank, members, self._outbox, self._sleep, reads, self._expel)
        self._connections: dict[int, ShmConnection] = {}
        self._sockets: dict[int, ShmConnection] = {}
        self._gone: set[int] = set()
        self._next_look = 0.0
        self._liveness = Liveness(config, time.monotonic())

    @property
    def ranks_per_host(self) -> int:
        return len(self._index)

    @property
    def members(self) -> Collection[int]:
        """The ranks of this host, this one included."""
        return self._index.keys()

    def connected_peers(self) -> Collection[int]:
        return set(self._connections)

    def idle(self) -> bool:
        return not any(c.outgoing.unfinished or c.outgoing.loans.lent for c in tuple(self._connections.values()))

    def allocate(self, num_bytes: int) -> np.ndarray[Any, Any] | None:
        return self._outbox.arena.allocate(num_bytes)

    def progress(self) -> bool:
        """One round: now and then sockets, then read, then write, then now and then timers."""
        endpoint = self._endpoint
        assert endpoint is not None, "attach() comes first"
        now = time.monotonic()
        if self._sleep.sockets_called or now >= self._next_look:
            self._look(now)
        more, ended = False, []
        for connection in tuple(self._connections.values()):
            outgoing = connection.outgoing
            outgoing.blocked = False
            if outgoing.loans.lent:
                outgoing.loans.collect(endpoint)
            if outgoing.unfinished is not None:  # the endpoint does not report the peer as ready for the rest
                more = self._send(connection, endpoint) or more
            if connection.incoming.has_mail:
                more = self._receive(connection, endpoint) or more
            if connection.ended is not None:
                ended.append(connection)
        for connection in ended:
            more = self._judge(connection, now) or more
        for peer in tuple(endpoint.ready_peers()):
            connection_of_peer = self._connections.get(peer)
            if connection_of_peer is None:
                self._send_to_absent(peer, endpoint, now)
            elif connection_of_peer.ended is None:
                more = self._send(connection_of_peer, endpoint) or more
        if now >= self._liveness.due_at:
            self._check_timers(now)
            more = more or self.can_send()  # the report of a loss must not wait
        for connection in tuple(self._connections.values()):
            connection.bell.ring_if_owed()
        return more

    def can_send(self) -> bool:
        """Whether a message that became ready since ``progress`` can leave."""
        assert self._endpoint is not None
        connections = (self._connections.get(peer) for peer in self._endpoint.ready_peers())
        return any(c is not None and c.ended is None and not c.outgoing.blocked for c in connections)

    def _receive(self, connection: ShmConnection, endpoint: Endpoint) -> bool:
        try:
            return connection.incoming.receive(endpoint)
        except ProtocolError as error:
            self._lose(connection.peer, f"protocol violation: {error}")
            return True

    def _judge(self, connection: ShmConnection, now: float) -> bool:
        """Lose a peer whose connection has ended, when that is due; returns whether it was."""
        if connection.incoming.has_mail or self._connections.get(connection.peer) is not connection:
            return False
        others_wait = any(other.incoming.has_mail for other in self._connections.values())
        if others_wait and now < connection.ended_at + _VERDICT_S:
            return False
        reason = f"its connection ended ({connection.ended})"
        if connection.used:
            self._lose(connection.peer, self._liveness.explain_end(reason, now))
        else:
            self._drop(connection)
            self._meetings.absent[connection.peer] = reason
        return True

    def _send(self, connection: ShmConnection, endpoint: Endpoint) -> bool:
        try:
            return connection.outgoing.send(endpoint)
        except ProtocolError as error:
            self._lose(connection.peer, f"protocol violation: {error}")
            return True

    def _send_to_absent(self, peer: int, endpoint: Endpoint, now: float) -> None:
        """Handle a message for a peer that has not arrived, or is lost."""
        if peer in self._gone:
            while endpoint.next_message(peer) is not None:
                pass  # no rank will read it
            return
        reason = self._meetings.why_not(peer, now)
        if reason is not None:
            self._lose(peer, reason)

    def wait(self, timeout_s: float, *, eager: bool = False) -> None:
        self._sleep.wait(min(timeout_s, self._liveness.due_at - time.monotonic()), eager=eager)

    def wake(self) -> None:
        self._sleep.wake()

    def keep_rests(self, is_withdrawn: Callable[[Outgoing], bool]) -> bool:
        kept = [c.outgoing.keep_rest(is_withdrawn) for c in tuple(self._connections.values())]
        return all(kept)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a bell rings or a socket is readable, for a joint epoll object."""
        return self._sleep.epoll.fileno()

    def fall_asleep(self, *, eager: bool) -> bool:
        """Return whether the caller may wait for ``fileno``. If it may, it calls ``wake_up`` afterwards."""
        return self._sleep.fall_asleep(eager=eager)

    def wake_up(self, *, eager: bool) -> None:
        """End a wait for ``fileno``."""
        self._sleep.wake_up(eager=eager)
        self._sleep.sockets_called = True  # or the epoll object would stay readable

    def _look(self, now: float) -> None:
        """Connect, accept, shake hands, notice ends."""
        self._next_look = now + _LOOK_S
        self._sleep.sockets_called = False
        self._meetings.connect_to_all(now)
        for fd, _ in self._sleep.epoll.poll(0):
            if not self._meetings.on_event(fd, now) and fd in self._sockets:
                self._on_end(fd, now)
        self._take_arrivals(now)

    def _take_arrivals(self, now: float) -> None:
        meetings = self._meetings
        arrived, meetings.arrived = meetings.arrived, []
        for peer, sock, bell_fd, mapping in arrived:
            indices = self._index[self.rank], self._index[peer]
            connection = ShmConnection(peer, indices, sock, bell_fd, self._outbox, mapping, self._pool, now)
            self._connections[peer] = self._sockets[sock.fileno()] = connection
            self._memories.add(connection, self._index[peer])
            self._sleep.neighbours = tuple(self._connections.values())
        failed, meetings.failed = meetings.failed, []
        for peer, reason in failed:
            self._lose(peer, reason)

    def _on_end(self, fd: int, now: float) -> None:
        """Note the end of a connection: its socket is readable, and nothing is ever sent on it."""
        connection = self._sockets[fd]
        try:
            data = connection.sock.recv(1)
            connection.ended = "it sent unexpected data" if data else "the connection was closed by the other end"
        except BlockingIOError:
            return
        except OSError as error:
            connection.ended = str(error)
        connection.ended_at = now
        self._forget_socket(connection)

    def _forget_socket(self, connection: ShmConnection) -> None:
        fd = connection.sock.fileno()
        if self._sockets.pop(fd, None) is not None:
            self._sleep.epoll.unregister(fd)

    def _drop(self, connection: ShmConnection) -> None:
        self._forget_socket(connection)
        del self._connections[connection.peer]
        self._sleep.neighbours = tuple(self._connections.values())
        connection.close()

    def _lose(self, peer: int, reason: str) -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            self._drop(connection)
        self._gone.add(peer)
        assert self._endpoint is not None
        self._endpoint.peer_lost(peer, reason)

    def _expel(self, peer: int, reason: str) -> None:
        if peer not in self._gone:
            self._lose(peer, f"protocol violation: {reason}")

    def _check_timers(self, now: float) -> None:
        self._outbox.words[OWNER.beat] += 1
        self.counters.heartbeats_sent += len(self._connections)
        connections = tuple(self._connections.values())
        self._liveness.look((connection.pulse for connection in connections), now)
        for connection in connections:
            connection.take_pulse(now)
            reason = self._liveness.verdict(connection.pulse, now)
            if reason is not None and connection.ended is None:
                self._lose(connection.peer, reason)
        self._meetings.expire(now)
        self._take_arrivals(now)

    def let_go(self) -> None:
        for connection in self._connections.values():
            connection.sock.close()
        self._meetings.let_go()
        self._sleep.epoll.close()

    def close(self, timeout_s: float) -> None:  # noqa: ARG002  (what was published stays readable without this rank)
        """End all connections; the peers first read what this rank has published."""
        self._meetings.close()
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._memories.close()
        self._sleep.close()
        self._outbox.close()
