"""The parts of the engine, each by itself: what waits to leave, the allowance, states, receives from anybody, loss."""

from __future__ import annotations

import json

import numpy as np
import pytest
from engines_by_hand import SMALL, allreduce

from totalreduce.engine import outbox as outbox_module
from totalreduce.engine.any_receives import AnyReceive, AnyReceives
from totalreduce.engine.channels import Bodies
from totalreduce.engine.control import LossNotice
from totalreduce.engine.counters import Counters
from totalreduce.engine.early import EarlyFrames
from totalreduce.engine.engine import Engine
from totalreduce.engine.entries import Entries
from totalreduce.engine.floating import FloatingStore, floating_cost
from totalreduce.engine.members import Members
from totalreduce.engine.names import NameTable
from totalreduce.engine.operation import Operation, State
from totalreduce.engine.outbox import BODY_BYTES, Outbox, OutgoingMessage, QueuedMessage
from totalreduce.engine.planner import Planner
from totalreduce.engine.reception import Delivery
from totalreduce.engine.rendezvous import Rendezvous
from totalreduce.engine.scratch import ScratchPool
from totalreduce.engine.signatures import SignatureExchange
from totalreduce.engine.submission import Submission
from totalreduce.engine.table import OperationTable
from totalreduce.engine.telling import Telling
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import GroupClosed, MismatchError, PeerLost, ProtocolError
from totalreduce.foundation.header import Flag, Frame, Header
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature
from totalreduce.schedules.actions import Send

MESSAGE = Signature(OpKind.SEND_RECV, DType.FLOAT64, ReduceOp.NONE, 0, ())


class Parts:
    """What several parts share, as ``Engine`` wires it, for rank 0 of three."""

    def __init__(self, share: int = 4096) -> None:
        self.counters = Counters()
        self.table = OperationTable(self.counters)
        self.outbox = Outbox(SMALL, 0)
        self.members = Members(0, 3)
        self.floating = FloatingStore(share)
        self.entries = Entries(self.outbox, self.table.early.allowance.share)
        self.telling = Telling(0, self.outbox, self.entries, self.members)
        self.rendezvous = Rendezvous(SMALL, self.table, self.floating, self.outbox, self.entries, self.counters)
        self.signatures = SignatureExchange(0, self.table, self.entries, self.members, self.telling, self.counters)
        self.planner = Planner(0, range(3), self.table.names, SMALL, shared_memory=True)

    def submit(self, name: str = "w", elements: int = 20) -> Operation:
        record = self.table.names.record("", name)
        key = (record.op_id, record.next_iteration)
        buffers = [memoryview(bytearray(8 * elements))]
        layout = self.planner.layout(record, allreduce(elements), (0, 1, 2), buffers)
        record.next_iteration += 1
        operation = self.table.make(Submission(name, layout.signature, buffers), record, key, layout, 0.0, None)
        operation.make_lanes()
        self.table.add(operation, 0.0)
        return operation

    def first_message(self, operation: Operation) -> QueuedMessage:
        lane = operation.lanes[0]
        action = operation.program.actions[0]
        assert isinstance(action, Send)
        assert lane.regions[0] is not None
        return QueuedMessage(operation, 0, action, lane.regions[0])

    def frames(self, peer: int) -> list[Header]:
        found = []
        while peer in self.outbox.control_waits:
            found.append(Header.unpack(self.outbox.take_control(peer).header))
        return found


# ------------------------------------------------------------------------------------------------------------- outbox


def test_control_frames_leave_before_answers_and_both_in_order() -> None:
    parts = Parts()
    parts.outbox.answer(1, Frame.POSTED, (5, 0))
    parts.outbox.control(1, Frame.REQUEST, key=(6, 0))
    parts.outbox.answer(1, Frame.POSTED, (7, 1))
    parts.outbox.answer(1, Frame.POSTED, (5, 0))  # once is enough
    parts.outbox.control(1, Frame.MISMATCH, key=(8, 0), body=b"{}")
    assert [(frame.frame, frame.operation, frame.iteration, frame.body_bytes) for frame in parts.frames(1)] == [
        (Frame.REQUEST, 6, 0, 0),
        (Frame.MISMATCH, 8, 0, 2),
        (Frame.POSTED, 5, 0, 0),
        (Frame.POSTED, 7, 1, 0),
    ]
    assert 2 not in parts.outbox.control_waits


