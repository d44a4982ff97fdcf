"""One operation of the message list: its layout, its bytes, its state, and the progress of each of its lanes.

An operation is in one of these states; ``Operation.enter`` allows no other change::

    WAITING ──> MOVING ──> DONE
       │          │
       ├──────────┼──────> FAILED
       └──────────┴──────> FAILING ──> FAILED

The engine makes every change of state.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from totalreduce.engine.layout import OperationLayout, Region
from totalreduce.foundation.types import DType, Signature
from totalreduce.schedules.actions import Program

__all__ = ["Arrival", "BodyMemory", "Carriage", "Lane", "Operation", "Progress", "State", "progress_text"]


class State(enum.IntEnum):
    """Where an operation is in its life. States from ``DONE`` on mean that it has ended."""

    WAITING = 0
    """It was submitted, and no byte of it has left or arrived."""
    MOVING = 1
    """Its messages leave and arrive."""
    DONE = 2
    """The result is there, and every message has left."""
    FAILING = 3
    """It has failed, and an addition to its tensor is still being carried out."""
    FAILED = 4
    """It has failed, and has completed."""


#: The states that may follow each state, by its number: indexing a tuple is faster than hashing a member.
_NEXT_STATES: Final[tuple[tuple[State, ...], ...]] = (
    (State.MOVING, State.DONE, State.FAILING, State.FAILED),
    (State.DONE, State.FAILING, State.FAILED),
    (),
    (State.FAILED,),
    (),
)

#: The peers of an operation of which none has an entry.
_NOWHERE: Final[AbstractSet[int]] = frozenset()


class BodyMemory(Protocol):
    """The owner of the memory in which the body of a message has arrived."""

    def release(self) -> None:
        """Take the memory back. Called once, when nothing reads the body any more."""


class Progress(enum.IntEnum):
    """How far a carrier has come with an operation (``Carriage.advance``)."""

    WAITING = 0
    """Some rank has not given the operation to its carrier yet."""
    MOVING = 1
    """All ranks have given it to their carriers, which carry it out."""
    DONE = 2
    """The result is there, and the carrier needs the tensor no more."""
    REFUSED = 3
    """Another rank means another operation by the same name: messages must carry it out, and find the difference."""


class Carriage:
    """What a carrier (``engine.carrying``) keeps of an operation that it has taken. The methods do nothing by default.

    They are called under the engine's lock, except ``announce``, ``advance`` and ``has_changed``. ``announce`` and
    ``advance`` are called by the thread that moves messages.

    Attributes:
        exchanges_messages: Whether the carrier sends and receives the messages of the schedule. Then it takes the
            operation at any time, and never gives it back; and a message of it may be half-way out when it fails.
        bytes_sent: The bytes that other ranks get of this rank, unless the carrier counts them itself.
        bytes_received: The bytes that this rank gets of other ranks, unless the carrier counts them itself.
    """

    __slots__ = ()
    exchanges_messages: ClassVar[bool] = False
    bytes_sent: int = 0
    bytes_received: int = 0

    def announce(self) -> Progress:
        """Let the other ranks know that this rank has submitted the operation; as ``advance``."""
        return self.advance(patient=False)

    def advance(self, *, patient: bool) -> Progress:  # noqa: ARG002  (see the docstring)
        """Do what can be done for the operation now, or a part of it; return how far it has come.

        ``patient``: a caller is blocked on the operation, so that it may wait for the other ranks for a moment.
        """
        return Progress.WAITING

    def has_changed(self) -> bool:
        """Return whether ``advance`` can do something. Any thread."""
        return False

    def promote(self) -> None:
        """Prefer the operation to those that are not promoted."""

    def progress(self) -> str:
        """Return the progress in words."""
        return "with a carrier"

    def needs(self, peer: int) -> bool:  # noqa: ARG002
        """Return whether a peer still has something to do for the operation."""
        return True

    def end(self) -> None:
        """Note that the operation has ended well: then before the program can change its tensors."""

    def fail(self) -> None:
        """Note that the operation has failed: the same."""

    def give_back(self) -> bool:
        """Give the operation back to the engine, whose messages then carry it out; return whether that is possible.

        It is not if all ranks have given it to their carriers, which will then finish it.
        """
        return False

    # The engine calls the following methods only if ``exchanges_messages``.

    def posted(self, peer: int) -> None:
        """Let messages leave to a peer that has submitted the operation."""

    def accepts(self, peer: int, lane: int, step: int) -> bool:  # noqa: ARG002
        """Return whether the engine may receive a message that has arrived."""
        return False

    def receive(self, peer: int, lane: int, step: int, body: memoryview | None) -> None:
        """Note that the engine has received a message that was accepted.

        ``body``: its bytes, which stay there until they were used; ``None``: they are in the result.
        """


@dataclass(slots=True, eq=False)
class Arrival:
    """A segment that has arrived and is not part of the result yet.

    Attributes:
        buffer: The bytes, or ``None`` if they were received straight into the result.
        memory: The owner of the buffer's memory: a floating message, a scratch segment or a lease of the transport;
            ``None`` if the buffer belongs to this arrival alone.
        computing: Whether the segment is in the computation list.
    """

    buffer: memoryview | None
    memory: BodyMemory | None = None
    computing: bool = False

    def release(self) -> None:
        """Give the memory of the buffer back to its owner."""
        if self.memory is not None:
            self.memory.release()


class Lane:
    """One lane: a slice of every chunk, with its own position in the program.

    Attributes:
        index: The number of the lane.
        regions: The regions of the program's actions in this lane.
        position: The index of the action that is next.
        arrivals: Segments that have arrived and are not used yet, by the index of their receive in the program.
        begun: Indices of the receives whose message has begun to arrive.
    """

    __slots__ = ("arrivals", "begun", "index", "position", "regions")

    def __init__(self, index: int, regions: Sequence[Region | None]) -> None:
        """Begin before the first action."""
        self.index, self.regions, self.position = index, regions, 0
        self.arrivals: dict[int, Arrival] = {}
        self.begun: set[int] = set()


class Operation:
    """An operation in flight on this rank.

    Attributes:
        name: The name under which it was submitted; ``unnamed#3`` for operations without a name.
        key: (operation id, iteration): equal on all ranks.
        layout: The signature, the schedule, and where the bytes of its messages are.
        buffers: The bytes of the tensor, input and output, or of every block (``None`` for blocks of other ranks).
        accumulators: By buffer and lane: partial sums that are not kept in the tensor.
        priority: Smaller is more urgent.
        sequence: The position in the order of submission on this rank.
        owner: A value of the caller, which the engine does not read.
        carriage: What the carrier that has taken it keeps of it; ``None``: the engine's messages carry it out.
        state: Where the operation is in its life.
        described: Whether this rank has told its neighbours the signature. If not, they conclude it from the previous
            operation of the same name.
        promoted: Whether a caller is blocked on it, here or on a peer.
        posted_by: Peers known to have submitted it.
        eager_sent: By peer: bytes that were sent before the peer was known to have submitted the operation.
        has_entry_at: Peers that have an entry of the operation for this rank (``entries``).
        unsent: Messages that are queued or on their way out. The operation ends only when none is left.
        computing: The number of additions that are being carried out at this moment.
        queued: By peer: queued messages, so that promotion can give them a better position.
        held: By peer that was asked to say when it has submitted the operation: messages that wait until then.
        error: The error with which it failed.
    """

    __slots__ = (
        "accumulators",
        "buffers",
        "carriage",
        "computing",
        "described",
        "eager_sent",
        "error",
        "has_entry_at",
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
        "state",
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
        """Begin without lanes; see ``make_lanes``."""
        self.name, self.key, self.layout = name, key, layout
        self.priority, self.sequence, self.submitted_at = priority, sequence, now
        self.buffers, self.owner = buffers, owner
        self.accumulators: dict[tuple[int, int], memoryview] = {}
        self.lanes: list[Lane] = []
        self.lanes_left = layout.num_lanes
        self.unsent = 0
        self.computing = 0
        self.messages_received = 0
        self.carriage: Carriage | None = None
        self.described = False
        self.promoted = False
        self.state = State.WAITING
        self.posted_by: set[int] = set()
        self.eager_sent: dict[int, int] = {}
        self.has_entry_at: AbstractSet[int] = _NOWHERE
        self.queued: dict[int, list[Any]] = {}
        self.held: dict[int, list[Any]] = {}
        self.error: BaseException | None = None

    def make_lanes(self) -> list[Lane]:
        """Make the lanes, each before its first action: messages carry the operation out."""
        layout = self.layout
        self.lanes = [Lane(index, layout.regions(index)) for index in range(layout.num_lanes)]
        return self.lanes

    def enter(self, state: State) -> None:
        """Change the state."""
        assert state in _NEXT_STATES[self.state], f"{self.name!r} cannot go from {self.state.name} to {state.name}"
        self.state = state

    @property
    def finished(self) -> bool:
        """Whether it has ended, well or not."""
        return self.state >= State.DONE

    @property
    def is_leaving(self) -> bool:
        """Whether messages of an operation that has failed may be half-way out."""
        half_way = any(not message.sent for messages in self.queued.values() for message in messages)
        return self.error is not None and (half_way or (self.carriage is not None and self.has_messages))

    @property
    def has_messages(self) -> bool:
        """Whether messages of its schedule carry it out, be they the engine's or a carrier's."""
        return self.carriage is None or self.carriage.exchanges_messages

    @property
    def program(self) -> Program:
        """The compiled schedule for this rank."""
        return self.layout.program

    @property
    def signature(self) -> Signature:
        """The kind of collective, the element type, the shape, the reduction and the root."""
        return self.layout.signature

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the whole group that take part."""
        return self.layout.ranks

    def progress(self) -> str:
        """Return its progress in words."""
        if self.carriage is not None:
            return self.carriage.progress()
        held = [peer for peer, messages in self.held.items() if messages]
        return progress_text(self.messages_received, len(self.program.receives) * len(self.lanes), held)

    def wire_dtype(self, *, partial: bool) -> DType:
        """Return the element type of a segment on the wire."""
        return self.layout.partial_dtype if partial else self.layout.dtype

    def needs(self, peer: int, *, unreachable: bool = False) -> bool:
        """Return whether a message to or from a peer is still missing, or the peer's part in a carrier.

        A message that the transport has taken is missing only if the peer is ``unreachable`` and it was not sent.
        """
        if self.carriage is not None:
            leaving = any(not message.sent for message in self.queued.get(peer, ()))
            return leaving or self.carriage.needs(peer)
        if self.held.get(peer):
            return True
        if any(not (message.sent if unreachable else message.taken) for message in self.queued.get(peer, ())):
            return True
        return any(
            action.peer == peer and lane.regions[index] is not None and index not in lane.arrivals
            for lane in self.lanes
            for index, action in enumerate(self.layout.program.actions[lane.position :], lane.position)
        )

    def segment(self, region: Region, lane: int, *, partial: bool = False) -> memoryview:
        """Return the bytes of a region: those of the partial sums if ``partial`` is set and they are kept apart."""
        if partial and self.layout.keeps_partials:
            # For each lane, and only while it is needed: to touch fresh memory takes longer than the addition.
            accumulator = self.accumulators.get((region.buffer, lane))
            if accumulator is None:
                accumulator = memoryview(bytearray(self.layout.accumulator_bytes(region.buffer, lane)))
                self.accumulators[region.buffer, lane] = accumulator
            return accumulator[region.wide_start : region.wide_stop]
        buffer = self.buffers[region.buffer]
        assert buffer is not None, f"{self.name!r}: block {region.buffer} is not on this rank"
        return buffer[region.start : region.stop]

    def target(self, region: Region) -> memoryview:
        """Return the bytes into which a finished sum is written."""
        buffer = self.buffers[region.into]
        assert buffer is not None
        return buffer[region.start : region.stop]


def progress_text(received: int, total: int, held: Sequence[int]) -> str:
    """Return in words how many messages of an operation have come. ``held``: ranks for which messages wait."""
    text = f"{received} of {total} messages received"
    return f"{text}, holding messages for rank(s) {', '.join(map(str, sorted(held)))}" if held else text
