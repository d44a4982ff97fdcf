"""The Total Reduce engine of one rank: an object without threads, sockets or clocks that runs collectives.

Callers report each event by calling a method, in most cases with the current time as ``now``, and ask the engine what
to do next:

* for the application, the runner calls ``submit``, ``receive_any``, ``promote`` and ``close``, and collects
  completed operations with ``table.pop_completed()``;
* a transport gets messages to send from ``next_message`` and reports them with ``message_sent``; it asks ``accept``
  where to store a received body and reports a complete body with ``delivered``. It calls ``peer_lost`` if it cannot
  reach a peer any more, or if ``accept`` or ``delivered`` has raised ``ProtocolError`` for a message of that peer;
* a thread takes an addition or a copy with ``computations.take()``, carries it out with
  ``runner.endpoint.carry_out``, and reports its end with ``computed``;
* the runner calls ``tick`` from time to time.

This file implements the life cycle of an operation. The engine's parts, one file each, do the rest. Names in italics
in this table are those of the Total Reduce paper:

=====================  ================================================================================================
``table``              the operations in flight (*message list*) and the operations that have ended
``names``              the id and the next iteration of each operation name
``planner``            the schedule and the layout of each operation
``outbox``             the messages that wait to be sent, in the order in which they are sent (*payload_pick_ready*)
``rendezvous``         decides which messages may leave before this rank knows that the receiver has submitted the
                       operation; ``entries`` does so for control frames
``reception``          the memory for received bodies; ``floating`` keeps messages that arrive before their operation is
                       submitted, and ``scratch`` lends temporary buffers
``carrying``           gives operations to carriers, which carry them out in place of the engine's messages
``relaying``           is the carrier by the transport's relay
``computations``       the additions and copies of received bytes that can be carried out (*computation list*)
``signatures``         the check that all ranks have submitted the same kind, element type, shape, reduction, root
                       and schedule
``early``              control frames about operations that this rank has not submitted yet
``members``            the ranks that are lost or have departed
``telling``            the errors that the other ranks are told of before this rank's program
``control``            the bodies of control frames
``channels``           messages of other protocols, such as the agreement on the order of native operations, and bodies
                       that follow them
``any_receives``       receive operations that accept a message from whichever of several ranks sends first
``stall``, ``reports`` the search for ranks that keep other ranks waiting
=====================  ================================================================================================

Words: the *key* of an operation is its id and its iteration. The id is a hash of the operation's scope and name.
Subgroups and point-to-point messages use the same engine as the whole group; the scope prevents their names from
colliding. The iteration is the number of earlier operations with the same id. An operation has *ended* when it leaves
``table.active``, and has *completed* when its owner is told; the two differ only in ``State.FAILING``.

A rank is *lost* if it fails without notice or violates the protocol; then the group can no longer be used. The rank
that finds the loss tells all others by a LOST frame without a key. Each of these passes the frame on, once, to the
ranks with which it is connected. A rank fails its operations only when its own LOST frames have left (``telling``). So
if its program then ends, its peers have already been told who is lost, and do not take this rank for the cause.

A rank has *departed* if it has closed the group with a GOODBYE frame, or if another rank has reported that it has.
An operation fails with ``PeerLost`` if any of its ranks still has a message to exchange with the departed rank; it then
fails on every rank where it has not ended yet. A LOST frame with an operation's key reports a departure, and makes that
operation fail; a LOST frame without a key reports a loss.

This rank counts a peer as having *posted* an operation once a data message or a POSTED frame shows that the peer has
submitted it; ``Operation.posted_by`` is the set of these peers.

Invariants (``validate`` checks the parts of them that can be seen in the engine's attributes):

* an operation is in ``table.active`` from ``submit`` or ``Carrying.adopt`` until it has ended; no two active operations
  have the same key;
* the order in which the bytes of a result are combined depends on the schedule alone, never on arrival;
* no memory is taken for a message before its length has been compared with what is expected or allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from totalreduce.engine.any_receives import AnyReceive, AnyReceives
from totalreduce.engine.carrying import Carrying
from totalreduce.engine.channels import Channels
from totalreduce.engine.computations import Computation, ComputationList
from totalreduce.engine.control import (
    Description,
    Farewell,
    LossNotice,
    StatusReply,
    StatusRequest,
    decode_mismatch,
)
from totalreduce.engine.counters import Counters
from totalreduce.engine.early import EarlyRecord, entry_cost
from totalreduce.engine.entries import Entries
from totalreduce.engine.floating import FloatingMessage
from totalreduce.engine.members import Members
from totalreduce.engine.names import NameRecord, following, preceding
from totalreduce.engine.operation import Arrival, Lane, Operation, State
from totalreduce.engine.outbox import NO_KEY, Outbox, OutgoingMessage, QueuedMessage
from totalreduce.engine.planner import Planner
from totalreduce.engine.reception import Delivery, Reception
from totalreduce.engine.relaying import Relaying
from totalreduce.engine.rendezvous import Rendezvous
from totalreduce.engine.reports import Reports
from totalreduce.engine.signatures import ENDS_EARLY, SignatureExchange
from totalreduce.engine.stall import StallWatch
from totalreduce.engine.submission import Submission
from totalreduce.engine.table import OperationTable
from totalreduce.engine.telling import Telling
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import ConfigurationError, GroupClosed, MismatchError, PeerLost, ProtocolError
from totalreduce.foundation.header import HEADER_BYTES, Flag, Frame, Header
from totalreduce.foundation.observer import Observer
from totalreduce.schedules.actions import Send
from totalreduce.transports.base import Lease

__all__ = ["Engine"]

_Key = tuple[int, int]
#: A peer sends these frames about an operation only if messages carry the operation out there.
_SENT_WITH_MESSAGES = frozenset({Frame.POSTED, Frame.REQUEST, Frame.DESCRIBE})


class Engine:
    """The state of one rank of one group.

    Attributes:
        rank: This rank.
        config: The settings.
        counters: What the engine has done so far.
        observers: Objects that are called on every event.
    The other attributes are the parts that the module's docstring lists. Each has the name given there, behind an
    underscore if only the engine uses the part; but ``stall`` is ``Engine.stalls``. ``names`` and ``early`` are
    attributes of ``Engine.table``, ``floating`` and ``scratch`` of ``Engine.reception``. ``control`` is a module.
    """

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

        Args:
            rank: This rank.
            world_size: The number of ranks.
            config: The settings. Those in ``EngineConfig.wire_settings`` are equal on all ranks.
            epoch: A number that all ranks of this group share. Messages with another epoch are read and discarded.
            observers: Objects that are called on every event; the list may be changed later.
            hosts: For each rank, a number that is equal for ranks of one host; by default every rank has a host of its
                own. Used to choose schedules; the same on every rank.
            shared_memory: Whether ranks of one host send through shared memory. Used to choose schedules; the same on
                every rank.
        """
        self.rank, self.config = rank, config
        self.counters = counters = Counters()
        self.observers: list[Observer] = observers if observers is not None else []
        share = max(1, config.floating_bytes_max // max(1, world_size - 1))
        self.table = table = OperationTable(counters)
        self.planner = Planner(
            rank, hosts if hosts is not None else range(world_size), table.names, config, shared_memory=shared_memory
        )
        self.outbox = outbox = Outbox(config, epoch)
        self._entries = entries = Entries(outbox, table.early.allowance.share)
        self.members = members = Members(rank, world_size)
        self.telling = telling = Telling(rank, outbox, entries, members)
        self.reception = Reception(config, share, counters)
        self.computations = ComputationList()
        self.channels = Channels(outbox, members)
        self.channels.on_forgotten = self.reception.forget_bodies
        self.reports = Reports(counters, self.observers)
        floating = self.reception.floating
        self._rendezvous = rendezvous = Rendezvous(config, table, floating, outbox, entries, counters)
        self.carrying = carrying = Carrying(self, table, members, self.reception, rendezvous, self.observers, counters)
        self.relaying = Relaying(config, carrying, table, self.planner, outbox, entries, self.reception, counters)
        carrying.carriers.append(self.relaying)
        self._signatures = signatures = SignatureExchange(rank, table, entries, members, telling, counters)
        self._any_receives = AnyReceives(
            rank, table.names, table.early, floating, members.departed, outbox, rendezvous.asking, self.submit
        )
        self.stalls = StallWatch(rank, config.stall_warning_s, table, outbox, members, signatures, self.reports)

    # ------------------------------------------------------------------------------------------------ application

    def submit(self, submission: Submission, now: float, *, owner: Any = None, matches_next: bool = True) -> Operation:
        """Add an operation to ``table``, and give it to a carrier or queue the messages that can be sent at once.

        The operation that is returned may have ended already.

        Args:
            submission: The operation.
            now: The time in seconds.
            owner: A value of the caller, which is kept in the operation.
            matches_next: Whether to look for an ``AnyReceive`` that can take the next message of the name. Otherwise
                the caller does so.

        Raises:
            ConfigurationError: The name is in flight already, is too long, or its hash is that of another name; or
                there are too many names; or the schedule that was asked for does not exist.
            PeerLost: A rank of the group is lost; or a rank of the operation has departed, and the operation's kind is
                not in ``ENDS_EARLY``. An operation of a kind in ``ENDS_EARLY``, such as a broadcast, can end on one
                rank before the others have submitted it, and is accepted. If it needs a message from or to the departed
                rank, the returned operation fails as soon as no message of that rank can come any more
                (``Members.silent``).
            GroupClosed: This rank has closed the group.
        """
        name, signature, buffers, ranks, scope, repeats, priority, title, place, once = submission
        members, table = self.members, self.table
        members.check_usable()
        ranks = members.everybody if ranks is None else ranks
        names = table.names
        record = names.record_once(scope, once, title) if once else names.record(scope, name, place)
        key = (record.op_id, record.next_iteration)
        if name is not None and not repeats and (key[0], preceding(key[1])) in table.active:
            raise ConfigurationError(
                f"an operation named {name!r} is already in flight on rank {self.rank}; wait for it or use another name"
            )
        # Where a verdict says that a rank is lost, the operation is accepted, and fails when the others have been told.
        if signature.kind not in ENDS_EARLY and members.verdict is None:
            for peer, reason in members.departed.items():
                if peer in ranks:
                    self.telling.tell(ranks, Frame.LOST, LossNotice(peer, reason).encode(), key)
                    # The other ranks count this operation when they submit it. So it is counted here, although it has
                    # failed: the next operation of the name has the same key on all ranks.
                    record.next_iteration = following(key[1])
                    if once:
                        names.end_once(key[0])
                    table.early.claim(key)
                    self.reception.drop(self.reception.floating.claim(key))
                    raise PeerLost(peer, reason)
        layout = self.planner.layout(record, signature, ranks, buffers)
        record.next_iteration = following(key[1])
        if once:
            names.begin_once(record)
        operation = table.make(submission, record, key, layout, now, owner)
        table.add(operation, now)
        for observer in self.observers:
            observer.submitted(operation.name, key[1], now, num_bytes=layout.num_bytes, priority=priority)
        early = table.early.claim(key)
        if early.failure is not None:
            self.reception.drop(self.reception.floating.claim(key))
            self._end(operation, now, _by_own_name(operation, early.failure))
        elif not self.carrying.take(operation, record, early):
            self.carry_by_messages(operation, record, early, now)
        # Only point-to-point messages set ``repeats``, and their ``ranks`` are (source, target). A receive has used up
        # one iteration of its name. The source's next message of this name may have arrived already, and a waiting
        # ``AnyReceive`` can take it now. (In a send, ``ranks[0]`` is this rank, from which no ``AnyReceive`` receives.)
        if repeats and matches_next:
            self._any_receives.match(ranks[0], (record.op_id, record.next_iteration), now)
        return operation

    def promote(self, operation: Operation, now: float) -> None:
        """Send the messages of an operation before those of operations that are not promoted, here and at its peers.

        The peers learn of it by a flag of the messages that leave afterwards. With ``scheduling="fifo"`` the order of
        messages does not change. The runner calls this method when a caller on this rank is blocked on the operation;
        ``accept`` and ``_claim_floating`` call it when a message says that a caller on another rank is blocked.
        """
        if operation.promoted or operation.finished:
            return
        operation.promoted = True
        self.counters.promotions += 1
        self.outbox.promote(operation)
        if operation.carriage is not None:
            operation.carriage.promote()
        for observer in self.observers:
            observer.promoted(operation.name, operation.key[1], now)

    def receive_any(self, receive: AnyReceive, now: float) -> None:
        """Receive one message from the rank in ``receive.candidates`` that sends or announces one first.

        If several have done so before this call, the first of them in the order of ``candidates`` is taken. When the
        sender is known, the receive is submitted as an operation with the same ``owner``.

        Raises:
            ConfigurationError: A candidate's name is too long, or its hash is that of another name; or there are too
                many names.
            PeerLost: A rank is lost; or no message can come any more from any candidate (``Members.silent``), and none
                of them has sent a message that this operation could still receive.
            GroupClosed: This rank has closed the group.
        """
        self.members.check_usable()
        if self._any_receives.receive(receive, now):
            return
        departed = self.members.departed
        if receive.candidates.keys() <= self.members.silent():
            peer = next(iter(receive.candidates))
            raise PeerLost(peer, departed[peer])
        self._any_receives.add(receive)

    def close(self, now: float, *, tell: Collection[int], reason: str = "") -> None:
        """Fail all pending operations, receives and channels, refuse later submissions, and send GOODBYE frames.

        Args:
            now: The time in seconds.
            tell: Peers that get a GOODBYE frame, after queued replies and, if a rank is lost, a LOST frame.
            reason: The reason in words, which the peers show.
        """
        members = self.members
        if members.closed:
            return
        members.closed = True
        for operation in self.table.select():
            self._end(operation, now, GroupClosed(f"the group was closed with {operation.name!r} pending"))
        self.table.close()
        for receive in self._any_receives.take_all():
            self.table.end_receive(receive, GroupClosed("the group was closed with a receive pending"))
        self.channels.fail(GroupClosed("the group was closed"), now)
        # A peer that got only this rank's GOODBYE would name this rank as the cause, and not one that departed before.
        first = next((LossNotice(*departure) for departure in members.departed.items()), None)
        farewell = Farewell(reason, first).encode()
        for peer in tell:
            if peer in members.departed:
                continue
            self.outbox.write_answers(peer)
            if members.verdict is not None and members.verdict.rank != peer:
                self.outbox.control(peer, Frame.LOST, body=members.verdict.encode())
            self.outbox.control(peer, Frame.GOODBYE, body=farewell)
        self.outbox.drop_streams()

    # ---------------------------------------------------------------------------------------------------- sending

    def next_message(self, peer: int, now: float, *, bulk: bool = False) -> OutgoingMessage | None:
        """Return the next message for ``peer``: control frames, then channel messages that have bodies, then data.

        Of data, the most urgent message that may leave is the next one; ``starvation_limit`` says how often messages
        may overtake an older one. Bodies of channel messages take turns with data.

        With ``bulk``, return the most urgent message of bulk that is queued apart (``Outbox.bulk_peers``).
        """
        outbox = self.outbox
        queue = (outbox.bulk_queues if bulk else outbox.queues).get(peer)
        while True:
            # Checked in every pass, because ``admit`` may have queued a REQUEST frame.
            if peer in outbox.control_waits and not bulk:
                self.counters.control_sent += 1
                return outbox.take_control(peer)
            if not bulk and (message := outbox.take_stream(peer, competes=bool(queue))) is not None:
                return message
            queued = queue.pop() if queue is not None else None
            if queued is None:
                (outbox.bulk_ready if bulk else outbox.ready).discard(peer)
                return None
            flags = self._rendezvous.admit(queued)
            if flags is not None:
                if queued.operation.state is State.WAITING:
                    self.first_byte(queued.operation, now)
                return outbox.data_message(queued, flags)

    def message_sent(self, message: OutgoingMessage, now: float) -> None:
        """Record that the transport no longer needs the memory of a message."""
        num_bytes = len(message.body) if message.body is not None else 0
        self.counters.bytes_sent += HEADER_BYTES + num_bytes
        self.counters.sent_to[message.peer] += HEADER_BYTES + num_bytes
        if message.on_sent is not None:
            message.on_sent()
            self.telling.proceed(now)
        queued = message.queued
        if queued is None:
            return
        self.counters.messages_sent += 1
        queued.sent = True
        operation = queued.operation
        operation.unsent -= 1
        if queued.action.partial and operation.layout.sends_partials_once:
            operation.accumulators.pop((queued.region.buffer, queued.lane), None)
        for observer in self.observers:
            observer.sent(
                operation.name,
                operation.key[1],
                now,
                peer=message.peer,
                lane=queued.lane,
                step=queued.action.step,
                num_bytes=num_bytes,
            )
        self.end_if_done(operation, now)

    # -------------------------------------------------------------------------------------------------- receiving

    def accept(self, peer: int, header: Header, now: float, lease: Lease | None = None) -> Delivery:
        """Decide into which memory the body of an arriving message is received, and act on the message's header.

        The header may show that the operation must be taken back from the carrier, that it is urgent, that the peer has
        posted it, or that its signature differs, so that it fails.

        ``lease``: memory of the transport that already contains the body. If the engine keeps the body there,
        ``Delivery.lease`` of the returned delivery is this object. Otherwise it is ``None``, and the transport must
        copy the body to ``Delivery.view``.

        Raises:
            ProtocolError: The message violates the protocol.
        """
        reception = self.reception
        if header.epoch != self.outbox.epoch:
            return reception.sink(peer, header, of_this_epoch=False)
        if header.frame is Frame.CHANNEL_BODY:
            return reception.channel_body(peer, header, self.channels.room(peer, header.operation, header.body_bytes))
        if header.frame is not Frame.DATA:
            return reception.control(peer, header)
        operation = self.table.active.get((header.operation, header.iteration))
        if operation is None:
            return self._accept_unknown(peer, header, now, lease)
        if header.signature != operation.layout.expectation.signature_from(peer):
            self._check_signature(operation, peer, header.signature, now)  # which fails the operation
            return reception.sink(peer, header)
        if operation.carriage is not None:
            delivery = self.carrying.accept(operation, peer, header, now)
            if delivery is not None:
                return delivery
        if header.flags & Flag.URGENT:
            self.promote(operation, now)
        if peer not in operation.posted_by:
            # ``rendezvous`` queues the operation's messages that it held back for this peer. It must do so before
            # ``delivered`` queues later messages of the same lanes.
            self._rendezvous.posted(operation, peer)
        delivery = reception.receive(peer, header, operation, lease)
        if operation.state is State.WAITING:
            self.first_byte(operation, now)
        return delivery

    def delivered(self, delivery: Delivery, now: float) -> None:
        """Record that the body of an accepted message has arrived.

        Raises:
            ProtocolError: The message is a control frame that no correct peer sends; or the peer does not read the
                answers to its questions.
        """
        self.reception.arriving.discard(delivery)
        header, peer = delivery.header, delivery.peer
        self.counters.bytes_received += HEADER_BYTES + header.body_bytes
        self.counters.received_from[peer] += HEADER_BYTES + header.body_bytes
        if header.epoch != self.outbox.epoch:
            return
        if header.frame is Frame.CHANNEL_BODY:
            self.channels.body_arrived(peer, header.operation)
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
            return  # the body was received only to be discarded
        if operation.state >= State.DONE:
            arrival.release()
            return
        if operation.carriage is not None:
            if arrival.buffer is not None:
                lane.arrivals[delivery.index] = arrival  # until the carrier has used the body
            operation.carriage.receive(peer, header.lane, header.step, arrival.buffer)
            return
        self._arrived(operation, lane, delivery.index, arrival, peer, header, now)

    # -------------------------------------------------------------------------------------------------- computing

    def computed(self, computation: Computation, seconds: float, now: float) -> None:
        """Record that a computation has ended. ``seconds``: the time that it took."""
        operation, lane = computation.operation, computation.lane
        self.counters.reduce_s += seconds
        computation.arrival.release()
        operation.computing -= 1
        if operation.state >= State.DONE:
            self.table.addition_ended(operation)
            return
        for observer in self.observers:
            action = operation.program.actions[computation.index]
            observer.reduced(operation.name, operation.key[1], now, lane=lane.index, step=action.step, seconds=seconds)
        del lane.arrivals[computation.index]
        lane.position = computation.index + 1
        self._advance(operation, lane, now)

    # ------------------------------------------------------------------------------------------------------ peers

    def peer_lost(self, peer: int, reason: str, now: float) -> None:
        """Note that this rank has lost another one.

        Its connection has ended or was never made, it is silent, or it has violated the protocol. All other ranks are
        told; then all pending operations fail, and later ones are refused. Nothing of this happens if the loss of a
        rank is known already, or if this rank has closed the group. If the rank had departed before, only operations
        that still need it fail.
        """
        members = self.members
        self.telling.forget(peer, now)
        if members.closed or members.verdict is not None:
            return
        if peer in members.departed:
            # Pending operations are checked now. If only another rank has reported the departure, they were not checked
            # before, and the GOODBYE may never come. If they were checked when the GOODBYE came, messages that the
            # transport had taken counted as sent (``Operation.needs``), and some of these can now never be sent.
            if peer not in members.unreachable:
                members.unreachable.add(peer)
                self.reception.forget(peer)
                self.peer_departed(peer, members.departed[peer], now)
            return
        self._pronounce(LossNotice(peer, reason), members.everybody, now)

    def _pronounce(self, verdict: LossNotice, ranks: Collection[int], now: float) -> None:
        """Tell ranks that a rank is lost; when they have been told, end the group.

        Does nothing if the loss of a rank is known already, or if this rank has closed the group.
        """
        members = self.members
        if members.closed or members.verdict is not None:
            return
        members.verdict = verdict
        self.telling.tell([rank for rank in ranks if rank != verdict.rank], Frame.LOST, verdict.encode())
        self.telling.then(self._lose, now)

    def _lose(self, now: float) -> None:
        """Fail all pending operations, and refuse all later ones: a rank is lost, and the others have been told."""
        members, verdict = self.members, self.members.verdict
        if members.closed or verdict is None:
            return
        members.lost = verdict.error()
        self.outbox.drop_streams()
        for operation in self.table.select():
            self._end(operation, now, verdict.error())
        for receive in self._any_receives.take_all():
            self.table.end_receive(receive, verdict.error())
        self.channels.fail(verdict.error(), now)

    def peer_departed(self, peer: int, reason: str, now: float) -> None:
        """Mark a rank as departed: fail the operations that still need a message to or from it.

        A receive from any rank fails if no message can come any more from any of its candidates (``Members.silent``).
        The channels are notified of the departure.
        """
        self.members.depart(peer, reason)
        self._rendezvous.forget(peer)
        for operation in self.table.select():
            self._fail_if_needed(operation, peer, now)
        # A rank describes an operation only if its signature differs from the one that it described last under the
        # name. Suppose that one rank has described a new signature to the departed rank alone, and the others have the
        # old one and have described nothing: then only the departed rank could have found the mismatch. So each
        # remaining rank now describes its pending operations with the departed rank, if it has not described them yet.
        self._signatures.describe_late(self.table.select(lambda operation: peer in operation.ranks))
        silent = self.members.silent()
        for receive in self._any_receives.take_all(lambda waiting: waiting.candidates.keys() <= silent):
            self.table.end_receive(receive, PeerLost(peer, reason))
        self.channels.depart(peer, reason, now)

    # --------------------------------------------------------------------------------------------------- watching

    def tick(self, now: float) -> None:
        """Advance what has deadlines: errors that wait until ranks are told, channels, carriers, and the stall watch.

        A departed rank whose last messages were awaited long enough sends nothing any more. Called a few times a
        second, and at ``channels.next_due()``.
        """
        self.telling.proceed(now)
        self.channels.tick(now)
        self.carrying.tick(now)
        self.stalls.tick(now)
        arriving = {delivery.peer for delivery in self.reception.arriving} | self.carrying.arriving()
        for peer in self.members.overdue(now, arriving):
            self.peer_departed(peer, self.members.departed[peer], now)

    def validate(self) -> None:
        """Check the invariants. Only tests call this: the simulator after most events, and the tests of the engine."""
        done = State.DONE
        for key, operation in self.table.active.items():
            assert operation.key == key
            assert operation.state < done
            assert operation.lanes_left or operation.unsent, f"{operation.name} is done but active"
            for lane in operation.lanes:
                if lane.arrivals:
                    assert min(lane.arrivals) >= lane.position
        self.reception.validate()
        self._rendezvous.validate()
        for peer in self.outbox.streaming():
            assert peer in self.outbox.ready
        for peer, queue in self.outbox.queues.items():
            assert not len(queue) or peer in self.outbox.ready
        for peer, queue in self.outbox.bulk_queues.items():
            assert not len(queue) or peer in self.outbox.bulk_ready

    # --------------------------------------------------------------------------------- the life of an operation

    def carry_by_messages(self, operation: Operation, record: NameRecord, early: EarlyRecord, now: float) -> None:
        """Have messages carry an operation out: give it those that have arrived, and queue the first of its own."""
        operation.make_lanes()
        others = None
        if self.carrying.may_be_taken(operation):
            # A peer may have given this operation to a carrier that needs no messages, and takes it back when a message
            # about it arrives from this rank. In some schedules this rank must receive before it sends, and both ranks
            # would wait for ever. Therefore this rank sends POSTED to every rank of the operation.
            others = self.members.others(operation.ranks)
        self._rendezvous.submitted(operation, early, others)
        self._signatures.submitted(operation, record)
        for peer, theirs in early.described.items():
            self._check_signature(operation, peer, theirs, now)
        self._claim_floating(operation, now)
        if not self.carrying.is_wanted(operation):
            self.run_lanes(operation, now)
        for peer in self.members.silent():
            self._fail_if_needed(operation, peer, now)

    def run_lanes(self, operation: Operation, now: float) -> None:
        """Run the program of every lane until it must wait; send the first messages on the way."""
        if not operation.finished:
            for lane in operation.lanes:
                self._advance(operation, lane, now)

    def first_byte(self, operation: Operation, now: float) -> None:
        """Note that the first byte of an operation is on its way, or has arrived."""
        operation.enter(State.MOVING)
        for observer in self.observers:
            observer.first_byte(operation.name, operation.key[1], now)

    def _advance(self, operation: Operation, lane: Lane, now: float) -> None:
        """Run the program of a lane until it must wait for a message or a computation."""
        actions, regions = operation.layout.program.actions, lane.regions
        while lane.position < len(actions):
            action, region = actions[lane.position], regions[lane.position]
            if region is None:
                pass  # this lane has no part in this action
            elif isinstance(action, Send):
                operation.unsent += 1
                self.outbox.push(QueuedMessage(operation, lane.index, action, region))
            else:
                arrival = lane.arrivals.get(lane.position)
                if arrival is None:
                    return
                if arrival.buffer is not None:
                    self.computations.append(operation, lane, action, region, arrival)
                    return
                del lane.arrivals[lane.position]
            lane.position += 1
        operation.lanes_left -= 1
        self.end_if_done(operation, now)

    def end_if_done(self, operation: Operation, now: float) -> None:
        """End an operation of which all lanes have ended and all messages have left."""
        if operation.lanes_left == 0 and operation.unsent == 0 and operation.state < State.DONE:
            self._end(operation, now, None)

    def _end(self, operation: Operation, now: float, error: BaseException | None) -> None:
        """End an operation, successfully or with an error.

        After a success nothing accesses the tensor. After a failure these may still access it: (a) the transport, which
        is sending a message from it: the runner completes such an operation (``Operation.is_leaving``) only when the
        transport has copied the rest (``Transport.keep_rests``); (b) a thread that is receiving a body; (c) a thread
        that advances the operation in its carrier; (d) a thread that is carrying out an addition or a copy. In case
        (d), and until the other ranks have been told of the error, the operation is in ``State.FAILING``. But if a rank
        is lost or this rank has closed the group, it completes at once.
        """
        if operation.carriage is not None:
            self.carrying.end(operation, well=error is None)
        group_goes_on = not self.members.have_ended
        must_wait = error is not None and group_goes_on and not self.telling.is_done
        self.table.end(operation, error, now, group_goes_on=group_goes_on, is_told=not must_wait)
        names = self.table.names
        if operation.key[0] in names.once:
            names.end_once(operation.key[0])
            self._signatures.forget(operation)
        if must_wait:
            self.telling.then(lambda _: self.table.complete_told(), now)
        self.stalls.forget(operation.key)
        if error is None:
            self._signatures.ended_well(operation)
        else:
            self.outbox.discard(operation)
            self._rendezvous.discard(operation)
            self.computations.discard(operation)
            self.reception.abandon(operation)
        for observer in self.observers:
            observer.done(operation.name, operation.key[1], now, error=error)

    def _fail_if_needed(self, operation: Operation, peer: int, now: float) -> None:
        """Fail an operation that still has to exchange a message with a departed rank.

        The error names the rank that departed first among those with which messages are still to be exchanged.
        """
        departed, unreachable = self.members.departed, self.members.unreachable
        if not operation.finished and operation.needs(peer, unreachable=peer in unreachable):
            first = next(other for other in departed if operation.needs(other, unreachable=other in unreachable))
            notice = LossNotice(first, departed[first])
            self.telling.tell(operation.ranks, Frame.LOST, notice.encode(), operation.key, operation)
            self._end(operation, now, notice.error())

    def _check_signature(self, operation: Operation, peer: int, theirs: bytes, now: float) -> None:
        """Fail an operation if a peer has submitted a different signature."""
        if not operation.finished:
            error = self._signatures.compare(operation, peer, theirs)
            if error is not None:
                self._end(operation, now, error)

    # ------------------------------------------------------------------------------------------- messages, private

    def _accept_unknown(self, peer: int, header: Header, now: float, lease: Lease | None) -> Delivery:
        """Accept a message of an operation that is not active: it has ended, or was not submitted here yet."""
        key = (header.operation, header.iteration)
        if self.table.was_submitted(key) or self.table.early.of(key).failure is not None:
            self._signatures.compare_past(peer, key, header.signature)
            return self.reception.sink(peer, header)
        delivery = self.reception.float(peer, header, lease)
        for observer in self.observers:
            name = self._signatures.name_of(header.operation)
            observer.floating(name, header.iteration, now, peer=peer, num_bytes=header.body_bytes)
        self._any_receives.match(peer, key, now)
        return delivery

    def _claim_floating(self, operation: Operation, now: float) -> None:
        """Give an operation the messages that arrived before it was submitted."""
        for message in self.reception.floating.claim(operation.key):
            self._check_signature(operation, message.peer, message.header.signature, now)
            if operation.finished:
                self.reception.drop([message])
                continue
            try:
                lane, index, *_ = self.reception.find_receive(operation, message.peer, message.header)
            except ProtocolError as error:  # mark the peer as lost, instead of raising in the caller of ``submit``
                self.reception.drop([message])
                self.peer_lost(message.peer, f"protocol violation: {error}", now)
                continue
            if message.header.flags & Flag.URGENT:
                self.promote(operation, now)
            self._rendezvous.posted(operation, message.peer)
            if operation.state is State.WAITING:
                self.first_byte(operation, now)
            if message.complete:  # otherwise ``_floating_delivered`` assigns it when the rest of the body has arrived
                lane.arrivals[index] = Arrival(message.body, message)
                self._note_received(operation, message.peer, message.header, now)

    def _floating_delivered(self, message: FloatingMessage, now: float) -> None:
        message.complete = True
        header = message.header
        key = (header.operation, header.iteration)
        operation = self.table.active.get(key)
        if message.dropped or (operation is None and self.table.was_submitted(key)):
            self.reception.drop([message])  # the operation has failed while the body was arriving
        elif operation is not None:
            index = operation.program.receives[message.peer, header.step]
            arrival = Arrival(message.body, message)
            self._arrived(operation, operation.lanes[header.lane], index, arrival, message.peer, header, now)

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
        self._note_received(operation, peer, header, now)
        if index == lane.position:
            self._advance(operation, lane, now)

    def _note_received(self, operation: Operation, peer: int, header: Header, now: float) -> None:
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

    # ------------------------------------------------------------------------------------------- control, private

    def _on_control(self, peer: int, header: Header, body: bytes, now: float) -> None:
        key = (header.operation, header.iteration)
        if header.frame in _SENT_WITH_MESSAGES and key in self.table.active:
            self.carrying.give_back(self.table.active[key], now)
        if header.flags & Flag.EAGER:  # the peer has paid for an entry; if none is needed, it gets its allowance back
            cost = entry_cost(header.frame, header.body_bytes)
            if self.table.was_submitted(key):
                self.table.early.allowance.owe(peer, cost)
            else:
                self.table.early.enter(peer, key, cost)
        match header.frame:
            case Frame.POSTED:
                self._rendezvous.on_posted(peer, key)
            case Frame.REQUEST:
                if self._rendezvous.on_request(peer, key, ended=self._signatures.has_ended):
                    self._any_receives.match(peer, key, now)
            case Frame.CREDIT:
                self._rendezvous.on_credit(peer, header.operation, header.iteration)
            case Frame.DESCRIBE:
                error = self._signatures.described(peer, key, header.signature, Description.decode(body, peer))
                if error is not None:
                    self._end(self.table.active[key], now, error)
                self._any_receives.match(peer, key, now)
            case Frame.MISMATCH:
                self._fail(peer, key, decode_mismatch(body, peer), now)
                self._signatures.distrust(key)
            case Frame.LOST:
                notice = LossNotice.decode(body, peer, self.members.world_size)
                if key == NO_KEY:
                    self._pronounce(notice, [other for other in self.telling.connected() if other != peer], now)
                else:
                    # A LOST frame with a key reports that ``notice.rank`` has departed. Its last messages may still be
                    # on their way to this rank. Therefore only the named operation fails now; the others are checked
                    # when the GOODBYE arrives, when the connection ends, or when ``members.overdue`` returns the rank.
                    self.members.depart_by_report(notice.rank, notice.text, now)
                    self._fail(peer, key, notice.error(), now)
            case Frame.STATUS_REQUEST:
                self.stalls.on_request(peer, key, StatusRequest.decode(body, peer), now)
            case Frame.STATUS_REPLY:
                reply = StatusReply.decode(body, peer)
                self.stalls.on_reply(peer, key, reply)
                if reply.submitted:
                    self._any_receives.match(peer, key, now, is_announced=True)
            case Frame.CHANNEL:
                self.outbox.check_reads(peer)
                self.channels.arrived(peer, header.operation, body, last=bool(header.step), now=now)
            case Frame.GOODBYE:
                farewell = Farewell.decode(body, peer, self.members.world_size)
                first = farewell.first
                self.telling.forget(peer, now)
                if self.members.verdict is None:  # otherwise the peer has left because of the same loss
                    if first is not None and first.rank not in (peer, self.rank):
                        self.members.depart_by_report(first.rank, first.text, now)
                    self.peer_departed(peer, farewell.reason, now)
            case _:
                raise ProtocolError(
                    f"rank {peer} sent a {header.frame.name} frame to the engine; it is for the transport only"
                )

    def _fail(self, peer: int, key: _Key, error: MismatchError | PeerLost, now: float) -> None:
        """Fail the operation that a peer's frame names; if it is not submitted here yet, fail it on submission."""
        operation = self.table.active.get(key)
        if operation is not None:
            self._end(operation, now, _by_own_name(operation, error))
        elif not self.table.was_submitted(key) and self.table.early.note_failure(peer, key, error):
            self.reception.drop(self.reception.floating.claim(key))


def _by_own_name(operation: Operation, error: MismatchError | PeerLost) -> MismatchError | PeerLost:
    """Return an error that a peer has reported, with the name of this rank: ranks may have made different calls."""
    if isinstance(error, MismatchError) and error.tensor != operation.name:
        return MismatchError(operation.name, error.ranks, error.values)
    return error
