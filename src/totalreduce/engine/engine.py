"""The Total Reduce engine: when things run. A plain object without thread, socket or clock.

Everything that happens is a method call with the time as an argument; what should happen next is asked for:

* the application calls ``submit`` and ``promote`` and collects ``pop_completed``;
* a transport calls ``next_message`` / ``message_sent`` for what leaves and ``accept`` / ``delivered`` for what arrives;
* a computer calls ``next_computation`` / ``computed``.

The pieces of the Total Reduce design and where they are: *message list* ``_active``; *floating message list*
``floating.FloatingStore``; *computation list* ``_computations``; *payload_pick_ready* ``sendqueue.SendQueue``; the
self-guided
*header* ``foundation.header``. What the design left open is here: iterations, lanes, an eager allowance that bounds
floating memory (beyond it a sender waits for ``POSTED``), typed mismatches, the loss of a peer.

Invariants (checked by ``validate``):

* an operation is in ``_active`` from ``submit`` until it is done or failed, and its key is never active twice;
* the order in which a result's bytes are combined depends on the program alone, never on arrival;
* no memory is taken for a message before its length has been compared with what is expected or allowed.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from totalreduce.engine.channels import Channel, Channels, pieces
from totalreduce.engine.counters import Counters
from totalreduce.engine.early import EarlyNews, News
from totalreduce.engine.floating import FloatingMessage, FloatingStore, floating_cost
from totalreduce.engine.layout import Expectation, OperationLayout, Place
from totalreduce.engine.names import NameRecord, NameTable
from totalreduce.engine.operation import AnyReceive, Arrival, Lane, Operation
from totalreduce.engine.scratch import ScratchPool
from totalreduce.engine.sendqueue import QueuedMessage, SendQueue
from totalreduce.engine.stall import StallReport, StallWatch
from totalreduce.foundation.checks import NAME_BYTES_MAX
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import (
    ConfigurationError,
    GroupClosed,
    MismatchError,
    PeerLost,
    ProtocolError,
    TotalReduceError,
)
from totalreduce.foundation.header import HEADER_BYTES, Flag, Frame, Header, unpack_schedule, unpack_signature
from totalreduce.foundation.observer import Observer
from totalreduce.foundation.types import Algorithm, OpKind, ReduceOp, Signature
from totalreduce.schedules import program_for
from totalreduce.schedules.actions import Mode, Program, Receive, Send, translate
from totalreduce.schedules.select import LinkModel, Selector
from totalreduce.transports.base import Lease

__all__ = ["CONTROL_BYTES_MAX", "Computation", "Delivery", "Engine", "OutgoingMessage"]

#: The longest body of a control frame that is accepted.
CONTROL_BYTES_MAX = 16 * 1024
#: Kinds in which a rank may be done, and leave, before others have begun: its part is here, or it is missed.
_ENDS_EARLY = frozenset({OpKind.BROADCAST, OpKind.REDUCE, OpKind.GATHER, OpKind.SCATTER, OpKind.SEND_RECV})
#: Those of them in which somebody may yet say that it is something else; a message's two ranks meet in it, or nowhere.
_CONTRADICTED_LATE = _ENDS_EARLY - {OpKind.SEND_RECV}
#: Kinds whose root has heard from everybody when it is done.
_COLLECTING = frozenset({OpKind.REDUCE, OpKind.GATHER})
#: Kinds whose blocks may have other sizes each time, and which no rank can be done with before it has heard from
#: everybody, or from somebody who has.
_EXCHANGES = frozenset({OpKind.ALLGATHER, OpKind.ALLTOALL})
#: Answers that wait for a peer to read them, at most: each takes some 250 bytes until it leaves.
_ANSWERS_MAX = 65_536
#: Frames of channel messages that may wait for a peer that goes on sending channel messages (at most 16 MiB).
_POSTED_MAX = 1024
#: Texts in control frames, at most.
_TEXT_CHARACTERS_MAX, _REASON_CHARACTERS_MAX = 2048, 500
#: Stall reports that nobody has fetched, at most.
_REPORTS_MAX = 1000
#: In control frames that are about no operation.
_NO_KEY = (0, 0)


class Report(Protocol):
    """What is told to observers and the log when somebody keeps others waiting."""

    def as_dict(self) -> dict[str, object]:
        """JSON-ready."""


@dataclass(slots=True, eq=False)
class OutgoingMessage:
    """One message on its way out. ``body`` is ``None`` for frames without one."""

    peer: int
    header: bytes
    body: memoryview | None
    queued: QueuedMessage | None = None
    share_key: Hashable = None


@dataclass(slots=True, eq=False)
class Delivery:
    """Where the body of an incoming message goes. ``view`` may be redirected while the body is still arriving."""

    peer: int
    header: Header
    view: memoryview
    operation: Operation | None = None
    lane: Lane | None = None
    index: int = 0
    arrival: Arrival | None = None
    floating: FloatingMessage | None = None
    lease: Lease | None = None


@dataclass(slots=True, eq=False)
class Computation:
    """An entry of the computation list: combine or copy ``incoming`` into ``destination``."""

    operation: Operation
    lane: Lane
    index: int
    mode: Mode
    local: memoryview
    incoming: memoryview
    destination: memoryview
    arrival: Arrival
    local_partial: bool
    incoming_partial: bool
    divisor: int


class Engine:
    """The state of one rank of one group. See the module docstring."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        config: EngineConfig,
        *,
        epoch: int = 0,
        observers: list[Observer] | None = None,
        hosts: Sequence[int] | None = None,
        shared_memory: bool = True,
    ) -> None:
        """Make an idle engine.

        ``hosts``: a number per rank that says which host it is on (default: one of its own). ``shared_memory``: whether
        ranks of one host send through it. Both are for the choice of schedules, and equal on all ranks.
        """
        self.rank, self.world_size, self.config, self.epoch = rank, world_size, config, epoch
        self.counters = Counters()
        self.everybody = tuple(range(world_size))
        #: Which schedule carries out what; the ranks may agree on better numbers than its default ones.
        places = tuple(hosts) if hosts is not None else self.everybody
        self.selector = Selector(LinkModel(), places, config.schedules, shared_memory)
        self.observers: list[Observer] = observers if observers is not None else []
        self._share = max(1, config.floating_bytes_max // max(1, world_size - 1))
        self.floating = FloatingStore(self._share)
        self.scratch = ScratchPool(config.scratch_segments)
        self._active: dict[tuple[int, int], Operation] = {}
        self._names = NameTable()
        self._queues: dict[int, SendQueue] = {}
        self._controls: dict[int, deque[OutgoingMessage]] = {}
        self._posted: dict[int, int] = {}  #: By peer: frames of channel messages among these.
        #: By peer: answers to its control frames, in order. They are what a peer can make grow, so they are bounded.
        self._answers: dict[int, dict[tuple[Frame, tuple[int, int]], None]] = {}
        #: Peers for which there is something to send. A superset is harmless; missing one is not.
        self._ready: set[int] = set()
        self._eager_used: dict[int, int] = {}
        self._computations: deque[Computation] = deque()
        self._completed: list[Operation | AnyReceive] = []
        self._any_receives: list[AnyReceive] = []
        self._deliveries: set[Delivery] = set()
        self._sequence = 0
        self._early = EarlyNews()
        #: Failed operations of which an addition is still being carried out: not completed before it has ended.
        self._unsettled: list[Operation] = []
        self._stalls = StallWatch(rank, config.stall_warning_s)
        self._reports: list[Report] = []
        self._channels = Channels()
        self._lost: PeerLost | None = None
        self._departed: dict[int, str] = {}
        self._closed = False
        self._active_since: float | None = None

    # ------------------------------------------------------------------------------------------------ application

    def submit(
        self,
        name: str | None,
        signature: Signature,
        buffers: Sequence[memoryview | None],
        *,
        ranks: tuple[int, ...] | None = None,
        scope: str = "",
        repeats: bool = False,
        priority: int = 0,
        now: float,
        owner: Any = None,
        becoming: bool = False,
    ) -> Operation:
        """Put an operation on the message list ("when a new gradient is ready").

        Args:
            name: Equal on all ranks, unique among operations in flight. ``None``: the n-th unnamed operation here
                meets the n-th unnamed one elsewhere.
            signature: What it is.
            buffers: Writable bytes, input and output: of the tensor, or of one block per chunk of the schedule.
            ranks: Who takes part, this rank included (default: everybody); roots are places in this tuple.
            scope: What sets the names of one subgroup apart from those of another.
            repeats: The name may be in flight several times: the n-th here meets the n-th elsewhere.
            priority: Smaller is more urgent; 32 bits signed.
            now: Seconds.
            owner: Kept in the operation for the caller.
            becoming: It was a receive from anybody.

        Raises:
            ValueError: The name is in flight already.
            PeerLost: A rank of the group is gone.
            GroupClosed: This rank closed the group.
        """
        self._check_usable()
        ranks = self.everybody if ranks is None else ranks
        record = self._names.record(scope, name)
        op_id = record.op_id
        key = (op_id, record.next_iteration)
        if signature.kind not in _ENDS_EARLY:
            for peer, reason in self._departed.items():
                if peer in ranks:
                    self._tell_of_departure(key, peer, reason, ranks)
                    raise PeerLost(peer, reason)
        if (
            name is not None
            and not repeats
            and record.next_iteration
            and (op_id, record.next_iteration - 1) in self._active
        ):
            raise ConfigurationError(
                f"an operation named {name!r} is already in flight on rank {self.rank}; wait for it or use another name"
            )
        layout = self._layout(record, signature, ranks, buffers)
        record.next_iteration = (record.next_iteration + 1) & 0xFFFFFFFF
        shown = record.shown(key[1])
        operation = Operation(
            shown, key, layout, buffers, priority=priority, sequence=self._sequence, now=now, owner=owner
        )
        self._sequence += 1
        self.counters.operations += 1
        self.counters.payload_bytes += layout.num_bytes
        if not self._active:
            self._active_since = now
        self._active[key] = operation
        for observer in self.observers:
            observer.submitted(shown, key[1], now, num_bytes=layout.num_bytes, priority=priority)
        news = self._early.claim(key)
        if news.poison is not None:
            self._drop_floating(self.floating.claim(key))
            self._finish(operation, now, news.poison)
            return operation
        self._announce(operation, record, news)
        for peer, theirs in news.described.items():
            if theirs != layout.expectation.signature_from(peer) and not operation.finished:
                self._mismatch(operation, peer, theirs, now)
        self._claim_floating(operation, now)
        if not operation.finished:
            for lane in operation.lanes:
                self._advance(operation, lane, now)
        for peer in self._departed:
            self._fail_if_needed(operation, peer, now)
        if repeats and not becoming:  # a message that had overtaken this one may have waited for its turn
            self._match_any(ranks[0], (op_id, record.next_iteration), now)
        return operation

    def promote(self, operation: Operation, now: float) -> None:
        """Somebody is blocked on the operation: it overtakes every static priority, and says so to its peers."""
        if operation.promoted or operation.finished:
            return
        operation.promoted = True
        self.counters.promotions += 1
        for peer, messages in operation.queued.items():
            queue = self._queues[peer]
            messages[:] = [message for message in messages if not message.taken]
            for message in messages:
                queue.rerank(message)
        for observer in self.observers:
            observer.promoted(operation.name, operation.key[1], now)

    def receive_any(self, receive: AnyReceive, now: float) -> None:
        """Receive from whoever of the candidates sends first. The operation it becomes has the same owner.

        Raises:
            PeerLost: A rank of the group is gone.
            GroupClosed: This rank closed the group.
        """
        self._check_usable()
        for peer, name in receive.candidates.items():
            record = self._names.record(receive.scope, name)
            if self._is_announced((record.op_id, record.next_iteration)):
                self._become(receive, peer, now)
                return
        for peer in receive.candidates:
            if all(candidate in self._departed for candidate in receive.candidates):
                raise PeerLost(peer, self._departed[peer])
        self._any_receives.append(receive)

    def pop_completed(self) -> list[Operation | AnyReceive]:
        """Operations that finished since the last call, well (``error`` is ``None``) or not."""
        completed, self._completed = self._completed, []
        return completed

    def pop_reports(self) -> list[Report]:
        """Stall reports made since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def close(self, now: float, *, tell: Collection[int], reason: str = "") -> None:
        """Fail what is pending and take nothing more; the peers in ``tell`` learn that this was on purpose, and why."""
        if self._closed:
            return
        self._closed = True
        for operation in list(self._active.values()):
            self._finish(operation, now, GroupClosed(f"the group was closed with {operation.name!r} pending"))
        self._completed += self._unsettled
        self._unsettled.clear()
        self._end_any_receives(lambda _: True, GroupClosed("the group was closed with a receive pending"))
        self._channels.fail(GroupClosed("the group was closed"), now)
        for peer in tell:
            if peer in self._departed:
                continue
            answers = self._answers.pop(peer, {})
            while answers:  # before the farewell, as everything that this rank still has to say
                self._controls.setdefault(peer, deque()).append(self._next_answer(peer, answers))
            if self._lost is not None and self._lost.rank != peer:
                # Or a peer that has not heard of the loss yet would take this rank's leaving for the cause.
                self._control(peer, Frame.LOST, body=self._lost_body(self._lost))
            body = json.dumps({"reason": reason[:_REASON_CHARACTERS_MAX]}).encode() if reason else b""
            self._control(peer, Frame.GOODBYE, body=body)

    @property
    def num_active(self) -> int:
        """Operations in flight."""
        return len(self._active)

    def active_s(self, now: float) -> float:
        """Seconds with at least one operation in flight."""
        running = now - self._active_since if self._active_since is not None else 0.0
        return self.counters.active_s + running

    @property
    def lost(self) -> PeerLost | None:
        """Who was lost, if somebody was."""
        return self._lost

    # --------------------------------------------------------------------------------------------------- channels

    def open_channel(self, number: int, channel: Channel, now: float) -> None:
        """Have messages of other protocols delivered; ``number`` is equal on all ranks, one channel each.

        Raises:
            PeerLost: A rank is gone.
            GroupClosed: This rank closed the group.
        """
        self._check_usable()
        self._channels.begin(number, channel, now)

    def close_channel(self, number: int) -> None:
        """Deliver nothing more."""
        self._channels.end(number)

    def post(self, peer: int, number: int, message: bytes) -> None:
        """Send a message through a channel; it leaves before all data."""
        if self._closed or self._lost is not None or peer in self._departed:
            return
        for piece, last in pieces(message):
            self._control(peer, Frame.CHANNEL, key=(number, 0), body=piece, step=int(last))
            self._posted[peer] = self._posted.get(peer, 0) + 1

    def channels_due(self) -> float | None:
        """When ``tick`` should be called for the sake of a channel."""
        return self._channels.next_due()

    # ---------------------------------------------------------------------------------------------------- sending

    def ready_peers(self) -> Collection[int]:
        """Peers for which ``next_message`` may have something."""
        return self._ready

    def next_message(self, peer: int, now: float) -> OutgoingMessage | None:
        """The next message for ``peer``: control frames first, then the most urgent data message that may leave."""
        controls = self._controls.get(peer)
        if controls:
            self.counters.control_sent += 1
            control = controls.popleft()
            if control.header[3] == Frame.CHANNEL:
                self._posted[peer] -= 1
            return control
        answers = self._answers.get(peer)
        if answers:
            return self._next_answer(peer, answers)
        queue = self._queues.get(peer)
        while queue:
            queued = queue.pop()
            if queued is None:
                break
            flags = self._permission(queued)
            if flags is not None:
                return self._outgoing(queued, flags, now)
            if self._controls.get(peer):  # holding the message back has produced a REQUEST
                return self.next_message(peer, now)
        self._ready.discard(peer)
        return None

    def message_sent(self, message: OutgoingMessage, now: float) -> None:
        """The transport has taken the message completely; its memory may be reused."""
        self.counters.bytes_sent += HEADER_BYTES + (len(message.body) if message.body is not None else 0)
        queued = message.queued
        if queued is None:
            return
        self.counters.messages_sent += 1
        operation = queued.operation
        operation.unsent -= 1
        if queued.action.partial and operation.layout.sends_partials_once:
            operation.accumulators.pop((queued.place.buffer, queued.lane), None)
        for observer in self.observers:
            observer.sent(
                operation.name,
                operation.key[1],
                now,
                peer=message.peer,
                lane=queued.lane,
                step=queued.action.step,
                num_bytes=len(message.body) if message.body is not None else 0,
            )
        self._finish_if_done(operation, now)

    # -------------------------------------------------------------------------------------------------- receiving

    def may_receive(self) -> bool:
        """Whether there is scratch memory for another message; if not, the transport waits with reading."""
        return self.scratch.available

    def accept(self, peer: int, header: Header, now: float, lease: Lease | None = None) -> Delivery:
        """Decide where the body of a message goes ("decide which payload is about to be received").

        Raises:
            ProtocolError: No correct peer sends this.
        """
        if header.epoch != self.epoch:
            return self._sink(peer, header)
        if header.frame is not Frame.DATA:
            if header.body_bytes > CONTROL_BYTES_MAX:
                raise ProtocolError(f"a control frame of {header.body_bytes} bytes from rank {peer}")
            return self._tracked(Delivery(peer, header, memoryview(bytearray(header.body_bytes))))
        key = (header.operation, header.iteration)
        operation = self._active.get(key)
        if operation is None:
            return self._accept_unknown(peer, header, key, now, lease)
        if header.signature != operation.layout.expectation.signature_from(peer):
            self._mismatch(operation, peer, header.signature, now)
            return self._sink(peer, header)
        if header.flags & Flag.EAGER:
            self._owe(peer, floating_cost(header.body_bytes))
        if header.flags & Flag.URGENT:
            self.promote(operation, now)
        if peer not in operation.posted_by:
            operation.posted_by.add(peer)
            self._release_held(operation, peer)  # or what comes later would overtake what is held
        lane, index, action, place = self._slot(operation, peer, header)
        self._note_first_byte(operation, now)
        is_next = lane.position == index
        if action.mode is Mode.REPLACE and (is_next or action.anytime):
            arrival = Arrival(None)
            view = operation.segment(place, lane.index)
        elif lease is not None and (is_next or lease.may_be_kept):
            view = lease.body
            arrival = Arrival(view, lease=lease)
            return self._tracked(Delivery(peer, header, view, operation, lane, index, arrival, lease=lease))
        elif self._waits_for_another(operation, lane, index):
            # Scratch that is full of messages which wait for another peer's would keep that one from being read.
            view = memoryview(bytearray(header.body_bytes))
            arrival = Arrival(view, early=True)
        else:
            view = self.scratch.take(header.body_bytes)
            arrival = Arrival(view)
        return self._tracked(Delivery(peer, header, view, operation, lane, index, arrival))

    def delivered(self, delivery: Delivery, now: float) -> None:
        """The body of an accepted message is here."""
        self._deliveries.discard(delivery)
        header, peer = delivery.header, delivery.peer
        self.counters.bytes_received += HEADER_BYTES + header.body_bytes
        if header.epoch != self.epoch:
            return
        if header.frame is not Frame.DATA:
            self._on_control(peer, header, bytes(delivery.view), now)
            return
        self.counters.messages_received += 1
        if delivery.floating is not None:
            self._floating_delivered(delivery.floating, now)
            return
        operation, lane, arrival = delivery.operation, delivery.lane, delivery.arrival
        if operation is None or lane is None or arrival is None:
            return  # a sink
        if operation.finished:
            self._release(arrival)
            return
        self._arrived(operation, lane, delivery.index, arrival, peer, header, now)

    # -------------------------------------------------------------------------------------------------- computing

    def next_computation(self) -> Computation | None:
        """The next entry of the computation list, or ``None``."""
        if not self._computations:
            return None
        computation = self._computations.popleft()
        computation.operation.computing += 1
        return computation

    def peek_computation(self) -> Computation | None:
        """The next entry of the computation list, left where it is."""
        return self._computations[0] if self._computations else None

    def computed(self, computation: Computation, seconds: float, now: float) -> None:
        """The entry was carried out, which took ``seconds``."""
        operation, lane = computation.operation, computation.lane
        self.counters.reduce_s += seconds
        self._release(computation.arrival)
        operation.computing -= 1
        if operation.finished:
            if operation in self._unsettled and not operation.computing:
                self._unsettled.remove(operation)
                self._completed.append(operation)
            return
        for observer in self.observers:
            action = operation.program.actions[computation.index]
            observer.reduced(operation.name, operation.key[1], now, lane=lane.index, step=action.step, seconds=seconds)
        del lane.arrivals[computation.index]
        lane.position = computation.index + 1
        self._advance(operation, lane, now)

    # ------------------------------------------------------------------------------------------------------ peers

    def peer_lost(self, peer: int, reason: str, now: float, *, first_hand: bool = True) -> None:
        """A rank is gone: everything pending and everything later fails, and, first hand, everybody is told."""
        # A rank that left in good order is no loss for this one, unless another rank still needed it.
        if self._lost is not None or self._closed or (first_hand and peer in self._departed):
            return
        self._lost = PeerLost(peer, reason)
        if first_hand:
            body = self._lost_body(self._lost)
            for other in range(self.world_size):
                if other not in (self.rank, peer) and other not in self._departed:
                    self._control(other, Frame.LOST, body=body)
        for operation in list(self._active.values()):
            self._finish(operation, now, PeerLost(peer, reason))
        self._end_any_receives(lambda _: True, PeerLost(peer, reason))
        self._channels.fail(PeerLost(peer, reason), now)

    @staticmethod
    def _lost_body(lost: PeerLost) -> bytes:
        return json.dumps({"rank": lost.rank, "reason": lost.reason[:_REASON_CHARACTERS_MAX]}).encode()

    def peer_departed(self, peer: int, reason: str, now: float) -> None:
        """A rank closed the group in good order: only what still needs it fails."""
        self._departed.setdefault(
            peer, reason
        )  # perhaps another rank has told of it, who did not get all of its messages
        for operation in list(self._active.values()):
            self._fail_if_needed(operation, peer, now)
        # It may have been the one that was told what another rank means, and have left without reading it.
        self._break_silence(operation for operation in self._active.values() if peer in operation.ranks)
        self._end_any_receives(lambda receive: set(receive.candidates) <= set(self._departed), PeerLost(peer, reason))
        self._channels.depart(peer, reason, now)

    # --------------------------------------------------------------------------------------------------- watching

    def tick(self, now: float) -> None:
        """Advance the stall watch and the channels; call it a few times a second, and at ``channels_due``."""
        self._channels.tick(now)
        for operation in self._stalls.late(self._active.values(), now):
            self.inquire(operation, now, warn=True)
        for report in self._stalls.concluded(self._active, now):
            self.publish(report, now)

    def publish(self, report: Report, now: float) -> None:
        """Have a stall logged and shown to the observers; also for what lives beside the engine."""
        self.counters.stalls += 1
        if len(self._reports) < _REPORTS_MAX:
            self._reports.append(report)
        for observer in self.observers:
            observer.stalled(report.as_dict(), now)

    def inquire(self, operation: Operation, now: float, *, warn: bool = False) -> None:
        """Ask every peer whether it has submitted the operation."""
        if not self._stalls.begin(operation.key, now, warn=warn):
            return
        self._break_silence([operation])
        body = json.dumps({"name": operation.name, "waited_s": round(now - operation.submitted_at, 3)}).encode()
        for peer in operation.ranks:
            if peer != self.rank and peer not in self._departed:
                self._control(peer, Frame.STATUS_REQUEST, key=operation.key, body=body)

    def explain(self, operation: Operation, now: float) -> str:
        """What is known about why the operation is not done: for the message of a deadline error."""
        return self._stalls.explain(operation, now)

    def validate(self) -> None:
        """Check the invariants; the tests and the simulator call it after every event."""
        for key, operation in self._active.items():
            assert operation.key == key
            assert not operation.finished
            assert operation.lanes_left or operation.unsent, f"{operation.name} is done but active"
            assert self._names.is_past(key)
            for lane in operation.lanes:
                for index in lane.arrivals:
                    assert index >= lane.position
        assert 0 <= self.floating.total_bytes <= self.config.floating_bytes_max
        for used in self._eager_used.values():
            assert 0 <= used <= self._share
        for peer, queue in self._queues.items():
            assert not len(queue) or peer in self._ready
        assert self.scratch.in_use >= 0

    # ---------------------------------------------------------------------------------------- submission, private

    def _check_usable(self) -> None:
        if self._closed:
            raise GroupClosed(f"rank {self.rank} has closed the group; make a new one with init()")
        if self._lost is not None:
            raise PeerLost(self._lost.rank, self._lost.reason)

    def _fail_if_needed(self, operation: Operation, peer: int, now: float) -> None:
        """Fail an operation that still has something to get from, or to give to, a rank that has left."""
        if not operation.finished and operation.needs(peer):
            reason = self._departed[peer]
            self._tell_of_departure(operation.key, peer, reason, operation.ranks)
            self._finish(operation, now, PeerLost(peer, reason))

    def _tell_of_departure(self, key: tuple[int, int], peer: int, reason: str, ranks: Sequence[int]) -> None:
        """Tell those who wait for this rank's part of an operation that it will not come, and why."""
        body = json.dumps({"rank": peer, "reason": reason[:_REASON_CHARACTERS_MAX]}).encode()
        for other in ranks:
            if other != self.rank and other not in self._departed:
                self._control(other, Frame.LOST, key=key, body=body)

    def _layout(
        self, record: NameRecord, signature: Signature, ranks: tuple[int, ...], buffers: Sequence[memoryview | None]
    ) -> OperationLayout:
        """Usually the one of the last time: the same tensor is reduced in every step."""
        sizes = [0 if buffer is None else len(buffer) for buffer in buffers]
        layout = record.layout
        if layout is None or layout.signature != signature or layout.sizes != sizes or layout.ranks != ranks:
            program = self._program(signature, record.op_id, ranks)
            layout = record.layout = OperationLayout(signature, program, ranks, sizes, self.config)
        return layout

    def _program(self, signature: Signature, op_id: int, ranks: tuple[int, ...]) -> Program:
        """The schedule: decided by what is equal on all ranks."""
        kind, size, root = signature.kind, len(ranks), signature.root
        algorithm = signature.algorithm
        if algorithm is Algorithm.AUTO:
            num_bytes = signature.num_elements * signature.dtype.itemsize
            algorithm = self.selector.choose(kind, num_bytes, ranks)
        if algorithm is Algorithm.STAR:
            root = op_id % size  # so that many small operations spread over all ranks
        hosts = self.selector.hosts_of(ranks) if algorithm is Algorithm.HIERARCHICAL else ()
        program = program_for(kind, algorithm, ranks.index(self.rank), size, root, hosts)
        return program if ranks == self.everybody else translate(program, ranks)

    def use_links(self, links: LinkModel) -> None:
        """Let the selector go by these numbers from now on. All ranks call it with the same, with nothing in flight."""
        old = self.selector
        self.selector = Selector(links, old.hosts, old.overrides, old.shared_memory)
        for record in self._names:
            record.layout = None

    def _announce(self, operation: Operation, record: NameRecord, news: News) -> None:
        """Tell the neighbours what the operation is, if it is a new one, and that it is posted, if it is large."""
        key, layout = operation.key, operation.layout
        if record.told is not layout:
            self._describe(operation, record)
            record.told = layout
        large = {peer for peer, count in layout.expected_bytes.items() if count > self.config.eager_bytes}
        for peer in large.union(news.requested):
            self._control(peer, Frame.POSTED, key=key)
        operation.posted_by.update(news.posted)
        operation.promoted = news.urgent

    def _describe(self, operation: Operation, record: NameRecord) -> None:
        """Tell everybody whom this rank would meet in the operation what it is.

        The ranks that mean the same are joined to those that mean something else somewhere, and whoever is at that
        place hears of it, whatever each of them waits for. If all mean what they meant the last time and agreed then,
        nobody needs to be told; where that is in doubt, see ``_break_silence``.

        Where everybody needs everybody's blocks, new sizes are not told to who knows the name and gets a message that
        waits for none of theirs, whose header has them: they are others in every step of sparse methods.
        """
        layout = operation.layout
        kind, program = layout.signature.kind, layout.program
        # A message has a header, so its receiver need not say what it waits for.
        neighbours = program.targets if kind is OpKind.SEND_RECV else (*program.targets, *program.sources)
        learn = program.addressed if kind in _EXCHANGES else ()
        operation.described = True
        for peer in dict.fromkeys(neighbours):
            if peer in self._departed or (peer in learn and peer in record.known_to):
                continue
            record.known_to.add(peer)
            body = json.dumps({"name": record.name, "is": layout.describe_to(peer)[:_TEXT_CHARACTERS_MAX]}).encode()
            self._control(peer, Frame.DESCRIBE, key=operation.key, body=body, signature=layout.signature_to(peer))

    def _break_silence(self, operations: Iterable[Operation]) -> None:
        """Say of operations under way what others were left to conclude."""
        for operation in operations:
            record = self._names.get(operation.key[0])
            if not operation.described and record is not None:
                self._describe(operation, record)

    def _doubt(self, key: tuple[int, int]) -> None:
        """Ranks were wrong about each other's operation, and may be about those of its name that followed."""
        record = self._names.get(key[0])
        if record is not None:
            record.told = None
            record.known_to.clear()
            self._break_silence(o for o in self._active.values() if o.key[0] == key[0] and o.key[1] > key[1])

    def _claim_floating(self, operation: Operation, now: float) -> None:
        for message in self.floating.claim(operation.key):
            if operation.finished:
                self._drop_floating([message])
            elif message.header.signature != operation.layout.expectation.signature_from(message.peer):
                self._mismatch(operation, message.peer, message.header.signature, now)
                self._drop_floating([message])
            else:
                try:
                    lane, index, *_ = self._slot(operation, message.peer, message.header)
                except ProtocolError as error:  # found in the caller's thread, but it is the peer's fault
                    self._drop_floating([message])
                    self.peer_lost(message.peer, f"protocol violation: {error}", now)
                    continue
                operation.posted_by.add(message.peer)
                self._note_first_byte(operation, now)
                if message.complete:
                    lane.arrivals[index] = Arrival(message.body, message)
                    self._observe_received(operation, message.peer, message.header, now)
                # An incomplete one finds its operation when its body is here (_floating_delivered).

    def _drop_floating(self, messages: list[FloatingMessage]) -> None:
        for message in messages:
            message.dropped = True
            if not message.complete:
                continue  # its memory is in use until the body is here
            self.counters.dropped_messages += 1
            self.counters.dropped_bytes += message.header.body_bytes
            self.floating.release(message)
            self._flush_credit(message.peer)

    # ------------------------------------------------------------------------------------------- sending, private

    def _queue(self, peer: int) -> SendQueue:
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = SendQueue(
                fifo=self.config.scheduling == "fifo", starvation_limit=self.config.starvation_limit
            )
        return queue

    def _enqueue(self, message: QueuedMessage) -> None:
        peer, operation = message.action.peer, message.operation
        operation.queued.setdefault(peer, []).append(message)
        self._queue(peer).push(message)
        self._ready.add(peer)

    def _permission(self, queued: QueuedMessage) -> int | None:
        """Flags to send the message with, or ``None``: it is held until the peer says that it has submitted."""
        operation, action = queued.operation, queued.action
        peer = action.peer
        if peer in operation.posted_by:
            return Flag.NONE
        body_bytes = queued.place.body_bytes
        cost = floating_cost(body_bytes)
        used, sent = self._eager_used.get(peer, 0), operation.eager_sent.get(peer, 0)
        held = operation.held.get(peer)
        # Once one message is held the later ones of the operation are: a lane's messages must not overtake each other.
        if held is None and sent + body_bytes <= self.config.eager_bytes and used + cost <= self._share:
            self._eager_used[peer] = used + cost
            operation.eager_sent[peer] = sent + body_bytes
            return Flag.EAGER
        if held is None:
            held = operation.held[peer] = []
            self._control(peer, Frame.REQUEST, key=operation.key)
        held.append(queued)
        self.counters.held_messages += 1
        return None

    def _outgoing(self, queued: QueuedMessage, flags: int, now: float) -> OutgoingMessage:
        operation, action = queued.operation, queued.action
        body = operation.segment(queued.place, queued.lane, partial=action.partial)
        if operation.promoted:
            flags |= Flag.URGENT
        if operation.first_byte_at is None:
            self._note_first_byte(operation, now)
        signature = operation.layout.signature_to(action.peer)
        header = Header.pack_data(
            self.epoch, operation.key, queued.lane, action.step, flags, len(body), signature, operation.priority
        )
        share_key = (operation.key, queued.lane, action.step, action.chunk)
        return OutgoingMessage(action.peer, header, body, queued, share_key)

    def _release_held(self, operation: Operation, peer: int) -> None:
        held = operation.held.pop(peer, None)
        if held:
            operation.queued.setdefault(peer, []).extend(held)
            self._queue(peer).push_back(held)
            self._ready.add(peer)

    def _control(
        self,
        peer: int,
        frame: Frame,
        *,
        key: tuple[int, int] = _NO_KEY,
        body: bytes = b"",
        signature: bytes = bytes(24),
        step: int = 0,
    ) -> None:
        message = self._control_message(peer, frame, key, body, signature, step)
        self._controls.setdefault(peer, deque()).append(message)
        self._ready.add(peer)

    def _control_message(
        self, peer: int, frame: Frame, key: tuple[int, int], body: bytes, signature: bytes = bytes(24), step: int = 0
    ) -> OutgoingMessage:
        header = Header(frame, self.epoch, key[0], key[1], step=step, body_bytes=len(body), signature=signature)
        return OutgoingMessage(peer, header.pack(), memoryview(body) if body else None)

    def _answer(self, peer: int, frame: Frame, key: tuple[int, int]) -> None:
        """Answer a peer's frame, after all control frames. Of equal answers one is sent, written when it leaves.

        Raises:
            ProtocolError: The peer does not read its answers.
        """
        answers = self._answers.setdefault(peer, {})
        answers[frame, key] = None
        if len(answers) > _ANSWERS_MAX:
            raise ProtocolError(f"rank {peer} has asked for more than {_ANSWERS_MAX} answers and reads none of them")
        self._ready.add(peer)

    def _next_answer(self, peer: int, answers: dict[tuple[Frame, tuple[int, int]], None]) -> OutgoingMessage:
        frame, key = next(iter(answers))
        del answers[frame, key]
        body = b""
        if frame is Frame.CREDIT:
            key = (self.floating.take_credit(peer), 0)
        elif frame is Frame.STATUS_REPLY:
            operation, submitted = self._active.get(key), self._is_submitted(key)
            progress = operation.progress() if operation is not None else "done" if submitted else "not submitted"
            body = json.dumps({"submitted": submitted, "progress": progress}).encode()
        self.counters.control_sent += 1
        return self._control_message(peer, frame, key, body)

    # ----------------------------------------------------------------------------------------- receiving, private

    def _tracked(self, delivery: Delivery) -> Delivery:
        self._deliveries.add(delivery)
        return delivery

    def _sink(self, peer: int, header: Header) -> Delivery:
        """Read the body and forget it: an old epoch, or an operation that failed."""
        limit = 4 * self.config.segment_bytes
        if header.body_bytes > limit:
            raise ProtocolError(f"a message of {header.body_bytes} bytes from rank {peer}; the limit is {limit}")
        self.counters.dropped_messages += 1
        self.counters.dropped_bytes += header.body_bytes
        if header.flags & Flag.EAGER and header.frame is Frame.DATA:
            self._owe(peer, floating_cost(header.body_bytes))
        return self._tracked(Delivery(peer, header, memoryview(bytearray(header.body_bytes))))

    def _accept_unknown(
        self, peer: int, header: Header, key: tuple[int, int], now: float, lease: Lease | None
    ) -> Delivery:
        if self._names.is_past(key) or self._early.of(key).poison is not None:
            self._check_past(peer, key, header.signature)
            return self._sink(peer, header)
        if not header.flags & Flag.EAGER:
            raise ProtocolError(
                f"rank {peer} sent {header.body_bytes} bytes of an operation that was never posted here"
            )
        if header.body_bytes > min(4 * self.config.segment_bytes, self._share):
            raise ProtocolError(f"a floating message of {header.body_bytes} bytes from rank {peer}")
        if lease is not None and not lease.may_be_kept:
            lease = None
        message = self.floating.accept(peer, header, lease)
        self.counters.floating_messages += 1
        if header.flags & Flag.URGENT:
            self._early.note_urgent(peer, key)
        for observer in self.observers:
            observer.floating(
                self._name_of(header.operation), header.iteration, now, peer=peer, num_bytes=header.body_bytes
            )
        delivery = self._tracked(Delivery(peer, header, message.body, floating=message, lease=lease))
        self._match_any(peer, key, now)
        return delivery

    def _slot(self, operation: Operation, peer: int, header: Header) -> tuple[Lane, int, Receive, Place]:
        """The receive a header belongs to, after comparing everything it says with what is expected."""
        index = operation.layout.program.receives.get((peer, header.step))
        if index is None or header.lane >= len(operation.lanes):
            raise ProtocolError(
                f"rank {peer} sent lane {header.lane}, step {header.step} of {operation.name!r}, which its schedule "
                "does not have"
            )
        lane = operation.lanes[header.lane]
        action, place = operation.layout.program.actions[index], lane.places[index]
        assert isinstance(action, Receive)
        if place is None or header.body_bytes != place.body_bytes:
            raise ProtocolError(
                f"rank {peer} sent {header.body_bytes} bytes for lane {header.lane}, step {header.step} of "
                f"{operation.name!r}; {'none' if place is None else place.body_bytes} are expected"
            )
        if index < lane.position or index in lane.expected:
            raise ProtocolError(f"rank {peer} sent lane {header.lane}, step {header.step} of {operation.name!r} twice")
        lane.expected.add(index)
        return lane, index, action, place

    @staticmethod
    def _waits_for_another(operation: Operation, lane: Lane, index: int) -> bool:
        """Whether a message from another peer, which is not here yet, comes before receive ``index``."""
        actions = operation.program.actions
        return any(
            isinstance(action, Receive) and action.peer != actions[index].peer and earlier not in lane.arrivals
            for earlier, action in enumerate(actions[lane.position : index], lane.position)
            if lane.places[earlier] is not None
        )

    def _floating_delivered(self, message: FloatingMessage, now: float) -> None:
        message.complete = True
        if message.dropped:
            self._drop_floating([message])
            return
        operation = self._active.get((message.header.operation, message.header.iteration))
        if operation is None:
            record = self._names.get(message.header.operation)
            if record is not None and message.header.iteration < record.next_iteration:
                self._drop_floating([message])  # submitted and failed while the body was arriving
            return
        index = operation.program.receives[message.peer, message.header.step]
        lane = operation.lanes[message.header.lane]
        self._arrived(operation, lane, index, Arrival(message.body, message), message.peer, message.header, now)

    def _arrived(
        self,
        operation: Operation,
        lane: Lane,
        index: int,
        arrival: Arrival,
        peer: int,
        header: Header,
        now: float,
    ) -> None:
        lane.arrivals[index] = arrival
        self._observe_received(operation, peer, header, now)
        if index == lane.position:
            self._advance(operation, lane, now)

    def _observe_received(self, operation: Operation, peer: int, header: Header, now: float) -> None:
        operation.messages_received += 1
        for observer in self.observers:
            observer.received(
                operation.name,
                operation.key[1],
                now,
                peer=peer,
                lane=header.lane,
                step=header.step,
                num_bytes=header.body_bytes,
            )

    def _release(self, arrival: Arrival) -> None:
        """Give the memory of a segment back to whom it belongs."""
        if arrival.lease is not None:
            arrival.lease.release()
        elif arrival.floating is not None:
            self.floating.release(arrival.floating)
            self._flush_credit(arrival.floating.peer)
        elif arrival.buffer is not None and not arrival.early:
            self.scratch.give(arrival.buffer)

    def _owe(self, peer: int, cost: int) -> None:
        self.floating.owe(peer, cost)
        self._flush_credit(peer)

    def _flush_credit(self, peer: int, *, force: bool = False) -> None:
        if self.floating.is_credit_due(peer, flush=force):
            self._answer(peer, Frame.CREDIT, _NO_KEY)

    # ------------------------------------------------------------------------------------------- progress, private

    def _advance(self, operation: Operation, lane: Lane, now: float) -> None:
        """Run a lane's program until it must wait for a message or a computation."""
        actions, places = operation.layout.program.actions, lane.places
        while lane.position < len(actions):
            action, place = actions[lane.position], places[lane.position]
            if place is None:
                pass  # the block is too small for so many lanes
            elif isinstance(action, Send):
                operation.unsent += 1
                self._enqueue(QueuedMessage(operation, lane.index, action, place))
            else:
                arrival = lane.arrivals.get(lane.position)
                if arrival is None or arrival.computing:
                    return
                if arrival.buffer is not None:
                    self._compute(operation, lane, action, place, arrival)
                    return
                del lane.arrivals[lane.position]
            lane.position += 1
        operation.lanes_left -= 1
        self._finish_if_done(operation, now)

    def _compute(self, operation: Operation, lane: Lane, action: Receive, place: Place, arrival: Arrival) -> None:
        assert arrival.buffer is not None
        arrival.computing = True
        mode = action.mode
        partial = mode is Mode.COMBINE
        average = mode is Mode.COMBINE_LAST and operation.signature.reduction is ReduceOp.AVG
        self._computations.append(
            Computation(
                operation,
                lane,
                lane.position,
                mode,
                local=operation.segment(place, lane.index, partial=action.onto_partial),
                incoming=arrival.buffer,
                destination=operation.segment(place, lane.index, partial=True) if partial else operation.target(place),
                arrival=arrival,
                local_partial=action.onto_partial,
                incoming_partial=action.partial,
                divisor=len(operation.ranks) if average else 1,
            )
        )

    def _note_first_byte(self, operation: Operation, now: float) -> None:
        if operation.first_byte_at is None:
            operation.first_byte_at = now
            for observer in self.observers:
                observer.first_byte(operation.name, operation.key[1], now)

    def _finish_if_done(self, operation: Operation, now: float) -> None:
        if not operation.finished and operation.lanes_left == 0 and operation.unsent == 0:
            self._finish(operation, now, None)

    def _finish(self, operation: Operation, now: float, error: BaseException | None) -> None:
        operation.finished, operation.error = True, error
        del self._active[operation.key]
        self._stalls.forget(operation.key)
        if error is not None:
            self._abandon(operation)
        if not self._active and self._active_since is not None:
            self.counters.active_s += now - self._active_since
            self._active_since = None
        kind, program = operation.layout.signature.kind, operation.layout.program
        if error is None and kind in _CONTRADICTED_LATE and (program.targets or kind not in _COLLECTING):
            self._early.ended[operation.key] = operation.layout.expectation
        if operation.computing and isinstance(error, MismatchError):
            self._unsettled.append(operation)  # the group goes on, and the tensor may be used again at once
        else:
            self._completed.append(operation)
        for observer in self.observers:
            observer.done(operation.name, operation.key[1], now, error=error)

    def _abandon(self, operation: Operation) -> None:
        """Make sure that nothing reads or writes the tensor any more."""
        for peer, messages in operation.queued.items():
            for message in messages:
                self._queues[peer].discard(message)
        operation.held.clear()
        for computation in [queued for queued in self._computations if queued.operation is operation]:
            self._computations.remove(computation)
            self._release(computation.arrival)
        for delivery in self._deliveries:
            if delivery.operation is operation and delivery.arrival is not None and delivery.arrival.buffer is None:
                delivery.view = memoryview(bytearray(len(delivery.view)))
        for lane in operation.lanes:
            for arrival in lane.arrivals.values():
                if not arrival.computing:
                    self._release(arrival)
            lane.arrivals.clear()

    # ------------------------------------------------------------------------------------------- control, private

    def _on_control(self, peer: int, header: Header, body: bytes, now: float) -> None:
        key = (header.operation, header.iteration)
        match header.frame:
            case Frame.POSTED:
                self._on_posted(peer, key)
            case Frame.REQUEST:
                self._on_request(peer, key, now)
            case Frame.CREDIT:
                self._on_credit(peer, header.operation)
            case Frame.DESCRIBE:
                self._on_describe(peer, key, header.signature, _decode(body, peer), now)
            case Frame.MISMATCH:
                self._on_mismatch(peer, key, _decode(body, peer), now)
            case Frame.LOST:
                document = _decode(body, peer)
                self._on_lost(peer, key, document, now)
            case Frame.STATUS_REQUEST:
                self._on_status_request(peer, key, _decode(body, peer), now)
            case Frame.STATUS_REPLY:
                self._on_status_reply(peer, key, _decode(body, peer))
            case Frame.CHANNEL:
                if self._posted.get(peer, 0) > _POSTED_MAX:
                    raise ProtocolError(f"rank {peer} goes on sending messages and reads none of those sent to it")
                self._channels.arrived(peer, header.operation, body, last=bool(header.step), now=now)
            case Frame.GOODBYE:
                reason = f" after {_text(_decode(body, peer), 'reason', _REASON_CHARACTERS_MAX)}" if body else ""
                self.peer_departed(peer, f"it has closed the group{reason}", now)
            case _:
                raise ProtocolError(f"rank {peer} sent a {header.frame.name} frame, which the transport handles")

    def _on_posted(self, peer: int, key: tuple[int, int]) -> None:
        operation = self._active.get(key)
        if operation is not None:
            operation.posted_by.add(peer)
            self._release_held(operation, peer)
        elif not self._names.is_past(key):
            self._early.note_posted(peer, key)

    def _on_request(self, peer: int, key: tuple[int, int], now: float) -> None:
        self._flush_credit(peer, force=True)
        if key in self._active or key in self._early.ended:  # if nothing was to come, it shows what it belongs to
            self._answer(peer, Frame.POSTED, key)
        elif not self._names.is_past(key):
            self._early.note_requested(peer, key)
            self._match_any(peer, key, now)

    def _on_credit(self, peer: int, amount: int) -> None:
        used = self._eager_used.get(peer, 0)
        if amount > used:
            raise ProtocolError(f"rank {peer} gave back {amount} bytes of an allowance of which {used} are used")
        self._eager_used[peer] = used - amount
        for operation in list(self._active.values()):
            if peer in operation.held and operation.eager_sent.get(peer, 0) < self.config.eager_bytes:
                self._release_held(operation, peer)

    def _on_describe(
        self, peer: int, key: tuple[int, int], signature: bytes, document: dict[str, Any], now: float
    ) -> None:
        self._early.names[key[0]] = _text(document, "name", NAME_BYTES_MAX)
        self._early.descriptions[peer, key[0]] = signature, _text(document, "is")
        operation = self._active.get(key)
        if operation is not None:
            if signature != operation.layout.expectation.signature_from(peer):
                self._mismatch(operation, peer, signature, now)
        elif self._names.is_past(key):
            self._check_past(peer, key, signature)
        elif self._early.of(key).poison is None:
            self._early.note_described(peer, key, signature)
            self._match_any(peer, key, now)

    def _on_mismatch(self, peer: int, key: tuple[int, int], document: dict[str, Any], now: float) -> None:
        try:
            ranks = tuple(int(rank) for rank in document["ranks"])
            values = tuple(str(value)[:_TEXT_CHARACTERS_MAX] for value in document["values"])
            error = MismatchError(str(document["tensor"])[:NAME_BYTES_MAX], ranks, values)
        except (KeyError, OverflowError, TypeError, ValueError) as cause:
            raise ProtocolError("a MISMATCH frame that cannot be read") from cause
        operation = self._active.get(key)
        if operation is not None:
            self._finish(operation, now, error)
        elif not self._names.is_past(key):
            self._poison(peer, key, error)
        self._doubt(key)

    def _poison(self, peer: int, key: tuple[int, int], error: MismatchError | PeerLost) -> None:
        """An operation that was not submitted here fails as soon as it is."""
        self._drop_floating(self.floating.claim(key))
        self._early.note_poison(peer, key, error)

    def _on_lost(self, peer: int, key: tuple[int, int], document: dict[str, Any], now: float) -> None:
        lost = document.get("rank")
        if not isinstance(lost, int) or not 0 <= lost < self.world_size:
            raise ProtocolError(f"rank {peer} reports the loss of {lost!r}, which is no rank")
        reason = f"{_text(document, 'reason', _REASON_CHARACTERS_MAX)} (reported by rank {peer})"
        if key == _NO_KEY:
            self.peer_lost(lost, reason, now, first_hand=False)
        else:  # a rank that left in good order: what it has taken part in may still come to its end
            self._departed.setdefault(lost, reason)
            operation = self._active.get(key)
            if operation is not None:
                self._finish(operation, now, PeerLost(lost, reason))
            elif not self._names.is_past(key):
                self._poison(peer, key, PeerLost(lost, reason))

    def _on_status_request(self, peer: int, key: tuple[int, int], document: dict[str, Any], now: float) -> None:
        waited_s = document.get("waited_s", 0.0)
        if not isinstance(waited_s, (int, float)):
            raise ProtocolError(f"rank {peer} asks for an operation that is late by {waited_s!r}")
        self._answer(peer, Frame.STATUS_REPLY, key)
        if self._is_submitted(key) or not waited_s >= self.config.stall_warning_s > 0:
            return
        if self._early.note_report(peer, key, waited_s):
            name = _text(document, "name", NAME_BYTES_MAX)
            self.publish(StallReport(name, key[1], waited_s, (self.rank,), {peer: "waiting for this rank"}, ()), now)

    def _is_submitted(self, key: tuple[int, int]) -> bool:
        return key in self._active or self._names.is_past(key)

    def _on_status_reply(self, peer: int, key: tuple[int, int], document: dict[str, Any]) -> None:
        progress = _text(document, "progress")
        self._stalls.answered(key, peer, submitted=bool(document.get("submitted")), progress=progress)

    # --------------------------------------------------------------------------------------- agreement and reports

    def _mismatch(self, operation: Operation, peer: int, theirs: bytes, now: float) -> None:
        """Two ranks disagree: the operation fails here, and everybody is told what both wanted."""
        self._finish(
            operation,
            now,
            self._disagreement(operation.name, operation.key, operation.layout.expectation, peer, theirs),
        )

    def _check_past(self, peer: int, key: tuple[int, int], theirs: bytes) -> None:
        """An operation that ended here early is another one elsewhere: those who still wait are to learn it, once.

        This rank may be many operations further by then.
        """
        expected, record = self._early.ended.get(key), self._names.get(key[0])
        if expected is not None and record is not None and theirs != expected.signature_from(peer):
            del self._early.ended[key]
            self._disagreement(record.shown(key[1]), key, expected, peer, theirs)

    def _disagreement(
        self, name: str, key: tuple[int, int], expected: Expectation, peer: int, theirs: bytes
    ) -> MismatchError:
        """Tell everybody what this rank and ``peer`` wanted."""
        described, value = self._early.descriptions.get((peer, key[0]), (b"", ""))
        mine = shown = expected.describe(peer)
        if described != theirs:  # it has not described this one, or is ahead and has described the next
            value, shown = unpack_signature(theirs), unpack_signature(expected.signature_from(peer))
        if value == shown:  # people see no difference: it is the schedule, or a shape that the header only counts
            if unpack_schedule(theirs) != unpack_schedule(expected.packed):
                value = f"{mine}, carried out by {unpack_schedule(theirs)}"
                mine = f"{mine}, carried out by {unpack_schedule(expected.packed)}"
            else:
                value = f"{value}, of another shape"
        error = MismatchError(name, (self.rank, peer), (mine, value))
        document = {"tensor": name, "ranks": error.ranks, "values": error.values}
        body = json.dumps(document).encode()
        self.counters.mismatches += 1
        for other in expected.ranks:
            if other != self.rank and other not in self._departed:
                self._control(other, Frame.MISMATCH, key=key, body=body)
        self._doubt(key)
        return error

    # -------------------------------------------------------------------------------------- receives from anybody

    def _match_any(self, peer: int, key: tuple[int, int], now: float) -> None:
        """``peer`` has sent something that was not submitted here: perhaps a receive waits for anybody."""
        while self._is_announced(key):  # the next ones of this peer may be here too, if they have overtaken this one
            for receive in self._any_receives:
                name = receive.candidates.get(peer)
                record = self._names.record(receive.scope, name) if name is not None else None
                if record is not None and key == (record.op_id, record.next_iteration):
                    break
            else:
                return
            self._any_receives.remove(receive)
            self._become(receive, peer, now)
            key = (key[0], key[1] + 1)

    def _is_announced(self, key: tuple[int, int]) -> bool:
        """Whether a peer has sent, or wants to send, something of an operation."""
        news = self._early.of(key)
        return key in self.floating or bool(news.requested) or bool(news.described)

    def _become(self, receive: AnyReceive, peer: int, now: float) -> None:
        self.submit(
            receive.candidates[peer],
            receive.signature,
            [receive.buffer],
            ranks=(peer, self.rank),
            scope=receive.scope,
            repeats=True,
            priority=receive.priority,
            now=now,
            owner=receive.owner,
            becoming=True,
        )

    def _end_any_receives(self, ended: Callable[[AnyReceive], bool], error: TotalReduceError) -> None:
        for receive in [pending for pending in self._any_receives if ended(pending)]:
            self._any_receives.remove(receive)
            receive.error = error
            self._completed.append(receive)

    # -------------------------------------------------------------------------------------------------- small things

    def _name_of(self, op_id: int) -> str:
        record = self._names.get(op_id)
        return record.name if record is not None else self._early.names.get(op_id, f"{op_id:#018x}")


def _decode(body: bytes, peer: int) -> dict[str, Any]:
    """JSON of a control frame: data, never code.

    Raises:
        ProtocolError: It is not a JSON object.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as cause:
        raise ProtocolError(f"a control frame of rank {peer} that is no JSON") from cause
    if not isinstance(document, dict):
        raise ProtocolError(f"a control frame of rank {peer} that is no JSON object")
    return document


def _text(document: dict[str, Any], field: str, characters_max: int = _TEXT_CHARACTERS_MAX) -> str:
    """A text of a control frame, for people."""
    return str(document.get(field, "?"))[:characters_max]
