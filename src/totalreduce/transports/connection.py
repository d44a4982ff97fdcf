"""One TCP connection: handshake first, then frames in both directions. Non-blocking; edge-triggered readiness.

Big bodies are received straight into place. Headers and small bodies come through a staging buffer, so that a small
message costs one system call and not two.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import termios
from collections.abc import Callable, Sequence
from typing import final

from totalreduce.foundation.errors import AuthenticationError, ProtocolError
from totalreduce.foundation.header import HEADER_BYTES, Frame, Header
from totalreduce.transports.base import Delivery, Endpoint, Outgoing
from totalreduce.transports.handshake import Acceptor, Connector
from totalreduce.transports.liveness import Pulse
from totalreduce.transports.tls import HIDDEN_BYTES_MAX, TlsChannel

__all__ = ["Connection"]

_STAGING_BYTES = 8 * 1024
#: How much may be received in one go before other work gets its turn.
_READ_QUANTUM_BYTES = 1 << 20
#: ``SO_RCVLOWAT`` while a large body arrives.
_WAKE_BYTES, _WAKE_BYTES_MIN = 256 * 1024, 32 * 1024
#: Small messages are gathered into one system call up to this.
_GATHER_BYTES = 32 * 1024
_GATHER_MESSAGES = 16
#: How a TLS record begins that says what is wrong.
_TLS_ALERT = b"\x15\x03"


@final
class Connection:
    """A socket, who is at the other end, and what is half-way in or out.

    Attributes:
        peer: Rank at the other end; -1 until it has said so.
        outgoing: Whether this rank opened it.
        established: Whether the handshake is complete.
        pulse: When something last arrived, and when something last left.
        moved_at: When something besides a heartbeat last arrived.
        refused: Whether it was refused, and only waits for the other end to have read why.
    """

    def __init__(
        self,
        sock: socket.socket,
        handshake: Connector | Acceptor,
        *,
        outgoing: bool,
        now: float,
        channel: TlsChannel | None = None,
    ) -> None:
        """Take over a non-blocking socket, and the channel over it if there is one."""
        self.sock, self.outgoing = sock, outgoing
        self.peer = handshake.peer if outgoing else -1
        self.connecting = outgoing
        self.established = self.refused = False
        self.readable, self.writable = False, outgoing
        self.opened_at = self.moved_at = now
        self.pulse = Pulse(now)
        self.ended: str | None = None
        self._handshake: Connector | Acceptor | None = handshake
        self._channel = channel
        self._send: Callable[[Sequence[memoryview | bytes]], int] = sock.sendmsg if channel is None else channel.send
        self._recv_into: Callable[[memoryview], int] = sock.recv_into if channel is None else channel.recv_into
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._begin = self._end = 0
        self._delivery: Delivery | None = None
        self._received = 0
        self._wake_bytes = 1
        self._raw_out = b""
        self._leaving: list[Outgoing] = []
        self._views: list[memoryview] = []

    @property
    def busy(self) -> bool:
        """Whether a message is half-way out."""
        return bool(self._views) or bool(self._raw_out)

    # ---------------------------------------------------------------------------------------------------- handshake

    def connected(self) -> None:
        """The TCP connection stands: begin the handshake.

        Raises:
            OSError: It does not stand.
        """
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        self.connecting = False
        if self._channel is None:
            self._begin_handshake()

    def advance_handshake(self) -> None:
        """Exchange what can be exchanged.

        Raises:
            AuthenticationError: The other end is not one of us.
            OSError: The connection ended.
        """
        if self._channel is not None and not self._channel.ready:
            try:
                self._channel.advance()
            except BlockingIOError:
                return
            assert self._handshake is not None
            self._handshake.bind(self._channel.binding())
            self.readable = True  # the channel may have more than the last message of the TLS handshake
            self._begin_handshake()
        self.flush_raw()
        while self._handshake is not None and not self._raw_out:
            handshake = self._handshake
            have = self._end - self._begin
            if have < handshake.needed:
                if not self._fill(handshake.needed - have):
                    return
                continue
            data = bytes(self._staging[self._begin : self._begin + handshake.needed])
            self._begin += handshake.needed
            self._raw_out = handshake.feed(data)
            self.flush_raw()
            if handshake.needed == 0:
                self.peer = handshake.peer
                self._handshake = None
        if self._handshake is None:
            self.established = True
            if self._channel is not None:
                self._channel.trusted = True

    def _begin_handshake(self) -> None:
        if isinstance(self._handshake, Connector):
            self._raw_out = self._handshake.outgoing
            self.flush_raw()

    def refuse(self) -> bool:
        """Tell the other end why, if there is a way to say it; returns whether it needs time to read that."""
        if self._channel is None:
            return False
        self._channel.say_why()
        self.shutdown()
        self.refused = True
        return True

    def flush_raw(self) -> None:
        """Send bytes that are not messages: handshake and heartbeats."""
        while self._raw_out and self.writable:
            try:
                sent = self._send([self._raw_out])
            except BlockingIOError:
                self.writable = False
                return
            self._raw_out = self._raw_out[sent:]

    def queue_raw(self, data: bytes) -> None:
        """Send ``data`` between two messages; only while nothing is half-way out."""
        self._raw_out += data
        self.flush_raw()

    # ------------------------------------------------------------------------------------------------------ writing

    def write(self, endpoint: Endpoint, now: float) -> bool:
        """Send messages until the socket is full or there is none; returns whether anything left.

        Raises:
            OSError: The connection ended.
        """
        progress = False
        self.flush_raw()
        while self.writable and not self._raw_out:
            if not self._views and not self._load(endpoint):
                break
            try:
                sent = self._send(self._views)
            except BlockingIOError:
                self.writable = False
                break
            progress = True
            self.pulse.spoke_at = now
            self._consume(sent)
            if not self._views:
                leaving, self._leaving = self._leaving, []
                for message in leaving:
                    endpoint.message_sent(message)
        return progress

    def _load(self, endpoint: Endpoint) -> bool:
        """Take the next message, and small ones after it as long as they stay small together."""
        total = 0
        while total < _GATHER_BYTES and len(self._leaving) < _GATHER_MESSAGES:
            message = endpoint.next_message(self.peer)
            if message is None:
                break
            self._leaving.append(message)
            self._views.append(memoryview(message.header))
            total += HEADER_BYTES
            if message.body is not None and len(message.body):
                self._views.append(message.body)
                total += len(message.body)
        return bool(self._views)

    def _consume(self, sent: int) -> None:
        views = self._views
        done = 0
        for view in views:
            if sent < len(view):
                break
            sent -= len(view)
            done += 1
        del views[:done]
        if sent:
            views[0] = views[0][sent:]

    # ------------------------------------------------------------------------------------------------------ reading

    def read(self, endpoint: Endpoint, now: float) -> bool:
        """Receive messages until the socket is empty or the quantum is used; returns whether anything came.

        Raises:
            OSError: The connection ended.
            ProtocolError: The peer sent what no correct peer sends.
        """
        quantum = _READ_QUANTUM_BYTES
        progress = False
        while quantum > 0:
            if self._delivery is not None:
                count = self._read_body(endpoint)
                self.moved_at = now
            elif self._end - self._begin >= HEADER_BYTES:
                if not self._read_header(endpoint, now):
                    break  # no scratch memory at the moment
                count = HEADER_BYTES
            else:
                count = self._fill(HEADER_BYTES)
            if not count:
                break
            progress = True
            quantum -= count
        if progress:
            self.pulse.heard_at = now
        if not self.readable:
            self._settle()
        return progress

    def _settle(self) -> None:
        """Before waiting: say how much of a large body must be there to be worth waking up for.

        Without it a body of 512 KiB at 1 Gbit/s wakes this process eight times, and several ranks on few cores have
        no time for that.
        """
        delivery = self._delivery
        left = len(delivery.view) - self._received if delivery is not None else 0
        if self._channel is not None:
            left -= HIDDEN_BYTES_MAX  # what the socket has given away already would be waited for in vain
        wanted = min(left, _WAKE_BYTES) if left > _WAKE_BYTES_MIN else 1
        if wanted != self._wake_bytes:
            self._wake_bytes = wanted
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _read_header(self, endpoint: Endpoint, now: float) -> bool:
        header = Header.unpack(self._staging[self._begin : self._begin + HEADER_BYTES])
        if header.frame is Frame.HEARTBEAT:
            if header.body_bytes:
                raise ProtocolError("a heartbeat with a body")
            self._begin += HEADER_BYTES
            return True
        if header.frame is Frame.DATA and not endpoint.may_receive():
            return False
        self._begin += HEADER_BYTES
        self.moved_at = now
        delivery = endpoint.accept(self.peer, header)
        staged = min(self._end - self._begin, header.body_bytes)
        if staged:
            delivery.view[:staged] = self._staging[self._begin : self._begin + staged]
            self._begin += staged
        if staged == header.body_bytes:
            endpoint.delivered(delivery)
        else:
            self._delivery, self._received = delivery, staged
        return True

    def _read_body(self, endpoint: Endpoint) -> int:
        delivery = self._delivery
        assert delivery is not None
        view = delivery.view
        count = self._receive(view[self._received :])
        self._received += count
        if self._received == len(view):
            self._delivery = None
            endpoint.delivered(delivery)
        return count

    def _fill(self, wanted: int) -> int:
        """Read into staging; at least ``wanted`` bytes would be welcome."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif len(self._staging) - self._end < wanted:
            rest = self._end - self._begin
            self._staging[:rest] = bytes(self._staging[self._begin : self._end])
            self._begin, self._end = 0, rest
        # During the handshake nothing beyond it is read, so that a stranger's bytes are never parsed as frames.
        limit = self._end + wanted if self._handshake is not None else len(self._staging)
        count = self._receive(self._staging[self._end : limit])
        self._end += count
        return count

    def _receive(self, view: memoryview) -> int:
        if not self.readable:
            return 0
        try:
            count = self._recv_into(view)
        except BlockingIOError:
            self.readable = False
            return 0
        if count == 0:
            if self._handshake is not None and self._channel is None and self._staging[self._begin :][:2] == _TLS_ALERT:
                who = f"rank {self.peer}" if self.outgoing else "somebody"
                raise AuthenticationError(f"{who} speaks TLS and this rank does not: set TLS on every rank or on none")
            raise ConnectionResetError("the connection was closed by the other end")
        return count

    @property
    def unread_bytes(self) -> int:
        """Bytes that were handed to the kernel, and that the other end's kernel has not acknowledged."""
        try:
            return int.from_bytes(fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except OSError:
            return 0

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def shutdown(self) -> None:
        """Say that nothing more will be sent."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError as error:  # it has ended already
            self.ended = self.ended or str(error)

    def drain(self, reads_max: int = sys.maxsize) -> bool:
        """Read and forget; returns whether the other end has closed too, or talks on after so many reads."""
        for _ in range(reads_max):
            try:
                if not self.sock.recv_into(self._staging):
                    break
            except BlockingIOError:
                return False
            except OSError:
                break
        return True
