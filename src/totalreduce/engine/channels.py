"""Channels: messages between ranks, for protocols beside the engine such as the agreement on an order.

A message travels in control frames that follow each other directly. Messages for a channel that is not open here yet
are kept. For every peer there is a bound on its unfinished message, and on its messages for channels that are not open.

Large bodies may follow a message. They leave from the sender's memory, and are received into memory that the receiving
protocol has named when it has read the message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

from totalreduce.engine.members import Members
from totalreduce.engine.outbox import Outbox
from totalreduce.foundation.errors import ProtocolError, TotalReduceError

__all__ = ["Bodies", "Channel", "Channels"]

#: The longest message, in bytes.
_MESSAGE_BYTES_MAX: Final = 8 * 1024 * 1024
#: The bytes of one peer's messages that may wait until their channels are opened.
_EARLY_BYTES_MAX: Final = 1024 * 1024
#: The bytes counted for a waiting message beside its body, so that the number of empty messages is bounded.
_MESSAGE_COST: Final = 512


@final
@dataclass(frozen=True, slots=True, eq=False)
class Bodies:
    """Where the bodies go that follow a message.

    Attributes:
        views: Memory of bytes, one for each body, not empty.
        arrived: Called under the engine's lock when all bodies have come.
    """

    views: Sequence[memoryview]
    arrived: Callable[[], object]


class Channel(Protocol):
    """A protocol's end of a channel.

    The methods are called under the engine's lock. They return quickly and submit nothing.
    """

    def receive(self, peer: int, message: bytes, now: float) -> Bodies | None:
        """Handle a complete message of a peer; return where the bodies go that follow it, ``None`` without bodies.

        The messages of one peer come in order, each behind the bodies of the one before.

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


@final
@dataclass(slots=True, eq=False)
class _Following:
    """Bodies of a peer that have not arrived.

    Attributes:
        number: The channel.
        views: The memory that no part of a body has been given.
        arrived: See ``Bodies``.
        is_under_way: Whether a part has its memory and has not arrived.
    """

    number: int
    views: deque[memoryview]
    arrived: Callable[[], object]
    is_under_way: bool = False


class Channels:
    """The channels of one rank, and the messages that arrive for them.

    Attributes:
        on_forgotten: Called with the number of a channel, or with ``None`` for all of them: bodies that are arriving
            must not be written to their memory any more.
    """

    def __init__(self, outbox: Outbox, members: Members) -> None:
        """Begin without open channels; messages leave through ``outbox``."""
        self._outbox, self._members = outbox, members
        self.on_forgotten: Callable[[int | None], None] = lambda _: None
        self._open: dict[int, Channel] = {}
        #: By peer: the channel and the pieces of a message whose last piece has not arrived.
        self._partial: dict[int, tuple[int, bytearray]] = {}
        #: By peer: the bodies that have not arrived.
        self._following: dict[int, _Following] = {}
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
            self._give(channel, number, peer, message, now)

    def close(self, number: int) -> None:
        """Close a channel. Messages that arrive for it later are dropped."""
        self._open.pop(number, None)
        self._closed.add(number)
        self._following = {peer: entry for peer, entry in self._following.items() if entry.number != number}
        self.on_forgotten(number)

    def post(self, peer: int, number: int, message: bytes) -> None:
        """Send a message through a channel. It leaves before all data.

        Nothing is sent to a rank that has left, nor after the group has ended.
        """
        if not self._members.have_ended and peer not in self._members.departed:
            self._outbox.channel_message(peer, number, message)

    def post_with_bodies(
        self,
        peer: int,
        number: int,
        message: bytes,
        bodies: Sequence[memoryview],
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send a message through a channel, and the bodies that follow it; the arguments as of ``channel_stream``.

        The peer must have opened the channel. The messages that are sent to one peer in this way come in order, whether
        they have bodies or not. They may be overtaken by those of ``post``. Nothing is sent to a rank that has left,
        nor after the group has ended.
        """
        if not self._members.have_ended and peer not in self._members.departed:
            self._outbox.channel_stream(peer, number, message, bodies, on_sent)

    def room(self, peer: int, number: int, num_bytes: int) -> memoryview | None:
        """Return the memory for the next bytes of a body; ``None``: nobody needs them any more, so they are forgotten.

        Raises:
            ProtocolError: No body of this channel follows, or it has fewer bytes; or other bytes of it are under way.
        """
        if number in self._closed or self._members.have_ended:
            return None
        following = self._following.get(peer)
        is_known = following is not None and following.number == number and not following.is_under_way
        if following is None or not is_known or not 0 < num_bytes <= len(following.views[0]):
            raise ProtocolError(f"rank {peer} sends {num_bytes} bytes of a body that no message has announced")
        following.is_under_way = True
        view = following.views[0]
        if num_bytes == len(view):
            following.views.popleft()
        else:
            following.views[0] = view[num_bytes:]
        return view[:num_bytes]

    def body_arrived(self, peer: int, number: int) -> None:
        """Note that bytes of a body have arrived, for which ``room`` was called."""
        following = self._following.get(peer)
        if following is None or following.number != number:
            return  # the channel was closed meanwhile
        following.is_under_way = False
        if not following.views:
            del self._following[peer]
            following.arrived()

    def arrived(self, peer: int, number: int, piece: bytes, *, last: bool, now: float) -> None:
        """Handle a piece of a message.

        Raises:
            ProtocolError: The message is too long, or another message comes before its last piece; or the peer has sent
                too much through channels that are not open.
        """
        known, message = self._partial.pop(peer, (number, None))
        if known != number:
            raise ProtocolError(f"rank {peer} sends a message through one channel in the midst of another one's")
        if number in self._closed or self._members.have_ended:
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
            self._give(channel, number, peer, whole, now)
        else:
            self._early_bytes[peer] = early_bytes
            self._early.setdefault(number, []).append((peer, whole))

    def _give(self, channel: Channel, number: int, peer: int, message: bytes, now: float) -> None:
        following = self._following.get(peer)  # messages of other channels may overtake bodies
        if following is not None and following.number == number:
            raise ProtocolError(f"rank {peer} sends a message before the bodies that follow an earlier one")
        bodies = channel.receive(peer, message, now)
        if bodies is None:
            return
        if following is not None:
            raise ProtocolError(f"rank {peer} sends a message before the bodies that follow an earlier one")
        self._following[peer] = _Following(number, deque(bodies.views), bodies.arrived)

    def fail(self, error: TotalReduceError, now: float) -> None:
        """Tell every open channel."""
        self._following.clear()
        self.on_forgotten(None)
        for channel in list(self._open.values()):
            channel.fail(error, now)

    def depart(self, peer: int, reason: str, now: float) -> None:
        """Tell every open channel."""
        for channel in list(self._open.values()):
            channel.depart(peer, reason, now)

    def next_due(self) -> float | None:
        """Return the earliest time at which an open channel has to act."""
        earliest = None
        for channel in self._open.values():  # in each round of the thread that moves messages, so without a generator
            due = channel.next_due()
            if due is not None and (earliest is None or due < earliest):
                earliest = due
        return earliest

    def tick(self, now: float) -> None:
        """Tell the open channels that are due."""
        for channel in list(self._open.values()):
            due = channel.next_due()
            if due is not None and now >= due:
                channel.tick(now)
