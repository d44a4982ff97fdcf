"""One operation of the message list: what it is, where its bytes are, how far each of its lanes has come.

Plain data and index arithmetic; every change of state is made by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from totalreduce.engine.floating import FloatingMessage
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.header import pack_signature
from totalreduce.foundation.partition import balanced_range, lane_count
from totalreduce.foundation.types import DType, Signature
from totalreduce.schedules.actions import NOTHING, Program

__all__ = ["Arrival", "Lane", "Operation"]


@dataclass(slots=True, eq=False)
class Arrival:
    """A segment that is here but not yet part of the result.

    Attributes:
        buffer: The bytes, or ``None`` where they were received straight into the result.
        floating: The floating message that owns the buffer, if one does; else the buffer is scratch or ``early``.
        early: The buffer is memory of its own, because the lane waits for another peer's message first.
        computing: Whether it is in the computation list.
    """

    buffer: memoryview | None
    floating: FloatingMessage | None = None
    computing: bool = False
    early: bool = False


@dataclass(slots=True, eq=False)
class Lane:
    """One lane: a slice of every chunk with its own position in the program."""

    index: int
    position: int = 0
    arrivals: dict[int, Arrival] = field(default_factory=dict)  #: by index of the receive in the program
    expected: set[int] = field(default_factory=set)  #: receives whose message has begun to arrive


class Operation:
    """An operation in flight on this rank.

    Attributes:
        name: As submitted; ``unnamed#3`` for operations without a name.
        key: (operation id, iteration): equal on all ranks.
        signature: What it is.
        program: The compiled schedule for this rank.
        priority: Smaller is more urgent.
        sequence: Place in the order of submission on this rank.
        result: The bytes of the tensor; input and output.
        accumulator: float32 partial sums of a half-precision tensor, or ``None``.
        promoted: Somebody is blocked on it, here or at a peer.
        posted_by: Peers known to have submitted it.
        eager_sent: Bytes sent to a peer without its word.
        unsent: Messages queued or on their way out; the operation is not done before they are gone.
        error: Why it failed, if it did.
    """

    __slots__ = (
        "_lane_ranges",
        "_num_chunks",
        "accumulator",
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
        "owner",
        "packed_signature",
        "partial_dtype",
        "posted_by",
        "priority",
        "program",
        "promoted",
        "queued",
        "result",
        "sequence",
        "signature",
        "submitted_at",
        "unsent",
    )

    def __init__(
        self,
        name: str,
        key: tuple[int, int],
        signature: Signature,
        program: Program,
        result: memoryview,
        *,
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
            signature: What it is; ``result`` holds exactly its elements.
            program: From ``schedules.program_for``.
            result: Writable bytes.
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
        self.result, self.owner = result, owner
        self.dtype, self.itemsize = dtype, dtype.itemsize
        widen = dtype.is_half and config.half_accumulation == "float32" and program.partial_sums
        self.partial_dtype = DType.FLOAT32 if widen else dtype
        num_elements = signature.num_elements
        self.accumulator = memoryview(bytearray(4 * num_elements)) if widen else None
        chunk_bytes = -(-num_elements // program.num_chunks) * self.partial_dtype.itemsize
        num_lanes = lane_count(
            chunk_bytes,
            segment_bytes=config.segment_bytes,
            segment_bytes_min=config.segment_bytes_min,
            lanes_min=config.lanes_min,
        )
        self._num_chunks = program.num_chunks
        self._lane_ranges: dict[int, list[tuple[int, int]]] = {}
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

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.signature.num_elements * self.itemsize

    def elements(self, chunk: int, lane: int) -> tuple[int, int]:
        """Half-open element range of one lane of one chunk; nothing of ``NOTHING``."""
        if chunk == NOTHING:
            return 0, 0
        ranges = self._lane_ranges.get(chunk)
        if ranges is None:
            start, stop = balanced_range(self.signature.num_elements, self._num_chunks, chunk)
            num_lanes = len(self.lanes)
            ranges = []
            for index in range(num_lanes):
                low, high = balanced_range(stop - start, num_lanes, index)
                ranges.append((start + low, start + high))
            self._lane_ranges[chunk] = ranges
        return ranges[lane]

    def wire_dtype(self, *, partial: bool) -> DType:
        """Element type of a segment on the wire."""
        return self.partial_dtype if partial else self.dtype

    def segment_bytes(self, chunk: int, lane: int, *, partial: bool) -> int:
        """Body bytes of one message."""
        start, stop = self.elements(chunk, lane)
        return (stop - start) * (self.partial_dtype.itemsize if partial else self.itemsize)

    def segment(self, chunk: int, lane: int, *, partial: bool = False) -> memoryview:
        """The bytes of one lane of one chunk: of the partial sums if ``partial`` and they are kept apart."""
        start, stop = self.elements(chunk, lane)
        if partial and self.accumulator is not None:
            return self.accumulator[4 * start : 4 * stop]
        return self.result[self.itemsize * start : self.itemsize * stop]

    def expected_bytes(self, peer: int) -> int:
        """How many body bytes ``peer`` will send for this operation, about (exact up to rounding of chunks)."""
        actions = self.program.actions
        receives = sum(
            source == peer and actions[index].chunk != NOTHING for (source, _), index in self.program.receives.items()
        )
        return receives * (self.num_bytes // self._num_chunks)
