"""TCP between ranks: one connection per pair on first use, one thread, edge-triggered epoll.

* A connection is made when a message for a peer is ready; the peer uses it for the other direction too, unless it has
  opened one itself in the same moment (then each keeps to its own: messages of one sender never change lanes).
* ``TCP_NOTSENT_LOWAT`` keeps what cannot be overtaken small; the message to leave is chosen at the last moment.
* Heartbeats go both ways on every connection, so a stopped process and a cut link show as silence. A crash shows at
  once, as the end of the connection. Time in which this rank itself did not look does not count as silence.
* Nobody is believed before the handshake; strangers are refused, counted and otherwise ignored.
* With ``Tls`` every connection is encrypted, and nobody without a certificate gets as far as that handshake.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import final

from totalreduce.foundation.config import TcpConfig, Tls
from totalreduce.foundation.errors import AuthenticationError, ProtocolError
from totalreduce.foundation.header import Frame, Header
from totalreduce.foundation.os_errors import is_out_of_descriptors
from totalreduce.transports.base import Endpoint, Transport, TransportCounters
from totalreduce.transports.connection import Connection
from totalreduce.transports.door import Door, Shortage
from totalreduce.transports.handshake import Acceptor, Connector, JobIdentity
from totalreduce.transports.liveness import Liveness
from totalreduce.transports.tls import HungUp, TlsChannel, TlsCredentials

__all__ = ["TcpTransport", "listen"]

_log = logging.getLogger(__name__)

_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
#: Eight bytes of flags, fifteen 32-bit numbers, then ``tcpi_rtt`` in microseconds.
_TCP_INFO_RTT = struct.Struct("68xI")
#: Round trips shorter than this are a local network (or one host).
_NEAR_S = 0.005
#: A refused connection is tried again this often: the peer listens before its address is known, so it is gone.
_REFUSALS_MAX = 3
_RETRY_S = 0.1
#: The last connection to a peer may end a moment before something else brings the reason (LOST, from another rank).
_VERDICT_S = 0.2
#: ``close`` waits so long for the peers to read, after the last byte that one of them has taken.
_DRAIN_S = 1.0
#: A peer that hangs up when TLS begins has none, unless strangers took its places for a moment.
_NO_TLS_S = 1.0
#: A rank whose certificate does not suit the others stays so long after the end, so that they learn why it went.
_SHOW_S = 0.5
#: How often a refused stranger is read from, so that what he has sent does not turn our alert into a reset.
_LINGER_READS_MAX = 16


def listen(address: str) -> socket.socket:
    """A listening socket on a free port of ``address``.

    Raises:
        OSError: The address is not of this machine.
    """
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


def _round_trip_s(sock: socket.socket) -> float:
    """The kernel's estimate of the round-trip time, from ``struct tcp_info``."""
    information = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_RTT.size)
    return float(_TCP_INFO_RTT.unpack(information)[0]) / 1e6


