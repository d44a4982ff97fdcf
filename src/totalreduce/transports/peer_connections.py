"""The TCP connections of one rank: opened on first use, accepted, authenticated, tried again, and closed."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.errors import AuthenticationError
from totalreduce.foundation.os_errors import is_out_of_descriptors
from totalreduce.foundation.unreachable import Obstacle, describe_unreachable
from totalreduce.transports.connection import Connection, tcp_info
from totalreduce.transports.handshake import Acceptor, Connector, JobIdentity
from totalreduce.transports.listener import DescriptorShortage, Listener
from totalreduce.transports.liveness import Liveness
from totalreduce.transports.tls import HungUp, TlsChannel, TlsCredentials

__all__ = ["PeerConnections"]

_log = logging.getLogger(__name__)

#: Round trips shorter than this are a local network (or one host).
_NEAR_S = 0.005
#: So many refused attempts mean that the peer is gone: it listens before its address is known.
_REFUSALS_MAX = 3
_RETRY_S = 0.1
#: A peer that hangs up when TLS begins does not use TLS, unless it was short of room for handshakes for a moment.
_NO_TLS_S = 1.0
#: How often a refused connection is read from, so that unread bytes do not turn the TLS alert into a reset.
_LINGER_READS_MAX = 16
_PORTS = "docs/where.md, 'Firewalls and ports'"
#: What to check for each cause of a connection to a rank that could not be made.
_ADVICE = {
    Obstacle.NOBODY_LISTENS: (
        "It has listened there when it joined: look for its end in its output. If it still runs, another host has this "
        "address in this network (TOTALREDUCE_INTERFACE on its host chooses the network), or a firewall refuses "
        f"connections ({_PORTS})"
    ),
    Obstacle.NO_ANSWER: (
        f"A firewall may drop what is sent to this port ({_PORTS}), the host may be off, or this is its address in a "
        "network that this host cannot use (TOTALREDUCE_INTERFACE on its host chooses the network)"
    ),
    Obstacle.NO_ROUTE: (
        "It has told an address of a network that this host cannot reach: set TOTALREDUCE_INTERFACE on its host to the "
        "interface of a network that all hosts share, and check with `ip route get` here. A firewall can answer so, "
        f"too ({_PORTS})"
    ),
}
_EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


@dataclass(slots=True)
class _Attempts:
    """The attempts to connect to one peer."""

    first_at: float  #: When the first one began, in seconds.
    retry_at: float = 0.0  #: When the next one may begin.
    failures: int = 0  #: How many have failed since the last success.


@final
class PeerConnections:
    """All connections of one rank, established or not."""

    def __init__(
        self,
        rank: int,
        addresses: Sequence[tuple[str, int]],
        listener: Listener,
        identity: JobIdentity,
        config: TcpConfig,
        credentials: TlsCredentials | None,
        liveness: Liveness,
        lose: Callable[[int, str], None],
    ) -> None:
        """Begin without a connection; for the arguments see ``TcpTransport``.

        ``liveness``: its ``due_at`` is brought forward to attempts that are to be repeated. ``lose`` is called with a
        peer that cannot be reached, and the reason.
        """
        self.open: dict[int, Connection] = {}  #: By descriptor.
        #: By peer, the connection that this rank's messages take. It is chosen once and never changed.
        self.routes: dict[int, Connection] = {}
        #: By peer, the connection that the messages of large operations take. It is chosen once and never changed. If
        #: no second connection can be made, it is the same as the first.
        self.bulk_routes: dict[int, Connection] = {}
        self.gone: set[int] = set()  #: Peers that are lost, or whose connection was closed.
        self.listener = listener  #: The listening socket.
        self.distrust = False  #: Whether this rank and another one did not accept each other's certificates.
        self._rank, self._addresses = rank, addresses
        self._identity, self._config, self._credentials = identity, config, credentials
        self._liveness, self._lose = liveness, lose
        self._attempts: dict[int, _Attempts] = {}
        self._shortage = DescriptorShortage(rank, config.connect_timeout_s)

    def find_route(self, peer: int, now: float) -> Connection | None:
        """Return a new route to ``peer``, established or not; ``None`` if it is too early to try again."""
        attempts = self._attempts.get(peer)
        if attempts is not None and now < attempts.retry_at:
            return None
        for connection in self._established(peer):
            self.routes[peer] = connection
            return connection
        return self._connect(peer, now, self.routes)

    def find_bulk_route(self, peer: int, now: float) -> Connection | None:
        """Return a new route for bulk to ``peer``, established or not; ``None`` until the first route is established.

        The second connection is made after the first one, so that each rank can use for bulk the connection that the
        other one has opened for its own messages.
        """
        first = self.routes.get(peer) or self.find_route(peer, now)
        if first is None or not first.established:
            return None
        for connection in self._established(peer):
            if connection is not first:
                self.bulk_routes[peer] = connection
                return connection
        return self._connect(peer, now, self.bulk_routes)

    def is_last(self, peer: int) -> bool:
        """Whether there is one connection to a peer, and no other one on which its messages could still arrive."""
        return len(self._established(peer)) == 1

    def accept(self) -> None:
        """Accept the connections that wait, or some of them: the rest after the peers had their turn."""
        for _turn in range(-(-self._config.pending_handshakes_max // 4)):
            accepted = self.listener.accept(time.monotonic())
            if accepted is None:
                self._liveness.due_at = min(self._liveness.due_at, self.listener.resume_at)
                return
            sock, origin = accepted
            pending = [c for c in self.open.values() if not c.established and not c.opened_here]
            if len(pending) >= self._config.pending_handshakes_max:
                # The oldest is refused: a peer's handshake takes but a moment, so idle strangers cannot keep it out.
                self.drop(pending[0])
                if not pending[0].refused:
                    self.listener.refused("too many connections without a handshake")
            self._add(sock, Acceptor(self._identity, self._rank, len(self._addresses)), f"a process at {origin[0]}")

    def advance(self, connection: Connection) -> None:
        """Go on with connecting, with the handshake, or with the end of a refused connection."""
        now = time.monotonic()
        if connection.refused:
            if connection.drain(_LINGER_READS_MAX):
                self.drop(connection)
            return
        try:
            if connection.connecting:
                if not connection.outgoing.writable:
                    return
                connection.connected()
                self._choose_congestion(connection)
            connection.advance_handshake()
        except AuthenticationError as error:
            if not connection.refuse() or connection.opened_here or connection.drain(_LINGER_READS_MAX):
                self.drop(connection)
            if connection.opened_here:
                self.distrust = self._credentials is not None
                self._lose(connection.peer, str(error))
            else:
                self.listener.refused(str(error))
        except OSError as error:
            self.drop(connection)
            if connection.opened_here:
                self._connect_failed(connection.peer, error, now)
            else:
                self.listener.refused(str(error))
        if connection.established:
            if not connection.opened_here:
                self._choose_congestion(connection)
            self.listener.counters.connections += 1
            attempts = self._attempts.get(connection.peer)
            if attempts is not None:
                attempts.retry_at, attempts.failures = 0.0, 0
            connection.pulse.heard_at = now

    def expire(self, connection: Connection, now: float) -> None:
        """Drop a connection that was not established in time."""
        config = self._config
        timeout_s = config.connect_timeout_s if connection.opened_here else config.handshake_timeout_s
        if now - connection.opened_at <= timeout_s:
            return
        self.drop(connection)
        if connection.opened_here:
            if not self._share_route(connection.peer):
                self._lose(connection.peer, self._explain_silence(connection, timeout_s))
        elif not connection.refused:
            self.listener.refused("it did not complete the handshake in time")

    def drop(self, connection: Connection) -> None:
        """Close a connection. If this rank's messages took it, the peer is gone."""
        fd = connection.sock.fileno()
        if fd >= 0 and self.open.get(fd) is connection:
            del self.open[fd]
            self.listener.epoll.unregister(fd)
        for routes in (self.routes, self.bulk_routes):
            if routes.get(connection.peer) is connection:
                del routes[connection.peer]
                if connection.established:
                    self.gone.add(connection.peer)
        if connection.established:
            for other in self._established(connection.peer):
                other.incoming.another_has_ended()
        connection.close()

    def _established(self, peer: int) -> list[Connection]:
        return [connection for connection in self.open.values() if connection.peer == peer and connection.established]

    def _add(self, sock: socket.socket, handshake: Connector | Acceptor, other: str) -> Connection:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = None
        if self._credentials is not None:
            accepting = isinstance(handshake, Acceptor)
            channel = TlsChannel(sock, self._credentials, other=other, accepting=accepting)
        lowat_bytes = self._config.notsent_lowat_bytes
        connection = Connection(sock, handshake, channel, time.monotonic(), notsent_lowat_bytes=lowat_bytes)
        self.open[sock.fileno()] = connection
        self.listener.epoll.register(sock.fileno(), _EVENTS)
        return connection

    def _choose_congestion(self, connection: Connection) -> None:
        """Choose the congestion control of a connection whose round trip was measured; see ``TcpConfig.congestion``."""
        sock = connection.sock
        names = [self._config.congestion] if self._config.congestion else []
        information = None if names else tcp_info(sock)
        if information is not None and information[1] < _NEAR_S:
            names = ["cubic", "reno"]
        for name in names:
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            except OSError:
                continue
            return
        if self._config.congestion:
            _log.warning("congestion control %r is not available; the system's stays", self._config.congestion)

    def _connect(self, peer: int, now: float, routes: dict[int, Connection]) -> Connection | None:
        """Open a connection as one of the ``routes``; ``None`` if that has failed."""
        self._attempts.setdefault(peer, _Attempts(now))
        address = self._addresses[peer]
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if not is_out_of_descriptors(error):
                raise
            if self._share_route(peer):
                return self.bulk_routes[peer]
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
        connection = self._add(sock, Connector(self._identity, self._rank, peer), other)
        routes[peer] = connection
        return connection

    def _share_route(self, peer: int) -> bool:
        """Send bulk by the first connection if there is one, because a second one cannot be made."""
        first = self.routes.get(peer)
        if first is None or not first.established:
            return False
        self.bulk_routes[peer] = first
        return True

    def _connect_failed(self, peer: int, error: OSError, now: float) -> None:
        if self._share_route(peer):
            return
        attempts = self._attempts[peer]
        attempts.failures += 1
        timeout_s = self._config.connect_timeout_s
        if isinstance(error, HungUp):
            timeout_s = min(timeout_s, _NO_TLS_S)
        refused = isinstance(error, ConnectionRefusedError) and attempts.failures >= _REFUSALS_MAX
        if refused or now - attempts.first_at > timeout_s:
            refusal = self.listener.last_refusal
            hint = f" (this rank has refused a connection: {refusal})" if refusal else ""
            self._lose(peer, self._explain_failure(peer, error) + hint)
        else:
            self._try_again(peer, now)

    def _explain_failure(self, peer: int, error: OSError) -> str:
        host, port = self._addresses[peer][:2]
        return f"cannot connect to rank {peer}: {describe_unreachable(error, host, port, _ADVICE)}"

    def _explain_silence(self, connection: Connection, timeout_s: float) -> str:
        """Return why a connection that was opened here was not established in time."""
        peer = connection.peer
        if connection.connecting:
            return self._explain_failure(peer, TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
        host, port = self._addresses[peer][:2]
        return (
            f"cannot connect to rank {peer}: a process listens at port {port} of {host}, but has not answered within "
            f"{timeout_s:g} s. Rank {peer} may be stopped (a debugger, SIGSTOP, no memory), or another program has its "
            "address"
        )

    def _try_again(self, peer: int, now: float) -> None:
        self._attempts[peer].retry_at = now + _RETRY_S
        self._liveness.due_at = min(self._liveness.due_at, now + _RETRY_S)
