"""The engine's promises: order freedom, floating messages, urgency, bounded memory, several iterations."""

import numpy as np
import pytest
from rack import BARRIER, SMALL, Rack, allreduce, broadcast, drain, values_of

from totalreduce.engine.floating import floating_cost
from totalreduce.foundation.errors import ConfigurationError, GroupClosed, PeerLost
from totalreduce.foundation.header import Flag, Frame
from totalreduce.foundation.types import Algorithm, OpKind, ReduceOp, operation_id


def test_one_rank_is_done_at_once() -> None:
    rack = Rack(1)
    operation = rack.submit(0, "w", [1.0, 2.0])
    assert rack.completed[0] == [operation]
    assert values_of(operation) == [1.0, 2.0]
    assert rack.engines[0].table.num_active == 0


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_sum(world_size: int) -> None:
    rack = Rack(world_size)
    inputs = [np.arange(100) * 10.0 + rank for rank in range(world_size)]
    operations = [rack.submit(rank, "w", inputs[rank]) for rank in range(world_size)]
    rack.run()
    for rank, operation in enumerate(operations):
        assert rack.completed[rank] == [operation]
        assert operation.error is None
        assert values_of(operation) == sum(inputs).tolist()


def test_any_order_of_submission() -> None:
    rack = Rack(2)
    names = [f"tensor {index}" for index in range(10)]
    first = {name: rack.submit(0, name, [float(index)] * 30) for index, name in enumerate(names)}
    second = {name: rack.submit(1, name, [100.0] * 30) for name in reversed(names)}
    rack.run()
    for index, name in enumerate(names):
        assert values_of(first[name]) == values_of(second[name]) == [100.0 + index] * 30


def test_unnamed_operations_meet_in_their_order() -> None:
    rack = Rack(2)
    a = [rack.submit(0, None, [float(index)]) for index in range(3)]
    b = [rack.submit(1, None, [10.0]) for _ in range(3)]
    rack.run()
    assert [values_of(operation) for operation in a] == [[10.0], [11.0], [12.0]]
    assert [values_of(operation) for operation in b] == [[10.0], [11.0], [12.0]]
    assert [operation.name for operation in a] == ["unnamed#0", "unnamed#1", "unnamed#2"]


def test_what_comes_before_its_operation_floats_and_is_claimed() -> None:
    rack = Rack(2)
    rack.submit(0, "w", [1.0] * 8)
    rack.run()
    engine = rack.engines[1]
    assert engine.counters.floating_messages == len(engine.reception.floating) == 2  # two lanes
    assert engine.reception.floating.total_bytes == 2 * floating_cost(16)
    late = rack.submit(1, "w", [2.0] * 8)
    rack.run()
    assert values_of(late) == [3.0] * 8
    assert engine.reception.floating.total_bytes == 0
    assert engine.reception.floating.peak_bytes == 2 * floating_cost(16)


def test_an_operation_whose_floating_body_is_still_arriving() -> None:
    rack = Rack(2)
    rack.submit(0, "w", [1.0, 1.0])
    header, body = rack.take_data(0, 1)
    delivery = rack.begin_receiving(0, 1, header)
    late = rack.submit(1, "w", [2.0, 2.0])
    rack.end_receiving(1, delivery, body)
    rack.run()
    assert values_of(late) == [3.0, 3.0]


def test_an_iteration_ahead_is_kept_apart() -> None:
    rack = Rack(3)
    fast = rack.submit(0, "w", [1.0])
    rack.submit(1, "w", [10.0])
    rack.submit(2, "w", [100.0])
    while not fast.finished:
        rack.run()
    second = rack.submit(0, "w", [2.0])
    rack.run()
    assert not second.finished
    assert len(rack.engines[1].reception.floating) == 1
    later = [rack.submit(1, "w", [20.0]), rack.submit(2, "w", [200.0])]
    rack.run()
    assert values_of(fast) == [111.0]
    assert [values_of(operation) for operation in (second, *later)] == [[222.0]] * 3


def test_the_same_name_twice_in_flight() -> None:
    rack = Rack(2)
    rack.submit(0, "w")
    with pytest.raises(ValueError, match="'w' is already in flight on rank 0"):
        rack.submit(0, "w")
    rack.submit(1, "w")
    rack.run()
    again = [rack.submit(rank, "w", [5.0]) for rank in range(2)]
    rack.run()
    assert values_of(again[0]) == [10.0]


