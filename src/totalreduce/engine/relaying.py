"""Which operations a transport's relay gets: large ones whose messages come from one neighbour and leave to another.

An operation begins with messages of the engine. It is a *candidate* for the relay (``Relay``) if the
relay can follow its schedule. It is handed over as soon as its receivers are known to have submitted it, and no message
of it is arriving or waiting to be added here. From then on the relay has it until it ends: the engine sees no
message of it but those that are half-way out, and the relay reports its end. If it fails, the relay forgets it.

The messages on the wire are those of the engine. So each rank may hand an operation over, at any time, or not at all.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from totalreduce.engine.counters import Counters
from totalreduce.engine.floating import floating_cost
from totalreduce.engine.layout import OperationLayout, Region
from totalreduce.engine.operation import Operation, RelayedOperation
from totalreduce.engine.outbox import Outbox
from totalreduce.engine.reception import Reception
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.types import PAIRWISE, Algorithm, ReduceOp
from totalreduce.kernels import relay as words
from totalreduce.kernels.arrays import Array
from totalreduce.kernels.element_types import FLOAT32, KINDS, REDUCTIONS, SUM, has_code
from totalreduce.schedules.actions import NOTHING, Action, Mode, Receive, Send

__all__ = ["Order", "Relay", "RelayPlan", "RelayTask", "RelayedTraffic", "Relaying"]

_RECEIVE: Final = {
    Mode.REPLACE: words.REPLACE,
    Mode.COMBINE: words.COMBINE,
    Mode.COMBINE_LAST: words.COMBINE_LAST,
}


#: The length of a line of the processor's cache.
_LINE_BYTES: Final = 64


class Order(NamedTuple):
    """The place of a message among those that wait; the most urgent one has the smallest priority.

    Attributes:
        is_promoted: Whether a caller waits for its operation.
        priority: The priority of its operation.
        sequence: When its operation was submitted.
    """

    is_promoted: bool
    priority: int
    sequence: int


@dataclass(frozen=True, slots=True, eq=False)
class RelayPlan:
    """What the relay needs of an operation and does not change from iteration to iteration.

    Attributes:
        peers: The ranks with which messages are exchanged.
        sources: Those from which bodies come. A message without body may come by any connection.
        targets: Those to which messages leave.
        rows: By lane: the rows of ``kernels.relay``, one after the other.
        lanes: The words of the lanes that do not change (``kernels.relay.lanes_of``).
        following: By lane: for each row, and for the end, the first row from there on that receives, and that sends.
        kind: The element type (``kernels.element_types``).
        itemsize: The bytes of an element.
        reduction: How contributions are combined (``kernels.element_types``).
        divisor: Of an average; otherwise 1.
        sums: The numbers of the unfinished sums that are not kept in the tensor, by buffer and lane.
        sum_bytes: The length of the longest of these sums, or a little more.
    """

    peers: tuple[int, ...]
    sources: frozenset[int]
    targets: frozenset[int]
    rows: list[array[int]]
    lanes: Array
    following: list[list[tuple[int, int]]]
    kind: int
    itemsize: int
    reduction: int
    divisor: int
    sums: Mapping[tuple[int, int], int]
    sum_bytes: int


class RelayTask(NamedTuple):
    """An operation that is handed over to the relay.

    Attributes:
        plan: What does not change.
        key: The operation's key.
        signature: The packed signature of its messages.
        order: The place of its messages among those that wait.
        buffers: The bytes of the operation, as in ``engine.operation``.
        positions: By lane: the index of the next row that receives, and of the next one that sends.
        sums: Unfinished sums that are there already: the number, as in the plan, and the bytes.
        owner: A value of the user.
    """

    plan: RelayPlan
    key: tuple[int, int]
    signature: bytes
    order: Order
    buffers: Sequence[memoryview | None]
    positions: list[tuple[int, int]]
    sums: list[tuple[int, memoryview]]
    owner: Any


class RelayedTraffic(NamedTuple):
    """What the relay has exchanged with a peer by one connection since the last report.

    Attributes:
        bytes_in: Bytes that have come, heartbeats included.
        messages_in: Messages that have come completely.
        bytes_out: Bytes that have left.
        messages_out: Messages that have left completely.
        eager_in: Messages that have come with the flag EAGER.
        eager_bytes_in: The bytes of their bodies.
    """

    bytes_in: int
    messages_in: int
    bytes_out: int
    messages_out: int
    eager_in: int
    eager_bytes_in: int


class Relay(Protocol):
    """Moves the messages of large operations (``relay.relay``)."""

    def may_take(self, plan: RelayPlan) -> bool:
        """Return whether an operation with this plan can be taken now.

        If not, because a message is arriving from a source, the relay sees to it that nothing follows that message.
        """

    def take(self, task: RelayTask) -> RelayedOperation:
        """Take an operation that can be taken now, from within ``Relaying.hand_over``."""

    def arriving(self) -> set[int]:
        """Return the peers of which a message of an operation is arriving. Any thread."""


class Relaying:
    """Hands operations over to the relay.

    Attributes:
        relay: The relay of the transport; ``None``: there is none.
        candidates: Operations that were started and may be handed over later.
    """

    __slots__ = ("_counters", "_eager_bytes", "_outbox", "_reception", "candidates", "relay")

    def __init__(self, config: EngineConfig, outbox: Outbox, reception: Reception, counters: Counters) -> None:
        """Begin without a relay."""
        self._eager_bytes = config.eager_bytes
        self._outbox, self._reception, self._counters = outbox, reception, counters
        self.relay: Relay | None = None
        self.candidates: dict[Operation, None] = {}

    def started(self, operation: Operation) -> None:
        """Note that messages of the engine carry an operation out."""
        if self.relay is not None and operation.layout.is_bulk and not operation.finished:
            layout = operation.layout
            if layout.relay_plan is None:
                layout.relay_plan = _plan(layout, self._outbox.bulk_peers, self._eager_bytes) or False
            if layout.relay_plan:
                self.candidates[operation] = None

    def hand_over(self) -> list[Operation]:
        """Hand the candidates over that nothing prevents; return those that the relay has taken."""
        taken = []
        for operation in list(self.candidates):
            if operation.finished:
                del self.candidates[operation]
            elif self._hand_over(operation):
                del self.candidates[operation]
                taken.append(operation)
        return taken

    def _hand_over(self, operation: Operation) -> bool:
        plan = operation.layout.relay_plan
        assert self.relay is not None
        assert isinstance(plan, RelayPlan)
        if operation.held or operation.computing or not plan.targets <= operation.posted_by:
            return False
        if not self.relay.may_take(plan) or any(lane.arrivals for lane in operation.lanes):
            return False
        key = operation.key
        for delivery in self._reception.arriving:
            header = delivery.header
            if (header.operation, header.iteration) == key and delivery.operation in (operation, None):
                return False
        waiting: dict[int, int] = {}  # by lane: the first action whose message waits
        leaving = set()  # messages that are half-way out, which the engine sends to their end
        for messages in operation.queued.values():
            for message in messages:
                if not message.taken:
                    index = operation.program.sends[message.action.peer, message.action.step]
                    waiting[message.lane] = min(waiting.get(message.lane, index), index)
                elif not message.sent:
                    leaving.add(message)  # a set, because messages that were held are listed twice
        if not operation.lanes_left and not waiting:
            return False  # only messages that are half-way out are left of it
        positions = [
            (following[lane.position][0], following[waiting.get(lane.index, lane.position)][1])
            for lane, following in zip(operation.lanes, plan.following, strict=True)
        ]
        order = Order(operation.promoted, operation.priority, operation.sequence)
        signature = operation.layout.expectation.packed
        sums = [(plan.sums[place], view) for place, view in operation.accumulators.items()]
        task = RelayTask(plan, key, signature, order, operation.buffers, positions, sums, operation)
        operation.relayed = self.relay.take(task)
        operation.lanes_left = len(operation.lanes)  # until the relay reports its end, also of a rank that only sends
        self._outbox.discard(operation)
        operation.queued = {
            peer: [message for message in messages if message in leaving] for peer, messages in operation.queued.items()
        }
        operation.unsent = len(leaving)
        return True

    def count(self, peer: int, traffic: RelayedTraffic) -> None:
        """Count what the relay has exchanged with a peer."""
        counters = self._counters
        counters.bytes_sent += traffic.bytes_out
        counters.sent_to[peer] += traffic.bytes_out
        counters.bytes_received += traffic.bytes_in
        counters.received_from[peer] += traffic.bytes_in
        counters.messages_sent += traffic.messages_out
        counters.messages_received += traffic.messages_in
        if traffic.eager_in:
            overhead = traffic.eager_in * floating_cost(0)
            self._reception.floating.owe(peer, traffic.eager_bytes_in + overhead)

    def arriving(self) -> set[int]:
        """Return the peers of which a message is arriving through the relay."""
        return self.relay.arriving() if self.relay is not None else set()

    def order_of_bulk(self, peer: int) -> Order | None:
        """Return the place of the most urgent message of bulk that the engine itself has for a peer."""
        queue = self._outbox.bulk_queues.get(peer)
        message = queue.peek() if queue is not None else None
        if message is None:
            return None
        operation = message.operation
        return Order(operation.promoted, operation.priority, operation.sequence)


def _plan(layout: OperationLayout, bulk_peers: frozenset[int], eager_bytes: int) -> RelayPlan | None:
    """Return what the relay needs for operations of a layout; ``None`` if it cannot carry them out."""
    program, signature = layout.program, layout.signature
    peers = tuple(dict.fromkeys((*program.sources, *program.targets)))
    # A message must come when its lane expects it. With one source it does. In the chain of a broadcast the consent, an
    # empty message, is the only one of a second source, and comes after the data of this rank has left.
    if len(program.sources) > 1 and program.algorithm != Algorithm.CHAIN:
        return None
    if signature.kind in PAIRWISE or not 0 < len(peers) <= words.PEERS_MAX or not bulk_peers.issuperset(peers):
        return None
    if layout.num_lanes > words.LANES_MAX:
        return None
    # A receiver says that it has submitted an operation only if it expects more than the eager allowance.
    if layout.num_bytes <= eager_bytes:
        return None
    receives = [action for action in program.actions if isinstance(action, Receive)]
    if any(action.onto_partial for action in receives):
        return None
    if layout.keeps_partials and not layout.sends_partials_once:
        return None  # a sum would give its slot back when a part of it has been sent
    can_add = not signature.dtype.is_half and has_code(signature.dtype, signature.reduction)
    if not can_add and any(action.mode is not Mode.REPLACE for action in receives):
        return None
    sums, rows = _Sums(layout), []
    for lane in range(layout.num_lanes):
        row = functools.partial(_row, sums, peers, lane)
        rows.append(array("q", itertools.chain.from_iterable(map(row, program.actions, layout.regions(lane)))))
    sources = frozenset(action.peer for action in receives if action.chunk != NOTHING)
    return RelayPlan(
        peers=peers,
        sources=sources,
        targets=frozenset(program.targets),
        rows=rows,
        lanes=words.lanes_of(rows),
        following=[_following(row) for row in rows],
        kind=KINDS.get(signature.dtype, FLOAT32),
        itemsize=signature.dtype.itemsize,
        reduction=REDUCTIONS.get(signature.reduction, SUM),
        divisor=len(layout.ranks) if signature.reduction is ReduceOp.AVG else 1,
        sums=sums.numbers,
        sum_bytes=sums.num_bytes,
    )


def _following(rows: array[int]) -> list[tuple[int, int]]:
    """Return ``RelayPlan.following`` of one lane."""
    length = len(rows) // words.ROW_WORDS
    return [
        (words.next_row(rows, length, index, False), words.next_row(rows, length, index, True))
        for index in range(length + 1)
    ]


class _Sums:
    """The unfinished sums of an operation that are not kept in its tensor.

    Attributes:
        numbers: By buffer and lane: the number of the sum.
        num_bytes: The length of the longest sum, rounded up so that each begins with a line of the cache.
    """

    def __init__(self, layout: OperationLayout) -> None:
        self._layout = layout
        self.numbers: dict[tuple[int, int], int] = {}
        longest = max(layout.accumulator_bytes(buffer, 0) for buffer in range(len(layout.sizes)))
        self.num_bytes = _LINE_BYTES * max(1, -(-longest // _LINE_BYTES))

    def place(self, lane: int, region: Region, *, partial: bool) -> tuple[int, int]:
        """Return the buffer and the first byte of a region: of the unfinished sums, if they are kept apart."""
        if not partial or not self._layout.keeps_partials:
            return region.buffer, region.start
        number = self.numbers.setdefault((region.buffer, lane), len(self.numbers))
        return words.OF_SUMS, number * self.num_bytes + region.wide_start


def _row(sums: _Sums, peers: tuple[int, ...], lane: int, action: Action, region: Region | None) -> tuple[int, ...]:
    """Return the words of a row of ``kernels.relay``."""
    if region is None:
        return (words.NOTHING, *(words.ROW_WORDS - 1) * [0])
    if isinstance(action, Send):
        what, place = words.SEND, sums.place(lane, region, partial=action.partial)
    elif action.mode is Mode.COMBINE_LAST:
        what, place = words.COMBINE_LAST, (region.into, region.start)
    else:
        what, place = _RECEIVE[action.mode], sums.place(lane, region, partial=action.mode is Mode.COMBINE)
    return what, action.step, peers.index(action.peer), region.buffer, region.start, region.body_bytes, *place