@final
class TcpTransport(Transport):
    """One rank's sockets. One thread at a time but for ``wait`` and ``wake``."""

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
            listener: From ``listen``; already known to the others.
            identity: What makes a peer one of us.
            config: Sizes and deadlines.
            tls: Files for TLS; on every rank or on none.

        Raises:
            ConfigurationError: The files cannot be used, or the others could not accept this rank's certificate.
        """
        self._credentials = None if tls is None else TlsCredentials(tls)
        self.rank, self.world_size = rank, len(addresses)
        self.counters = TransportCounters()
        self._addresses, self._listener = addresses, listener
        self._identity, self._config = identity, config
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        #: By peer: the connection this rank's messages take. Chosen once, never changed.
        self._routes: dict[int, Connection] = {}
        self._refusals: dict[int, int] = {}
        self._retry_at: dict[int, float] = {}
        self._first_try: dict[int, float] = {}
        #: Peers of which a connection has ended: when, and why. They are lost if nothing says that they have left.
        self._ended: dict[int, tuple[float, str]] = {}
        self._gone: set[int] = set()
        self._endpoint: Endpoint | None = None
        self._events: deque[tuple[int, int]] = deque()
        #: Why a connection to this rank was last refused.
        self._last_refusal = ""
        #: Whether this rank and another one, as far as it is one, could not agree on their certificates.
        self._distrust = False
        #: Connections with a message half-way out that the socket takes again.
        self._unblocked: list[Connection] = []
        self._heartbeat = Header(Frame.HEARTBEAT, identity.epoch).pack()
        self._liveness = Liveness(config, time.monotonic())
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll.register(self._wake_read, select.EPOLLIN)
        self._door = Door(rank, listener, self._epoll)
        self._shortage = Shortage(rank, config.connect_timeout_s)

    @property
    def ranks_per_host(self) -> int:
        """How many ranks listen on this rank's address."""
        mine = self._addresses[self.rank][0]
        return sum(1 for host, _ in self._addresses if host == mine)

    def attach(self, endpoint: Endpoint) -> None:
        """Say who asks and answers."""
        self._endpoint = endpoint

    def connected_peers(self) -> Collection[int]:
        """Peers with an established connection."""
        return {c.peer for c in self._connections.values() if c.established}

    def idle(self) -> bool:
        """Whether no message is half-way out."""
        return not any(connection.busy for connection in self._connections.values())

    def fileno(self) -> int:
        """Becomes readable when ``wait`` would end. For whoever has more to wait for."""
        return self._epoll.fileno()

    def wake(self) -> None:
        """End a ``wait``."""
        with contextlib.suppress(BlockingIOError, OSError):  # a full pipe wakes as well; a closed one need not
            os.write(self._wake_write, b"w")

    # ----------------------------------------------------------------------------------------------------- progress

    def progress(self) -> bool:
        """One round: what epoll said, then read, then write, then timers."""
        endpoint = self._endpoint
        assert endpoint is not None, "attach() comes first"
        self._events.extend(self._epoll.poll(0))
        while self._events:
            self._on_event(*self._events.popleft())
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.readable:
                self._guard(connection, endpoint, now, reading=True)
        while self._unblocked:  # their peers need not be ready: what is half-way out may be the last there is
            connection = self._unblocked.pop()
            if self._routes.get(connection.peer) is connection:
                self._guard(connection, endpoint, now, reading=False)
        for peer in tuple(endpoint.ready_peers()):
            if peer in self._gone:
                while endpoint.next_message(peer) is not None:
                    pass  # nobody will read it
                continue
            route = self._route(peer, now)
            if route is not None and route.established and route.writable:
                self._guard(route, endpoint, now, reading=False)
        if now >= self._liveness.due_at:
            self._timers(endpoint, now)
        return self._more_to_do(endpoint)

    def _more_to_do(self, endpoint: Endpoint) -> bool:
        """Whether another round would move something, as far as epoll has said."""
        if any(c.readable for c in self._connections.values()) and endpoint.may_receive():
            return True
        routes = (self._routes.get(peer) for peer in endpoint.ready_peers())
        return any(route is not None and route.established and route.writable for route in routes)

    def wait(self, timeout_s: float, *, eager: bool = False) -> None:  # noqa: ARG002  (the kernel waits well)
        """Wait for epoll to say something; ``progress`` looks at it."""
        timeout_s = min(timeout_s, max(0.0, self._liveness.due_at - time.monotonic()))
        self._events.extend(self._epoll.poll(timeout_s))

    def _on_event(self, fd: int, events: int) -> None:
        if fd == self._wake_read:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        elif fd == self._listener.fileno():
            self._accept()
        else:
            connection = self._connections.get(fd)
            if connection is not None:
                if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP):
                    connection.readable = True
                if events & (select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR):
                    connection.writable = True
                    if connection.established and connection.busy:
                        self._unblocked.append(connection)
                if connection.connecting or not connection.established:
                    self._advance(connection)

    def _guard(self, connection: Connection, endpoint: Endpoint, now: float, *, reading: bool) -> None:
        """Read or write, and turn what goes wrong into the loss of the peer."""
        if not connection.established:
            return
        try:
            if reading:
                connection.read(endpoint, now)
            else:
                connection.write(endpoint, now)
        except ProtocolError as error:
            self._drop(connection)
            endpoint.peer_lost(connection.peer, f"protocol violation: {error}")
        except OSError as error:
            if not reading:
                # What the peer said before it went (GOODBYE, LOST) still counts; reading will come to the same end.
                connection.readable, connection.writable = True, False
                return
            self._drop(connection)
            self._ended[connection.peer] = now, f"its connection ended ({error})"
            self._liveness.due_at = now

    # -------------------------------------------------------------------------------------------------- connections

    def _accept(self) -> None:
        for _turn in range(-(-self._config.pending_handshakes_max // 4)):  # the rest after the peers had their turn
            accepted = self._door.accept(time.monotonic())
            if accepted is None:
                self._liveness.due_at = min(self._liveness.due_at, self._door.resume_at)
                return
            sock, origin = accepted
            pending = [c for c in self._connections.values() if not c.established and not c.outgoing]
            if len(pending) >= self._config.pending_handshakes_max:
                # The oldest goes: a peer needs but a moment for its handshake, so who idles cannot keep it out.
                self._drop(pending[0])
                if not pending[0].refused:
                    self._refused("too many connections that do not say who they are")
            handshake = Acceptor(self._identity, self.rank, self.world_size)
            self._adopt(sock, handshake, f"somebody at {origin[0]}", outgoing=False)

    def _adopt(self, sock: socket.socket, handshake: Connector | Acceptor, other: str, *, outgoing: bool) -> Connection:
        self._tune(sock)
        channel = None
        if self._credentials is not None:
            channel = TlsChannel(sock, self._credentials, other=other, accepting=not outgoing)
        connection = Connection(sock, handshake, outgoing=outgoing, now=time.monotonic(), channel=channel)
        self._connections[sock.fileno()] = connection
        events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
        self._epoll.register(sock.fileno(), events)
        return connection

    def _tune(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # not known to every kernel, and only an optimisation
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, self._config.notsent_lowat_bytes)

    def _choose_congestion(self, connection: Connection) -> None:
        """See ``TcpConfig.congestion``. Decided once the connection stands and its round trip was measured."""
        sock = connection.sock
        names = [self._config.congestion] if self._config.congestion else []
        if not names and _round_trip_s(sock) < _NEAR_S:
            names = ["cubic", "reno"]
        for name in names:
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            except OSError:
                continue
            return
        if self._config.congestion:
            _log.warning("congestion control %r is not available; the system's stays", self._config.congestion)

    def _route(self, peer: int, now: float) -> Connection | None:
        route = self._routes.get(peer)
        if route is not None or peer in self._gone or now < self._retry_at.get(peer, 0.0):
            return route
        for connection in self._connections.values():
            if connection.peer == peer and connection.established:
                self._routes[peer] = connection
                return connection
        return self._connect(peer, now)

    def _connect(self, peer: int, now: float) -> Connection | None:
        self._first_try.setdefault(peer, now)
        address = self._addresses[peer]
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if not is_out_of_descriptors(error):
                raise
            self._shortage.occurred(peer, error, now)
            self._try_again(peer, now)
            return None
        self._shortage.ended()
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._connect_failed(peer, OSError(code, os.strerror(code)), now)
            return None
        other = f"rank {peer} at {address[0]}:{address[1]}"
        connection = self._adopt(sock, Connector(self._identity, self.rank, peer), other, outgoing=True)
        connection.writable = False  # epoll says when the connection stands
        self._routes[peer] = connection
        return connection

    def _advance(self, connection: Connection) -> None:
        """Go on with connecting or with the handshake."""
        now = time.monotonic()
        if connection.refused:
            if connection.drain(_LINGER_READS_MAX):
                self._drop(connection)
            return
        try:
            if connection.connecting:
                if not connection.writable:
                    return
                connection.connected()
                self._choose_congestion(connection)
            connection.advance_handshake()
        except AuthenticationError as error:
            if not connection.refuse() or connection.outgoing or connection.drain(_LINGER_READS_MAX):
                self._drop(connection)
            if connection.outgoing:
                self._distrust = self._credentials is not None
                self._lose(connection.peer, str(error))
            else:
                self._refused(str(error))
        except OSError as error:
            self._drop(connection)
            if connection.outgoing:
                self._connect_failed(connection.peer, error, now)
            else:
                self._refused(str(error))
        if connection.established:
            if not connection.outgoing:
                self._choose_congestion(connection)
            self.counters.connections += 1
            self._refusals.pop(connection.peer, None)
            self._retry_at.pop(connection.peer, None)
            connection.pulse.heard_at = now

    def _refused(self, reason: str) -> None:
        self._last_refusal = reason
        count = self.counters.refused_connections = self.counters.refused_connections + 1
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th: strangers must not fill the log
            _log.warning("rank %d refused a connection (number %d): %s", self.rank, count, reason)

    def _connect_failed(self, peer: int, error: OSError, now: float) -> None:
        refusals = self._refusals[peer] = self._refusals.get(peer, 0) + 1
        refused = isinstance(error, ConnectionRefusedError)
        timeout_s = self._config.connect_timeout_s
        if isinstance(error, HungUp):
            timeout_s = min(timeout_s, _NO_TLS_S)
        too_late = now - self._first_try[peer] > timeout_s
        if (refused and refusals >= _REFUSALS_MAX) or too_late:
            host, port = self._addresses[peer][:2]
            hint = f" (this rank has refused a connection: {self._last_refusal})" if self._last_refusal else ""
            self._lose(peer, f"cannot connect to {host}:{port}: {error.strerror or error}{hint}")
        else:
            self._try_again(peer, now)

    def _try_again(self, peer: int, now: float) -> None:
        self._retry_at[peer] = now + _RETRY_S
        self._liveness.due_at = min(self._liveness.due_at, now + _RETRY_S)

    def _drop(self, connection: Connection) -> None:
        fd = connection.sock.fileno()
        if fd >= 0 and self._connections.get(fd) is connection:
            del self._connections[fd]
            self._epoll.unregister(fd)
        if self._routes.get(connection.peer) is connection:
            del self._routes[connection.peer]
            if connection.established:
                self._gone.add(connection.peer)
        connection.close()

    def _lose(self, peer: int, reason: str) -> None:
        self._gone.add(peer)
        assert self._endpoint is not None
        self._endpoint.peer_lost(peer, reason)

    # ------------------------------------------------------------------------------------------------------- timers

    def _timers(self, endpoint: Endpoint, now: float) -> None:
        config, liveness = self._config, self._liveness
        self._door.resume(now)
        connections = list(self._connections.values())
        liveness.look((connection.pulse for connection in connections), now)
        liveness.due_at = min(liveness.due_at, self._door.resume_at)
        for connection in connections:
            if connection.established:
                self._watch(connection, endpoint, now)
            elif now - connection.opened_at > (
                config.connect_timeout_s if connection.outgoing else config.handshake_timeout_s
            ):
                self._drop(connection)
                if connection.outgoing:
                    self._lose(connection.peer, f"no connection within {config.connect_timeout_s} s")
                elif not connection.refused:
                    self._refused("it did not say who it is in time")
        for peer, (ended_at, reason) in list(self._ended.items()):
            due = self._verdict_at(peer, ended_at)
            if now >= due:
                del self._ended[peer]
                self._lose(peer, reason)
            else:
                liveness.due_at = min(liveness.due_at, due)
        for peer in [peer for peer, due in self._retry_at.items() if now >= due]:
            del self._retry_at[peer]

    def _verdict_at(self, peer: int, ended_at: float) -> float:
        """When a peer counts as lost of which a connection ended at ``ended_at``.

        Two ranks that connect to each other at the same time have two connections. A peer that leaves ends both, and
        what it has said last may still be on its way on the other one, for as long as a slow link takes. So as long as
        something comes there the peer is not lost; heartbeats do not count, because a peer that leaves sends none.
        """
        others = [c.moved_at for c in self._connections.values() if c.peer == peer]
        return max(ended_at, *others) + self._config.silence_s if others else ended_at + _VERDICT_S

    def _watch(self, connection: Connection, endpoint: Endpoint, now: float) -> None:
        pulse = connection.pulse
        reason = self._liveness.verdict(pulse, now)
        if reason is not None and not connection.readable:
            self._drop(connection)
            self._gone.add(connection.peer)
            endpoint.peer_lost(connection.peer, reason)
            return
        if pulse.silence_s(now) > 2 * self._config.heartbeat_s:
            # Part of a body may lie there unreported: see Connection._settle. After the verdict above, not before:
            # by the next time reading has either found something or said that there is nothing.
            connection.readable = True
        if not connection.busy and self._liveness.is_beat_due(pulse, now):
            self.counters.heartbeats_sent += 1
            try:
                connection.queue_raw(self._heartbeat)
            except OSError:
                connection.readable = True  # reading will say what happened

    # -------------------------------------------------------------------------------------------------------- close

    def close(self, timeout_s: float) -> None:
        """Say that nothing more comes, wait for the others to have read it, close.

        A peer behind a slow link is waited for as long as it takes bytes, within ``timeout_s``: whatever it sends to a
        socket that is closed, were it a heartbeat, makes the kernel throw away what it has not sent.
        """
        deadline = time.monotonic() + timeout_s
        if self._distrust:
            self._show_certificate(min(deadline, time.monotonic() + _SHOW_S))
        self._door.close()
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
                self._epoll.poll(min(0.05, max(0.0, deadline - time.monotonic())))
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._epoll.close()
        # A late ``wake`` must not write to whatever has this number next.
        ends, self._wake_read, self._wake_write = (self._wake_read, self._wake_write), -1, -1
        for end in ends:
            os.close(end)

    def let_go(self) -> None:
        """Close the sockets of a forked child, so that their ends show when the parent dies."""
        for connection in self._connections.values():
            connection.close()
        self._door.let_go()
        self._epoll.close()

    def _show_certificate(self, deadline: float) -> None:
        """Answer those who connect now, so that they see what is wrong and not merely that nobody is there."""
        while time.monotonic() < deadline:
            for fd, events in (*self._events, *self._epoll.poll(max(0.0, deadline - time.monotonic()))):
                connection = self._connections.get(fd)
                if connection is None or not (connection.established or connection.outgoing):
                    self._on_event(fd, events)
            self._events.clear()
