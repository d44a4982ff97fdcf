"""The ring to one peer and the ring from it: how messages are published and read. The fast path.

An entry is the header, three words and room for a small body. The first word says how many bytes of the body this
entry is about and in which piece of the sender's pool they lie (or that they are here), the second which use of the
piece it is. A body in the sender's arena is a *loan*: it has a number behind those of the pieces, is given back in the
same way, and the third word says where in the file it is. Its message has left when the peer has given it back.
"""

from __future__ import annotations

from typing import final

import numpy as np

from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import HEADER_BYTES, Frame, Header
from totalreduce.transports.base import Delivery, Endpoint, Outgoing
from totalreduce.transports.shm_memory import CONSUMED, GIVEN_BACK, LOANS, PUBLISHED, Layout, Mapping, Outbox
from totalreduce.transports.shm_pool import StagingPool
from totalreduce.transports.shm_sleep import ASLEEP, WANTS_ROOM, Doorbell

__all__ = ["IncomingRing", "OutgoingRing"]

#: The first word: length, number of the piece plus one (0: in the entry itself), then bits.
_PIECE_SHIFT, _LENGTH_MASK, _PIECE_MASK = 32, 0xFFFFFFFF, 0xFFFF
_KEEPABLE, _CONTINUES = 1 << 62, 1 << 63
#: So many messages one peer may send or be sent before it is another peer's turn.
_QUANTUM = 4
#: From here on copying goes through NumPy, which lets other threads run meanwhile.
_NUMPY_BYTES = 32 * 1024


def _entries(layout: Layout, owner: int, reader: int, view: memoryview) -> list[tuple[memoryview, memoryview, int]]:
    """By slot: the header, the body, and the place of the first word."""
    entries = []
    for slot in range(layout.slots):
        header, body = layout.entry(owner, reader, slot), layout.entry_body(owner, reader, slot)
        word = layout.entry_word(owner, reader, slot)
        entries.append((view[header : header + HEADER_BYTES], view[body : body + layout.inline_bytes], word))
    return entries


