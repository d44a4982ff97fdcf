"""How the ranks of one host meet: Unix sockets, the job's handshake, then memory and event counters change hands.

::

    lower rank                          higher rank
    HELLO                            ->
                                     <- CHALLENGE
    PROOF, card + two descriptors    ->
                                     <- card + two descriptors

The card says how the memory is laid out; it must be equal. The socket stays open and silent: its end means that the
other process has ended.

A rank connects to every higher rank at once, and every lower rank connects to it. A peer that cannot be reached, or
leaves before anything was exchanged, is *absent*. It is lost only when a message for it is ready, because it may have
left in good order.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.errors import AuthenticationError, ConfigurationError, ProtocolError
from totalreduce.foundation.os_errors import describe_error, is_out_of_descriptors, out_of_descriptors
from totalreduce.transports.base import TransportCounters
from totalreduce.transports.handshake import Acceptor, Connector, JobIdentity
from totalreduce.transports.listener import DescriptorShortage, Listener
from totalreduce.transports.shm_memory import CARD_BYTES, Mapping, Outbox

__all__ = ["Arrival", "Meetings", "listen", "process_and_user"]

_CREDENTIALS = struct.Struct("3i")
#: The time between two attempts to connect to a busy listener, or to ask whether a peer listens.
_RETRY_S = 0.1


def listen() -> tuple[socket.socket, str]:
    """Return a listening Unix socket with a random abstract name, and its address for the other ranks.

    Raises:
        OSError: The system allows no Unix sockets.
    """
    address = f"@totalreduce-{secrets.token_hex(16)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_name(address))
        sock.listen(1024)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock, address


def process_and_user(sock: socket.socket) -> tuple[int, int]:
    """Return the numbers of the process at the other end of a Unix socket, 0 if it is not visible, and of its user."""
    process, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return process, user


def _connect(address: str) -> socket.socket:
    """Return a non-blocking connection. A Unix socket is connected at once or not at all.

    Raises:
        BlockingIOError: The listener is busy; try again.
        OSError: There is no listener.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(_name(address))
    except OSError:
        sock.close()
        raise
    return sock


def _name(address: str) -> str:
    return "\0" + address.removeprefix("@")


class Arrival(NamedTuple):
    """A peer that has proved its membership, and the resources that it has handed over."""

    peer: int
    sock: socket.socket
    bell_fd: int
    mapping: Mapping


@final
class _Meeting:
    """A connection whose other end has not proved its membership yet."""

    def __init__(
        self, sock: socket.socket, handshake: Connector | Acceptor, card: bytes, own_fds: tuple[int, int], now: float
    ) -> None:
        """Take over a socket; ``own_fds`` are the descriptors to hand over."""
        self.sock = sock  #: The socket, non-blocking.
        self.opened_at = now  #: In seconds.
        self.outgoing = isinstance(handshake, Connector)  #: Whether this rank opened the connection.
        self.peer = handshake.peer  #: Rank at the other end; -1 until it has said so.
        self.silent = True  #: Whether the other end has not sent anything yet.
        #: The peer's memory file and event counter, once ``advance`` has returned true.
        self.descriptors: list[int] = []
        self._handshake, self._card, self._own_fds = handshake, card, own_fds
        self._data = b""

    def begin(self) -> None:
        """Send the first message of the connecting side.

        Raises:
            AuthenticationError: The process at the other end belongs to another user.
            OSError: The connection ended.
        """
        self._check_user()
        if isinstance(self._handshake, Connector):
            self.sock.sendall(self._handshake.outgoing)

    def advance(self) -> bool:
        """Go on as far as possible; returns whether the peer is a member and has handed over its descriptors.

        Raises:
            AuthenticationError: The other end is no member of this job.
            ProtocolError: It is one, but has other settings.
            OSError: The connection ended, or this process has no room for the descriptors.
        """
        while True:
            proving = self._handshake.needed > 0
            wanted = self._handshake.needed if proving else CARD_BYTES
            try:
                self._receive(wanted - len(self._data), descriptors=not proving)
            except BlockingIOError:
                return False
            if len(self._data) < wanted:
                continue
            data, self._data = self._data, b""
            if not proving:
                self._compare(data)
                if not self.outgoing:
                    self._hand_over()
                return True
            answer = self._handshake.feed(data)
            if answer:
                # A socket buffer holds far more than a handshake: this never sends in part.
                self.sock.sendall(answer)
            if self.outgoing:
                self._hand_over()
            self.peer = self._handshake.peer

    def _receive(self, wanted: int, *, descriptors: bool) -> None:
        if descriptors:
            data, received, _, _ = socket.recv_fds(self.sock, wanted, 2, socket.MSG_CMSG_CLOEXEC)
            self.descriptors += received
        else:
            data = self.sock.recv(wanted)
        if not data:
            raise ConnectionResetError("the connection was closed by the other end")
        self.silent = False
        self._data += data

    def _hand_over(self) -> None:
        socket.send_fds(self.sock, [self._card], self._own_fds)

    def _compare(self, card: bytes) -> None:
        if card != self._card:
            raise ProtocolError(
                f"rank {self.peer} lays out its shared memory differently; start all ranks with the same version and "
                "the same engine settings"
            )
        if len(self.descriptors) != 2:
            # The kernel leaves out, without an error, those for which this process has no room.
            shortage = out_of_descriptors()
            if shortage is not None:
                raise shortage
            raise ProtocolError(f"rank {self.peer} handed over {len(self.descriptors)} descriptors instead of 2")

    def _check_user(self) -> None:
        _, user = process_and_user(self.sock)
        if user != os.geteuid():
            raise AuthenticationError(f"a process of user {user} connected; this one belongs to user {os.geteuid()}")

    def close(self) -> None:
        """Close the socket and the descriptors that the peer has handed over."""
        self.sock.close()
        descriptors, self.descriptors = self.descriptors, []
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


