"""TCP between ranks: one or two connections per pair on first use, one thread, edge-triggered epoll.

* A connection is made when a message for a peer is ready. The peer uses it for the other direction too, unless it has
  opened one itself at the same moment; then each rank sends on its own one. Messages of one sender never change over.
* Messages of large operations (``OperationLayout.is_bulk``) have a connection of their own, so that a small message
  never waits until a large one has left, only for what the network card queues. Bodies of channel messages (the values
  of a parameter server) leave by the first connection, in order with their messages: a small message may wait for one.
* ``TCP_NOTSENT_LOWAT`` keeps the data that cannot be overtaken small; each message is chosen at the last moment.
* Heartbeats go both ways on every connection, so a stopped process and a cut link show as silence. They wake no
  process: every rank asks its kernel when something last arrived. A crash shows at once, as the end of the connection.
  Time in which this rank itself did not look does not count as silence.
* No connection is trusted before the handshake; strangers are refused, counted and otherwise ignored.
* With ``Tls`` every connection is encrypted, and that handshake begins only after certificates were accepted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast, final

from totalreduce.foundation.config import TcpConfig, Tls
from totalreduce.foundation.errors import ProtocolError
from totalreduce.transports.base import Endpoint, Made, Outgoing, Transport, TransportCounters
from totalreduce.transports.connection import BEAT, Connection
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.listener import Listener
from totalreduce.transports.liveness import Liveness
from totalreduce.transports.peer_connections import PeerConnections
from totalreduce.transports.relay import MessageRelay, RelayPort
from totalreduce.transports.tls import TlsCredentials

__all__ = ["TcpTransport", "listen"]

#: Events that report the end of a stream, or an error.
_END = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
#: The last connection to a peer may end a moment before another rank reports the reason (LOST).
_VERDICT_S = 0.2
#: How long ``close`` waits for the peers to read, after the last byte that one of them has taken.
_DRAIN_S = 1.0
#: How often the relay moves messages, and what it refuses is read, before others have their turn.
_RELAY_TURNS_MAX = 16
#: A rank whose certificate is not accepted stays so long after the end, so that the others learn the reason.
_SHOW_S = 0.5


def listen(address: str) -> socket.socket:
    """Return a listening socket on a free port of ``address``. Raises ``OSError``."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind((address, 0))
        sock.listen(1024)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


@final
class _Poller:
    """An epoll object, its events, and a pipe by which other threads end a wait."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        #: (descriptor, events), in the order in which they came. Any thread that waits appends to it.
        self.events: deque[tuple[int, int]] = deque()
        self.wake_fd, self._wake_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  #: The ends of the pipe.
        self._lock = threading.Lock()
        self.epoll.register(self.wake_fd, select.EPOLLIN)

    def poll(self, timeout_s: float) -> None:
        self.events.extend(self.epoll.poll(timeout_s))

    def wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            if self._wake_write_fd >= 0:
                os.write(self._wake_write_fd, b"w")

    def clear_wake(self) -> None:
        """Empty the pipe."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_fd, 4096)

    def close(self) -> None:
        self.epoll.close()
        with self._lock:  # a late ``wake`` must not write to the next file with this number
            ends, self.wake_fd, self._wake_write_fd = (self.wake_fd, self._wake_write_fd), -1, -1
            for end in ends:
                os.close(end)


