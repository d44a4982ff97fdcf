"""The engine's promises: order freedom, floating messages, urgency, bounded memory, several iterations."""

import numpy as np
import pytest
from engines_by_hand import BARRIER, SMALL, Cluster, allreduce, broadcast, drain, values_of

from totalreduce.engine.floating import floating_cost
from totalreduce.foundation.errors import ConfigurationError, GroupClosed, PeerLost
from totalreduce.foundation.header import Flag, Frame
from totalreduce.foundation.types import Algorithm, OpKind, ReduceOp, operation_id


def test_one_rank_is_done_at_once() -> None:
    cluster = Cluster(1)
    operation = cluster.submit(0, "w", [1.0, 2.0])
    assert cluster.completed[0] == [operation]
    assert values_of(operation) == [1.0, 2.0]
    assert cluster.engines[0].table.num_active == 0


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_sum(world_size: int) -> None:
    cluster = Cluster(world_size)
    inputs = [np.arange(100) * 10.0 + rank for rank in range(world_size)]
    operations = [cluster.submit(rank, "w", inputs[rank]) for rank in range(world_size)]
    cluster.run()
    for rank, operation in enumerate(operations):
        assert cluster.completed[rank] == [operation]
        assert operation.error is None
        assert values_of(operation) == sum(inputs).tolist()


def test_any_order_of_submission() -> None:
    cluster = Cluster(2)
    names = [f"tensor {index}" for index in range(10)]
    first = {name: cluster.submit(0, name, [float(index)] * 30) for index, name in enumerate(names)}
    second = {name: cluster.submit(1, name, [100.0] * 30) for name in reversed(names)}
    cluster.run()
    for index, name in enumerate(names):
        assert values_of(first[name]) == values_of(second[name]) == [100.0 + index] * 30


def test_unnamed_operations_meet_in_their_order() -> None:
    cluster = Cluster(2)
    a = [cluster.submit(0, None, [float(index)]) for index in range(3)]
    b = [cluster.submit(1, None, [10.0]) for _ in range(3)]
    cluster.run()
    assert [values_of(operation) for operation in a] == [[10.0], [11.0], [12.0]]
    assert [values_of(operation) for operation in b] == [[10.0], [11.0], [12.0]]
    assert [operation.name for operation in a] == ["unnamed#0", "unnamed#1", "unnamed#2"]


def test_what_comes_before_its_operation_floats_and_is_claimed() -> None:
    cluster = Cluster(2)
    cluster.submit(0, "w", [1.0] * 8)
    cluster.run()
    engine = cluster.engines[1]
    assert engine.counters.floating_messages == len(engine.reception.floating) == 2  # two lanes
    assert engine.reception.floating.total_bytes == 2 * floating_cost(16)
    late = cluster.submit(1, "w", [2.0] * 8)
    cluster.run()
    assert values_of(late) == [3.0] * 8
    assert engine.reception.floating.total_bytes == 0
    assert engine.reception.floating.peak_bytes == 2 * floating_cost(16)


def test_an_operation_whose_floating_body_is_still_arriving() -> None:
    cluster = Cluster(2)
    cluster.submit(0, "w", [1.0, 1.0])
    header, body = cluster.take_data(0, 1)
    delivery = cluster.begin_receiving(0, 1, header)
    late = cluster.submit(1, "w", [2.0, 2.0])
    cluster.end_receiving(1, delivery, body)
    cluster.run()
    assert values_of(late) == [3.0, 3.0]


def test_an_iteration_ahead_is_kept_apart() -> None:
    cluster = Cluster(3)
    fast = cluster.submit(0, "w", [1.0])
    cluster.submit(1, "w", [10.0])
    cluster.submit(2, "w", [100.0])
    while not fast.finished:
        cluster.run()
    second = cluster.submit(0, "w", [2.0])
    cluster.run()
    assert not second.finished
    assert len(cluster.engines[1].reception.floating) == 1
    later = [cluster.submit(1, "w", [20.0]), cluster.submit(2, "w", [200.0])]
    cluster.run()
    assert values_of(fast) == [111.0]
    assert [values_of(operation) for operation in (second, *later)] == [[222.0]] * 3