def test_an_urgent_operation_leaves_next() -> None:
    rack = Rack(2)
    bulk = [rack.submit(rank, "bulk", [1.0] * 400, priority=5) for rank in range(2)]
    for _ in range(2):
        rack.give(0, 1, rack.take_data(0, 1))
    urgent = [rack.submit(rank, "urgent", [1.0] * 2, priority=-1) for rank in range(2)]
    header, _ = message = rack.take_data(0, 1)
    assert header.operation == operation_id("n:urgent")
    assert header.priority == -1
    rack.give(0, 1, message)
    rack.run()
    assert rack.completed[0] == [urgent[0], bulk[0]]


def test_a_promoted_operation_overtakes_every_static_priority_and_says_so() -> None:
    rack = Rack(2)
    rack.submit(0, "bulk", [1.0] * 400, priority=-100)
    waited = [rack.submit(rank, "waited", [1.0] * 2, priority=100) for rank in range(2)]
    rack.submit(1, "bulk", [1.0] * 400, priority=-100)
    rack.engines[0].promote(waited[0], rack.now)
    assert not waited[1].promoted
    header, _ = message = rack.take_data(0, 1)
    assert header.operation == operation_id("n:waited")
    assert header.flags & Flag.URGENT
    rack.give(0, 1, message)
    assert waited[1].promoted
    header, _ = rack.take_data(1, 0)
    assert header.operation == operation_id("n:waited")
    assert [engine.counters.promotions for engine in rack.engines] == [1, 1]


def test_urgency_survives_floating() -> None:
    rack = Rack(2)
    operation = rack.submit(0, "w")
    rack.engines[0].promote(operation, rack.now)
    rack.run()
    assert rack.submit(1, "w").promoted


def test_fifo_ignores_priority_and_promotion() -> None:
    rack = Rack(2, scheduling="fifo")
    bulk = rack.submit(0, "bulk", [1.0] * 400)
    urgent = rack.submit(0, "urgent", priority=-1)
    rack.engines[0].promote(urgent, rack.now)
    assert rack.take_data(0, 1)[0].operation == bulk.key[0]


def test_the_eager_allowance_holds_back_until_the_peer_has_posted() -> None:
    rack = Rack(2, eager_bytes=128)
    operation = rack.submit(0, "w", [1.0] * 100)
    sent = drain(rack, 0, 1)
    frames = [header.frame for header, _ in sent]
    assert frames.count(Frame.DESCRIBE) == frames.count(Frame.REQUEST) == 1
    eager = [header for header, _ in sent if header.frame is Frame.DATA]
    assert 0 < sum(header.body_bytes for header in eager) <= 128
    assert all(header.flags & Flag.EAGER for header in eager)
    assert rack.engines[0].counters.held_messages > 0
    for message in sent:
        rack.give(0, 1, message)
    assert rack.take(0, 1) is None
    late = rack.submit(1, "w", [2.0] * 100)
    answers = drain(rack, 1, 0)
    assert Frame.POSTED in [header.frame for header, _ in answers]
    for message in answers:
        rack.give(1, 0, message)
    header, _ = message = rack.take_data(0, 1)
    assert not header.flags & Flag.EAGER
    rack.give(0, 1, message)
    rack.run()
    assert values_of(operation) == values_of(late) == [3.0] * 100


def test_a_sender_stays_within_its_share_over_all_operations() -> None:
    rack = Rack(2, floating_bytes_max=2000)
    for index in range(50):
        rack.submit(0, f"tensor {index}", [float(index)] * 16)
    rack.run()
    assert 1000 < rack.engines[1].reception.floating.total_bytes <= 2000
    late = [rack.submit(1, f"tensor {index}", [1.0] * 16) for index in reversed(range(50))]
    rack.run()
    assert [values_of(operation)[0] for operation in late] == [1.0 + index for index in reversed(range(50))]
    assert rack.engines[1].reception.floating.total_bytes == 0
    assert rack.engines[1].reception.floating.peak_bytes <= 2000


