"""The pieces of this rank's memory in which bodies wait for their receivers: written once, read by one or more peers.

A piece is free again when every peer to which it was sent has given it back; each peer says so in a word of its own
memory. The piece that came back last is used first, because it is still in the processor's cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any, final

import numpy as np

from totalreduce.transports.shm_memory import PEER, Outbox

__all__ = ["Piece", "StagingPool"]


@final
class Piece:
    """One piece of the pool, and the peers that have still to read it."""

    __slots__ = ("array", "keepable", "key", "large", "number", "out", "readers", "use")

    def __init__(self, number: int, array: np.ndarray[Any, Any], *, large: bool) -> None:
        self.number = number  #: Number of the piece in the layout.
        self.array = array
        self.large = large  #: Whether it is one of the large pieces.
        self.use = 0  #: How often it has been filled. A peer gives back a use, not the piece.
        self.out = False  #: Whether a peer may still have to read it.
        self.keepable = False  #: Whether a receiver may keep it while it waits for other messages.
        self.key: Hashable = None
        self.readers: list[memoryview] = []  #: For each reader, the block of words in which it gives pieces back.

    @property
    def released(self) -> bool:
        """Whether every reader has given it back."""
        use, word = self.use, PEER.given_back + self.number
        return all(block[word] == use for block in self.readers)


@final
class StagingPool:
    """The pieces of one outbox. Only the thread that moves messages uses it.

    This cannot deadlock: a message is only taken while a large piece is free (``has_room``). At most half of the large
    pieces are out as *keepable*; the others come back after a computation that waits for nothing.
    """

    def __init__(self, outbox: Outbox) -> None:
        layout = outbox.layout
        pieces = []
        for number in range(layout.pieces):
            start, length = layout.piece(number)
            array = np.frombuffer(outbox.view[start : start + length], np.uint8)
            pieces.append(Piece(number, array, large=number >= layout.small_pieces))
        self.large_bytes = layout.large_bytes  #: Length of the large pieces. Longer bodies are sent in parts.
        self._small_bytes = layout.small_bytes
        self._small = [piece for piece in pieces if not piece.large]
        self._large = [piece for piece in pieces if piece.large]
        self._out: deque[Piece] = deque()
        self._shared: dict[Hashable, Piece] = {}
        self._keepable = {False: layout.small_pieces // 2, True: layout.large_pieces // 2}
        self._order = outbox.fences.order

    def has_room(self) -> bool:
        """Whether a body of any length (or a part of it) can be staged."""
        return bool(self._large) or self._collect()

    def stage(self, body: memoryview, key: Hashable, reader: memoryview) -> Piece:
        """Return a piece with the bytes of ``body``, at most ``large_bytes``. Call it only after ``has_room``.

        The body is copied, unless a piece with an equal ``key`` (see ``Outgoing.share_key``) still holds it. ``reader``
        is the block of words in which the receiver gives pieces back.
        """
        if key is not None:
            shared = self._shared.get(key)
            if shared is not None and all(reader is not other for other in shared.readers):
                if not shared.out:  # it has come back meanwhile, but nothing else was written to it
                    (self._large if shared.large else self._small).remove(shared)
                    self._take(shared)
                shared.readers.append(reader)
                return shared
        out = self._out
        while out and out[0].released:
            self._free(out.popleft())
        length = len(body)
        piece = (self._small if length <= self._small_bytes and self._small else self._large).pop()
        if piece.key is not None and self._shared.get(piece.key) is piece:
            del self._shared[piece.key]
        piece.key = key
        if key is not None:
            self._shared[key] = piece
        if self._order is not None:
            self._order()  # the piece is written after the peers' words that it was read
        np.copyto(piece.array[:length], np.frombuffer(body, np.uint8))  # releases the GIL
        self._take(piece)
        piece.readers.append(reader)
        return piece

    def _take(self, piece: Piece) -> None:
        piece.out = True
        piece.use += 1
        piece.keepable = self._keepable[piece.large] > 0
        self._keepable[piece.large] -= piece.keepable
        self._out.append(piece)

    def _free(self, piece: Piece) -> None:
        piece.out = False
        piece.readers.clear()
        self._keepable[piece.large] += piece.keepable
        (self._large if piece.large else self._small).append(piece)

    def _collect(self) -> bool:
        """Look at all pieces that are out; returns whether a large one is free now."""
        staying: deque[Piece] = deque()
        for piece in self._out:
            if piece.released:
                self._free(piece)
            else:
                staying.append(piece)
        self._out = staying
        return bool(self._large)

    def has_come_back(self) -> bool:
        """Whether ``has_room`` may return true by now. Changes nothing; any thread."""
        return bool(self._large) or any(piece.released for piece in self._out.copy() if piece.large)

    def forget(self, reader: memoryview) -> None:
        """Count the pieces of a reader that is gone as given back."""
        for piece in self._out:
            piece.readers = [block for block in piece.readers if block is not reader]