@final
class TcpTransport(Transport):
    """One rank's sockets. One thread at a time except for ``wait`` and ``wake``."""

    def __init__(
        self,
        rank: int,
        addresses: Sequence[tuple[str, int]],
        listener: socket.socket,
        identity: JobIdentity,
        config: TcpConfig,
        tls: Tls | None = None,
    ) -> None:
        """Take over a listening socket.

        Args:
            rank: This rank.
            addresses: Where every rank listens, by rank.
            listener: From ``listen``; its address is already known to the others.
            identity: The membership that a peer must prove.
            config: Sizes and deadlines.
            tls: Files for TLS; on every rank or on none.

        Raises:
            ConfigurationError: The files cannot be used, or the others could not accept this rank's certificate.
        """
        credentials = None if tls is None else TlsCredentials(tls)
        self.rank, self.world_size = rank, len(addresses)
        self.counters = TransportCounters()
        self._addresses, self._config = addresses, config
        self._poller = _Poller()
        self._liveness = Liveness(config, time.monotonic())
        accepting = Listener(rank, listener, self._poller.epoll, self.counters)
        self._peers = PeerConnections(
            rank, addresses, accepting, identity, config, credentials, self._liveness, self._lose
        )
        self._connections, self._routes = self._peers.open, self._peers.routes
        self.bulk_peers = frozenset(range(len(addresses))) - {rank}
        #: Peers of which a connection has ended: when, and why. They are lost if nothing reports that they have left.
        self._ended: dict[int, tuple[float, str]] = {}
        #: Connections with a message half-way out whose sockets take bytes again.
        self._unblocked: list[Connection] = []
        #: Held by a thread that changes connections: in ``progress``, and in ``wait`` where it writes on or relays.
        self._changing = threading.Lock()
        self._relay: MessageRelay | None = None

    def use_relay(self, make: Callable[[Any], Made]) -> Made | None:
        if not self._config.has_relay or sys.byteorder != "little":  # it compares headers as they are on the wire
            return None
        poller, peers = self._poller, self._peers
        port = RelayPort(poller.epoll.fileno(), peers.open, peers.routes, peers.bulk_routes, poller.events)
        relay = make(port)
        self._relay = cast(MessageRelay, relay)
        return relay

    @property
    def ranks_per_host(self) -> int:
        """How many ranks listen on this rank's address."""
        own = self._addresses[self.rank][0]
        return sum(1 for host, _ in self._addresses if host == own)

    def count_in(self, counters: TransportCounters) -> None:
        """Count in another transport's counters from now on."""
        self.counters = self._peers.listener.counters = counters

    def connected_peers(self) -> Collection[int]:
        return {c.peer for c in tuple(self._connections.values()) if c.established}  # any thread may ask

    def idle(self) -> bool:
        return not any(connection.outgoing.busy for connection in self._connections.values())

    def keep_rests(self, is_withdrawn: Callable[[Outgoing], bool]) -> bool:
        self.wake()  # a thread that waits with the relay holds the lock
        with self._changing:
            for connection in self._connections.values():
                connection.outgoing.keep_rest(is_withdrawn)
            if self._relay is not None:
                self._relay.keep_rests()
        return True

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``wait`` would end, for a joint epoll object."""
        return self._poller.epoll.fileno()

    def wake(self) -> None:
        self._poller.wake()

    def progress(self) -> bool:
        """One round: the events of epoll, then read, then timers, then write what all of these have made ready."""
        endpoint, relay = self._endpoint, self._relay
        assert endpoint is not None, "attach() comes first"
        with self._changing:
            if relay is not None and relay.is_busy():
                relay.settle(time.monotonic())
                if not relay.is_busy():
                    return True  # its last operation has ended: whoever waits for that goes on before anything else
            events = self._poller.events
            if not events:  # otherwise ``wait`` has just asked the kernel
                self._poller.poll(0)
            while events:
                self._on_event(*events.popleft())
            now = time.monotonic()
            if relay is not None:
                relay.hand_over()
            for connection in list(self._connections.values()):
                if connection.incoming.readable and not (relay is not None and relay.reads(connection)):
                    self._guard(connection, endpoint, now, reading=True)
            if now >= self._liveness.due_at:
                self._check_timers(endpoint, now)
            while self._unblocked:  # their peers need not be ready: the rest of a message may be all that is to be sent
                connection = self._unblocked.pop()
                bulk = self._peers.bulk_routes.get(connection.peer) is connection
                if bulk or self._routes.get(connection.peer) is connection:
                    self._guard(connection, endpoint, now, reading=False, bulk=bulk)
            for bulk in (False, True):
                for peer in tuple(endpoint.ready_peers(bulk=bulk)):
                    self._send(peer, endpoint, now, bulk=bulk)
            more = relay is not None and relay.is_busy() and self._relay_messages(relay, endpoint, now)
            return more or bool(self._poller.events) or self._more_to_do(endpoint)

    def _relay_messages(self, relay: MessageRelay, endpoint: Endpoint, now: float) -> bool:
        """Have the relay move what it can, and read the messages that it refuses; return whether it could go on."""
        for _turn in range(_RELAY_TURNS_MAX):
            more = relay.pump(0.0)
            for connection in relay.settle(now):
                self._guard(connection, endpoint, now, reading=True)
            if not more or self._poller.events:
                return False
        return True

    def _send(self, peer: int, endpoint: Endpoint, now: float, *, bulk: bool) -> None:
        """Send messages of one kind to a peer, as many as its route takes."""
        if peer in self._peers.gone:
            while endpoint.next_message(peer, bulk=bulk) is not None:
                pass  # no rank will read it
            return
        if bulk:
            route = self._peers.bulk_routes.get(peer) or self._peers.find_bulk_route(peer, now)
        else:
            route = self._routes.get(peer) or self._peers.find_route(peer, now)
        if route is not None and route.established and route.outgoing.writable:
            self._guard(route, endpoint, now, reading=False, bulk=bulk)

    def _more_to_do(self, endpoint: Endpoint) -> bool:
        """Whether another round would move something, according to the events so far."""
        relay = self._relay
        for connection in self._connections.values():
            is_read_here = relay is None or not relay.reads(connection)
            if connection.incoming.readable and is_read_here and endpoint.may_receive():
                return True
        for bulk, routes in ((False, self._routes), (True, self._peers.bulk_routes)):
            for peer in endpoint.ready_peers(bulk=bulk):
                route = routes.get(peer)
                if route is None or not route.established or not route.outgoing.may_write:
                    continue
                if not bulk or relay is None or relay.is_rivals_turn(route):
                    return True
        return False

    def wait(self, timeout_s: float, *, eager: bool = False) -> None:  # noqa: ARG002  (the kernel waits well)
        """Wait for an event that ``progress`` must handle.

        That a message which is half-way out can go on is no such event: the message goes on here. A large message
        takes the kernel's buffer several times, and a round for each of them took a fifth of the processor time.
        """
        now = time.monotonic()
        until = min(now + timeout_s, self._liveness.due_at)
        # Not ``acquire(blocking=False)``: Ctrl-C between the call and ``try`` would leave the lock held for ever.
        if self._relay is not None and not self._changing.locked():
            with self._changing:
                if self._relay is not None and self._relay.is_busy():
                    self._relay.pump(0.0 if self._poller.events else max(0.0, until - now))
                    return
        while True:
            self._poller.poll(max(0.0, until - now))
            if self._relay is not None and self._poller.events and self._changing.locked():
                self.wake()  # the thread that waits with the relay: these may be events of the relay's connections
            now = time.monotonic()
            # Write before looking at the clock: on a busy machine the time may be over although the last poll has found
            # that a connection can be written to.
            if not self._write_on(now) or now >= until:
                return

    def _write_on(self, now: float) -> bool:
        """Go on with messages that are half-way out; returns whether no event is left for ``progress``.

        An event that says only that an idle connection is writable, which is known, is dropped: the kernel adds it to
        every other event of the connection, also to one whose bytes have been read already. A connection with messages
        that are not reported as sent is not idle.
        """
        events = self._poller.events
        with self._changing:
            while events:
                fd, event = events[0]
                connection = self._connections.get(fd)
                if event != select.EPOLLOUT or connection is None or not connection.established:
                    return False
                outgoing = connection.outgoing
                if not outgoing.is_half_way and (outgoing.busy or not outgoing.writable):
                    return False
                outgoing.writable = True
                try:
                    while outgoing.writable and outgoing.is_half_way:
                        if outgoing.write_on(now):
                            return False
                except OSError:  # ``progress`` comes to the same error
                    return False
                except BaseException:  # Ctrl-C may have cut a message in two: nothing may follow it
                    connection.shutdown()
                    raise
                events.popleft()
        return True

    def _on_event(self, fd: int, events: int) -> None:
        if fd == self._poller.wake_fd:
            self._poller.clear_wake()
        elif fd == self._peers.listener.sock.fileno():
            self._peers.accept()
        else:
            connection = self._connections.get(fd)
            if connection is not None:
                if events & _END:
                    connection.incoming.read_to_the_end()
                elif events & select.EPOLLIN:
                    connection.incoming.readable = True
                if events & (select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR):
                    connection.outgoing.writable = True
                    if connection.established and connection.outgoing.busy:
                        self._unblocked.append(connection)
                if not connection.established:
                    self._peers.advance(connection)

    def _guard(
        self, connection: Connection, endpoint: Endpoint, now: float, *, reading: bool, bulk: bool = False
    ) -> None:
        """Read, or write messages of one kind; an error is the loss of the peer."""
        if not connection.established:
            return
        try:
            relay = self._relay
            if reading:
                exactly = relay is not None and relay.is_read_exactly(connection)
                connection.incoming.read(connection.peer, endpoint, now, is_last=self._peers.is_last, exactly=exactly)
            else:
                may_load = None
                if bulk and relay is not None and relay.sends_by(connection):
                    may_load = functools.partial(relay.take_turn, connection)
                connection.outgoing.write(connection.peer, endpoint, now, bulk=bulk, may_load=may_load)
        except ProtocolError as error:
            self._peers.drop(connection)
            endpoint.peer_lost(connection.peer, f"protocol violation: {error}")
        except OSError as error:
            if not reading:
                # The peer's last messages (GOODBYE, LOST) still count; reading will come to the same end.
                connection.incoming.read_to_the_end()
                connection.outgoing.writable = False
                return
            self._peers.drop(connection)
            self._ended[connection.peer] = now, f"its connection ended ({error})"
            self._liveness.due_at = now

    def _lose(self, peer: int, reason: str) -> None:
        self._peers.gone.add(peer)
        assert self._endpoint is not None
        self._endpoint.peer_lost(peer, reason)

    def _check_timers(self, endpoint: Endpoint, now: float) -> None:
        liveness, listener = self._liveness, self._peers.listener
        listener.resume(now)
        connections = list(self._connections.values())
        liveness.look((connection.pulse for connection in connections), now)
        liveness.due_at = min(liveness.due_at, listener.resume_at)
        for connection in connections:
            if connection.established:
                self._watch(connection, endpoint, now)
            else:
                self._peers.expire(connection, now)
        for peer, (ended_at, reason) in list(self._ended.items()):
            due = self._verdict_at(peer, ended_at)
            if now >= due:
                del self._ended[peer]
                self._lose(peer, liveness.explain_end(reason, now))
            else:
                liveness.due_at = min(liveness.due_at, due)

    def _verdict_at(self, peer: int, ended_at: float) -> float:
        """Return when a peer is lost of which a connection ended at ``ended_at``.

        Two ranks that connect to each other at the same time have two connections. A peer that leaves ends both, and
        its last messages may still be on their way on the other one, for as long as a slow link takes. While something
        arrives there, the peer is not lost; heartbeats do not count, because a peer that leaves sends none.
        """
        others = [c.incoming.moved_at for c in self._connections.values() if c.peer == peer]
        return max(ended_at, *others) + self._config.silence_s if others else ended_at + _VERDICT_S

    def _watch(self, connection: Connection, endpoint: Endpoint, now: float) -> None:
        pulse = connection.pulse
        if connection.incoming.holds_farewell:
            return  # the peer sends no heartbeats any more, and its other connection is watched
        if pulse.silence_s(now) > self._config.heartbeat_s:
            connection.listen_for_beats(now)
        reason = self._liveness.verdict(pulse, now)
        if reason is not None and not connection.incoming.readable:
            self._peers.drop(connection)
            self._peers.gone.add(connection.peer)
            endpoint.peer_lost(connection.peer, reason)
            return
        is_relayed = self._relay is not None and self._relay.reads(connection)
        if (
            connection.incoming.is_mid_body or is_relayed
        ) and now - connection.incoming.moved_at > 2 * self._config.heartbeat_s:
            # A part of the body may have arrived unreported, below the low-water mark of the socket, and whether
            # anything arrives here can decide whether the peer is lost (``_verdict_at``).
            connection.incoming.readable = True
        if not connection.outgoing.busy and self._liveness.is_beat_due(pulse, now):
            self.counters.heartbeats_sent += 1
            try:
                connection.outgoing.send_raw(BEAT)
            except OSError:
                connection.incoming.read_to_the_end()  # which will report the error

    def close(self, timeout_s: float) -> None:
        """Say that nothing more comes, wait for the others to have read it, close.

        A peer behind a slow link is waited for as long as it takes bytes, within ``timeout_s``: whatever it sends to a
        socket that is closed, even a heartbeat, makes the kernel discard the bytes that were not sent yet.
        """
        with self._changing:
            self._close(time.monotonic() + timeout_s)

    def _close(self, deadline: float) -> None:
        if self._peers.distrust:
            self._show_certificate(min(deadline, time.monotonic() + _SHOW_S))
        self._peers.listener.close()
        waiting = [c for c in self._connections.values() if c.established]
        for connection in waiting:
            connection.shutdown()
        left, moved_at = -1, time.monotonic()
        while waiting and time.monotonic() < min(deadline, moved_at + _DRAIN_S):
            # A peer that has read everything closes too; data unread here would turn our close into a reset.
            waiting = [connection for connection in waiting if not connection.drain()]
            unread_bytes = sum(connection.unread_bytes for connection in waiting)
            if unread_bytes != left:
                left, moved_at = unread_bytes, time.monotonic()
            if waiting:
                self._poller.epoll.poll(min(0.05, max(0.0, deadline - time.monotonic())))
        for connection in list(self._connections.values()):
            self._peers.drop(connection)
        self._relay = None  # it has the number of the epoll object
        self._poller.close()

    def let_go(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._peers.listener.let_go()
        self._poller.epoll.close()

    def _show_certificate(self, deadline: float) -> None:
        """Answer ranks that connect now, so that they see what is wrong with the certificate."""
        while time.monotonic() < deadline:
            self._poller.poll(max(0.0, deadline - time.monotonic()))
            while self._poller.events:
                fd, events = self._poller.events.popleft()
                connection = self._connections.get(fd)
                if connection is None or not (connection.established or connection.opened_here):
                    self._on_event(fd, events)