@final
class OutgoingRing:
    """Entries that this rank writes for one peer.

    Attributes:
        published: How many so far.
        blocked: The last ``send`` stopped for want of room.
        busy: A message is half-way out.
    """

    def __init__(
        self,
        peer: int,
        indices: tuple[int, int],
        memories: tuple[Outbox, Mapping],
        layout: Layout,
        pool: StagingPool,
        bell: Doorbell,
    ) -> None:
        """Put everything where the fast path finds it.

        Args:
            peer: Its rank.
            indices: This rank's and the peer's.
            memories: This rank's and the peer's.
            layout: Of both.
            pool: This rank's.
            bell: The peer's.
        """
        me, other = indices
        outbox, mapping = memories
        self.published, self.blocked, self.busy = 0, False, False
        self._peer, self._pool, self._bell, self._order = peer, pool, bell, bell.fences.order
        self._mine, self._theirs = outbox.words, mapping.words
        self._slots, self._inline = layout.slots, layout.inline_bytes
        self._entries = _entries(layout, me, other, outbox.view)
        self._arena = outbox.arena
        self._loans: dict[int, tuple[int, Outgoing]] = {}
        self._free_loans = list(range(layout.pieces, layout.pieces + LOANS))
        self._uses = 0
        self._published_at = layout.block(me, other) + PUBLISHED
        self._consumed_at = layout.block(other, me) + CONSUMED
        self._given_back_at = layout.block(other, me) + GIVEN_BACK
        self._leaving: tuple[Outgoing, int] | None = None
        self._unheard = False

    @property
    def has_room(self) -> bool:
        """Whether what stopped ``send`` may be over. Any thread."""
        return self.published - self._theirs[self._consumed_at] < self._slots and self._pool.has_come_back()

    @property
    def lends(self) -> bool:
        """Whether the peer has still to read something in the arena. Any thread."""
        return bool(self._loans)

    @property
    def repaid(self) -> bool:
        """Whether it has read some of that. Any thread."""
        if not self._loans:
            return False
        words, at = self._theirs, self._given_back_at
        return any(words[at + number] == use for number, (use, _) in self._loans.copy().items())

    def collect(self, endpoint: Endpoint) -> None:
        """Say of the messages whose bodies were read that they have left."""
        words, at = self._theirs, self._given_back_at
        for number, (use, message) in self._loans.copy().items():
            if words[at + number] == use:
                del self._loans[number]
                self._free_loans.append(number)
                endpoint.message_sent(message)

    def send(self, endpoint: Endpoint) -> bool:
        """Publish messages until there is none, no room, or the quantum is used; returns whether the last.

        Raises:
            ProtocolError: The peer's counters make no sense.
        """
        self.blocked = False
        slots = self._slots
        for _turn in range(_QUANTUM):
            waiting = self.published - self._theirs[self._consumed_at]
            if waiting >= slots or not self._pool.has_room():
                self.blocked = True
                return False
            if waiting < 0:
                raise ProtocolError("it has consumed what was never sent")
            if self._order is not None:
                self._order()  # the entry is written after the peer's word that it was read
            if self._leaving is not None:
                self._send_part(endpoint, *self._leaving)
                continue
            message = endpoint.next_message(self._peer)
            if message is None:
                return False
            header, inline, word = self._entries[self.published % slots]
            header[:] = message.header
            body = message.body
            length = 0 if body is None else len(body)
            if length <= self._inline:
                if length:
                    assert body is not None
                    inline[:length] = body
                self._mine[word] = length
                self._publish()
                endpoint.message_sent(message)
            elif self._free_loans and body is not None and (place := self._arena.place_of(body)):
                self._lend(message, length, word, place)
            else:
                self._send_part(endpoint, message, 0)
        return True

    def _lend(self, message: Outgoing, length: int, word: int, place: int) -> None:
        """Say where a body in the arena is."""
        number = self._free_loans.pop()
        self._uses += 1
        self._loans[number] = self._uses, message
        self._mine[word] = length | (number + 1) << _PIECE_SHIFT | _KEEPABLE
        self._mine[word + 1] = self._uses
        self._mine[word + 2] = place
        self._publish()

    def _send_part(self, endpoint: Endpoint, message: Outgoing, done: int) -> None:
        """Stage a large body, or what of a very large one fits into one piece."""
        body = message.body
        assert body is not None
        total = len(body)
        part = min(total - done, self._pool.large_bytes)
        if part == total:
            piece = self._pool.stage(body, message.share_key, self._theirs, self._given_back_at)
        else:
            piece = self._pool.stage(body[done : done + part], None, self._theirs, self._given_back_at)
        word = self._entries[self.published % self._slots][2]
        bits = (_KEEPABLE if piece.keepable else 0) | (_CONTINUES if done else 0)
        self._mine[word] = part | (piece.number + 1) << _PIECE_SHIFT | bits
        self._mine[word + 1] = piece.use
        self._publish()
        done += part
        self.busy = done < total
        self._leaving = (message, done) if self.busy else None
        if not self.busy:
            endpoint.message_sent(message)

    def _publish(self) -> None:
        self.published += 1
        if self._order is not None:
            self._order()
        self._mine[self._published_at] = self.published
        self._unheard = True

    def tell(self) -> None:
        """Wake the peer if it sleeps over what was published.

        Not with every message: a peer that wakes may take the core of the one that wakes it, which then has not sent
        the others theirs yet.
        """
        if self._unheard:
            self._unheard = False
            self._bell.ring(ASLEEP)

    def close(self) -> None:
        """Take back what the peer was lent, and drop what is half-way out."""
        self._pool.forget(self._theirs)
        self._loans.clear()
        self._leaving, self.busy = None, False


class _Lease:
    """A body in the peer's pool or arena. Implements ``base.Lease``."""

    __slots__ = ("_place", "_ring", "_use", "body", "may_be_kept")

    def __init__(self, ring: IncomingRing, body: memoryview, place: int, use: int, *, may_be_kept: bool) -> None:
        self._ring, self._place, self._use = ring, place, use
        self.body, self.may_be_kept = body, may_be_kept

    def release(self) -> None:
        """Give the piece back."""
        self._ring.give_back(self._place, self._use)