def test_an_answer_is_written_when_it_leaves() -> None:
    parts = Parts()
    said = ["early"]
    parts.outbox.writers[Frame.STATUS_REPLY] = lambda peer, key: (key, f"{said[0]} {peer}".encode())
    parts.outbox.answer(1, Frame.STATUS_REPLY, (5, 0))
    said[0] = "late"
    message = parts.outbox.take_control(1)
    assert message.body is not None
    assert bytes(message.body) == b"late 1"


def test_bulk_is_queued_apart_and_control_frames_are_not() -> None:
    engine = Engine(0, 2, EngineConfig(bulk_bytes=64))
    engine.outbox.bulk_peers = frozenset({1})

    def submit(name: str, elements: int, priority: int = 0) -> Operation:
        buffers = [memoryview(bytearray(8 * elements))]
        return engine.submit(Submission(name, allreduce(elements), buffers, priority=priority), 0.0)

    large, small = submit("large", 1000), submit("small", 4)
    urgent, failing = submit("urgent", 1000, priority=-1), submit("failing", 1000)
    engine.outbox.control(1, Frame.STATUS_REQUEST)
    assert engine.outbox.ready == engine.outbox.bulk_ready == {1}
    engine.promote(large, 0.0)
    engine.outbox.discard(failing)

    def leave(*, bulk: bool) -> list[Operation | None]:
        messages = iter(lambda: engine.next_message(1, 0.0, bulk=bulk), None)
        return [None if message.queued is None else message.queued.operation for message in messages]

    assert list(dict.fromkeys(leave(bulk=True))) == [large, urgent]
    assert list(dict.fromkeys(leave(bulk=False))) == [None, small]
    assert engine.outbox.ready == engine.outbox.bulk_ready == set()


def kinds_that_leave(engine: Engine, peer: int) -> str:
    """Return a letter for each message: control frame, channel message, body of one, data."""
    letters = {Frame.CHANNEL: "m", Frame.CHANNEL_BODY: "b", Frame.DATA: "d"}
    found = ""
    while (message := engine.next_message(peer, 0.0)) is not None:
        found += letters.get(Header.unpack(message.header).frame, "c")
        engine.message_sent(message, 0.0)
    return found


def test_channel_messages_with_bodies_leave_in_order_and_bodies_in_turn_with_data() -> None:
    engine = Engine(1, 2, EngineConfig(schedules={OpKind.ALLREDUCE: "star"}))  # rank 0 adds
    sent: list[str] = []
    body = memoryview(bytes(BODY_BYTES + 10))

    def post(name: str, *bodies: memoryview) -> None:
        engine.channels.post_with_bodies(0, 7, name.encode(), bodies, lambda: sent.append(name))

    post("small")
    post("large", body, body[:100])
    post("last", body[:5])
    engine.channels.post(0, 8, b"urgent")
    assert kinds_that_leave(engine, 0) == "m" + "m" + "mbbb" + "mb"  # the urgent one first
    assert sent == ["small", "large", "last"]
    for number in range(3):
        engine.submit(Submission(f"{number}", allreduce(4), [memoryview(bytearray(32))]), 0.0)
    post("beside data", body[:7], body[:8], body[:9])
    post("small")
    found = kinds_that_leave(engine, 0).replace("c", "")
    assert found in ("mdbdbdbm", "mbdbdbdm")
    assert engine.outbox.ready == set()


def test_streams_that_are_never_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "_STREAM_FRAMES_MAX", 3)
    outbox = Parts().outbox
    for _ in range(3):
        outbox.channel_stream(1, 7, b"", [], None)
    outbox.check_reads(1)
    outbox.channel_stream(1, 7, b"", [], None)
    outbox.check_reads(2)
    with pytest.raises(ProtocolError, match="rank 1 goes on sending messages and reads none of those sent to it"):
        outbox.check_reads(1)


@pytest.mark.parametrize(("skipped", "expected"), [(0, "mmc"), (2, "c"), (3, "c"), (5, "mc")])
def test_messages_without_bodies_leave_before_the_farewell(skipped: int, expected: str) -> None:
    """Bodies are dropped with their messages and all behind them: half a stream would be a violation."""
    engine = Engine(0, 2, EngineConfig())

    def post(name: str, *bodies: bytes) -> None:
        engine.channels.post_with_bodies(1, 7, name.encode(), [memoryview(body) for body in bodies])

    post("first")
    post("second")
    post("large", b"body", b"body")
    post("goodbye")
    for _ in range(skipped):
        assert engine.next_message(1, 0.0) is not None
    engine.close(0.0, tell=[1])
    assert kinds_that_leave(engine, 1) == expected
    assert engine.outbox.ready == set()