def test_credit_comes_back_so_that_eager_messages_go_on() -> None:
    rack = Rack(2, floating_bytes_max=2000)
    for index in range(100):
        operations = [rack.submit(rank, f"tensor {index}", [1.0]) for rank in range(2)]
        rack.run()
        assert all(operation.finished for operation in operations)
    assert rack.engines[0].counters.held_messages == 0
    assert rack.engines[0]._rendezvous._used[1] < 1000


def test_held_messages_are_not_overtaken_by_later_steps_of_their_lane() -> None:
    """A receiver that gets a later step first must keep it; with its scratch memory full of those nothing moves."""
    rack = Rack(2, floating_bytes_max=1000, starvation_limit=1)
    for rank in range(2):
        rack.submit(rank, "w", [1.0] * 16)
        if rank == 0:
            describe, eager = rack.take(0, 1), rack.take(0, 1)
            request = rack.take(0, 1)
            assert request[0].frame is Frame.REQUEST  # for lane 1, which the share has no room for
            rack.give(0, 1, describe)
            rack.give(0, 1, eager)
    for _ in range(2):
        rack.give(1, 0, rack.take_data(1, 0))
    while rack.compute(0):
        pass
    steps = [header.step for header, _ in drain(rack, 0, 1) if header.frame is Frame.DATA and header.lane == 1]
    assert steps == [0, 1]


def test_early_messages_of_a_barrier_take_no_scratch() -> None:
    rack = Rack(4, scratch_segments=1)
    barriers = [rack.submit(rank, "barrier", (), BARRIER) for rank in (1, 2, 3)]
    rack.run()
    assert not any(operation.finished for operation in barriers)
    assert all(engine.reception.scratch.in_use == 0 for engine in rack.engines)
    rack.submit(0, "barrier", (), BARRIER)
    rack.run()
    assert all(len(completed) == 1 for completed in rack.completed)


def test_messages_that_wait_for_another_peer_take_no_scratch() -> None:
    """A root that adds in the order of ranks: the late rank's messages must still be read."""
    rack = Rack(5, scratch_segments=1, schedules={OpKind.ALLREDUCE: Algorithm.STAR})
    names = [f"tensor {index}" for index in range(8)]
    operations = [rack.submit(rank, name, [1.0] * 10) for name in names for rank in (0, 2, 3, 4)]
    rack.run()
    assert all(engine.reception.scratch.available for engine in rack.engines)
    operations += [rack.submit(1, name, [1.0] * 10) for name in names]
    rack.run()
    assert all(values_of(operation) == [5.0] * 10 for operation in operations)
    assert all(engine.reception.scratch.in_use == 0 for engine in rack.engines)


def test_scratch_is_bounded_and_asks_the_transport_to_wait() -> None:
    rack = Rack(2, scratch_segments=3)
    operations = [rack.submit(rank, "w", [1.0] * 400) for rank in range(2)]
    for _ in range(3):
        rack.give(0, 1, rack.take_data(0, 1))
    assert not rack.engines[1].reception.scratch.available
    rack.compute(1)
    assert rack.engines[1].reception.scratch.available
    rack.run()
    assert values_of(operations[1]) == [2.0] * 400
    assert rack.engines[1].reception.scratch.in_use == 0


@pytest.mark.parametrize("algorithm", [Algorithm.CHAIN, Algorithm.TREE])
@pytest.mark.parametrize("root", [0, 1, 2])
def test_broadcast_ends_on_the_root_only_when_all_have_submitted(root: int, algorithm: Algorithm) -> None:
    rack = Rack(3, schedules={OpKind.BROADCAST: algorithm})
    others = [rank for rank in range(3) if rank != root]
    first = [rack.submit(rank, "w", [float(rank)] * 20, broadcast(20, root=root)) for rank in (root, others[0])]
    rack.run()
    assert not first[0].finished
    assert first[1].finished == (algorithm is Algorithm.TREE)  # a leaf of the tree has all it needs
    last = rack.submit(others[1], "w", [9.0] * 20, broadcast(20, root=root))
    rack.run()
    assert all(values_of(operation) == [float(root)] * 20 for operation in (*first, last))


