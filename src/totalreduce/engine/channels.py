"""Channels: small messages between ranks, for protocols beside the engine such as the agreement on an order.

A message travels in control frames that follow each other directly. Messages for a channel that is not open here yet
are kept. For every peer there is a bound on its unfinished message, and on its messages for channels that are not open.
"""

from __future__ import annotations

from typing import Final, Protocol

from totalreduce.engine.members import Members
from totalreduce.engine.outbox import Outbox
from totalreduce.foundation.errors import ProtocolError, TotalReduceError

__all__ = ["Channel", "Channels"]

#: The longest message, in bytes.
_MESSAGE_BYTES_MAX: Final = 8 * 1024 * 1024
#: The bytes of one peer's messages that may wait until their channels are opened.
_EARLY_BYTES_MAX: Final = 1024 * 1024
#: The bytes counted for a waiting message beside its body, so that the number of empty messages is bounded.
_MESSAGE_COST: Final = 512


class Channel(Protocol):
    """A protocol's end of a channel.

    The methods are called under the engine's lock. They return quickly and submit nothing.
    """

    def receive(self, peer: int, message: bytes, now: float) -> None:
        """Handle a complete message of a peer. The messages of one peer come in order.

        Raises:
            ProtocolError: No correct peer sends this message.
        """

    def fail(self, error: TotalReduceError, now: float) -> None:
        """Note that a rank is lost, or that this rank has closed the group: no more messages will come."""

    def depart(self, peer: int, reason: str, now: float) -> None:
        """Note that a rank has closed the group in good order: it will send no more messages."""

    def next_due(self) -> float | None:
        """Return the time at which ``tick`` is to be called; ``None``: not before another method was called."""

    def tick(self, now: float) -> None:
        """Act at the time that ``next_due`` has returned."""


class Channels:
    """The channels of one rank, and the messages that arrive for them."""

    def __init__(self, outbox: Outbox, members: Members) -> None:
        """Begin without open channels; messages leave through ``outbox``."""
        self._outbox, self._members = outbox, members
        self._open: dict[int, Channel] = {}
        #: By peer: the channel and the pieces of a message whose last piece has not arrived.
        self._partial: dict[int, tuple[int, bytearray]] = {}
        self._early: dict[int, list[tuple[int, bytes]]] = {}
        self._early_bytes: dict[int, int] = {}
        self._closed: set[int] = set()

    def open(self, number: int, channel: Channel, now: float) -> None:
        """Open a channel, and give it the messages that came before.

        ``number`` is equal on all ranks, and different for each channel.

        Raises:
            PeerLost: A rank is lost.
            GroupClosed: This rank has closed the group.
        """
        self._members.check_usable()
        self._open[number] = channel
        for peer, message in self._early.pop(number, ()):
            self._early_bytes[peer] -= len(message) + _MESSAGE_COST
            channel.receive(peer, message, now)

    def close(self, number: int) -> None:
        """Close a channel. Messages that arrive for it later are dropped."""
        self._open.pop(number, None)
        self._closed.add(number)

    def post(self, peer: int, number: int, message: bytes) -> None:
        """Send a message through a channel. It leaves before all data.

        Nothing is sent to a rank that has left, nor after the group has ended.
        """
        members = self._members
        if not members.closed and members.lost is None and peer not in members.departed:
            self._outbox.channel_message(peer, number, message)

    def arrived(self, peer: int, number: int, piece: bytes, *, last: bool, now: float) -> None:
        """Handle a piece of a message.

        Raises:
            ProtocolError: The message is too long, or another message comes before its last piece; or the peer has sent
                too much through channels that are not open.
        """
        known, message = self._partial.pop(peer, (number, None))
        if known != number:
            raise ProtocolError(f"rank {peer} sends a message through one channel in the midst of another one's")
        if number in self._closed:
            return
        if message is not None or not last:
            message = bytearray() if message is None else message
            message += piece
            if len(message) > _MESSAGE_BYTES_MAX:
                raise ProtocolError(f"rank {peer} sends a message of more than {_MESSAGE_BYTES_MAX} bytes")
        channel = self._open.get(number)
        early_bytes = 0
        if channel is None:
            early_bytes = self._early_bytes.get(peer, 0) + _MESSAGE_COST + len(piece if message is None else message)
            if early_bytes > _EARLY_BYTES_MAX:
                raise ProtocolError(f"rank {peer} sends too much through channels that are not open here")
        if not last:
            assert message is not None
            self._partial[peer] = number, message
            return
        whole = piece if message is None else bytes(message)
        if channel is not None:
            channel.receive(peer, whole, now)
        else:
            self._early_bytes[peer] = early_bytes
            self._early.setdefault(number, []).append((peer, whole))

    def fail(self, error: TotalReduceError, now: float) -> None:
        """Tell every open channel."""
        for channel in list(self._open.values()):
            channel.fail(error, now)

    def depart(self, peer: int, reason: str, now: float) -> None:
        """Tell every open channel."""
        for channel in list(self._open.values()):
            channel.depart(peer, reason, now)

    def next_due(self) -> float | None:
        """Return the earliest time at which an open channel has to act."""
        if not self._open:
            return None
        return min((due for channel in self._open.values() if (due := channel.next_due()) is not None), default=None)

    def tick(self, now: float) -> None:
        """Tell the open channels that are due."""
        for channel in list(self._open.values()):
            due = channel.next_due()
            if due is not None and now >= due:
                channel.tick(now)