def test_nothing_is_written_to_the_memory_of_a_channel_after_a_loss() -> None:
    source, target = (Engine(rank, 3, EngineConfig()) for rank in range(2))
    memory = np.zeros(8, np.uint8)

    class Reader:
        def receive(self, peer, message, now):
            return Bodies([memory.data], pytest.fail)

        def fail(self, error, now):
            assert isinstance(error, PeerLost)

    target.channels.open(7, Reader(), 0.0)
    for _ in range(2):
        source.channels.post_with_bodies(1, 7, b"message", [memoryview(b"the body")])
    messages = [source.next_message(1, 0.0) for _ in range(4)]

    def accept(message: OutgoingMessage) -> Delivery:
        return target.accept(0, Header.unpack(message.header), 0.0)

    target.delivered(accept_all(accept(messages[0]), messages[0]), 0.0)
    delivery = accept(messages[1])
    target.peer_lost(2, "gone", 0.0)
    target.delivered(accept_all(delivery, messages[1]), 0.0)
    for message in messages[2:]:
        target.delivered(accept_all(accept(message), message), 0.0)
    assert not memory.any()
    source.channels.post_with_bodies(1, 7, b"message", [memoryview(b"the body")])
    source.peer_lost(2, "gone", 0.0)
    assert kinds_that_leave(source, 1) == "c"  # the report of the loss


def accept_all(delivery: Delivery, message: OutgoingMessage) -> Delivery:
    delivery.view[:] = message.body
    return delivery


def test_bodies_of_channel_messages_arrive_in_their_memory() -> None:
    """From one engine into another one, in frames of at most a segment."""
    source, target = (Engine(rank, 2, EngineConfig()) for rank in range(2))
    rng = np.random.default_rng(3)
    bodies = [rng.integers(0, 256, length, np.uint8) for length in (2 * BODY_BYTES + 3, 17)]
    memory = [np.zeros_like(body) for body in bodies]
    arrived: list[int] = []

    class Reader:
        def receive(self, peer, message, now):
            assert (peer, message) == (0, b"two bodies")
            return Bodies([each.data for each in memory], lambda: arrived.append(peer))

    target.channels.open(7, Reader(), 0.0)
    source.channels.post_with_bodies(1, 7, b"two bodies", [body.data for body in bodies])
    count = 0
    while (message := source.next_message(1, 0.0)) is not None:
        delivery = target.accept(0, Header.unpack(message.header), 0.0)
        delivery.view[:] = message.body
        assert arrived == []
        target.delivered(delivery, 0.0)
        count += 1
    assert (count, arrived) == (5, [0])
    for got, body in zip(memory, bodies, strict=True):
        np.testing.assert_array_equal(got, body)
    assert target.counters.received_from[0] == 5 * 64 + sum(map(len, bodies)) + len(b"two bodies")


@pytest.mark.parametrize(("elements", "is_bulk"), [(8, False), (9, True)])
def test_an_operation_is_bulk_if_one_of_its_messages_is_longer_than_allowed(elements: int, is_bulk: bool) -> None:
    engine = Engine(0, 2, EngineConfig(bulk_bytes=64, schedules={OpKind.ALLREDUCE: "star"}))
    buffers = [memoryview(bytearray(8 * elements))]
    assert engine.submit(Submission("w", allreduce(elements), buffers), 0.0).layout.is_bulk == is_bulk