@final
class IncomingRing:
    """Entries that one peer writes for this rank. One thread at a time, but for ``give_back``.

    Attributes:
        consumed: How many were read so far.
    """

    def __init__(
        self,
        peer: int,
        indices: tuple[int, int],
        memories: tuple[Outbox, Mapping],
        layout: Layout,
        bell: Doorbell,
    ) -> None:
        """Put everything where the fast path finds it; for the arguments see ``OutgoingRing``."""
        me, other = indices
        outbox, mapping = memories
        self.consumed, self._seen = 0, 0
        self._peer, self._bell, self._order = peer, bell, bell.fences.order
        self._mine, self._theirs, self._view = outbox.words, mapping.words, mapping.view
        self._slots, self._inline = layout.slots, layout.inline_bytes
        self._entries = _entries(layout, other, me, mapping.view)
        self._arena_at = layout.total_bytes
        self._pieces = [layout.piece(number) for number in range(layout.pieces)]
        self._published_at = layout.block(other, me) + PUBLISHED
        self._consumed_at = layout.block(me, other) + CONSUMED
        self._given_back_at = layout.block(me, other) + GIVEN_BACK
        self._arriving: tuple[Delivery, int] | None = None

    @property
    def has_mail(self) -> bool:
        """Whether the peer has published something that was not read. Any thread."""
        return self._theirs[self._published_at] != self.consumed

    @property
    def has_news(self) -> bool:
        """The same, without what was left unread for want of memory. Any thread."""
        return self._theirs[self._published_at] != self._seen

    def receive(self, endpoint: Endpoint) -> bool:
        """Read what was published, up to the quantum; returns whether more can be read.

        Raises:
            ProtocolError: The peer's memory says what no correct peer writes.
        """
        published = self._theirs[self._published_at]
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
        packed, inline, place = self._entries[self.consumed % self._slots]
        word = self._theirs[place]
        if word & _CONTINUES:
            self._receive_part(endpoint, place)
            return True
        length = word & _LENGTH_MASK
        header = Header.unpack(packed)
        if header.frame is Frame.DATA and not endpoint.may_receive():
            return False
        if self._arriving is not None:
            raise ProtocolError("a message within another one")
        if not (word >> _PIECE_SHIFT) & _PIECE_MASK:
            if length != header.body_bytes or length > self._inline:
                raise ProtocolError(f"{length} bytes in an entry, {header.body_bytes} in its header")
            delivery = endpoint.accept(self._peer, header)
            if length:
                delivery.view[:] = inline[:length]
            self._consume()
            endpoint.delivered(delivery)
        elif length == header.body_bytes:
            self._receive_staged(endpoint, header, place)
        elif length < header.body_bytes:
            self._arriving = endpoint.accept(self._peer, header), 0
            self._receive_part(endpoint, place)
        else:
            raise ProtocolError(f"{length} bytes in a piece, {header.body_bytes} in its header")
        return True

    def _receive_staged(self, endpoint: Endpoint, header: Header, entry: int) -> None:
        """A whole body in one piece, or lent: offer it as a lease, or copy it."""
        place, use, body = self._staged(entry)
        lease = _Lease(self, body, place, use, may_be_kept=bool(self._theirs[entry] & _KEEPABLE))
        delivery = endpoint.accept(self._peer, header, lease)
        if delivery.lease is not lease:
            _copy(delivery.view, body)
            self.give_back(place, use)
        self._consume()
        endpoint.delivered(delivery)

    def _receive_part(self, endpoint: Endpoint, entry: int) -> None:
        """A part of a body that is longer than a piece."""
        if self._arriving is None:
            raise ProtocolError("the continuation of nothing")
        delivery, done = self._arriving
        place, use, body = self._staged(entry)
        view = delivery.view
        if done + len(body) > len(view):
            raise ProtocolError(f"{done + len(body)} bytes of a body of {len(view)}")
        _copy(view[done : done + len(body)], body)
        self.give_back(place, use)
        self._consume()
        done += len(body)
        self._arriving = None if done == len(view) else (delivery, done)
        if done == len(view):
            endpoint.delivered(delivery)

    def _staged(self, entry: int) -> tuple[int, int, memoryview]:
        """Where to give a body back, which use that is, and the bytes, by the entry's words."""
        word, use = self._theirs[entry], self._theirs[entry + 1]
        number, length = ((word >> _PIECE_SHIFT) & _PIECE_MASK) - 1, word & _LENGTH_MASK
        pieces = self._pieces
        if 0 <= number < len(pieces):
            start, available = pieces[number]
        elif number < len(pieces) + LOANS:
            start = self._theirs[entry + 2]
            available = len(self._view) - start if start >= self._arena_at else 0
        else:
            available = 0
        if not 0 < length <= available:
            raise ProtocolError(f"{length} bytes in piece {number}, which the pool does not have")
        return self._given_back_at + number, use, self._view[start : start + length]

    def _consume(self) -> None:
        self.consumed += 1
        if self._order is not None:
            self._order()
        self._mine[self._consumed_at] = self.consumed

    def give_back(self, place: int, use: int) -> None:
        """A piece of the peer's pool has been read. Any thread."""
        if self._order is not None:
            self._order()
        self._mine[place] = use
        self._bell.ring(WANTS_ROOM)


def _copy(target: memoryview, source: memoryview) -> None:
    if len(source) < _NUMPY_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
