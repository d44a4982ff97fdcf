"""The ring of messages to one peer and the ring from it. Every message between ranks of a host passes through here.

An entry of a ring has the message's header, three words, and room for a small body. The first word says how many bytes
of the body this entry is about, and in which piece of the sender's pool they lie (or that they lie in the entry). The
second word is the use of that piece. A body in the sender's arena is *lent*: its number follows those of the pieces, it
is given back in the same way, and the third word is its offset in the file. A lent message has left when the peer has
given it back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np

from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import HEADER_BYTES, Frame, Header
from totalreduce.transports.base import Delivery, Endpoint, Outgoing
from totalreduce.transports.shm_memory import LOANS, PEER, Mapping, Outbox
from totalreduce.transports.shm_pool import StagingPool
from totalreduce.transports.shm_waiting import WANTS_ROOM, Doorbell

__all__ = ["IncomingRing", "OutgoingRing"]

#: The first word: length, number of the piece plus one (0: the body lies in the entry), then two bits.
_PIECE_SHIFT, _LENGTH_MASK, _PIECE_MASK = 32, 0xFFFFFFFF, 0xFFFF
_KEEPABLE, _CONTINUES = 1 << 62, 1 << 63
#: After this many messages to or from one peer it is another peer's turn.
_QUANTUM = 4
#: From this size on NumPy copies a body, because it lets other threads run meanwhile.
_NUMPY_BYTES = 32 * 1024

#: Header, body and words of an entry.
_Entry = tuple[memoryview, memoryview, memoryview]


def _entries(memory: Outbox | Mapping, owner: int, reader: int) -> list[_Entry]:
    """Return the entries of the ring from index ``owner`` to index ``reader``, in the memory of ``owner``."""
    layout, view, words = memory.layout, memory.view, memory.words
    entries = []
    for slot in range(layout.slots):
        header, body = layout.entry(owner, reader, slot), layout.entry_body(owner, reader, slot)
        word = layout.entry_word(owner, reader, slot)
        room = view[body : body + layout.inline_bytes]
        entries.append((view[header : header + HEADER_BYTES], room, words[word : word + 3]))
    return entries


def _block(memory: Outbox | Mapping, owner: int, peer: int) -> memoryview:
    """Return the words that index ``owner`` keeps about index ``peer``, in the memory of ``owner``."""
    start = memory.layout.block(owner, peer)
    return memory.words[start : start + memory.layout.block_words]


@final
class _Loans:
    """Messages whose bodies the peer reads in this rank's arena."""

    __slots__ = ("_free", "_order", "_theirs", "_uses", "lent")

    def __init__(self, theirs: memoryview, pieces: int, order: Callable[[], object] | None) -> None:
        """Begin without loans.

        Args:
            theirs: The block in which the peer gives back.
            pieces: The number of pieces of the pool.
            order: See ``Fences``.
        """
        self._theirs, self._free, self._order = theirs, list(range(pieces, pieces + LOANS)), order
        self._uses = 0
        #: By number of the loan: its use and the message. Only the thread that moves messages changes it.
        self.lent: dict[int, tuple[int, Outgoing]] = {}

    @property
    def available(self) -> bool:
        """Whether one more body can be lent."""
        return bool(self._free)

    @property
    def returned(self) -> bool:
        """Whether the peer has given back a body. Any thread."""
        theirs = self._theirs
        return any(theirs[PEER.given_back + number] == use for number, (use, _) in self.lent.copy().items())

    def add(self, message: Outgoing) -> tuple[int, int]:
        """Lend the body of a message; returns the number of the loan and its use."""
        number = self._free.pop()
        self._uses += 1
        self.lent[number] = self._uses, message
        return number, self._uses

    def collect(self, endpoint: Endpoint) -> None:
        """Tell the endpoint which of the messages have left: those whose bodies the peer has given back."""
        theirs = self._theirs
        for number, (use, message) in self.lent.copy().items():
            if theirs[PEER.given_back + number] == use:
                if self._order is not None:
                    self._order()  # the body may be written after the peer's word that it was read
                del self.lent[number]
                self._free.append(number)
                endpoint.message_sent(message)