def test_the_same_name_twice_in_flight() -> None:
    cluster = Cluster(2)
    cluster.submit(0, "w")
    with pytest.raises(ValueError, match="'w' is already in flight on rank 0"):
        cluster.submit(0, "w")
    cluster.submit(1, "w")
    cluster.run()
    again = [cluster.submit(rank, "w", [5.0]) for rank in range(2)]
    cluster.run()
    assert values_of(again[0]) == [10.0]


def test_an_urgent_operation_leaves_next() -> None:
    cluster = Cluster(2)
    bulk = [cluster.submit(rank, "bulk", [1.0] * 400, priority=5) for rank in range(2)]
    for _ in range(2):
        cluster.give(0, 1, cluster.take_data(0, 1))
    urgent = [cluster.submit(rank, "urgent", [1.0] * 2, priority=-1) for rank in range(2)]
    header, _ = message = cluster.take_data(0, 1)
    assert header.operation == operation_id("n:urgent")
    assert header.priority == -1
    cluster.give(0, 1, message)
    cluster.run()
    assert cluster.completed[0] == [urgent[0], bulk[0]]


def test_a_promoted_operation_overtakes_every_static_priority_and_says_so() -> None:
    cluster = Cluster(2)
    cluster.submit(0, "bulk", [1.0] * 400, priority=-100)
    waited = [cluster.submit(rank, "waited", [1.0] * 2, priority=100) for rank in range(2)]
    cluster.submit(1, "bulk", [1.0] * 400, priority=-100)
    cluster.engines[0].promote(waited[0], cluster.now)
    assert not waited[1].promoted
    header, _ = message = cluster.take_data(0, 1)
    assert header.operation == operation_id("n:waited")
    assert header.flags & Flag.URGENT
    cluster.give(0, 1, message)
    assert waited[1].promoted
    header, _ = cluster.take_data(1, 0)
    assert header.operation == operation_id("n:waited")
    assert [engine.counters.promotions for engine in cluster.engines] == [1, 1]


def test_urgency_survives_floating() -> None:
    cluster = Cluster(2)
    operation = cluster.submit(0, "w")
    cluster.engines[0].promote(operation, cluster.now)
    cluster.run()
    assert cluster.submit(1, "w").promoted


def test_fifo_ignores_priority_and_promotion() -> None:
    cluster = Cluster(2, scheduling="fifo")
    bulk = cluster.submit(0, "bulk", [1.0] * 400)
    urgent = cluster.submit(0, "urgent", priority=-1)
    cluster.engines[0].promote(urgent, cluster.now)
    assert cluster.take_data(0, 1)[0].operation == bulk.key[0]


def test_the_eager_allowance_holds_back_until_the_peer_has_posted() -> None:
    cluster = Cluster(2, eager_bytes=128)
    operation = cluster.submit(0, "w", [1.0] * 100)
    sent = drain(cluster, 0, 1)
    frames = [header.frame for header, _ in sent]
    assert frames.count(Frame.DESCRIBE) == frames.count(Frame.REQUEST) == 1
    eager = [header for header, _ in sent if header.frame is Frame.DATA]
    assert 0 < sum(header.body_bytes for header in eager) <= 128
    assert all(header.flags & Flag.EAGER for header in eager)
    assert cluster.engines[0].counters.held_messages > 0
    for message in sent:
        cluster.give(0, 1, message)
    assert cluster.take(0, 1) is None
    late = cluster.submit(1, "w", [2.0] * 100)
    answers = drain(cluster, 1, 0)
    assert Frame.POSTED in [header.frame for header, _ in answers]
    for message in answers:
        cluster.give(1, 0, message)
    header, _ = message = cluster.take_data(0, 1)
    assert not header.flags & Flag.EAGER
    cluster.give(0, 1, message)
    cluster.run()
    assert values_of(operation) == values_of(late) == [3.0] * 100


def test_a_sender_stays_within_its_share_over_all_operations() -> None:
    cluster = Cluster(2, floating_bytes_max=2000)
    for index in range(50):
        cluster.submit(0, f"tensor {index}", [float(index)] * 16)
    cluster.run()
    assert 1000 < cluster.engines[1].reception.floating.total_bytes <= 2000
    late = [cluster.submit(1, f"tensor {index}", [1.0] * 16) for index in reversed(range(50))]
    cluster.run()
    assert [values_of(operation)[0] for operation in late] == [1.0 + index for index in reversed(range(50))]
    assert cluster.engines[1].reception.floating.total_bytes == 0
    assert cluster.engines[1].reception.floating.peak_bytes <= 2000


