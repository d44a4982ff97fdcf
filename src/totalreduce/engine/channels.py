"""Channels: small messages between ranks that are no operation, for protocols that live beside the engine.

A message of any length travels in control frames, in order; what comes for a channel that is not open here yet is kept,
within bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from totalreduce.foundation.errors import ProtocolError, TotalReduceError

__all__ = ["PIECE_BYTES", "Channel", "Channels", "pieces"]

#: A longer message travels in several frames.
PIECE_BYTES: Final = 16 * 1024
#: The longest message, and how much may wait for a channel to be opened, per peer.
_MESSAGE_BYTES_MAX = 64 * 1024 * 1024
_EARLY_BYTES_MAX = 1024 * 1024
#: What an early message costs beside its body: even empty ones are bounded.
_EARLY_COST = 256


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


def pieces(message: bytes) -> Iterator[tuple[bytes, bool]]:
    """A message's frames, and whether each is the last one."""
    for begin in range(0, max(1, len(message)), PIECE_BYTES):
        end = begin + PIECE_BYTES
        yield message[begin:end], end >= len(message)


class Channels:
    """The open channels of one rank and what arrives for them."""

    def __init__(self) -> None:
        """None is open."""
        self.open: dict[int, Channel] = {}
        self._partial: dict[tuple[int, int], bytearray] = {}
        self._early: dict[int, list[tuple[int, bytes]]] = {}
        self._early_bytes: dict[int, int] = {}
        self._closed: set[int] = set()

    def begin(self, number: int, channel: Channel, now: float) -> None:
        """Open a channel; it is given what came early."""
        self.open[number] = channel
        for peer, message in self._early.pop(number, ()):
            self._early_bytes[peer] -= len(message) + _EARLY_COST
            channel.receive(peer, message, now)

    def end(self, number: int) -> None:
        """Close a channel; what still comes is dropped."""
        self.open.pop(number, None)
        self._closed.add(number)

    def arrived(self, peer: int, number: int, piece: bytes, *, last: bool, now: float) -> None:
        """Part of a message is here.

        Raises:
            ProtocolError: It is too long, or too much comes for a channel that is not open.
        """
        partial = self._partial.get((peer, number))
        if partial is not None or not last:
            partial = self._partial.setdefault((peer, number), bytearray())
            partial += piece
            if len(partial) > _MESSAGE_BYTES_MAX:
                raise ProtocolError(f"rank {peer} sends a message of more than {_MESSAGE_BYTES_MAX} bytes")
            if not last:
                return
            piece = bytes(self._partial.pop((peer, number)))
        channel = self.open.get(number)
        if channel is not None:
            channel.receive(peer, piece, now)
        elif number not in self._closed:
            waiting = self._early_bytes.get(peer, 0) + len(piece) + _EARLY_COST
            if waiting > _EARLY_BYTES_MAX:
                raise ProtocolError(f"rank {peer} sends too much through channels that are not open here")
            self._early_bytes[peer] = waiting
            self._early.setdefault(number, []).append((peer, piece))

    def fail(self, error: TotalReduceError, now: float) -> None:
        """Tell every open channel."""
        for channel in list(self.open.values()):
            channel.fail(error, now)

    def depart(self, peer: int, reason: str, now: float) -> None:
        """Tell every open channel."""
        for channel in list(self.open.values()):
            channel.depart(peer, reason, now)

    def next_due(self) -> float | None:
        """When ``tick`` has something to do."""
        if not self.open:
            return None
        return min((due for channel in self.open.values() if (due := channel.next_due()) is not None), default=None)

    def tick(self, now: float) -> None:
        """Tell those whose time has come."""
        for channel in list(self.open.values()):
            due = channel.next_due()
            if due is not None and now >= due:
                channel.tick(now)
