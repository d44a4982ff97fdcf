"""How two ranks of one host meet: a Unix socket, the job's handshake, then memory and event counter change hands.

::

    lower rank                          higher rank
    HELLO                            ->
                                     <- CHALLENGE
    PROOF, card + two descriptors    ->
                                     <- card + two descriptors

The card says how the memory is laid out; it must be equal. The socket stays open and silent: its end means that the
other process has ended.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from typing import final

from totalreduce.foundation.errors import AuthenticationError, ProtocolError
from totalreduce.foundation.os_errors import out_of_descriptors
from totalreduce.transports.handshake import Acceptor, Connector
from totalreduce.transports.shm_memory import CARD_BYTES

__all__ = ["Meeting", "connect", "listen"]

_CREDENTIALS = struct.Struct("3i")


def listen() -> tuple[socket.socket, str]:
    """A listening Unix socket with a random abstract name, and its address as the others are told it.

    Raises:
        OSError: The system has no Unix sockets for us.
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


def connect(address: str) -> socket.socket:
    """A non-blocking connection; Unix sockets stand at once or not at all.

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


@final
class Meeting:
    """A connection on which nobody is believed yet.

    Attributes:
        sock: Non-blocking.
        peer: Rank at the other end; -1 until it has said so.
        outgoing: Whether this rank opened it.
        silent: Whether the other end has not said anything yet.
        opened_at: Seconds.
        descriptors: The peer's memory file and event counter, once ``advance`` has returned true; not closed by it.
    """

    def __init__(
        self, sock: socket.socket, handshake: Connector | Acceptor, card: bytes, ours: tuple[int, int], now: float
    ) -> None:
        """Take over a socket; ``ours``: the descriptors to hand over."""
        self.sock, self.opened_at = sock, now
        self.outgoing = isinstance(handshake, Connector)
        self.peer = handshake.peer
        self.silent = True
        self.descriptors: list[int] = []
        self._handshake, self._card, self._ours = handshake, card, ours
        self._data = b""

    def begin(self) -> None:
        """Say what the connecting side says first.

        Raises:
            AuthenticationError: Somebody else's process.
            OSError: The connection ended.
        """
        self._check_user()
        if isinstance(self._handshake, Connector):
            self.sock.sendall(self._handshake.outgoing)

    def advance(self) -> bool:
        """Go on as far as possible; returns whether the peer is one of us and has handed over its descriptors.

        Raises:
            AuthenticationError: The other end is not one of us.
            ProtocolError: It is, but its settings are others.
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
        socket.send_fds(self.sock, [self._card], self._ours)

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
        credentials = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.geteuid():
            raise AuthenticationError(f"a process of user {user} connected; this one belongs to user {os.geteuid()}")

    def close(self) -> None:
        """Close everything that was not handed on."""
        self.sock.close()
        descriptors, self.descriptors = self.descriptors, []
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