def test_credit_comes_back_so_that_eager_messages_go_on() -> None:
    cluster = Cluster(2, floating_bytes_max=2000)
    for index in range(100):
        operations = [cluster.submit(rank, f"tensor {index}", [1.0]) for rank in range(2)]
        cluster.run()
        assert all(operation.finished for operation in operations)
    assert cluster.engines[0].counters.held_messages == 0
    assert cluster.engines[0]._rendezvous._used[1] < 1000


def test_held_messages_are_not_overtaken_by_later_steps_of_their_lane() -> None:
    """A receiver that gets a later step first must keep it; with its scratch memory full of those nothing moves."""
    cluster = Cluster(2, floating_bytes_max=1000, starvation_limit=1)
    for rank in range(2):
        cluster.submit(rank, "w", [1.0] * 16)
        if rank == 0:
            describe, eager = cluster.take(0, 1), cluster.take(0, 1)
            request = cluster.take(0, 1)
            assert request[0].frame is Frame.REQUEST  # for lane 1, which the share has no room for
            cluster.give(0, 1, describe)
            cluster.give(0, 1, eager)
    for _ in range(2):
        cluster.give(1, 0, cluster.take_data(1, 0))
    while cluster.compute(0):
        pass
    steps = [header.step for header, _ in drain(cluster, 0, 1) if header.frame is Frame.DATA and header.lane == 1]
    assert steps == [0, 1]


def test_early_messages_of_a_barrier_take_no_scratch() -> None:
    cluster = Cluster(4, scratch_segments=1)
    barriers = [cluster.submit(rank, "barrier", (), BARRIER) for rank in (1, 2, 3)]
    cluster.run()
    assert not any(operation.finished for operation in barriers)
    assert all(engine.reception.scratch.in_use == 0 for engine in cluster.engines)
    cluster.submit(0, "barrier", (), BARRIER)
    cluster.run()
    assert all(len(completed) == 1 for completed in cluster.completed)


def test_messages_that_wait_for_another_peer_take_no_scratch() -> None:
    """A root that adds in the order of ranks: the late rank's messages must still be read."""
    cluster = Cluster(5, scratch_segments=1, schedules={OpKind.ALLREDUCE: Algorithm.STAR})
    names = [f"tensor {index}" for index in range(8)]
    operations = [cluster.submit(rank, name, [1.0] * 10) for name in names for rank in (0, 2, 3, 4)]
    cluster.run()
    assert all(engine.reception.scratch.available for engine in cluster.engines)
    operations += [cluster.submit(1, name, [1.0] * 10) for name in names]
    cluster.run()
    assert all(values_of(operation) == [5.0] * 10 for operation in operations)
    assert all(engine.reception.scratch.in_use == 0 for engine in cluster.engines)


def test_scratch_is_bounded_and_asks_the_transport_to_wait() -> None:
    cluster = Cluster(2, scratch_segments=3)
    operations = [cluster.submit(rank, "w", [1.0] * 400) for rank in range(2)]
    for _ in range(3):
        cluster.give(0, 1, cluster.take_data(0, 1))
    assert not cluster.engines[1].reception.scratch.available
    cluster.compute(1)
    assert cluster.engines[1].reception.scratch.available
    cluster.run()
    assert values_of(operations[1]) == [2.0] * 400
    assert cluster.engines[1].reception.scratch.in_use == 0


@pytest.mark.parametrize("algorithm", [Algorithm.CHAIN, Algorithm.TREE])
@pytest.mark.parametrize("root", [0, 1, 2])
def test_broadcast_ends_on_the_root_only_when_all_have_submitted(root: int, algorithm: Algorithm) -> None:
    cluster = Cluster(3, schedules={OpKind.BROADCAST: algorithm})
    others = [rank for rank in range(3) if rank != root]
    first = [cluster.submit(rank, "w", [float(rank)] * 20, broadcast(20, root=root)) for rank in (root, others[0])]
    cluster.run()
    assert not first[0].finished
    assert first[1].finished == (algorithm is Algorithm.TREE)  # a leaf of the tree has all it needs
    last = cluster.submit(others[1], "w", [9.0] * 20, broadcast(20, root=root))
    cluster.run()
    assert all(values_of(operation) == [float(root)] * 20 for operation in (*first, last))