def test_average_divides_once() -> None:
    rack = Rack(3)
    operations = [rack.submit(rank, "w", [0.1, 0.2], allreduce(2, reduction=ReduceOp.AVG)) for rank in range(3)]
    rack.run()
    assert values_of(operations[0]) == [(0.1 + 0.1 + 0.1) / 3, (0.2 + 0.2 + 0.2) / 3]


def test_a_lost_peer_fails_what_is_pending_and_what_comes_later_on_every_rank() -> None:
    rack = Rack(4)
    pending = [rack.submit(rank, "w") for rank in range(3)]
    rack.engines[1].peer_lost(3, "its connection ended", rack.now)
    rack.collect(1)
    for target in (0, 2):
        while rack.move(1, target):
            pass
    for rank, operation in enumerate(pending):
        assert isinstance(operation.error, PeerLost)
        assert operation.error.rank == 3
        assert rack.completed[rank] == [operation]
        with pytest.raises(PeerLost, match=r"rank 3 is lost: .*its connection ended"):
            rack.submit(rank, "next")
    assert "reported by rank 1" in str(pending[0].error)
    rack.run()  # what was under way is read and forgotten
    assert all(engine.reception.scratch.in_use == 0 for engine in rack.engines)


def test_goodbye_fails_only_what_still_needs_the_one_who_left() -> None:
    rack = Rack(2)
    done = [rack.submit(rank, "done") for rank in range(2)]
    rack.run()
    rack.submit(0, "pending")
    rack.engines[1].close(rack.now, tell=[0])
    rack.run()
    assert done[0].error is None
    pending = rack.completed[0][-1]
    assert isinstance(pending.error, PeerLost)
    assert pending.error.rank == 1
    assert "closed the group" in str(pending.error)


def test_an_operation_that_a_departure_fails_completes_after_its_last_addition() -> None:
    """The group goes on, so the caller may use the tensor again when the operation completes."""
    rack = Rack(3)
    operation = rack.submit(0, "w", [1.0] * 30)
    rack.submit(2, "w", [1.0] * 30)
    while (computation := rack.begin_computing(0)) is None:
        assert rack.move(2, 0) or rack.move(0, 2)
    rack.engines[1].close(rack.now, tell=[0, 2])
    while rack.move(1, 0):
        pass
    assert isinstance(operation.error, PeerLost)
    assert rack.completed[0] == []
    rack.end_computing(0, computation)
    assert rack.completed[0] == [operation]


def test_iterations_are_counted_beyond_32_bits() -> None:
    rack = Rack(2)
    for rank in range(2):
        rack.submit(rank, "w", [0.0])
    rack.run()
    for engine in rack.engines:
        next(iter(engine.table.names)).next_iteration = 0xFFFFFFFE
    for turn in range(4):  # each rank is once a whole operation ahead: its message comes early
        mine = rack.submit(turn % 2, "w", [1.0 + turn])
        rack.run()
        other = rack.submit(1 - turn % 2, "w", [10.0])
        rack.run()
        assert values_of(mine) == values_of(other) == [11.0 + turn]
        assert mine.key[1] == (0xFFFFFFFE + turn) % (1 << 32)


@pytest.mark.parametrize("asks", [False, True])
def test_without_the_goodbye_of_a_departed_rank_the_end_of_its_connection_counts(asks: bool) -> None:
    """Rank 2 is told by rank 1 that rank 0 has departed, and gets no GOODBYE itself."""
    rack = Rack(3)
    everyones, mine = rack.submit(1, "w"), rack.receive(0, 2, 1)
    rack.engines[0].close(rack.now, tell=[1])
    while rack.move(0, 1) or rack.move(1, 2):
        pass
    assert isinstance(everyones.error, PeerLost)
    assert mine.error is None
    if asks:  # the question makes the transport connect
        rack.engines[2].stalls.inquire(mine, rack.now)
        assert 0 in rack.engines[2].outbox.ready
    rack.engines[2].peer_lost(0, "its connection ended", rack.now)
    rack.collect(2)
    assert isinstance(mine.error, PeerLost)
    assert mine.error.rank == 0
    # Rank 0 is not lost for rank 2: the other two go on, and do not talk to it any more.
    rack.send(1, 2, [7.0])
    got = rack.receive(1, 2, 1)
    rack.engines[2].stalls.inquire(got, rack.now)
    rack.run()
    assert values_of(got) == [7.0]
    assert rack.take(2, 0) is None or not asks