def test_replies_that_are_never_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a question is forgotten, because a correct rank repeats it. Other answers are not."""
    monkeypatch.setattr(outbox_module, "_ANSWERS_MAX", 3)
    parts = Parts()
    for index in range(5):
        parts.outbox.answer(1, Frame.STATUS_REPLY, (index, 0))
    parts.outbox.answer(1, Frame.POSTED, (9, 0))
    parts.outbox.answer(1, Frame.CREDIT, outbox_module.NO_KEY)
    left = [(frame.frame, frame.operation) for frame in parts.frames(1)]
    assert left == [*((Frame.STATUS_REPLY, index) for index in range(3)), (Frame.POSTED, 9), (Frame.CREDIT, 0)]


def test_channel_messages_that_are_never_read_are_bounded() -> None:
    parts = Parts()
    parts.outbox.channel_message(1, 7, bytes(16 * 2**20))  # 1,024 pieces
    parts.outbox.check_reads(1)
    parts.outbox.channel_message(1, 7, b"one more")
    with pytest.raises(ProtocolError, match="rank 1 goes on sending messages and reads none"):
        parts.outbox.check_reads(1)
    assert len(parts.frames(1)) == 1025
    parts.outbox.check_reads(1)


# --------------------------------------------------------------------------------------------------------- rendezvous


def test_a_message_leaves_eagerly_is_held_and_leaves_when_posted() -> None:
    parts = Parts(share=1200)
    first, second = parts.submit("a"), parts.submit("b")
    assert parts.rendezvous.admit(parts.first_message(first)) == Flag.EAGER
    held = parts.first_message(second)
    assert parts.rendezvous.admit(held) is None  # each message takes 960 bytes and its body
    assert [(frame.frame, frame.operation) for frame in parts.frames(1)] == [(Frame.REQUEST, second.key[0])]
    assert second.held[1] == [held]
    parts.rendezvous.on_posted(1, second.key)
    assert second.held == {}
    assert parts.outbox.queues[1].pop() is held
    assert parts.rendezvous.admit(held) == Flag.NONE


def test_credit_frees_what_is_held() -> None:
    parts = Parts(share=1200)
    first, second = parts.submit("a"), parts.submit("b")
    parts.rendezvous.admit(parts.first_message(first))
    cost = floating_cost(parts.first_message(first).region.body_bytes)
    parts.rendezvous.admit(parts.first_message(second))
    parts.rendezvous.on_credit(1, cost, 0)
    message = parts.outbox.queues[1].pop()
    assert message is not None
    assert message.operation is second
    assert parts.rendezvous.admit(message) == Flag.EAGER
    parts.rendezvous.on_credit(1, cost, 1024)  # of the REQUEST
    for amounts in ((1, 0), (0, 1)):
        with pytest.raises(ProtocolError, match="rank 1 gave back 1 bytes of an allowance of which 0 are used"):
            parts.rendezvous.on_credit(1, *amounts)


def test_allowance_goes_back_by_quarters_of_the_share() -> None:
    parts = Parts(share=4000)
    parts.floating.allowance.owe(1, 999)
    assert parts.frames(1) == []
    parts.floating.allowance.owe(1, 1)
    assert [(frame.frame, frame.operation, frame.iteration) for frame in parts.frames(1)] == [(Frame.CREDIT, 1000, 0)]
    parts.table.early.allowance.owe(1, 8 * 2**20 - 1)
    assert parts.frames(1) == []
    parts.floating.allowance.owe(1, 999)
    parts.table.early.allowance.owe(1, 1)
    assert [(frame.operation, frame.iteration) for frame in parts.frames(1)] == [(999, 8 * 2**20)]


def test_a_request_is_answered_at_once_or_when_the_operation_is_submitted() -> None:
    parts = Parts()
    operation = parts.submit()
    assert not parts.rendezvous.on_request(1, operation.key, ended=lambda _: False)
    assert [frame.frame for frame in parts.frames(1)] == [Frame.POSTED]
    record = parts.table.names.record("", "later")
    parts.table.early.enter(1, (record.op_id, 0), 1024)
    assert parts.rendezvous.on_request(1, (record.op_id, 0), ended=lambda _: False)
    later = parts.submit("later")
    parts.rendezvous.submitted(later, parts.table.early.claim(later.key), None)
    assert [frame.frame for frame in parts.frames(1)] == [Frame.POSTED]
    assert parts.frames(2) == []


# --------------------------------------------------------------------------------------------------------- signatures


def test_neighbours_are_told_a_new_signature_once() -> None:
    parts = Parts()
    for turn in range(2):
        operation = parts.submit()
        record = parts.table.names.get(operation.key[0])
        assert record is not None
        parts.signatures.submitted(operation, record)
        told = [[frame.frame for frame in parts.frames(peer)] for peer in (1, 2)]
        assert told == ([[Frame.DESCRIBE]] * 2 if turn == 0 else [[], []])
        parts.table.end(operation, None, 0.0, group_goes_on=True)


def test_a_difference_is_told_to_all_ranks() -> None:
    parts = Parts()
    operation = parts.submit()
    mine = operation.layout.expectation.packed
    assert parts.signatures.compare(operation, 1, mine) is None
    theirs = bytes([mine[0], DType.INT32, *mine[2:]])
    error = parts.signatures.compare(operation, 1, theirs)
    assert error is not None
    assert (error.tensor, error.ranks) == ("w", (0, 1))
    assert "float64" in error.values[0]
    assert "int32" in error.values[1]
    for peer in (1, 2):
        assert [frame.frame for frame in parts.frames(peer)] == [Frame.MISMATCH]


# --------------------------------------------------------------------------------------------- the life of operations


@pytest.mark.parametrize("state", State)
def test_only_the_transitions_of_the_table_are_allowed(state: State) -> None:
    allowed = {
        State.WAITING: {State.MOVING, State.DONE, State.FAILING, State.FAILED},
        State.MOVING: {State.DONE, State.FAILING, State.FAILED},
        State.DONE: set(),
        State.FAILING: {State.FAILED},
        State.FAILED: set(),
    }
    for following in State:
        operation = Parts().submit()
        operation.state = state
        if following in allowed[state]:
            operation.enter(following)
            assert operation.state is following
        else:
            with pytest.raises(AssertionError, match=f"cannot go from {state.name} to {following.name}"):
                operation.enter(following)
    assert operation.finished == (operation.state in (State.DONE, State.FAILING, State.FAILED))


def test_a_mismatch_completes_when_the_last_addition_has_ended() -> None:
    parts = Parts()
    operation = parts.submit()
    operation.computing = 1
    parts.table.end(operation, MismatchError("w", (0, 1), ("a", "b")), 2.5, group_goes_on=True)
    assert (operation.state, parts.table.pop_completed(), parts.counters.active_s) == (State.FAILING, [], 2.5)
    operation.computing = 0
    parts.table.addition_ended(operation)
    assert operation.state is State.FAILED
    assert parts.table.pop_completed() == [operation]


def test_after_a_loss_nothing_waits_for_additions() -> None:
    parts = Parts()
    operation = parts.submit()
    operation.computing = 1
    parts.table.end(operation, PeerLost(1, "killed"), 0.0, group_goes_on=False)
    assert parts.table.pop_completed() == [operation]
    parts.table.addition_ended(operation)
    assert parts.table.pop_completed() == []


# ------------------------------------------------------------------------------------------- receives and lost ranks


def test_a_receive_is_taken_by_the_first_announced_message() -> None:
    names, early, floating = NameTable(()), EarlyFrames(), FloatingStore(4096)
    submitted = []

    def submit(submission: Submission, now: float, *, owner: object, matches_next: bool) -> None:
        submitted.append((submission.name, submission.ranks, owner, now, matches_next))
        names.record(submission.scope, submission.name).next_iteration += 1

    receives = AnyReceives(0, names, early, floating, (), Outbox(SMALL, 0), (), submit)
    receive = AnyReceive({1: "from 1", 2: "from 2"}, MESSAGE, memoryview(bytearray(8)), "", 0, owner="me")
    key = (names.record("", "from 2").op_id, 0)
    assert not receives.receive(receive, 0.0)
    receives.add(receive)
    receives.match(2, key, 0.0)  # nothing was announced
    floating.accept(2, Header(Frame.DATA, 0, *key, flags=Flag.EAGER))
    receives.match(1, key, 0.0)  # the message is from rank 2
    receives.match(2, (key[0], 1), 0.0)  # and is the first one
    assert not submitted
    receives.match(2, key, 1.0)
    assert submitted == [("from 2", (2, 0), "me", 1.0, False)]
    receives.match(2, key, 2.0)
    assert receives.take_all() == []
    floating.accept(2, Header(Frame.DATA, 0, key[0], 1, flags=Flag.EAGER))
    assert receives.receive(receive, 3.0), "its message is there when it begins"
    assert len(submitted) == 2


def test_ranks_that_have_left_are_told_nothing() -> None:
    parts = Parts()
    parts.members.check_usable()
    parts.members.departed[2] = "it has closed the group"
    lost = LossNotice(1, "its connection ended")
    parts.telling.tell(parts.members.everybody, Frame.LOST, lost.encode(), (9, 3))
    assert parts.frames(0) == parts.frames(2) == []
    assert parts.members.others((2, 1, 0)) == [1]
    message = parts.outbox.take_control(1)
    assert message.body is not None
    assert json.loads(bytes(message.body)) == {"rank": 1, "reason": "its connection ended"}
    assert Header.unpack(message.header).operation == 9
    parts.members.lost = lost.error()
    with pytest.raises(PeerLost, match="rank 1 is lost: its connection ended"):
        parts.members.check_usable()
    parts.members.closed = True
    with pytest.raises(GroupClosed, match="rank 0 has closed the group"):
        parts.members.check_usable()


def test_a_scratch_segment_goes_back_to_its_pool() -> None:
    pool = ScratchPool(2)
    segments = [pool.take(100), pool.take(50)]
    assert (pool.in_use, pool.available, len(segments[0].view)) == (2, False, 100)
    segments[0].release()
    assert (pool.in_use, pool.available) == (1, True)
    again = pool.take(80)
    assert again.view.obj is segments[0].view.obj  # the same memory
    assert len(again.view) == 80
