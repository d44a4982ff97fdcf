"""The layout of a rank's board, which is equal for all ranks of a host.

A board has two parts: the entries in which the rank announces operations, and the stages, into which it copies what the
other ranks read of a tensor that does not lie in shared memory. There are stages of several lengths, so that many small
tensors have one at the same time. A stage has two halves for whole tensors, which the operations of a name use in turn,
or two sets of pieces, one piece for each rank, and two pieces of results (see ``kernels.exchange``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final, NamedTuple

from totalreduce.kernels import exchange
from totalreduce.kernels.arrays import Array
from totalreduce.kernels.exchange import HEAD

__all__ = ["BOARD_BYTES", "CLASS_OF_STAGE", "ENTRIES", "PIECES_BYTES_MAX", "STAGE_CLASSES", "BoardLayout", "StageClass"]

#: The number of entries. A name that comes again keeps two of them, so a model may have half as many tensors.
ENTRIES: Final = 1024
#: Tensors up to this length are exchanged as a whole, whatever the number of ranks.
_SMALL_BYTES_MAX: Final = 16 * 1024
#: Tensors are exchanged as a whole if those of all ranks together are at most so long. Every rank reads all of them,
#: but waits once instead of three times for each piece. Measured as a whole and in pieces, with 4 ranks on 2 cores: 62
#: and 69 µs with 32 KiB, 76 and 65 with 64 KiB, 107 and 80 with 128 KiB of shared memory; 125 and 134 with 64 KiB of
#: usual memory. On 16 cores: 31 and 42 with 16 KiB, 64 and 54 with 64 KiB, 110 and 74 with 128 KiB of shared memory.
_WHOLE_BYTES_MAX: Final = 192 * 1024
#: The same for two ranks. In pieces, each would read half of the other's tensor, and copy the other half of its own
#: twice. Measured: 83 instead of 114 µs with 1 MiB of usual memory, 71 instead of 93 µs in shared memory.
_WHOLE_BYTES_MAX_OF_TWO: Final = 2048 * 1024
#: A piece is at most so long: it stays in the second-level cache between the steps of a round.
_PIECE_BYTES_MAX: Final = 256 * 1024
_LINE: Final = 64


class StageClass(NamedTuple):
    """Stages of one length."""

    stage_bytes: int  #: The length of a stage.
    first: int  #: The number of the first one.
    stop: int  #: The number after that of the last one.
    at: int  #: The offset of the first one from the beginning of the stages.


def _classes(*stages: tuple[int, int]) -> tuple[StageClass, ...]:
    """Return the classes for pairs of a length and a number of stages, which lie one after the other."""
    firsts = itertools.accumulate((count for _, count in stages), initial=0)
    offsets = itertools.accumulate((length * count for length, count in stages), initial=0)
    return tuple(
        StageClass(length, first, first + count, at)
        for (length, count), first, at in zip(stages, firsts, offsets, strict=False)
    )


_KIB: Final = 1024
#: From the shortest to the longest. Tensors that are exchanged in pieces need one of the last class.
STAGE_CLASSES: Final = _classes(
    (2 * _KIB, 512), (8 * _KIB, 256), (32 * _KIB, 64), (128 * _KIB, 16), (512 * _KIB, 6), (2048 * _KIB, 6)
)
#: The class of every stage.
CLASS_OF_STAGE: Final = [each for each in STAGE_CLASSES for _ in range(each.first, each.stop)]
_LARGEST: Final = STAGE_CLASSES[-1].stage_bytes
#: The pieces of all ranks and a result are together at most so long: a stage has room for two such sets
#: (``piece_bytes``).
PIECES_BYTES_MAX: Final = _LARGEST // 2
BOARD_BYTES: Final = ENTRIES * exchange.ENTRY_BYTES + sum(
    (each.stop - each.first) * each.stage_bytes for each in STAGE_CLASSES
)


@dataclass(frozen=True, slots=True)
class BoardLayout:
    """The offsets in a memory whose board begins at ``board_at``."""

    board_at: int  #: Where the board begins, with its entries.

    @property
    def stages_at(self) -> int:
        """Where the stages begin."""
        return self.board_at + ENTRIES * exchange.ENTRY_BYTES

    @property
    def end(self) -> int:
        """Where the board ends."""
        return self.board_at + BOARD_BYTES

    def entry(self, number: int) -> int:
        """Return the offset of an entry."""
        return self.board_at + number * exchange.ENTRY_BYTES

    def stage(self, number: int) -> int:
        """Return the offset of a stage."""
        return self.halves(number)[0]

    def halves(self, number: int) -> tuple[int, int]:
        """Return the offsets of the two halves of a stage."""
        kind = CLASS_OF_STAGE[number]
        at = self.stages_at + kind.at + (number - kind.first) * kind.stage_bytes
        return at, at + kind.stage_bytes // 2

    @staticmethod
    def classes(num_bytes: int) -> tuple[StageClass, ...]:
        """Return the classes of the stages that have at least so many bytes, the shortest first."""
        return tuple(each for each in STAGE_CLASSES if num_bytes <= each.stage_bytes)

    @staticmethod
    def is_whole(num_bytes: int, ranks: int) -> bool:
        """Return whether so many ranks exchange tensors of this length as a whole (``HEAD.is_whole``)."""
        together_max = _WHOLE_BYTES_MAX_OF_TWO if ranks == 2 else _WHOLE_BYTES_MAX
        return num_bytes <= _SMALL_BYTES_MAX or num_bytes * ranks <= together_max

    @staticmethod
    def piece_bytes(ranks: int) -> int:
        """Return the length of a piece of an operation of so many ranks: two sets and two results fill a stage."""
        return min(_PIECE_BYTES_MAX, _LARGEST // (2 * (ranks + 1)) // _LINE * _LINE)

    def fill(self, block: Array, ranks: int, only_piece_bytes: int | None = None) -> None:
        """Write the offsets into the block of an operation.

        ``only_piece_bytes``: the length of the longest piece of an operation of one round, which needs one set only.
        """
        sets, piece_bytes = 2, self.piece_bytes(ranks)
        if only_piece_bytes is not None:
            sets, piece_bytes = 1, -(-only_piece_bytes // _LINE) * _LINE
        block[HEAD.entries], block[HEAD.board_at] = ENTRIES, self.board_at
        block[HEAD.stages_at], block[HEAD.stages_end] = self.stages_at, self.end
        block[HEAD.piece_bytes], block[HEAD.results_at] = piece_bytes, sets * ranks * piece_bytes
        block[HEAD.stage_bytes] = block[HEAD.results_at] + sets * piece_bytes
