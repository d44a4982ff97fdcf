"""When a transport's relay gets an operation of which it can carry out the schedule (``relay_plan``).

The relay is a carrier that exchanges the messages of the schedule (``carrying``). It *wants* an operation before the
first message of it, if it is of blocks, or if the peers know its signature already and no other operation is in flight.
Otherwise messages of the engine begin it, and the relay takes it as soon as its receivers are known to have submitted
it, and no message of it is arriving or waiting to be added here. From then on the relay has it until it ends: the
engine only sends those of its messages to their end that are half-way out, and the relay reports the operation's end.
If the operation fails, the relay forgets it.

The messages on the wire are those of the engine. So each rank may hand an operation over, at any time, or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple, Protocol

from totalreduce.engine.carrying import Carrier, Carrying
from totalreduce.engine.counters import Counters
from totalreduce.engine.entries import Entries
from totalreduce.engine.floating import floating_cost
from totalreduce.engine.operation import Carriage, Operation
from totalreduce.engine.outbox import Outbox, QueuedMessage
from totalreduce.engine.planner import Planner
from totalreduce.engine.reception import Reception
from totalreduce.engine.relay_plan import RelayPlan, Standing, plan_of
from totalreduce.engine.table import OperationTable
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.header import Frame
from totalreduce.schedules.actions import Send

__all__ = ["Order", "Relay", "RelayTask", "RelayedTraffic", "Relaying"]

#: The transfer of an operation that the relay wants takes at least as long as so many round trips.
_ROUND_TRIPS_MIN: Final = 16
#: After how many seconds the peers of an operation are asked whether they have submitted it.
_PATIENCE_S: Final = 0.2


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


class RelayTask(NamedTuple):
    """An operation that is handed over to the relay.

    Attributes:
        plan: What does not change.
        key: The operation's key.
        order: The place of its messages among those that wait.
        buffers: The bytes of the operation, as in ``engine.operation``.
        standing: How far messages of the engine have carried it out.
        sums: Unfinished sums that are there already: the number, as in the plan, and the bytes.
        held_back: Peers to which nothing leaves until they have submitted the operation (``Carriage.posted``).
        owner: A value of the user.
    """

    plan: RelayPlan
    key: tuple[int, int]
    order: Order
    buffers: Sequence[memoryview | None]
    standing: Standing
    sums: list[tuple[int, memoryview]]
    held_back: Collection[int]
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

    def prepare_to_take(self, plan: RelayPlan) -> bool:
        """Prepare to take an operation with this plan; return whether it can be taken now.

        If it cannot, because a message is arriving from a source, the relay sees to it that nothing follows that
        message.
        """

    def take(self, task: RelayTask) -> Carriage:
        """Take an operation that can be taken now, from within ``Relaying.hand_over``."""

    def arriving(self) -> set[int]:
        """Return the peers of which a message of an operation is arriving. Any thread."""


class Relaying(Carrier):
    """The relay as a carrier.

    Attributes:
        relay: The relay of the transport, if it has one.
        candidates: Operations that may be handed over, and whether messages of the engine have begun them.
    """

    __slots__ = (
        "_carrying",
        "_config",
        "_counters",
        "_entries",
        "_outbox",
        "_planner",
        "_reception",
        "_table",
        "_to_be_asked",
        "candidates",
        "relay",
    )

    def __init__(
        self,
        config: EngineConfig,
        carrying: Carrying,
        table: OperationTable,
        planner: Planner,
        outbox: Outbox,
        entries: Entries,
        reception: Reception,
        counters: Counters,
    ) -> None:
        """Begin without a relay."""
        self._config, self._carrying, self._table, self._planner = config, carrying, table, planner
        self._outbox, self._entries, self._reception, self._counters = outbox, entries, reception, counters
        self.relay: Relay | None = None
        self.candidates: dict[Operation, bool] = {}
        #: Operations that were handed over while some receivers were not known to have submitted them: these receivers.
        self._to_be_asked: dict[Operation, set[int]] = {}

    def wants(self, operation: Operation) -> bool:
        """See ``Carrier.wants``; an operation that it does not want may be handed over later all the same."""
        plan = self._plan(operation)
        if plan is None:
            return False
        # Until the neighbours know the signature, the first message must leave at once, because it tells them. And
        # beside other operations, it takes longer to wait for the receiver: in the replayed step of the gpt trace, the
        # last allreduce took 4 ms more. Operations of blocks wait in any case: their sizes, and so their signatures,
        # change often, and the relay cannot take them later.
        is_alone, neighbours_know_it = len(self._table.active) == 1, not operation.described
        waits = plan.is_of_blocks or (is_alone and neighbours_know_it)
        # The relay sends nothing to a peer before the peer has said that it has submitted the operation, which it does
        # only if it expects more than the eager allowance. The engine sends that allowance at once, and so is faster
        # where a round trip is long beside the transfer.
        links, bytes_to = self._planner.selector.links, operation.layout.bytes_to
        bytes_sent = [count for peer, count in bytes_to.items() if peer in plan.targets]
        if waits and bytes_sent:
            round_trip_bytes = 2 * links.latency_s * links.bytes_per_s
            is_near = _ROUND_TRIPS_MIN * round_trip_bytes <= sum(bytes_sent)
            waits = is_near and min(bytes_sent) > self._config.eager_bytes
        if waits:
            self.candidates[operation] = False
        else:
            self._note_begun(operation, plan)
        return waits

    def _note_begun(self, operation: Operation, plan: RelayPlan) -> None:
        """Note that messages of the engine begin an operation: one of blocks is not handed over after that."""
        if plan.is_of_blocks:
            self.candidates.pop(operation, None)
        else:
            self.candidates[operation] = True

    def _plan(self, operation: Operation) -> RelayPlan | None:
        """Return the plan of an operation, made once for its layout; ``None`` if the relay cannot carry it out."""
        layout = operation.layout
        if self.relay is None or not layout.is_bulk or operation.finished:
            return None
        if layout.relay_plan is None:
            bytes_per_s = self._planner.selector.links.bytes_per_s
            plan = plan_of(layout, self._outbox.bulk_peers, self._config, bytes_per_s)
            layout.relay_plan = False if plan is None else plan
        return layout.relay_plan or None

    def hand_over(self, now: float) -> None:
        """Hand candidates over; have the engine begin those that it has not begun and that cannot be handed over."""
        for operation, is_begun in list(self.candidates.items()):
            plan = operation.layout.relay_plan
            assert isinstance(plan, RelayPlan)
            if operation.finished or self._hand_over(operation, plan, now, is_begun=is_begun):
                del self.candidates[operation]
            elif not is_begun:
                self._note_begun(operation, plan)
                self._carrying.declined(operation, now)

    def _hand_over(self, operation: Operation, plan: RelayPlan, now: float, *, is_begun: bool) -> bool:
        """Hand an operation over, if nothing prevents it; return whether the relay has taken it."""
        assert self.relay is not None
        if any(operation.held.values()) or operation.computing:  # messages wait for a receiver, or are being added
            return False
        if is_begun and not plan.targets <= operation.posted_by:
            return False
        if not self.relay.prepare_to_take(plan):
            return False
        key = operation.key
        headers = (delivery.header for delivery in self._reception.arriving)
        if any((header.operation, header.iteration) == key for header in headers):
            return False
        waiting = set()  # messages that wait: the lane and the index of the action
        for messages in operation.queued.values():
            for message in messages:
                if not message.taken:
                    waiting.add((message.lane, operation.program.sends[message.action.peer, message.action.step]))
        if not operation.lanes_left and not waiting:
            return False  # only messages that are half-way out are left of it
        standing = plan.standing(operation, waiting)
        if standing is None:
            return False
        order = Order(operation.promoted, operation.priority, operation.sequence)
        sums = []
        for number in plan.needed_sums(standing) if operation.accumulators else ():
            found = plan.sums[number]
            sums.append((number, operation.accumulators[found.place][found.start : found.stop]))
        held_back = (operation.layout.bytes_to.keys() & plan.targets) - operation.posted_by
        task = RelayTask(plan, key, order, operation.buffers, standing, sums, held_back, operation)
        carriage = self.relay.take(task)
        for lane in operation.lanes:  # the relay has copied the bodies that wait there for their turn
            for arrival in lane.arrivals.values():
                arrival.release()
            lane.arrivals.clear()
        if held_back:
            self._to_be_asked[operation] = held_back
        operation.lanes_left = len(operation.lanes)  # until the relay reports the end: lanes that only send have ended
        self._outbox.discard(operation)
        operation.unsent = sum(map(len, operation.queued.values()))  # the engine sends these to their end
        self._carrying.taken(operation, carriage, now)
        return True

    def tick(self, now: float) -> None:
        """Ask the peers of operations that have waited for some time whether they have submitted them.

        A peer with another signature may expect too few bytes to say so by itself. When it has answered, the relay
        sends it a message, in which it finds the difference.
        """
        for operation, peers in list(self._to_be_asked.items()):
            if operation.finished:
                del self._to_be_asked[operation]
            elif operation.submitted_at <= now - _PATIENCE_S:
                del self._to_be_asked[operation]
                for peer in peers - operation.posted_by:
                    self._entries.tell(peer, Frame.REQUEST, operation.key, operation)

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
            self._reception.floating.allowance.owe(peer, traffic.eager_bytes_in + overhead)

    def moved(self, operation: Operation, used: Sequence[tuple[int, int]], reached: Sequence[tuple[int, int]]) -> None:
        """Release bodies that the relay has used, and send messages that a lane has come to.

        Both are given by the lane, and the index of the action in the program.
        """
        for lane, index in used:
            arrival = operation.lanes[lane].arrivals.pop(index, None)
            if arrival is not None:
                arrival.release()
        for lane, index in () if operation.finished else reached:
            action, region = operation.program.actions[index], operation.lanes[lane].regions[index]
            assert isinstance(action, Send)
            assert region is not None
            operation.unsent += 1
            self._outbox.push(QueuedMessage(operation, lane, action, region))

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