def test_average_divides_once() -> None:
    cluster = Cluster(3)
    operations = [cluster.submit(rank, "w", [0.1, 0.2], allreduce(2, reduction=ReduceOp.AVG)) for rank in range(3)]
    cluster.run()
    assert values_of(operations[0]) == [(0.1 + 0.1 + 0.1) / 3, (0.2 + 0.2 + 0.2) / 3]


def test_a_lost_peer_fails_what_is_pending_and_what_comes_later_on_every_rank() -> None:
    cluster = Cluster(4)
    pending = [cluster.submit(rank, "w") for rank in range(3)]
    cluster.engines[1].peer_lost(3, "its connection ended", cluster.now)
    cluster.collect(1)
    for target in (0, 2):
        while cluster.move(1, target):
            pass
    for rank, operation in enumerate(pending):
        assert isinstance(operation.error, PeerLost)
        assert operation.error.rank == 3
        assert cluster.completed[rank] == [operation]
        with pytest.raises(PeerLost, match=r"rank 3 is lost: .*its connection ended"):
            cluster.submit(rank, "next")
    assert "reported by rank 1" in str(pending[0].error)
    cluster.run()  # what was under way is read and forgotten
    assert all(engine.reception.scratch.in_use == 0 for engine in cluster.engines)


def test_goodbye_fails_only_what_still_needs_the_one_who_left() -> None:
    cluster = Cluster(2)
    done = [cluster.submit(rank, "done") for rank in range(2)]
    cluster.run()
    cluster.submit(0, "pending")
    cluster.engines[1].close(cluster.now, tell=[0])
    cluster.run()
    assert done[0].error is None
    pending = cluster.completed[0][-1]
    assert isinstance(pending.error, PeerLost)
    assert pending.error.rank == 1
    assert "closed the group" in str(pending.error)


def test_an_operation_that_a_departure_fails_completes_after_its_last_addition() -> None:
    """The group goes on, so the caller may use the tensor again when the operation completes."""
    cluster = Cluster(3)
    operation = cluster.submit(0, "w", [1.0] * 30)
    cluster.submit(2, "w", [1.0] * 30)
    while (computation := cluster.begin_computing(0)) is None:
        assert cluster.move(2, 0) or cluster.move(0, 2)
    cluster.engines[1].close(cluster.now, tell=[0, 2])
    while cluster.move(1, 0):
        pass
    assert isinstance(operation.error, PeerLost)
    assert cluster.completed[0] == []
    cluster.end_computing(0, computation)
    assert cluster.completed[0] == [operation]


def test_iterations_are_counted_beyond_32_bits() -> None:
    cluster = Cluster(2)
    for rank in range(2):
        cluster.submit(rank, "w", [0.0])
    cluster.run()
    for engine in cluster.engines:
        next(iter(engine.table.names)).next_iteration = 0xFFFFFFFE
    for turn in range(4):  # each rank is once a whole operation ahead: its message comes early
        mine = cluster.submit(turn % 2, "w", [1.0 + turn])
        cluster.run()
        other = cluster.submit(1 - turn % 2, "w", [10.0])
        cluster.run()
        assert values_of(mine) == values_of(other) == [11.0 + turn]
        assert mine.key[1] == (0xFFFFFFFE + turn) % (1 << 32)


@pytest.mark.parametrize("asks", [False, True])
def test_without_the_goodbye_of_a_departed_rank_the_end_of_its_connection_counts(asks: bool) -> None:
    """Rank 2 is told by rank 1 that rank 0 has departed, and gets no GOODBYE itself."""
    cluster = Cluster(3)
    everyones, mine = cluster.submit(1, "w"), cluster.receive(0, 2, 1)
    cluster.engines[0].close(cluster.now, tell=[1])
    while cluster.move(0, 1) or cluster.move(1, 2):
        pass
    assert isinstance(everyones.error, PeerLost)
    assert mine.error is None
    if asks:  # the question makes the transport connect
        cluster.engines[2].stalls.inquire(mine, cluster.now)
        assert 0 in cluster.engines[2].outbox.ready
    cluster.engines[2].peer_lost(0, "its connection ended", cluster.now)
    cluster.collect(2)
    assert isinstance(mine.error, PeerLost)
    assert mine.error.rank == 0
    # Rank 0 is not lost for rank 2: the other two go on, and do not talk to it any more.
    cluster.send(1, 2, [7.0])
    got = cluster.receive(1, 2, 1)
    cluster.engines[2].stalls.inquire(got, cluster.now)
    cluster.run()
    assert values_of(got) == [7.0]
    assert cluster.take(2, 0) is None or not asks


