"""The layout of a rank's board, which is equal for all ranks of a host.

A board has three parts: the entries in which the rank announces operations, the tensors of small operations, one for
each entry, and the stages of larger ones. A stage has two halves for whole tensors, which the operations of a name use
in turn, or two sets of pieces, one piece for each rank, and two pieces of results (see ``kernels.exchange``).
"""

from __future__ import annotations

from dataclasses import dataclass

from totalreduce.kernels import exchange
from totalreduce.kernels.arrays import Array

__all__ = ["BOARD_BYTES", "ENTRIES", "INLINE_BYTES", "STAGES", "BoardLayout"]

#: The number of operations that a rank can announce at a time.
ENTRIES = 128
#: Tensors up to this length lie in their entry.
INLINE_BYTES = 16 * 1024
#: Tensors are exchanged as a whole if those of all ranks together are at most so long. Every rank reads all of them,
#: but waits once instead of three times for each piece. Measured: 28 instead of 20 µs with 2 ranks and 64 KiB.
_WHOLE_BYTES_MAX = 512 * 1024
#: The number of larger tensors, in usual memory, that can be exchanged at a time.
STAGES = 12
_STAGE_BYTES = 1024 * 1024
#: A piece is at most so long: it stays in the second-level cache between the steps of a round.
_PIECE_BYTES_MAX = 128 * 1024
_LINE = 64
BOARD_BYTES = ENTRIES * (exchange.ENTRY_BYTES + INLINE_BYTES) + STAGES * _STAGE_BYTES


@dataclass(frozen=True, slots=True)
class BoardLayout:
    """The offsets in a memory whose board begins at ``board_at``.

    Attributes:
        board_at: Where the board begins, with its entries.
    """

    board_at: int

    @property
    def inline_at(self) -> int:
        """Where the tensors in the entries begin."""
        return self.board_at + ENTRIES * exchange.ENTRY_BYTES

    @property
    def stages_at(self) -> int:
        """Where the stages begin."""
        return self.inline_at + ENTRIES * INLINE_BYTES

    @property
    def end(self) -> int:
        """Where the board ends."""
        return self.board_at + BOARD_BYTES

    def entry(self, number: int) -> int:
        """Return the offset of an entry."""
        return self.board_at + number * exchange.ENTRY_BYTES

    def stage(self, number: int) -> int:
        """Return the offset of a stage."""
        return self.stages_at + number * _STAGE_BYTES

    def second_half(self, number: int) -> int:
        """Return the offset of the second half of a stage."""
        return self.stage(number) + _STAGE_BYTES // 2

    @staticmethod
    def mode(num_bytes: int, ranks: int) -> int:
        """Return how tensors of this length are exchanged by so many ranks (``exchange.MODE``)."""
        if num_bytes <= INLINE_BYTES:
            return exchange.IN_ENTRY
        return exchange.IN_STAGE if num_bytes * ranks <= _WHOLE_BYTES_MAX else exchange.PIECES

    @staticmethod
    def piece_bytes(ranks: int) -> int:
        """Return the length of a piece of an operation of so many ranks: two sets and two results fill a stage."""
        return min(_PIECE_BYTES_MAX, _STAGE_BYTES // (2 * (ranks + 1)) // _LINE * _LINE)

    def fill(self, block: Array, ranks: int) -> None:
        """Write the offsets into the block of an operation."""
        piece_bytes = self.piece_bytes(ranks)
        block[exchange.ENTRIES] = ENTRIES
        block[exchange.BOARD_AT], block[exchange.INLINE_AT] = self.board_at, self.inline_at
        block[exchange.STAGES_AT], block[exchange.STAGES_END] = self.stages_at, self.end
        block[exchange.INLINE_BYTES], block[exchange.STAGE_BYTES] = INLINE_BYTES, _STAGE_BYTES
        block[exchange.PIECE_BYTES], block[exchange.RESULTS_AT] = piece_bytes, 2 * ranks * piece_bytes
