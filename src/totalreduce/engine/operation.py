"""One operation of the message list: what it is, where its bytes are, how far each of its lanes has come.

Plain data and index arithmetic; every change of state is made by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from totalreduce.engine.floating import FloatingMessage
from totalreduce.engine.layout import OperationLayout, Place
from totalreduce.foundation.types import DType, Signature
from totalreduce.schedules.actions import Program
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


class Lane:
    """One lane: a slice of every chunk with its own position in the program.

    Attributes:
        index: Which one.
        places: Of its actions.
        position: The next action.
        arrivals: By index of the receive in the program: what is here and not yet used.
        expected: Receives whose message has begun to arrive.
    """

    __slots__ = ("arrivals", "expected", "index", "places", "position")

    def __init__(self, index: int, places: Sequence[Place | None]) -> None:
        """Begin at the beginning."""
        self.index, self.places, self.position = index, places, 0
        self.arrivals: dict[int, Arrival] = {}
        self.expected: set[int] = set()


class Operation:
    """An operation in flight on this rank.

    Attributes:
        name: As submitted; ``unnamed#3`` for operations without a name.
        key: (operation id, iteration): equal on all ranks.
        layout: What it is and where the bytes of its messages are.
        buffers: The bytes of the tensor, input and output, or of every block (``None`` for blocks of others).
        accumulators: By buffer and lane: partial sums that are not kept in the tensor.
        priority: Smaller is more urgent.
        sequence: Place in the order of submission on this rank.
        owner: Opaque to the engine; the runner's handle.
        described: This rank has told its neighbours what it is; else they conclude it from the last one of its name.
        promoted: Somebody is blocked on it, here or at a peer.
        posted_by: Peers known to have submitted it.
        eager_sent: Bytes sent to a peer without its word.
        unsent: Messages queued or on their way out; the operation is not done before they are gone.
        computing: Additions that are being carried out at this moment.
        queued: By peer: queued messages, so that promotion can re-rank them.
        held: By peer: messages that wait for the peer's word.
        error: Why it failed, if it did.
    """

    __slots__ = (
        "accumulators",
        "buffers",
        "computing",
        "described",
        "eager_sent",
        "error",
        "finished",
        "first_byte_at",
        "held",
        "key",
        "lanes",
        "lanes_left",
        "layout",
        "messages_received",
        "name",
        "owner",
        "posted_by",
        "priority",
        "promoted",
        "queued",
        "sequence",
        "submitted_at",
        "unsent",
    )

    def __init__(
        self,
        name: str,
        key: tuple[int, int],
        layout: OperationLayout,
        buffers: Sequence[memoryview | None],
        *,
        priority: int,
        sequence: int,
        now: float,
        owner: Any = None,
    ) -> None:
        """Begin at the beginning of every lane."""
        self.name, self.key, self.layout = name, key, layout
        self.priority, self.sequence, self.submitted_at = priority, sequence, now
        self.buffers, self.owner = buffers, owner
        self.accumulators: dict[tuple[int, int], memoryview] = {}
        self.lanes = [Lane(index, layout.places(index)) for index in range(layout.num_lanes)]
        self.lanes_left = layout.num_lanes
        self.unsent = 0
        self.computing = 0
        self.messages_received = 0
        self.described = False
        self.promoted = False
        self.finished = False
        self.posted_by: set[int] = set()
        self.eager_sent: dict[int, int] = {}
        self.queued: dict[int, list[Any]] = {}
        self.held: dict[int, list[Any]] = {}
        self.first_byte_at: float | None = None
        self.error: BaseException | None = None

    @property
    def program(self) -> Program:
        """The compiled schedule for this rank."""
        return self.layout.program

    @property
    def signature(self) -> Signature:
        """What it is."""
        return self.layout.signature

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the whole group that take part."""
        return self.layout.ranks

    def progress(self) -> str:
        """How far it has come, for people."""
        total = len(self.program.receives) * len(self.lanes)
        text = f"{self.messages_received} of {total} messages received"
        if self.held:
            text += f", holding messages for rank(s) {', '.join(map(str, sorted(self.held)))}"
        return text

    def wire_dtype(self, *, partial: bool) -> DType:
        """Element type of a segment on the wire."""
        return self.layout.partial_dtype if partial else self.layout.dtype

    def needs(self, peer: int) -> bool:
        """Whether there is still something to get from a peer, or to give to it."""
        if peer in self.held or any(not message.taken for message in self.queued.get(peer, ())):
            return True
        return any(
            action.peer == peer and lane.places[index] is not None and index not in lane.arrivals
            for lane in self.lanes
            for index, action in enumerate(self.layout.program.actions[lane.position :], lane.position)
        )

    def segment(self, place: Place, lane: int, *, partial: bool = False) -> memoryview:
        """The bytes of a place: of the partial sums if ``partial`` and they are kept apart."""
        if partial and self.layout.keeps_partials:
            # Lane by lane and only for as long as needed: memory that was never used before costs more than adding.
            accumulator = self.accumulators.get((place.buffer, lane))
            if accumulator is None:
                accumulator = memoryview(bytearray(self.layout.accumulator_bytes(place.buffer, lane)))
                self.accumulators[place.buffer, lane] = accumulator
            return accumulator[place.wide_start : place.wide_stop]
        buffer = self.buffers[place.buffer]
        assert buffer is not None, f"{self.name!r}: block {place.buffer} is not on this rank"
        return buffer[place.start : place.stop]

    def target(self, place: Place) -> memoryview:
        """Where a finished sum goes."""
        buffer = self.buffers[place.into]
        assert buffer is not None
        return buffer[place.start : place.stop]


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
