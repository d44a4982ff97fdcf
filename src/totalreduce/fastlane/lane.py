"""The fast lane of one rank: which operations it takes, what it needs for them, and their progress.

Docs: docs/design/0009-fast-lane.md. The lane has no thread. Under its lock, the engine offers operations to the lane
(``engine.carrying``); the thread that moves messages calls ``advance``, one thread at a time.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Final, final

import numpy as np

from totalreduce.engine.carrying import Carrier
from totalreduce.engine.layout import OperationLayout
from totalreduce.engine.names import is_later
from totalreduce.engine.operation import Carriage, Operation, Progress
from totalreduce.engine.signatures import ENDS_EARLY
from totalreduce.fastlane.board import BOARD_BYTES, ENTRIES, PIECES_BYTES_MAX, BoardLayout
from totalreduce.fastlane.stages import Stages
from totalreduce.foundation.types import DType, OpKind, ReduceOp
from totalreduce.kernels import exchange
from totalreduce.kernels.arrays import Array
from totalreduce.kernels.element_types import FLOAT32, KINDS, REDUCTIONS, SUM, has_code
from totalreduce.kernels.exchange import HEAD, PEER
from totalreduce.schedules.actions import Chunking
from totalreduce.transports.base import Boards

__all__ = ["FastLane", "LaneCarriage"]

#: Operations of which every rank's part is its own block.
_GATHERINGS: Final = frozenset({OpKind.ALLGATHER, OpKind.BROADCAST})
#: Operations of which every rank gets its own part only. All of a reduce is the root's part.
_SCATTERINGS: Final = frozenset({OpKind.REDUCE_SCATTER, OpKind.REDUCE})
#: Operations in which only the root's block has elements.
_ROOTED: Final = frozenset({OpKind.BROADCAST, OpKind.REDUCE})
#: How often a rank that has a core of its own looks again: about 0.2 ms.
_SPINS = 4000
#: How long a rank that shares its core lets others have it before it sleeps, in nanoseconds. Measured with 4 ranks on
#: 2 cores: 10 µs cost 20 % at 4 and 64 KiB, because to sleep and to wake takes longer.
_YIELD_NS = 500_000
#: The same at the begin of a short operation: long enough for the other ranks of the core to take their part. With it
#: four ranks on two cores took 74 to 97 instead of 111 to 118 µs for 4 KiB (medians of three pairs in turns).
_YIELD_AT_BEGIN_NS = 50_000
#: An operation that is exchanged in one round of pieces is short up to this length; 256 KiB took no less time.
_SHORT_BYTES_MAX = 128 * 1024
#: The steps of a round: stage, reduce, copy.
_STEPS = 3
#: How often pieces are moved before other operations get their turn: some milliseconds.
_PIECES_AT_A_TIME = 32
#: If the user lets ranks read each other's processes, a tensor outside of shared memory is staged only if it is shorter
#: than this. Design 0009 says why that is not the default.
_UNSTAGED_BYTES_MIN = 3 * 1024 * 1024
#: The same for two ranks, whose staged pieces mostly stay in the caches.
_UNSTAGED_BYTES_MIN_OF_TWO = 24 * 1024 * 1024
#: The bytes of the tensor of an operation, or of its blocks. In the kinds that the lane takes no rank lacks a block.
_Buffers = Sequence[memoryview | None]
#: The address of the tensor; where the other ranks can read it (``HEAD.source``); and the addresses of the blocks,
#: if the operation has blocks.
_Place = tuple[int, int, Sequence[int]]
_NO_PLACE: Final[_Place] = (0, 0, ())
#: Bits of the word in which ``advance`` says which ranks are to be woken.
_RANKS_MAX = 62


@final
class _Plan:
    """What the lane computes once for a layout whose operations it takes."""

    __slots__ = (
        "_adds",
        "_me",
        "_offsets",
        "_published",
        "_sums",
        "block",
        "bytes_received",
        "bytes_sent",
        "has_blocks",
        "is_short",
        "is_whole",
        "peers",
        "publishes",
        "ranks",
        "stage_classes",
    )

    def __init__(self, layout: OperationLayout, rank: int, boards: Boards, board: BoardLayout, fetched: Array) -> None:
        """``fetched``: memory for what the lane reads from other processes."""
        signature, itemsize, size = layout.signature, layout.dtype.itemsize, len(layout.ranks)
        count, blocks = signature.num_elements, signature.sizes
        self.ranks, self.has_blocks = layout.ranks, bool(blocks)  #: Whether it has a buffer for each rank.
        me = self._me = layout.ranks.index(rank)
        if signature.kind in _ROOTED:
            blocks = tuple(count if index == signature.root else 0 for index in range(size))
        adds = self._adds = signature.kind not in _GATHERINGS
        published = self._published = (count if adds else blocks[me]) * itemsize
        self.publishes = published > 0  #: Whether the other ranks read anything of this rank.
        gathers = signature.kind not in _SCATTERINGS
        # Other ranks read the blocks of a reduce-scatter one after the other; each block of a gathering lies apart.
        offsets = list(itertools.accumulate(blocks[:-1], initial=0)) if adds else [0] * size
        self._offsets = [offset * itemsize for offset in offsets]
        num_lanes = 1 if blocks else layout.num_lanes
        largest_part = max(blocks) if blocks else _divide_up(_divide_up(count, num_lanes), size)
        #: Whether the operation is exchanged as a whole, and not in pieces.
        self.is_whole = board.is_whole((count if adds else largest_part) * itemsize, size)
        is_whole = self.is_whole
        piece = board.piece_bytes(size) // itemsize
        lane_rounds = 1 if is_whole else max(1, _divide_up(largest_part, piece))
        self._sums = np.empty(exchange.COUNTED * max(itemsize, DType.FLOAT32.itemsize), np.uint8)
        #: The words of an operation's block that do not change.
        block = self.block = np.zeros(exchange.block_words(size), np.int64)
        rounds = lane_rounds * (1 if is_whole else num_lanes)
        #: Whether the rank that begins the operation looks for the others for a moment.
        self.is_short = is_whole or (rounds == 1 and count * itemsize <= _SHORT_BYTES_MAX)
        board.fill(block, size, largest_part * itemsize if rounds == 1 else None)
        #: The classes of which an operation may have a stage.
        self.stage_classes = board.classes(2 * published if is_whole else int(block[HEAD.stage_bytes]))
        block[HEAD.ranks], block[HEAD.me] = size, me
        block[HEAD.adds], block[HEAD.gathers], block[HEAD.is_cut] = adds, gathers, not blocks
        # An operation that adds nothing moves elements of any type, and reads neither the kind nor the reduction.
        block[HEAD.kind], block[HEAD.itemsize] = KINDS.get(layout.dtype, FLOAT32), itemsize
        block[HEAD.reduction] = REDUCTIONS.get(signature.reduction, SUM)
        block[HEAD.divisor] = size if signature.reduction is ReduceOp.AVG else 1
        block[HEAD.count], block[HEAD.lanes] = count, num_lanes
        block[HEAD.is_whole], block[HEAD.piece] = is_whole, piece
        block[HEAD.lane_rounds] = lane_rounds
        block[HEAD.rounds] = rounds
        block[HEAD.sums] = self._sums.ctypes.data
        block[HEAD.fetched] = fetched.ctypes.data
        text = layout.expectation.packed + repr(layout.ranks).encode()
        block[HEAD.signature] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        #: For every rank the index of its first word in the block.
        self.peers = [exchange.ORDER + size * size + index * PEER.num_words for index in range(size)]
        self._fill_peers(boards, blocks, offsets)
        if adds:
            self._fill_order(layout)
        own, everything, others = (blocks[me] if blocks else 0) * itemsize, count * itemsize, size - 1
        #: The bytes that the other ranks read of this rank's memory, and this rank of theirs (``bytes_received``).
        if not blocks:
            self.bytes_sent = others * everything if is_whole else 2 * others * everything // size
            self.bytes_received = self.bytes_sent
        elif adds:
            self.bytes_sent, self.bytes_received = everything - own, others * own
        else:
            self.bytes_sent, self.bytes_received = others * own, everything - own

    def _fill_peers(self, boards: Boards, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        block, memories = self.block, boards.memories()
        for index, (other, at) in enumerate(zip(self.ranks, self.peers, strict=True)):
            address = _address_of_memory(memories[other])
            block[at + PEER.memory], block[at + PEER.length] = address, len(memories[other])
            block[at + PEER.sleep] = address + boards.sleep_at
            block[at + PEER.process] = boards.processes.get(other, 0)
            if blocks:
                block[at + PEER.part_count], block[at + PEER.part_offset] = blocks[index], offsets[index]

    def _fill_order(self, layout: OperationLayout) -> None:
        contributions, size = layout.program.contributions, len(self.ranks)
        if contributions is not None:
            for part in range(size):
                order = contributions(part % layout.program.num_chunks)
                at = exchange.ORDER + part * size
                self.block[at : at + size] = [self.ranks.index(other) for other in order]

    def place(self, buffers: _Buffers, boards: Boards) -> _Place:
        """Return where the buffers of an operation are."""
        addresses = [_address_of(buffer) for buffer in buffers]
        source = self._source(buffers, boards) if self.publishes and not self.is_whole else 0
        return (0, source, addresses) if self.has_blocks else (addresses[0], source, ())

    def _source(self, buffers: _Buffers, boards: Boards) -> int:
        """Return ``HEAD.source``: the offset in shared memory; minus the address, if the tensor is read there; or 0."""
        offset = self._begin(buffers, boards.offset_of)
        if offset or self._published < (_UNSTAGED_BYTES_MIN_OF_TWO if len(self.ranks) == 2 else _UNSTAGED_BYTES_MIN):
            return offset
        address = self._begin(buffers, _address_of)
        return -address if address and boards.let_read(self.ranks, address, self._published) else 0

    def _begin(self, buffers: _Buffers, find: Callable[[memoryview], int]) -> int:
        """Return where the bytes begin that the other ranks read; ``find`` says where a buffer is, 0 if nowhere."""
        if not self.has_blocks or not self._adds:
            buffer = buffers[self._me if self.has_blocks else 0]
            return find(buffer) if buffer else 0
        # The others read one tensor from its beginning on, so the blocks of a reduce-scatter must follow each other.
        sources = set()
        for buffer, offset in zip(buffers, self._offsets, strict=False):
            if buffer:
                found = find(buffer)
                sources.add(found - offset if found else 0)
        return sources.pop() if len(sources) == 1 else 0

    def needs_stage(self, source: int) -> bool:
        """Return whether an operation needs a stage whose tensor is at ``source``."""
        return source == 0 and self.publishes

    def write(self, words: memoryview, place: _Place) -> None:
        """Write where the buffers of an operation are into its block."""
        words[HEAD.tensor], words[HEAD.source], blocks = place
        for at, address in zip(self.peers, blocks, strict=False):
            words[at + PEER.part_at] = address
        if len(blocks) > len(self.ranks):  # the last one takes the result of a reduce-scatter
            words[HEAD.result] = blocks[-1]


@final
class LaneCarriage(Carriage):
    """One operation that the lane has taken.

    Attributes:
        lane: The lane.
        operation: The operation.
        layout: Its layout.
        bytes_sent: The bytes that the other ranks read of this rank's memory.
        bytes_received: The bytes that this rank reads of the other ranks' memory.
        words: The words of its block (see ``kernels.exchange``); ``address`` is their address.
        buffers: The bytes of its tensors; empty after its end.
        place: Where the tensors are, or were.
        placed: Returns the buffer for which ``place`` was found, if it is the operation's only one and still exists.
        given_back: Whether messages carry the operation out after all, or it has failed before all ranks announced it.
        number: The number of its entry.
        plan: What is equal for all operations of its layout.
        other: The number of the entry that the next operation of the name uses, if that was found.
        iteration: The number in its entry by which the other ranks know it.
        stage: The number of its stage; ``None`` if it needs none.
        other_half: The offset of the half of its stage that the next operation of the name uses, if that is whole.
        ended: Whether it has ended here. Its entry and stage may still be read.
    """

    __slots__ = (
        "address",
        "buffers",
        "bytes_received",
        "bytes_sent",
        "ended",
        "given_back",
        "iteration",
        "lane",
        "layout",
        "number",
        "operation",
        "other",
        "other_half",
        "place",
        "placed",
        "plan",
        "ranks",
        "stage",
        "words",
    )

    def __init__(self, lane: FastLane, operation: Operation, plan: _Plan, buffers: _Buffers, number: int) -> None:
        self.lane, self.operation, self.plan, self.buffers = lane, operation, plan, buffers
        block = bytearray(plan.block)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        self.words = memoryview(block).cast("q")
        self.words[HEAD.address] = self.address
        self.number, self.ended, self.given_back = number, False, False
        self.stage: int | None = None
        self.other_half = 0
        self.place: _Place = _NO_PLACE
        self.placed: Callable[[], memoryview | None] = _no_buffer
        self.ranks, self.layout = plan.ranks, operation.layout
        self.bytes_sent, self.bytes_received = plan.bytes_sent, plan.bytes_received
        self.other: int | None = None
        self.iteration = operation.key[1] + 1  # 0 stands for an entry without an operation

    def write_place(self, place: _Place, buffers: _Buffers) -> None:
        """Write where the buffers of the operation are into the block."""
        self.plan.write(self.words, place)
        self.place, buffer = place, None if self.plan.has_blocks else buffers[0]
        self.placed = _no_buffer if buffer is None else weakref.ref(buffer)

    @property
    def has_begun(self) -> bool:
        """Whether all ranks have given the operation to their lanes."""
        return bool(self.words[HEAD.found] == len(self.plan.ranks) - 1)

    @property
    def was_read(self) -> bool:
        """Whether no rank reads its entries and its stage any more.

        Until a rank has submitted this operation, it may still read the last one of the name, whose entry is ``other``.
        All ranks have submitted it if all have announced it, or have announced a later one; or if messages have carried
        it out, and no rank can end such an operation before the others submit it.
        """
        operation = self.operation
        if self.given_back:
            went_well = operation.finished and operation.error is None
            can_end_early = self.other is not None and operation.signature.kind in ENDS_EARLY
            have_all_submitted = went_well and not can_end_early
            if not have_all_submitted and not self.lane.has_begun_after(self):
                return False
        return bool(self.lane.exchange(exchange.IS_READ, self.address, 0, 0))

    @property
    def is_over(self) -> bool:
        """Whether it has ended and no rank reads its entries and its stage any more."""
        return self.ended and self.was_read

    def announce(self) -> Progress:
        """Let the other ranks find the operation; end it if it is small and all ranks have announced it."""
        return self._progress(self.lane.announce(self))

    def advance(self, *, patient: bool) -> Progress:
        """Do a part of the operation; return how far it has come."""
        return self._progress(self.lane.advance(self, patient=patient))

    def _progress(self, status: int) -> Progress:
        """Return the meaning of a result of ``exchange.advance``."""
        if status == exchange.PENDING:
            return Progress.MOVING if self.has_begun else Progress.WAITING
        if status == exchange.VIOLATION:
            culprit = self.ranks[self.words[HEAD.culprit]]
            self.lane.boards.expel(culprit, "its announcement of an operation in shared memory is not valid")
            return Progress.WAITING
        return Progress.DONE if status == exchange.DONE else Progress.REFUSED

    def has_changed(self) -> bool:
        """Return whether another rank has changed what it has written about the operation."""
        return bool(self.lane.exchange(exchange.HAS_CHANGED, self.address, 0, 0))

    def give_back(self) -> bool:
        """Withdraw the announcement, unless all ranks have announced the operation; return whether it is withdrawn."""
        if self.has_begun:
            return False
        self.lane.exchange(exchange.WITHDRAW, self.address, 0, 0)
        self.end()
        return True

    def needs(self, peer: int) -> bool:
        """Return whether a peer has not announced the operation, or has not ended its part of it."""
        if peer not in self.ranks:
            return False
        self.lane.exchange(exchange.LOOK, self.address, 0, 0)
        return not self.lane.exchange(exchange.HAS_ENDED, self.address, self.ranks.index(peer), 0)

    def end(self) -> None:
        """Note that the operation has ended well, or is given back."""
        self.ended, self.buffers = True, ()
        if not self.has_begun:
            self.given_back = True

    def fail(self) -> None:
        """Note that the operation has failed.

        Its announcement stays: other ranks may have found it, and must not take its end for a success. They learn of
        the failure by messages. A mark in it tells those that read the tensor, or what is still staged of it, that it
        may change from now on.
        """
        self.lane.mark_failed(self)
        self.end()

    def progress(self) -> str:
        """Return the progress in words."""
        if not self.has_begun:
            return "announced in shared memory"
        copied, rounds = self.words[HEAD.copied], self.words[HEAD.rounds]
        return f"{copied} of {rounds} rounds of the fast lane done"


@final
class FastLane(Carrier):
    """The fast lane of one rank (``engine.carrying.Carrier``)."""

    def __init__(self, rank: int, boards: Boards, world_size: int) -> None:
        """``boards``: the memories of this host's ranks; ``world_size``: the number of ranks that share its cores."""
        assert boards.board_bytes >= BOARD_BYTES
        self._rank = rank
        self.boards = boards  #: The memories of this host's ranks.
        self._board = BoardLayout(boards.board_at)
        self._entries_at = _address_of_memory(boards.memories()[rank]) + self._board.entry(0)
        self._entries: list[LaneCarriage | None] = [None] * ENTRIES
        self._stages = Stages()
        #: One operation after the other adds up what it has read from other processes.
        self._fetched = np.empty(PIECES_BYTES_MAX, np.uint8)
        has_core = (os.cpu_count() or 1) >= world_size
        self._spins, self._yield_ns = (_SPINS, 0) if has_core else (0, _YIELD_NS)
        #: What ``restart`` writes of ``SPINS``, ``YIELD_NS`` and ``TURNS``: for long operations and for short ones.
        self._begin_with = (0, 0, 0), (self._spins, 0 if has_core else _YIELD_AT_BEGIN_NS, _STEPS)
        self._code = exchange.load()  # the function is in its memory
        self.exchange: exchange.Exchange = self._code.function  #: The compiled function (see ``kernels.exchange``).

    # ------------------------------------------------------------------------------------------ under the engine's lock

    def take(self, operation: Operation) -> LaneCarriage | None:
        """Take an operation if it is of a kind that the lane carries out and an entry, and a stage, are free."""
        plan = self._plan_of(operation.layout)
        if plan is None:
            return None
        buffers = operation.buffers
        number = self._free_entry(operation.key)
        if number is None:
            return None
        place, stage = plan.place(buffers, self.boards), None
        if plan.needs_stage(place[1]):
            stage = self._free_stage(plan)
            if stage is None:
                return None
        carriage = LaneCarriage(self, operation, plan, buffers, number)
        words = carriage.words
        key = operation.key[0]
        words[HEAD.key] = key - (1 << 64) if key >> 63 else key
        words[HEAD.iteration] = carriage.iteration
        words[HEAD.home] = _home(operation.key)
        words[HEAD.entry] = self._entry_of(carriage)
        carriage.write_place(place, buffers)
        if stage is not None:
            self._use_stage(carriage, stage)
        self._entries[number] = carriage
        return carriage

    def may_take(self, operation: Operation) -> bool:
        """Return whether another rank may have announced such an operation."""
        layout = operation.layout
        return layout.carried_by is not False and self._takes(layout)

    def mark_failed(self, carriage: LaneCarriage) -> None:
        """Let ranks that read the tensor of an operation, or its stage, know that it has failed."""
        self.exchange(exchange.MARK_FAILED, carriage.address, carriage.iteration, self._entry_of(carriage))

    def has_begun_after(self, carriage: LaneCarriage) -> bool:
        """Return whether all ranks have announced a later operation of the same name.

        Without a second entry (``other``) the name may have several operations in flight, so that a later one shows
        nothing of an earlier one: then the answer is no.
        """
        name, iteration = carriage.operation.key[0], carriage.iteration
        return carriage.other is not None and any(
            user is not None
            and user.operation.key[0] == name
            and user.ranks == carriage.ranks
            and is_later(user.iteration, iteration)
            and user.has_begun
            for user in map(self._entries.__getitem__, _numbers(carriage.operation.key))
        )

    def place_of_next(self, carriage: LaneCarriage, buffers: _Buffers) -> _Place | None:
        """Return where the buffers of the next operation of a name are; ``None`` if it cannot use the carriage."""
        plan = carriage.plan
        if not carriage.ended:
            return None
        # The next operation uses the other entry and the other half of the stage, which no rank reads any more if all
        # ranks have announced the last operation (``repeat``). A stage of pieces has no other half.
        has_other_half = plan.is_whole or carriage.stage is None
        is_other_free = has_other_half and not carriage.given_back
        if not is_other_free and not carriage.was_read:
            return None
        other = carriage.other
        if (other is None or self._entries[other] is not carriage) and not self._take_other(carriage):
            return None
        buffer = buffers[0]
        is_known = buffer is not None and carriage.placed() is buffer
        place = carriage.place if is_known else plan.place(buffers, self.boards)
        # Another operation may have got the stage; or the last tensor needed none, because it lay in shared memory.
        if carriage.stage is None and plan.needs_stage(place[1]):
            stage = self._free_stage(plan)
            if stage is None:
                return None
            self._use_stage(carriage, stage)
        return place

    def repeat(self, carriage: LaneCarriage, key: tuple[int, int], buffers: _Buffers, place: _Place) -> None:
        """Use a carriage for the next operation of its name, which ``restart`` announces.

        It uses the entry, and the half of the stage, of the operation before the last one. No rank reads these: all
        ranks have announced the last operation, and so have ended the one before it.
        """
        assert carriage.other is not None
        words = carriage.words
        if place is not carriage.place:
            carriage.write_place(place, buffers)
        carriage.ended = carriage.given_back = False
        words[HEAD.announced] = words[HEAD.found] = 0  # ``has_begun`` must not speak of the last operation
        carriage.buffers, carriage.iteration = buffers, key[1] + 1
        carriage.number, carriage.other = carriage.other, carriage.number
        if carriage.plan.is_whole:  # if it has no stage, both are 0
            words[HEAD.stage], carriage.other_half = carriage.other_half, words[HEAD.stage]

    # ---------------------------------------------------------------------------------- the thread that moves messages

    def restart(self, carriage: LaneCarriage) -> int:
        """As ``announce``, for a carriage of ``repeat``. This thread waits for the end of a small operation."""
        words, _held = carriage.words, carriage.buffers  # held, because another thread may end the operation meanwhile
        words[HEAD.spins], words[HEAD.yield_ns], words[HEAD.turns] = self._begin_with[carriage.plan.is_short]
        status = self.exchange(exchange.RESTART, carriage.address, carriage.iteration, self._entry_of(carriage))
        if words[HEAD.wake]:
            self._wake(carriage)
        return status

    def announce(self, carriage: LaneCarriage) -> int:
        """Announce an operation, and end it if it is small and all ranks have announced it.

        Returns a result of ``exchange.advance``.
        """
        return self.advance(carriage, patient=False, turns=0)

    def advance(self, carriage: LaneCarriage, *, patient: bool, turns: int = _PIECES_AT_A_TIME) -> int:
        """Do what can be done for an operation, or a part of it; return a result of ``exchange.advance``.

        Args:
            carriage: The operation.
            patient: Whether this process has nothing else to do, so that the function looks again for a while.
            turns: How often pieces are moved at most.
        """
        words, _held = carriage.words, carriage.buffers  # held, because another thread may end the operation meanwhile
        words[HEAD.turns] = turns
        words[HEAD.spins] = self._spins if patient else 0
        words[HEAD.yield_ns] = self._yield_ns if patient else 0
        while True:
            status = self.exchange(exchange.ADVANCE, carriage.address, 0, 0)
            if not words[HEAD.wake]:
                return status
            self._wake(carriage)
            are_turns_over = words[HEAD.seen] == -1  # otherwise it has returned only for other ranks to be woken
            if status != exchange.PENDING or not patient or are_turns_over:
                return status

    def _wake(self, carriage: LaneCarriage) -> None:
        wake = carriage.words[HEAD.wake]
        for index, peer in enumerate(carriage.ranks):
            if wake >> index & 1:
                self.boards.ring(peer)

    # -------------------------------------------------------------------------------------------------------- details

    def _plan_of(self, layout: OperationLayout) -> _Plan | None:
        plan = layout.carried_by
        if plan is None:
            if not self._takes(layout):
                layout.carried_by = False
                return None
            if any(rank not in self.boards.memories() for rank in layout.ranks):
                return None  # the ranks have not met yet
            self.boards.rely_on(layout.ranks)
            plan = layout.carried_by = _Plan(layout, self._rank, self.boards, self._board, self._fetched)
        return plan or None

    def _takes(self, layout: OperationLayout) -> bool:
        """Return whether the lane carries out operations of this layout: the same answer on all ranks."""
        if not 1 < len(layout.ranks) <= _RANKS_MAX or any(rank not in self.boards.members for rank in layout.ranks):
            return False
        kind, program = layout.signature.kind, layout.program
        if kind is OpKind.BARRIER or kind in _GATHERINGS:
            return True
        if program.contributions is None or not self._adds(layout):
            return False
        if kind in _SCATTERINGS:
            return True
        return (
            kind is OpKind.ALLREDUCE
            and program.chunking is Chunking.CUT
            and program.num_chunks in (1, len(layout.ranks))
        )

    @staticmethod
    def _adds(layout: OperationLayout) -> bool:
        """Return whether the lane has code for the element type and the reduction, with the bits of the schedule."""
        dtype, reduction = layout.dtype, layout.signature.reduction
        if dtype.is_half and layout.program.partial_sums and layout.partial_dtype is not DType.FLOAT32:
            return False  # the schedule rounds after every addition
        return has_code(dtype, reduction)

    def _entry_of(self, carriage: LaneCarriage) -> int:
        """Return the address of the entry of an operation."""
        return self._entries_at + carriage.number * exchange.ENTRY_BYTES

    def _free_entry(self, key: tuple[int, int], besides: LaneCarriage | None = None) -> int | None:
        """Return an entry in which an operation may be announced, but not one that ``besides`` uses."""
        if self._entries[_home(key)] is None:
            return _home(key)
        numbers = _numbers(key)
        for number in numbers:
            if self._entries[number] is None:
                return number
        for number in numbers:
            user = self._entries[number]
            if user is not None and user is not besides and user.is_over:
                self._stages.release(user)
                return number
        return None

    def _take_other(self, carriage: LaneCarriage) -> bool:
        """Give a name a second entry, which it uses in turn with the first one; return whether one was free."""
        other = self._free_entry(carriage.operation.key, besides=carriage)
        if other is None:
            return False
        carriage.other, self._entries[other] = other, carriage
        return True

    def _free_stage(self, plan: _Plan) -> int | None:
        return self._stages.find(plan.stage_classes)

    def _use_stage(self, carriage: LaneCarriage, number: int) -> None:
        self._stages.take(number, carriage)
        carriage.words[HEAD.stage], carriage.other_half = self._board.halves(number)


def _no_buffer() -> None:
    """Stand for a reference to a buffer that is not there."""


def _divide_up(count: int, parts: int) -> int:
    return -(-count // parts)


def _home(key: tuple[int, int]) -> int:
    """Return the first entry in which an operation may be announced: its meeting place, equal on all ranks."""
    return key[0] % ENTRIES


def _numbers(key: tuple[int, int]) -> list[int]:
    """Return the entries in which an operation may be announced."""
    home = _home(key)
    return [(home + probe) % ENTRIES for probe in range(exchange.PROBES)]


def _address_of(body: memoryview | None) -> int:
    if not body:
        return 0
    if body.readonly:  # a block of bytes that the operation does not write
        return _address_of_memory(body)
    return ctypes.addressof(ctypes.c_char.from_buffer(body))


def _address_of_memory(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address
