"""One TCP connection: handshake first, then messages in both directions. Non-blocking; edge-triggered readiness.

Large bodies are received straight into their destination. Headers and small bodies come through a staging buffer, so
that a small message costs one system call and not two. A large message goes into the socket as a whole.

A heartbeat is a single byte between two messages. The receiver is woken for a header and not for so few bytes: it asks
the kernel when something last arrived (``Connection.listen_for_beats``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import sys
import termios
from collections.abc import Callable, Sequence
from typing import final

from totalreduce.foundation.errors import AuthenticationError
from totalreduce.foundation.header import HEADER_BYTES, Frame, Header
from totalreduce.transports.base import Delivery, Endpoint, Outgoing
from totalreduce.transports.handshake import Acceptor, Connector
from totalreduce.transports.liveness import Pulse
from totalreduce.transports.tls import HIDDEN_BYTES_MAX, TlsChannel

__all__ = ["BEAT", "Connection", "UnsentLimit", "tcp_info"]

#: A heartbeat. No header begins with this byte.
BEAT = b"+"
_BEAT = BEAT[0]
#: Of ``struct tcp_info``: eight bytes of flags, fifteen 32-bit numbers, of which one is ``tcpi_last_data_recv``, in
#: milliseconds, and ``tcpi_rtt``, in microseconds.
_TCP_INFO = struct.Struct("52xI12xI")
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_NO_LIMIT = 1 << 30

_STAGING_BYTES = 8 * 1024
#: How much may be received in one go before other work gets its turn.
_READ_QUANTUM_BYTES = 1 << 20
#: ``SO_RCVLOWAT`` while a large body arrives: at most a segment (``engine.planner`` has the longest ones).
_WAKE_BYTES, _WAKE_BYTES_MIN = 1024 * 1024, 32 * 1024
#: Small messages are gathered into one system call up to this.
_GATHER_BYTES = 32 * 1024
_GATHER_MESSAGES = 16
#: The first bytes of a TLS record that reports an error.
_TLS_ALERT = b"\x15\x03"


@final
class UnsentLimit:
    """The limit for the bytes that wait in a socket, which decides when the socket takes the next message.

    A message that is much longer goes into the socket as a whole. Nothing may overtake its end in any case, and a
    socket that takes it in parts wakes this process for each of them. The next message waits until the limit is kept
    again, and is chosen then.
    """

    def __init__(self, sock: socket.socket, num_bytes: int) -> None:
        """Set the limit (``TCP_NOTSENT_LOWAT``); the kernel asks for more bytes when half of it is left."""
        self._sock = sock
        self.num_bytes = num_bytes  #: The limit.
        self.long_bytes = num_bytes + num_bytes // 2  #: Longer messages go into the socket as a whole.
        self._poll = select.poll()
        self._poll.register(sock, select.POLLOUT)
        self._set(num_bytes)

    def is_long(self, views: Sequence[memoryview | bytes]) -> bool:
        """Return whether so many bytes go into the socket without the limit."""
        return sum(map(len, views)) > self.long_bytes

    def send(self, views: Sequence[memoryview | bytes]) -> tuple[int, bool]:
        """Send without the limit; return how many bytes were taken, and whether the socket takes more with it.

        If not, the epoll object will report when it does.

        Raises:
            OSError: As for ``socket.sendmsg``.
        """
        self._set(_NO_LIMIT)
        try:
            sent = self._sock.sendmsg(views)
        finally:
            self._set(self.num_bytes)
        return sent, bool(self._poll.poll(0))  # the kernel reports an end of waiting only to those that have asked

    def _set(self, num_bytes: int) -> None:
        with contextlib.suppress(OSError):  # not known to every kernel, and only an optimisation
            self._sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, num_bytes)


@final
class _SendingHalf:
    """The sending half of a connection."""

    def __init__(
        self,
        send: Callable[[Sequence[memoryview | bytes]], int],
        pulse: Pulse,
        limit: UnsentLimit | None,
        *,
        counts_tell: bool,
    ) -> None:
        """Begin as a socket that takes no bytes.

        Args:
            send: Sends bytes; returns how many.
            pulse: When something last left.
            limit: Lets long messages into the socket as a whole; ``None``: in parts.
            counts_tell: ``send`` sends fewer bytes than it was given only where the socket is full.
        """
        self.writable = False  #: Whether the socket may take bytes; the epoll object says so.
        #: Whether a message of the relay is half-way out: nothing may be sent here before its end.
        self.is_lent = False
        self._limit = limit
        self._send, self._pulse, self._counts_tell = send, pulse, counts_tell
        self._raw = b""
        self._messages: list[Outgoing] = []
        self._views: list[memoryview] = []

    @property
    def busy(self) -> bool:
        """Whether messages were taken that have not been reported as sent."""
        return self.is_lent or self.has_messages

    @property
    def may_write(self) -> bool:
        """Whether messages of this half can leave now."""
        return self.writable and not self.is_lent

    @property
    def has_messages(self) -> bool:
        """Whether messages were taken here that have not been reported as sent."""
        return bool(self._messages) or bool(self._raw)

    @property
    def is_half_way(self) -> bool:
        """Whether the messages that were taken need nothing but room in the socket."""
        return bool(self._views) and not self._raw

    def send_raw(self, data: bytes = b"") -> bool:
        """Send bytes of the handshake, or a heartbeat, only between messages; returns whether all such bytes have left.

        Raises:
            OSError: The connection ended.
        """
        self._raw += data
        while self._raw and self.writable:
            try:
                sent = self._send([self._raw])
            except BlockingIOError:
                self.writable = False
                break
            self._raw = self._raw[sent:]
        return not self._raw

    def write(
        self, peer: int, endpoint: Endpoint, now: float, *, bulk: bool, may_load: Callable[[], bool] | None = None
    ) -> None:
        """Send what was taken, then messages of one kind (see ``Endpoint``), until the socket is full or there is none.

        ``may_load``: whether another message may be taken, asked before each; ``None``: any number.

        Raises:
            OSError: The connection ended.
        """
        if self.is_lent:
            return
        if self._raw:
            self.send_raw()
        while self.writable and not self._raw:
            if not self._messages:
                if may_load is not None and not may_load():
                    break
                if not self._load(peer, endpoint, bulk=bulk, most=1 if may_load is not None else _GATHER_MESSAGES):
                    break
            if self.write_on(now):
                messages, self._messages = self._messages, []
                for message in messages:
                    endpoint.message_sent(message)

    def write_on(self, now: float) -> bool:
        """Send what the socket takes of the messages that were taken; returns whether they have left.

        Raises:
            OSError: The connection ended.
        """
        if self._views:
            has_room = True
            try:
                if self._limit is not None and self._limit.is_long(self._views):
                    sent, has_room = self._limit.send(self._views)
                else:
                    sent = self._send(self._views)
            except BlockingIOError:
                self.writable = False
                return False
            self._pulse.spoke_at = now
            self._consume(sent)
            # Otherwise the epoll object says when there is room again.
            self.writable = has_room and not (self._views and self._counts_tell)
        return not self._views

    def keep_rest(self, is_withdrawn: Callable[[Outgoing], bool]) -> None:
        """Copy what has not left of the messages that were taken, if the operation of one of them has failed."""
        if self._views and any(map(is_withdrawn, self._messages)):
            self._views = [memoryview(bytes(view)) for view in self._views]

    def _load(self, peer: int, endpoint: Endpoint, *, bulk: bool, most: int) -> bool:
        """Take the next message, and small ones after it as long as they stay small together, ``most`` at most."""
        total = 0
        while total < _GATHER_BYTES and len(self._messages) < most:
            message = endpoint.next_message(peer, bulk=bulk)
            if message is None:
                break
            self._messages.append(message)
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


@final
class _ReceivingHalf:
    """The receiving half of a connection."""

    def __init__(self, sock: socket.socket, channel: TlsChannel | None, pulse: Pulse, now: float) -> None:
        self.readable = False  #: Whether the socket may have bytes.
        self.moved_at = now  #: When something besides a heartbeat last arrived.
        #: Whether the next message is a GOODBYE that is not read yet, because messages that the peer has sent before it
        #: may still arrive on another connection.
        self.holds_farewell = False
        self.is_ending = False  #: Whether the stream ends, or has an error.
        self._sock, self._pulse = sock, pulse
        self._recv_into: Callable[[memoryview], int] = sock.recv_into if channel is None else channel.recv_into
        #: TLS may hold so many bytes that the socket no longer has: then a short count does not say that it is empty.
        self._hidden_bytes = 0 if channel is None else HIDDEN_BYTES_MAX
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._begin = self._end = 0
        self._delivery: Delivery | None = None
        self._received = 0
        self.wake_bytes = 1  #: The low-water mark of the socket.
        self.longest_bytes = 0  #: The length of the longest body of a data message so far.

    @property
    def is_mid_body(self) -> bool:
        """Whether a part of a body has been read."""
        return self._delivery is not None

    @property
    def is_between_messages(self) -> bool:
        """Whether no byte of a message has been read that was not delivered."""
        return self._delivery is None and self._begin == self._end and not self.holds_farewell

    def give(self, data: memoryview) -> None:
        """Have bytes of a header read next that the relay has read. This half is between two messages."""
        self._staging[: len(data)] = data
        self._begin, self._end = 0, len(data)
        self.readable = True

    def read_to_the_end(self) -> None:
        """Note that the stream ends, or has an error: reading goes on until it comes to that."""
        self.readable = self.is_ending = True

    def another_has_ended(self) -> None:
        """Note that another connection to the same peer has ended: a GOODBYE may be due."""
        self.readable = self.readable or self.holds_farewell

    def take(self, count: int) -> bytes | None:
        """Return the next ``count`` bytes, or ``None`` if they have not all arrived. Later bytes are not read.

        During the handshake nothing else is read, so that bytes of a stranger are never parsed as messages.

        Raises:
            OSError: The connection ended.
        """
        while self._end - self._begin < count:
            wanted = count - (self._end - self._begin)
            if not self._fill(wanted, limit=wanted):
                return None
        begin, self._begin = self._begin, self._begin + count
        return bytes(self._staging[begin : self._begin])

    def is_tls_alert(self) -> bool:
        """Whether the bytes that were not taken are a TLS record that reports an error."""
        return self._staging[self._begin : self._end][:2] == _TLS_ALERT

    def read(
        self, peer: int, endpoint: Endpoint, now: float, *, is_last: Callable[[int], bool], exactly: bool = False
    ) -> None:
        """Receive messages until the socket is empty or the quantum is used up.

        ``is_last(peer)``: whether this is the only connection to the peer that is left. A GOODBYE waits for that.
        ``exactly``: at most one message, and no byte after it.

        Raises:
            OSError: The connection ended.
            ProtocolError: The peer sent what no correct peer sends.
        """
        quantum = _READ_QUANTUM_BYTES
        while quantum > 0:
            if self._delivery is not None:
                count = self._read_body(endpoint)
                self.moved_at = now
            elif self._skip_beats() >= HEADER_BYTES:
                if not self._read_header(peer, endpoint, now, is_last):
                    break  # no scratch memory at the moment, or a GOODBYE that must wait
                count = HEADER_BYTES
            else:
                limit = HEADER_BYTES - (self._end - self._begin) if exactly else _STAGING_BYTES
                count = self._fill(HEADER_BYTES, limit=limit)
            if not count:
                break
            quantum -= count
            if exactly and self.is_between_messages:
                break
        if quantum < _READ_QUANTUM_BYTES:
            self._pulse.heard_at = now
        if not self.readable:
            self._set_low_water_mark()

    def _skip_beats(self) -> int:
        """Skip heartbeats before a header; return how many bytes of a message are in the staging buffer."""
        while self._begin < self._end and self._staging[self._begin] == _BEAT:
            self._begin += 1
        return self._end - self._begin

    def _set_low_water_mark(self) -> None:
        """Tell the kernel how much of a header or of a large body must arrive before it reports the socket as readable.

        Without this a body of 512 KiB at 1 Gbit/s wakes this process eight times, and several ranks on few cores have
        no time for that; and every rank would be woken for every heartbeat.
        """
        delivery = self._delivery
        if delivery is None:
            wanted = max(1, HEADER_BYTES - (self._end - self._begin) - self._hidden_bytes)
        else:
            # The TLS library may hold some bytes already, and then they never come to the socket.
            left = len(delivery.view) - self._received - self._hidden_bytes
            wanted = min(left, _WAKE_BYTES) if left > _WAKE_BYTES_MIN else 1
        if wanted != self.wake_bytes:
            self.wake_bytes = wanted
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _read_header(self, peer: int, endpoint: Endpoint, now: float, is_last: Callable[[int], bool]) -> bool:
        header = Header.unpack(self._staging[self._begin : self._begin + HEADER_BYTES])
        if header.frame is Frame.DATA and not endpoint.may_receive():
            return False
        if header.frame is Frame.GOODBYE:
            self.holds_farewell = not is_last(peer)
            if self.holds_farewell:
                self.readable = False  # until another connection has ended (``another_has_ended``)
                return False
        self._begin += HEADER_BYTES
        self.moved_at = now
        if header.frame is Frame.DATA:
            self.longest_bytes = max(self.longest_bytes, header.body_bytes)
        delivery = endpoint.accept(peer, header)
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

    def _fill(self, wanted: int, *, limit: int) -> int:
        """Read at most ``limit`` bytes into the staging buffer, which gets room for ``wanted`` bytes."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif len(self._staging) - self._end < wanted:
            rest = self._end - self._begin
            self._staging[:rest] = bytes(self._staging[self._begin : self._end])
            self._begin, self._end = 0, rest
        count = self._receive(self._staging[self._end : self._end + limit])
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
            raise ConnectionResetError("the connection was closed by the other end")
        if count < len(view) and not self._hidden_bytes and not self.is_ending:
            self.readable = False  # the socket is empty; the epoll object reports what comes next
        return count