@pytest.mark.parametrize("promoted", [False, True])
def test_a_message_that_was_half_way_out_to_a_departed_rank_is_missing(promoted: bool) -> None:
    cluster = Cluster(2, eager_bytes=4096)
    sent = cluster.send(0, 1, [4.0])
    begun = cluster.begin_sending(0, 1)
    while begun is not None and begun.queued is None:
        cluster.end_sending(0, begun)
        begun = cluster.begin_sending(0, 1)
    assert begun is not None
    if promoted:
        cluster.engines[0].promote(sent, cluster.now)
    cluster.engines[1].close(cluster.now, tell=[0])
    while cluster.move(1, 0):
        pass
    assert sent.error is None
    assert not sent.finished  # the transport may still write it
    cluster.engines[0].peer_lost(1, "its connection ended", cluster.now)
    cluster.collect(0)
    assert isinstance(sent.error, PeerLost)


@pytest.mark.parametrize("num_elements", [1, 100])
def test_goodbye_of_one_who_has_given_everything_harms_nobody(num_elements: int) -> None:
    cluster = Cluster(3)
    operations = [cluster.submit(rank, "w", [1.0] * num_elements) for rank in range(3)]
    while not operations[0].finished:  # rank 0 goes as soon as it is done; others may still be busy
        for source in range(3):
            cluster.compute(source)
            for target in range(3):
                _ = source == target or cluster.move(source, target)
    cluster.engines[0].close(cluster.now, tell=[1, 2])
    cluster.run()
    assert all(operation.error is None for operation in operations)
    with pytest.raises(PeerLost, match="rank 0 is lost: it has closed the group"):
        cluster.submit(1, "next")


@pytest.mark.parametrize("num_elements", [1, 100])
@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_goodbye_reaches_those_who_wait_for_others_who_wait_for_the_one_who_left(
    world_size: int, num_elements: int
) -> None:
    """Only direct neighbours see what is missing; they tell the others, whether they have submitted before or not."""
    for submitting in range(1, world_size):
        cluster = Cluster(world_size)
        early = [cluster.submit(rank, "w", [1.0] * num_elements) for rank in range(submitting)]
        cluster.engines[world_size - 1].close(cluster.now, tell=range(world_size - 1))
        cluster.run()
        for rank in range(submitting, world_size - 1):
            with pytest.raises(PeerLost) as refused:
                cluster.submit(rank, "w", [1.0] * num_elements)
            assert refused.value.rank == world_size - 1
        cluster.run()
        for operation in early:
            assert isinstance(operation.error, PeerLost)
            assert operation.error.rank == world_size - 1


def test_a_closed_engine_fails_what_is_pending_and_refuses() -> None:
    cluster = Cluster(2)
    operation = cluster.submit(0, "w")
    cluster.engines[0].close(cluster.now, tell=[])
    cluster.collect(0)
    assert cluster.completed[0] == [operation]
    assert isinstance(operation.error, GroupClosed)
    with pytest.raises(GroupClosed, match="rank 0 has closed the group"):
        cluster.submit(0, "w")


def test_names_are_bounded() -> None:
    with pytest.raises(ConfigurationError, match="longer than 1024 bytes"):
        Cluster(2).submit(0, "x" * 1025)


def test_counters() -> None:
    cluster = Cluster(2, SMALL)
    for rank in range(2):
        cluster.submit(rank, "w", [1.0] * 20)
    cluster.run()
    for engine in cluster.engines:
        assert engine.counters.operations == 1
        assert engine.counters.payload_bytes == 160
        assert engine.counters.messages_sent == engine.counters.messages_received == 4  # two lanes, two steps
        assert engine.counters.reduce_s == pytest.approx(2e-6)
    total_sent = sum(engine.counters.bytes_sent for engine in cluster.engines)
    assert total_sent == sum(engine.counters.bytes_received for engine in cluster.engines)


def test_active_time_is_the_time_with_something_in_flight() -> None:
    cluster = Cluster(2)
    cluster.submit(0, "w")
    cluster.now = 2.0
    assert cluster.engines[0].table.active_s(2.0) == 2.0
    cluster.submit(1, "w")
    cluster.run()
    assert cluster.engines[0].table.active_s(5.0) == 2.0
