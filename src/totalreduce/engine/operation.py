"""One operation of the message list: what it is, where its bytes are, how far each of its lanes has come.

Plain data and index arithmetic; every change of state is made by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from totalreduce.engine.floating import FloatingMessage
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.header import pack_signature, unpack_signature, with_count
from totalreduce.foundation.partition import balanced_range, lane_count
from totalreduce.foundation.types import PAIRWISE, DType, OpKind, Signature
from totalreduce.schedules import chain
from totalreduce.schedules.actions import NOTHING, Layout, Program, Receive, Send
from totalreduce.transports.base import Lease

__all__ = ["AnyReceive", "Arrival", "Lane", "Operation"]


@dataclass(slots=True, eq=False)
class Arrival:
    """A segment that is here but not yet part of the result.

    Attributes:
        buffer: The bytes, or ``None`` where they were received straight into the result.
        floating: The floating message that owns the buffer, if one does; else the buffer is scratch, or ``early``.
        computing: Whether it is in the computation list.
        early: The buffer is memory of its own, because the lane waits for another peer's message first.
        lease: The transport's memory that ``buffer`` is, if it is.
    """

    buffer: memoryview | None
    floating: FloatingMessage | None = None
    computing: bool = False
    early: bool = False
    lease: Lease | None = None


@dataclass(slots=True, eq=False)
class Lane:
    """One lane: a slice of every chunk with its own position in the program."""

    index: int
    position: int = 0
    arrivals: dict[int, Arrival] = field(default_factory=dict)  #: by index of the receive in the program
    expected: set[int] = field(default_factory=set)  #: receives whose message has begun to arrive


#: Pieces of a chain are not smaller: below this what a message costs is more than what it carries.
_PIECE_BYTES_MIN = 64 * 1024
#: Several chunks may travel as one message of up to so many segments.
_SPAN_SEGMENTS = 2


class Operation:
    """An operation in flight on this rank.

    Attributes:
        name: As submitted; ``unnamed#3`` for operations without a name.
        key: (operation id, iteration): equal on all ranks.
        signature: What it is.
        program: The compiled schedule for this rank, with ranks of the whole group.
        ranks: The ranks of the whole group that take part.
        buffers: The bytes of the tensor, input and output, or of every block (``None`` for blocks of others).
        accumulators: By buffer: partial sums that are not kept in the tensor (wider, or not this rank's to change).
        priority: Smaller is more urgent.
        sequence: Place in the order of submission on this rank.
        promoted: Somebody is blocked on it, here or at a peer.
        posted_by: Peers known to have submitted it.
        eager_sent: Bytes sent to a peer without its word.
        unsent: Messages queued or on their way out; the operation is not done before they are gone.
        error: Why it failed, if it did.
    """

    __slots__ = (
        "_chunk_lanes",
        "_cut",
        "_keeps_partials",
        "_num_chunks",
        "_pair_signatures",
        "_ranges",
        "accumulators",
        "buffers",
        "computing",
        "dtype",
        "eager_sent",
        "error",
        "finished",
        "first_byte_at",
        "held",
        "itemsize",
        "key",
        "lanes",
        "lanes_left",
        "messages_received",
        "name",
        "num_bytes",
        "owner",
        "packed_signature",
        "partial_dtype",
        "posted_by",
        "priority",
        "program",
        "promoted",
        "queued",
        "ranks",
        "sequence",
        "signature",
        "submitted_at",
        "uneven",
        "unsent",
    )

    def __init__(
        self,
        name: str,
        key: tuple[int, int],
        signature: Signature,
        program: Program,
        buffers: Sequence[memoryview | None],
        *,
        ranks: tuple[int, ...],
        priority: int,
        sequence: int,
        config: EngineConfig,
        now: float,
        owner: Any = None,
    ) -> None:
        """Cut the tensor into lanes.

        Args:
            name: For people.
            key: (operation id, iteration).
            signature: What it is.
            program: From ``schedules.program_for``.
            buffers: Writable bytes: of the tensor, or of one block per chunk of the program.
            ranks: Who takes part.
            priority: Smaller is more urgent.
            sequence: Running number of the submission.
            config: Sizes of segments and lanes; equal on all ranks.
            now: Time of submission in seconds.
            owner: Opaque to the engine; the runner's handle.
        """
        dtype = signature.dtype
        self.name, self.key, self.signature, self.program = name, key, signature, program
        self.packed_signature = pack_signature(signature)
        self.priority, self.sequence, self.submitted_at = priority, sequence, now
        self.buffers, self.ranks, self.owner = buffers, ranks, owner
        self.dtype, self.itemsize = dtype, dtype.itemsize
        widen = dtype.is_half and config.half_accumulation == "float32" and program.partial_sums
        self.partial_dtype = DType.FLOAT32 if widen else dtype
        self._keeps_partials = widen or program.preserves
        self.accumulators: dict[int, memoryview] = {}
        self._num_chunks = program.num_chunks
        self._cut = program.layout is Layout.CUT
        self._ranges: dict[tuple[int, int], tuple[int, int]] = {}
        sizes = [len(buffer) // self.itemsize if buffer is not None else 0 for buffer in buffers]
        self.num_bytes = sum(sizes) * self.itemsize
        self._chunk_lanes = self._count_lanes(sizes, config)
        num_lanes = max(self._chunk_lanes)
        self.uneven = min(self._chunk_lanes) != num_lanes
        self._pair_signatures: dict[tuple[int, bool], bytes] = (
            self._sign_pairs(sizes) if signature.kind in PAIRWISE else {}
        )
        self.lanes = [Lane(index) for index in range(num_lanes)]
        self.lanes_left = num_lanes
        self.unsent = 0
        self.computing = 0  #: additions that are being carried out at this moment
        self.messages_received = 0
        self.promoted = False
        self.finished = False
        self.posted_by: set[int] = set()
        self.eager_sent: dict[int, int] = {}
        self.queued: dict[int, list[Any]] = {}  #: by peer: queued messages, so that promotion can re-rank them
        self.held: dict[int, list[Any]] = {}  #: by peer: messages that wait for the peer's word
        self.first_byte_at: float | None = None
        self.error: BaseException | None = None

    def _count_lanes(self, sizes: Sequence[int], config: EngineConfig) -> list[int]:
        """How many lanes each buffer has; sender and receiver of a block come to the same."""
        program, width = self.program, self.partial_dtype.itemsize
        if not self._cut:
            return [self._lanes_for(size * width, config) for size in sizes]
        num_bytes = sizes[0] * width
        num_lanes = self._lanes_for(-(-num_bytes // self._num_chunks), config)
        if program.span_max > 1:
            span_bytes = -(-num_bytes * program.span_max // self._num_chunks)
            num_lanes = max(num_lanes, -(-span_bytes // (_SPAN_SEGMENTS * config.segment_bytes)))
        if self.signature.kind in (OpKind.BROADCAST, OpKind.REDUCE):
            # The pieces of a chain must be many, or filling and emptying it takes long.
            piece_bytes = max(config.segment_bytes_min // 2, min(_PIECE_BYTES_MIN, config.segment_bytes))
            num_lanes = max(num_lanes, chain.pieces(len(self.ranks), num_bytes, piece_bytes))
        return [num_lanes]

    @staticmethod
    def _lanes_for(chunk_bytes: int, config: EngineConfig) -> int:
        return lane_count(
            chunk_bytes,
            segment_bytes=config.segment_bytes,
            segment_bytes_min=config.segment_bytes_min,
            lanes_min=config.lanes_min,
        )

    def _sign_pairs(self, sizes: Sequence[int]) -> dict[tuple[int, bool], bytes]:
        return {
            (action.peer, isinstance(action, Send)): with_count(self.packed_signature, sizes[action.chunk])
            for action in self.program.actions
        }

    def signature_to(self, peer: int) -> bytes:
        """The packed signature of messages to ``peer``."""
        return self._pair_signatures.get((peer, True), self.packed_signature)

    def signature_from(self, peer: int) -> bytes:
        """The packed signature that messages from ``peer`` must have."""
        return self._pair_signatures.get((peer, False), self.packed_signature)

    def describe_to(self, peer: int) -> str:
        """What this rank sends to ``peer``, for people."""
        packed = self._pair_signatures.get((peer, True))
        return unpack_signature(packed) if packed else self.signature.describe()

    def describe_from(self, peer: int) -> str:
        """What this rank expects of ``peer``, for people."""
        packed = self._pair_signatures.get((peer, False)) or self._pair_signatures.get((peer, True))
        return unpack_signature(packed) if packed else self.signature.describe()

    def has_lane(self, action: Send | Receive, lane: int) -> bool:
        """Whether a lane takes part in an action: blocks of different sizes have different numbers of lanes."""
        if not self.uneven or action.chunk == NOTHING:
            return True
        return lane < self._chunk_lanes[0 if self._cut else action.chunk]

    def elements(self, chunk: int, lane: int, span: int = 1) -> tuple[int, int]:
        """Half-open element range, within its buffer, of one lane of ``span`` chunks; nothing of ``NOTHING``.

        A tensor is cut into lanes and every lane into chunks, so that neighbouring chunks of a lane lie together.
        """
        if chunk == NOTHING:
            return 0, 0
        found = self._ranges.get((chunk, lane))
        if found is None:
            buffer = self.buffers[0 if self._cut else chunk]
            assert buffer is not None, f"{self.name!r}: block {chunk} is not on this rank"
            total = len(buffer) // self.itemsize
            found = balanced_range(total, self._chunk_lanes[0 if self._cut else chunk], lane)
            if self._cut and self._num_chunks > 1:
                first, last = balanced_range(found[1] - found[0], self._num_chunks, chunk)
                found = found[0] + first, found[0] + last
            self._ranges[chunk, lane] = found
        if span > 1:
            return found[0], self.elements(chunk + span - 1, lane)[1]
        return found

    def wire_dtype(self, *, partial: bool) -> DType:
        """Element type of a segment on the wire."""
        return self.partial_dtype if partial else self.dtype

    def segment_bytes(self, action: Send | Receive, lane: int) -> int:
        """Body bytes of one message."""
        start, stop = self.elements(action.chunk, lane, action.span)
        return (stop - start) * (self.partial_dtype.itemsize if action.partial else self.itemsize)

    def segment(self, chunk: int, lane: int, *, span: int = 1, partial: bool = False) -> memoryview:
        """The bytes of one lane of a chunk: of the partial sums if ``partial`` and they are kept apart."""
        start, stop = self.elements(chunk, lane, span)
        which = 0 if self._cut or chunk == NOTHING else chunk
        buffer = self.buffers[which]
        assert buffer is not None
        if partial and self._keeps_partials:
            width = self.partial_dtype.itemsize
            accumulator = self.accumulators.get(which)
            if accumulator is None:
                accumulator = memoryview(bytearray(len(buffer) // self.itemsize * width))
                self.accumulators[which] = accumulator
            return accumulator[width * start : width * stop]
        return buffer[self.itemsize * start : self.itemsize * stop]

    def expected_bytes(self, peer: int) -> int:
        """How many body bytes ``peer`` will send for this operation, about (exact up to rounding of chunks)."""
        total = 0
        for (source, _), index in self.program.receives.items():
            action = self.program.actions[index]
            if source == peer and action.chunk != NOTHING:
                buffer = self.buffers[0 if self._cut else action.chunk]
                assert buffer is not None
                total += len(buffer) * action.span // (self._num_chunks if self._cut else 1)
        return total


@dataclass(slots=True, eq=False)
class AnyReceive:
    """A receive from whoever sends first; it becomes an operation when somebody has.

    Attributes:
        candidates: Name of the message by sender.
        signature: What is received.
        buffer: Writable bytes.
        scope: As for ``Engine.submit``.
        priority: Smaller is more urgent.
        owner: Opaque to the engine.
        error: Why it ended before anybody had sent.
    """

    candidates: dict[int, str]
    signature: Signature
    buffer: memoryview
    scope: str
    priority: int
    owner: Any
    error: BaseException | None = None