@dataclass(slots=True)
class _Awaited:
    """A peer that has not arrived although a message for it is ready."""

    since: float  #: Since when, in seconds.
    asked_at: float  #: When this rank last asked whether the peer listens.


@final
class Meetings:
    """The listening socket of one rank, and all its connections whose other ends have not proved their membership."""

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str | None],
        sock: socket.socket,
        identity: JobIdentity,
        config: TcpConfig,
        outbox: Outbox,
        bell_fd: int,
        epoll: select.epoll,
        counters: TransportCounters,
    ) -> None:
        """Take over a listening socket. ``outbox`` and ``bell_fd`` are this rank's, for the peers."""
        self.arrived: list[Arrival] = []  #: Peers that have proved their membership. The caller takes them out.
        #: Peers that are no members, or have other settings: (rank, reason). The caller takes them out.
        self.failed: list[tuple[int, str]] = []
        self.absent: dict[int, str] = {}  #: Why a peer is absent, by rank.
        self._rank, self._addresses = rank, addresses
        self._identity, self._config = identity, config
        self._outbox, self._bell_fd = outbox, bell_fd
        self._meetings: dict[int, _Meeting] = {}
        self._met: set[int] = set()
        #: By peer: when to connect to it next.
        self._connect_at = {p: 0.0 for p, address in enumerate(addresses) if address is not None and p > rank}
        #: By peer that has not arrived although a message for it is ready.
        self._awaited: dict[int, _Awaited] = {}
        self._listener = Listener(rank, sock, epoll, counters)
        self._shortage = DescriptorShortage(rank, config.connect_timeout_s)

    def connect_to_all(self, now: float) -> None:
        """Connect to the peers to which it is time to connect."""
        for peer in [peer for peer, due in self._connect_at.items() if now >= due]:
            del self._connect_at[peer]
            try:
                sock = self._connect(peer, now)
            except OSError as error:
                self.absent[peer] = f"cannot connect to {self._addresses[peer]}: {error.strerror}"
            else:
                if sock is None:
                    self._connect_at[peer] = now + _RETRY_S
                else:
                    self._begin(sock, Connector(self._identity, self._rank, peer), now)

    def on_event(self, fd: int, now: float) -> bool:
        """Handle a readable socket; returns whether it is one of these."""
        if fd == self._listener.sock.fileno():
            self._accept(now)
        elif fd in self._meetings:
            self._advance(fd)
        else:
            return False
        return True

    def why_not(self, peer: int, now: float) -> str | None:
        """Return why a peer for which a message is ready will never arrive, or ``None`` as long as it may."""
        if peer in self.absent:
            return self.absent[peer]
        awaited = self._awaited.setdefault(peer, _Awaited(now, now))
        if peer < self._rank and now - awaited.asked_at > _RETRY_S:
            # It should have come. Does it still listen? An empty connection is ignored there.
            awaited.asked_at = now
            try:
                sock = self._connect(peer, now)
            except OSError as error:
                return f"cannot connect to {self._addresses[peer]}: {error.strerror}"
            if sock is not None:
                sock.close()
        timeout_s = self._config.connect_timeout_s
        if self._shortage.lasts:  # this rank cannot open a socket, which says nothing about the peer
            awaited.since = now
        elif now - awaited.since > timeout_s:
            return f"no connection within {timeout_s} s"
        return None

    def expire(self, now: float) -> None:
        """End the meetings that take too long, and accept again after a pause."""
        self._listener.resume(now)
        config = self._config
        for fd, meeting in list(self._meetings.items()):
            pending_s = now - meeting.opened_at
            if meeting.outgoing and pending_s > config.connect_timeout_s:
                self._refuse(fd, f"no connection within {config.connect_timeout_s} s")
            elif not meeting.outgoing and pending_s > config.handshake_timeout_s:
                self._refuse(fd, "it did not complete the handshake in time")

    def let_go(self) -> None:
        """Close the sockets in a forked child."""
        self._listener.let_go()
        for meeting in self._meetings.values():
            meeting.close()

    def close(self) -> None:
        """Close all that was not handed on."""
        self._listener.close()
        for meeting in self._meetings.values():
            meeting.close()
        self._meetings.clear()

    def _connect(self, peer: int, now: float) -> socket.socket | None:
        """Return a connection to a peer, or ``None`` if it must be tried again. Raises ``OSError``."""
        address = self._addresses[peer]
        assert address is not None
        try:
            sock = _connect(address)
        except BlockingIOError:
            return None
        except OSError as error:
            if not is_out_of_descriptors(error):
                raise
            self._shortage.occurred(peer, error, now)
            return None
        self._shortage.ended()
        return sock

    def _accept(self, now: float) -> None:
        while (accepted := self._listener.accept(now)) is not None:
            pending = [fd for fd, meeting in self._meetings.items() if not meeting.outgoing]
            if len(pending) >= self._config.pending_handshakes_max:
                # The oldest is refused: a peer's handshake takes but a moment, so idle strangers cannot keep it out.
                self._refuse(pending[0], "too many connections without a handshake")
            self._begin(accepted[0], Acceptor(self._identity, self._rank, len(self._addresses)), now)

    def _begin(self, sock: socket.socket, handshake: Connector | Acceptor, now: float) -> None:
        fd = sock.fileno()
        own_fds = self._outbox.fd, self._bell_fd
        self._meetings[fd] = _Meeting(sock, handshake, self._outbox.layout.card(), own_fds, now)
        self._listener.epoll.register(fd, select.EPOLLIN)
        self._advance(fd, begin=True)

    def _advance(self, fd: int, *, begin: bool = False) -> None:
        meeting = self._meetings[fd]
        try:
            if begin:
                meeting.begin()
            if not meeting.advance():
                return
            mapping = Mapping(meeting.descriptors[0], self._outbox.layout)
        except (AuthenticationError, ProtocolError) as error:
            self._refuse(fd, str(error))
            return
        except OSError as error:
            if is_out_of_descriptors(error):  # the peer is not to blame
                raise ConfigurationError(
                    f"rank {self._rank} cannot share memory with rank {meeting.peer}: {describe_error(error)}"
                ) from error
            self._ended(fd, str(error))
            return
        peer = meeting.peer
        if self._addresses[peer] is None or peer in self._met or (peer > self._rank) != meeting.outgoing:
            self._refuse(fd, f"rank {peer} is not expected here, or not again")
            return
        self._met.add(peer)
        del self._meetings[fd]
        memory_fd, bell_fd = meeting.descriptors
        os.close(memory_fd)
        os.set_blocking(bell_fd, False)
        self._listener.counters.connections += 1
        self.arrived.append(Arrival(peer, meeting.sock, bell_fd, mapping))

    def _refuse(self, fd: int, reason: str) -> None:
        """End a meeting for a reason of this rank."""
        meeting = self._remove(fd)
        if meeting.outgoing:
            self.failed.append((meeting.peer, reason))
        else:
            self._listener.refused(reason)

    def _ended(self, fd: int, reason: str) -> None:
        """Note that a meeting has ended by itself."""
        meeting = self._remove(fd)
        if meeting.outgoing:
            self.absent[meeting.peer] = f"its connection ended ({reason})"
        elif not meeting.silent:  # a peer that only asks whether this rank listens says nothing
            self._listener.refused(reason)

    def _remove(self, fd: int) -> _Meeting:
        meeting = self._meetings.pop(fd)
        self._listener.epoll.unregister(fd)
        meeting.close()
        return meeting