@final
class Connection:
    """A socket, its two halves, and the rank at the other end.

    Attributes:
        sock: The socket.
        peer: Rank at the other end; -1 until it has said so.
        opened_here: Whether this rank opened the connection.
        connecting: Whether the TCP connection is not established yet.
        established: Whether the handshake is complete.
        refused: Whether this rank has refused the connection, and only waits until the other end has read why.
        opened_at: In seconds.
        pulse: When something last arrived, and when something last left.
        outgoing: The sending half.
        incoming: The receiving half.
        unsent_limit: The limit for unsent bytes; ``None`` if the connection is encrypted.
    """

    def __init__(
        self,
        sock: socket.socket,
        handshake: Connector | Acceptor,
        channel: TlsChannel | None,
        now: float,
        *,
        notsent_lowat_bytes: int,
    ) -> None:
        """Take over a non-blocking socket, and the TLS channel over it if there is one.

        ``notsent_lowat_bytes``: see ``TcpConfig``.
        """
        self.sock = sock
        self.opened_here = self.connecting = isinstance(handshake, Connector)
        self.peer = handshake.peer
        self.established = self.refused = False
        self.opened_at = now
        self.pulse = Pulse(now)
        send = sock.sendmsg if channel is None else channel.send
        limit = UnsentLimit(sock, notsent_lowat_bytes)
        self.unsent_limit = limit if channel is None else None
        self.outgoing = _SendingHalf(send, self.pulse, self.unsent_limit, counts_tell=channel is None)
        self.incoming = _ReceivingHalf(sock, channel, self.pulse, now)
        self._handshake: Connector | Acceptor | None = handshake
        self._channel = channel
        #: The number of unread bytes, as it was last; where the system does not say when something arrived.
        self._unread = bytes(4)

    # ---------------------------------------------------------------------------------------------------- handshake

    def connected(self) -> None:
        """Begin the handshake: the TCP connection is established, or has failed. Raises ``OSError``: it has failed."""
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        self.connecting = False
        if self._channel is None:
            self._begin_handshake()

    def advance_handshake(self) -> None:
        """Go on with the handshake as far as the other end has come.

        Raises:
            AuthenticationError: The other end is no member of this job.
            OSError: The connection ended.
        """
        channel = self._channel
        if channel is not None and not channel.ready:
            try:
                channel.advance()
            except BlockingIOError:
                return
            assert self._handshake is not None
            self._handshake.bind(channel.binding())
            self.incoming.readable = True  # the channel may have more than the last message of the TLS handshake
            self._begin_handshake()
        while self.outgoing.send_raw() and self._handshake is not None:
            handshake = self._handshake
            try:
                data = self.incoming.take(handshake.needed)
            except ConnectionResetError as error:
                if channel is not None or not self.incoming.is_tls_alert():
                    raise
                who = f"rank {self.peer}" if self.opened_here else "a process"
                raise AuthenticationError(
                    f"{who} speaks TLS and this rank does not: set TLS on every rank or on none"
                ) from error
            if data is None:
                return
            self.outgoing.send_raw(handshake.feed(data))
            if handshake.needed == 0:
                self.peer = handshake.peer
                self._handshake = None
        if self._handshake is None:
            self.established = True
            if channel is not None:
                channel.trusted = True

    def _begin_handshake(self) -> None:
        if isinstance(self._handshake, Connector):
            self.outgoing.send_raw(self._handshake.outgoing)

    def refuse(self) -> bool:
        """Tell the other end why it is refused, if TLS has an alert for that; returns whether it must still read it."""
        if self._channel is None:
            return False
        self._channel.say_why()
        self.shutdown()
        self.refused = True
        return True

    def listen_for_beats(self, now: float) -> None:
        """Note in ``pulse`` when something last arrived, read or not: heartbeats wake nobody."""
        with contextlib.suppress(OSError):  # reading will come to the same error
            information = tcp_info(self.sock)
            if information is not None:
                self.pulse.heard_at = max(self.pulse.heard_at, now - information[0])
                return
            unread = fcntl.ioctl(self.sock, termios.FIONREAD, bytes(4))
            if unread != self._unread:
                self._unread, self.pulse.heard_at = unread, now

    # ------------------------------------------------------------------------------------------------------- the end

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
        """Tell the other end that nothing more will be sent."""
        with contextlib.suppress(OSError):  # the connection has ended already
            self.sock.shutdown(socket.SHUT_WR)

    def drain(self, reads_max: int = sys.maxsize) -> bool:
        """Read and discard; returns whether the other end has closed too, or sends on after so many reads."""
        discarded = bytearray(_STAGING_BYTES)
        for _ in range(reads_max):
            try:
                if not self.sock.recv_into(discarded):
                    break
            except BlockingIOError:
                return False
            except OSError:
                break
        return True


def tcp_info(sock: socket.socket) -> tuple[float, float] | None:
    """Return the time since something last arrived and the round-trip time, in seconds, as the kernel has them.

    ``None``: the system says less than Linux, as emulators and sandboxes do.
    """
    information = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(information) < _TCP_INFO.size:
        return None
    since_ms, round_trip_us = _TCP_INFO.unpack(information)
    return since_ms / 1e3, round_trip_us / 1e6