@final
class OutgoingRing:
    """The entries that this rank writes for one peer."""

    def __init__(
        self, peer: int, indices: tuple[int, int], outbox: Outbox, mapping: Mapping, pool: StagingPool, bell: Doorbell
    ) -> None:
        """Make the ring; for the arguments see ``ShmConnection``."""
        own, other = indices
        self.published = 0  #: Number of entries written so far.
        self.blocked = False  #: Whether the last ``send`` stopped for want of room.
        #: A message of which only a part has left, and what of its body has not; otherwise ``None``.
        self.unfinished: tuple[Outgoing, memoryview] | None = None
        self._peer, self._pool, self._bell, self._order = peer, pool, bell, bell.fences.order
        self._mine, self._theirs = _block(outbox, own, other), _block(mapping, other, own)
        self._slots, self._inline_bytes = outbox.layout.slots, outbox.layout.inline_bytes
        self._entries = _entries(outbox, own, other)
        self._arena = outbox.arena
        #: Messages whose bodies the peer reads in this rank's arena.
        self.loans = _Loans(self._theirs, outbox.layout.pieces, self._order)

    @property
    def has_room(self) -> bool:
        """Whether there may be room again for what stopped ``send``. Any thread."""
        return self.published - self._theirs[PEER.consumed] < self._slots and self._pool.has_come_back()

    def send(self, endpoint: Endpoint) -> bool:
        """Publish messages until there is none, no room, or the quantum is used up; returns whether it is used up.

        Raises:
            ProtocolError: The peer's counters make no sense.
        """
        self.blocked = False
        slots = self._slots
        for _turn in range(_QUANTUM):
            waiting = self.published - self._theirs[PEER.consumed]
            if waiting >= slots or not self._pool.has_room():
                self.blocked = True
                return False
            if waiting < 0:
                raise ProtocolError("it has consumed more than was sent")
            if self._order is not None:
                self._order()  # the entry is written after the peer's word that it was read
            if self.unfinished is not None:
                self._send_part(endpoint, *self.unfinished, is_first=False)
                continue
            message = endpoint.next_message(self._peer)
            if message is None:
                return False
            header, inline, words = self._entries[self.published % slots]
            header[:] = message.header
            body = message.body
            length = 0 if body is None else len(body)
            if length <= self._inline_bytes:
                if length:
                    assert body is not None
                    inline[:length] = body
                words[0] = length
                self._publish()
                endpoint.message_sent(message)
            elif body is not None and self.loans.available and (offset := self._arena.offset_of(body)):
                number, use = self.loans.add(message)
                words[0] = length | (number + 1) << _PIECE_SHIFT | _KEEPABLE
                words[1] = use
                words[2] = offset
                self._publish()
            else:
                assert body is not None
                self._send_part(endpoint, message, body, is_first=True)
        return True

    def _send_part(self, endpoint: Endpoint, message: Outgoing, rest: memoryview, *, is_first: bool) -> None:
        """Stage the rest of the body of a message, or as much of it as one piece can hold.

        ``is_first``: whether the rest is the whole body.
        """
        part = min(len(rest), self._pool.large_bytes)
        is_last = part == len(rest)
        if is_first and is_last:
            piece = self._pool.stage(rest, message.share_key, self._theirs)
        else:
            piece = self._pool.stage(rest[:part], None, self._theirs)
        words = self._entries[self.published % self._slots][2]
        bits = (_KEEPABLE if piece.keepable else 0) | (0 if is_first else _CONTINUES)
        words[0] = part | (piece.number + 1) << _PIECE_SHIFT | bits
        words[1] = piece.use
        self._publish()
        self.unfinished = None if is_last else (message, rest[part:])
        if is_last:
            endpoint.message_sent(message)

    def keep_rest(self, is_withdrawn: Callable[[Outgoing], bool]) -> bool:
        """Copy the rest of a message of a failed operation; return whether the peer reads no body of one in place."""
        if self.unfinished is not None:
            message, rest = self.unfinished
            if is_withdrawn(message):
                self.unfinished = message, memoryview(bytes(rest))
        return not any(is_withdrawn(message) for _, message in self.loans.lent.values())

    def _publish(self) -> None:
        self.published += 1
        if self._order is not None:
            self._order()
        self._mine[PEER.published] = self.published
        self._bell.owed = True

    def close(self) -> None:
        """Take back what the peer was lent, and drop a message of which only a part has left."""
        self._pool.forget(self._theirs)
        self.loans.lent.clear()
        self.unfinished = None


class _Lease:
    """A body in the peer's pool or arena. Implements ``base.Lease``."""

    __slots__ = ("_ring", "_use", "_word", "body", "may_be_kept")

    def __init__(self, ring: IncomingRing, body: memoryview, word: int, use: int, *, may_be_kept: bool) -> None:
        self._ring, self._word, self._use = ring, word, use
        self.body, self.may_be_kept = body, may_be_kept

    def release(self) -> None:
        """Give the piece back."""
        self._ring.give_back(self._word, self._use)