@pytest.mark.parametrize("promoted", [False, True])
def test_a_message_that_was_half_way_out_to_a_departed_rank_is_missing(promoted: bool) -> None:
    rack = Rack(2, eager_bytes=4096)
    sent = rack.send(0, 1, [4.0])
    begun = rack.begin_sending(0, 1)
    while begun is not None and begun.queued is None:
        rack.end_sending(0, begun)
        begun = rack.begin_sending(0, 1)
    assert begun is not None
    if promoted:
        rack.engines[0].promote(sent, rack.now)
    rack.engines[1].close(rack.now, tell=[0])
    while rack.move(1, 0):
        pass
    assert sent.error is None
    assert not sent.finished  # the transport may still write it
    rack.engines[0].peer_lost(1, "its connection ended", rack.now)
    rack.collect(0)
    assert isinstance(sent.error, PeerLost)


@pytest.mark.parametrize("num_elements", [1, 100])
def test_goodbye_of_one_who_has_given_everything_harms_nobody(num_elements: int) -> None:
    rack = Rack(3)
    operations = [rack.submit(rank, "w", [1.0] * num_elements) for rank in range(3)]
    while not operations[0].finished:  # rank 0 goes as soon as it is done; others may still be busy
        for source in range(3):
            rack.compute(source)
            for target in range(3):
                _ = source == target or rack.move(source, target)
    rack.engines[0].close(rack.now, tell=[1, 2])
    rack.run()
    assert all(operation.error is None for operation in operations)
    with pytest.raises(PeerLost, match="rank 0 is lost: it has closed the group"):
        rack.submit(1, "next")


@pytest.mark.parametrize("num_elements", [1, 100])
@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_goodbye_reaches_those_who_wait_for_others_who_wait_for_the_one_who_left(
    world_size: int, num_elements: int
) -> None:
    """Only direct neighbours see what is missing; they tell the others, whether they have submitted before or not."""
    for submitting in range(1, world_size):
        rack = Rack(world_size)
        early = [rack.submit(rank, "w", [1.0] * num_elements) for rank in range(submitting)]
        rack.engines[world_size - 1].close(rack.now, tell=range(world_size - 1))
        rack.run()
        for rank in range(submitting, world_size - 1):
            with pytest.raises(PeerLost) as refused:
                rack.submit(rank, "w", [1.0] * num_elements)
            assert refused.value.rank == world_size - 1
        rack.run()
        for operation in early:
            assert isinstance(operation.error, PeerLost)
            assert operation.error.rank == world_size - 1


def test_a_closed_engine_fails_what_is_pending_and_refuses() -> None:
    rack = Rack(2)
    operation = rack.submit(0, "w")
    rack.engines[0].close(rack.now, tell=[])
    rack.collect(0)
    assert rack.completed[0] == [operation]
    assert isinstance(operation.error, GroupClosed)
    with pytest.raises(GroupClosed, match="rank 0 has closed the group"):
        rack.submit(0, "w")


def test_names_are_bounded() -> None:
    with pytest.raises(ConfigurationError, match="longer than 1024 bytes"):
        Rack(2).submit(0, "x" * 1025)


def test_counters() -> None:
    rack = Rack(2, SMALL)
    for rank in range(2):
        rack.submit(rank, "w", [1.0] * 20)
    rack.run()
    for engine in rack.engines:
        assert engine.counters.operations == 1
        assert engine.counters.payload_bytes == 160
        assert engine.counters.messages_sent == engine.counters.messages_received == 4  # two lanes, two steps
        assert engine.counters.reduce_s == pytest.approx(2e-6)
    total_sent = sum(engine.counters.bytes_sent for engine in rack.engines)
    assert total_sent == sum(engine.counters.bytes_received for engine in rack.engines)


def test_active_time_is_the_time_with_something_in_flight() -> None:
    rack = Rack(2)
    rack.submit(0, "w")
    rack.now = 2.0
    assert rack.engines[0].table.active_s(2.0) == 2.0
    rack.submit(1, "w")
    rack.run()
    assert rack.engines[0].table.active_s(5.0) == 2.0
