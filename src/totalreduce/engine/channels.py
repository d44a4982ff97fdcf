"""Channels: small messages between ranks that are no operation, for protocols that live beside the engine.

A message travels in control frames, one directly after the other. What comes for a channel that is not open here yet
is kept. Both are bounded for every peer: its unfinished message, and what it sends through channels that are not open.
"""

from __future__ import annotations

from typing import Final, Protocol

from totalreduce.engine.members import Members
from totalreduce.engine.outbox import Outbox
from totalreduce.foundation.errors import ProtocolError, TotalReduceError

__all__ = ["Channel", "Channels"]

#: The longest message.
_MESSAGE_BYTES_MAX: Final = 8 * 1024 * 1024
#: How much of one peer may wait for channels to be opened.
_EARLY_BYTES_MAX: Final = 1024 * 1024
#: What an early message costs beside its body: even empty ones are bounded.
_MESSAGE_COST: Final = 512


class Channel(Protocol):
    """A protocol's end of a channel. Called under the engine's lock: be quick, and submit nothing."""

    def receive(self, peer: int, message: bytes, now: float) -> None:
        """A message of a peer, whole and in order.

        Raises:
            ProtocolError: No correct peer sends this.
        """

    def fail(self, error: TotalReduceError, now: float) -> None:
        """A rank is lost, or this one has closed the group: nothing more will come."""

    def depart(self, peer: int, reason: str, now: float) -> None:
        """A rank has closed the group in good order: nothing more will come from it."""

    def next_due(self) -> float | None:
        """When ``tick`` is to be called; ``None``: not before something else has happened."""

    def tick(self, now: float) -> None:
        """The time has come."""


class Channels:
    """The channels of one rank, and the messages that arrive for them."""

    def __init__(self, outbox: Outbox, members: Members) -> None:
        """Begin without open channels; messages leave through ``outbox``."""
        self._outbox, self._members = outbox, members
        self._open: dict[int, Channel] = {}
        #: By peer: the channel and the beginning of a message of which more is to come.
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
        """Part of a message is here.

        Raises:
            ProtocolError: The message is too long, or cut by another one; or too much comes for a channel that is not
                open.
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
        """When ``tick`` has something to do."""
        if not self._open:
            return None
        return min((due for channel in self._open.values() if (due := channel.next_due()) is not None), default=None)

    def tick(self, now: float) -> None:
        """Tell those whose time has come."""
        for channel in list(self._open.values()):
            due = channel.next_due()
            if due is not None and now >= due:
                channel.tick(now)