@final
class IncomingRing:
    """The entries that one peer writes for this rank. One thread at a time, except for ``give_back``."""

    def __init__(self, peer: int, indices: tuple[int, int], outbox: Outbox, mapping: Mapping, bell: Doorbell) -> None:
        """Make the ring; for the arguments see ``ShmConnection``."""
        own, other = indices
        layout = mapping.layout
        self.consumed = 0  #: Number of entries read so far.
        self._seen = 0
        self._peer, self._bell, self._order = peer, bell, bell.fences.order
        self._mine, self._theirs, self._view = _block(outbox, own, other), _block(mapping, other, own), mapping.view
        self._slots, self._inline_bytes = layout.slots, layout.inline_bytes
        self._entries = _entries(mapping, other, own)
        self._arena_begin = layout.total_bytes
        self._pieces = [layout.piece(number) for number in range(layout.pieces)]
        self._arriving: tuple[Delivery, int] | None = None

    @property
    def has_mail(self) -> bool:
        """Whether the peer has published an entry that was not read. Any thread."""
        return self._theirs[PEER.published] != self.consumed

    @property
    def has_news(self) -> bool:
        """Like ``has_mail``, without the entries that were left unread for want of memory. Any thread."""
        return self._theirs[PEER.published] != self._seen

    def receive(self, endpoint: Endpoint) -> bool:
        """Read what was published, up to the quantum; returns whether more can be read. Raises ``ProtocolError``."""
        published = self._theirs[PEER.published]
        waiting = published - self.consumed
        if not 0 <= waiting <= self._slots:
            raise ProtocolError(f"{waiting} entries in a ring of {self._slots}")
        if self._order is not None:
            self._order()
        stalled = False
        for _turn in range(min(waiting, _QUANTUM)):
            if not self._receive_entry(endpoint):
                stalled = True
                break
        self._seen = published if stalled else self.consumed
        self._bell.ring(WANTS_ROOM)
        return waiting > _QUANTUM and not stalled

    def _receive_entry(self, endpoint: Endpoint) -> bool:
        """Read one entry; returns whether there was memory for it."""
        packed, inline, words = self._entries[self.consumed % self._slots]
        word = words[0]
        if word & _CONTINUES:
            self._receive_part(endpoint, words)
            return True
        length = word & _LENGTH_MASK
        header = Header.unpack(packed)
        if header.frame is Frame.DATA and not endpoint.may_receive():
            return False
        if self._arriving is not None:
            raise ProtocolError("a message within another one")
        if not (word >> _PIECE_SHIFT) & _PIECE_MASK:
            if length != header.body_bytes or length > self._inline_bytes:
                raise ProtocolError(f"{length} bytes in an entry, {header.body_bytes} in its header")
            delivery = endpoint.accept(self._peer, header)
            if length:
                delivery.view[:] = inline[:length]
            self._consume()
            endpoint.delivered(delivery)
        elif length == header.body_bytes:
            self._receive_staged(endpoint, header, words)
        elif length < header.body_bytes:
            self._arriving = endpoint.accept(self._peer, header), 0
            self._receive_part(endpoint, words)
        else:
            raise ProtocolError(f"{length} bytes in a piece, {header.body_bytes} in its header")
        return True

    def _receive_staged(self, endpoint: Endpoint, header: Header, words: memoryview) -> None:
        """Receive a body that lies in one piece, or is lent: offer it as a lease, or copy it."""
        word, use, body = self._find_body(words)
        lease = _Lease(self, body, word, use, may_be_kept=bool(words[0] & _KEEPABLE))
        delivery = endpoint.accept(self._peer, header, lease)
        if delivery.lease is not lease:
            _copy(delivery.view, body)
            self.give_back(word, use)
        self._consume()
        endpoint.delivered(delivery)

    def _receive_part(self, endpoint: Endpoint, words: memoryview) -> None:
        """Receive a part of a body that is longer than a piece."""
        if self._arriving is None:
            raise ProtocolError("a continuation without a message")
        delivery, done = self._arriving
        word, use, body = self._find_body(words)
        view = delivery.view
        if done + len(body) > len(view):
            raise ProtocolError(f"{done + len(body)} bytes of a body of {len(view)}")
        _copy(view[done : done + len(body)], body)
        self.give_back(word, use)
        self._consume()
        done += len(body)
        self._arriving = None if done == len(view) else (delivery, done)
        if done == len(view):
            endpoint.delivered(delivery)

    def _find_body(self, words: memoryview) -> tuple[int, int, memoryview]:
        """Return the word in which a body is given back, its use, and its bytes, according to an entry's words."""
        word, use = words[0], words[1]
        number, length = ((word >> _PIECE_SHIFT) & _PIECE_MASK) - 1, word & _LENGTH_MASK
        pieces = self._pieces
        if 0 <= number < len(pieces):
            start, available = pieces[number]
        elif number < len(pieces) + LOANS:
            start = words[2]
            available = len(self._view) - start if start >= self._arena_begin else 0
        else:
            available = 0
        if not 0 < length <= available:
            raise ProtocolError(f"{length} bytes in piece {number}, which the pool does not have")
        return PEER.given_back + number, use, self._view[start : start + length]

    def _consume(self) -> None:
        self.consumed += 1
        if self._order is not None:
            self._order()
        self._mine[PEER.consumed] = self.consumed

    def give_back(self, word: int, use: int) -> None:
        """Give a piece of the peer's pool, or a body in its arena, back. Any thread."""
        if self._order is not None:
            self._order()
        self._mine[word] = use
        self._bell.ring(WANTS_ROOM)


def _copy(target: memoryview, source: memoryview) -> None:
    if len(source) < _NUMPY_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
