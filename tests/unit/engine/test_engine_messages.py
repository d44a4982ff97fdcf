"""Messages between two ranks, receives from anybody, and collectives whose ranks know only their own blocks."""

import pytest
from engines_by_hand import MESSAGE, Cluster, Message, broadcast, drain, values_of

from totalreduce.engine.any_receives import AnyReceive
from totalreduce.engine.operation import Operation
from totalreduce.foundation.errors import ConfigurationError, GroupClosed, MismatchError, PeerLost
from totalreduce.foundation.header import Frame
from totalreduce.foundation.types import Algorithm, DType, OpKind, ReduceOp, Signature
from totalreduce.schedules.direct import WINDOW

GATHER = Signature(OpKind.GATHER, DType.FLOAT64, ReduceOp.NONE, 0, ())
SCATTER = Signature(OpKind.SCATTER, DType.FLOAT64, ReduceOp.NONE, 0, ())
ALLTOALL = Signature(OpKind.ALLTOALL, DType.FLOAT64, ReduceOp.NONE, 0, ())


def allgather(*sizes: int, algorithm: Algorithm = Algorithm.DIRECT) -> Signature:
    return Signature(OpKind.ALLGATHER, DType.FLOAT64, ReduceOp.NONE, 0, (), sizes, algorithm)


def received(cluster: Cluster, receive: AnyReceive) -> Operation:
    """What a receive from anybody has become."""
    [operation] = [each for rank in cluster.completed for each in rank if each.owner is receive]
    assert isinstance(operation, Operation)
    return operation


# ------------------------------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize("count", [0, 1, 8, 100])
@pytest.mark.parametrize("early", [False, True])
def test_a_message_arrives(count: int, early: bool) -> None:
    cluster = Cluster(3)
    if early:
        sent = cluster.send(1, 2, range(count))
        cluster.run()
        got = cluster.receive(1, 2, count)
    else:
        got = cluster.receive(1, 2, count)
        cluster.run()
        sent = cluster.send(1, 2, range(count))
    cluster.run()
    assert sent.error is got.error is None
    assert sent.finished
    assert values_of(got) == [float(index) for index in range(count)]
    assert not any(cluster.completed[0])


def test_the_nth_send_meets_the_nth_receive_of_its_tag() -> None:
    cluster = Cluster(2)
    sent = [cluster.send(0, 1, [10.0 * tag + number], tag=tag) for number in range(3) for tag in (1, 2)]
    got = {tag: [cluster.receive(0, 1, 1, tag=tag) for _ in range(3)] for tag in (2, 1)}
    cluster.run()
    assert [values_of(operation)[0] for operation in got[1]] == [10.0, 11.0, 12.0]
    assert [values_of(operation)[0] for operation in got[2]] == [20.0, 21.0, 22.0]
    assert all(operation.finished for operation in sent)


def test_an_urgent_message_does_not_take_the_place_of_an_earlier_one() -> None:
    cluster = Cluster(2)
    for _ in range(2):  # the second time nothing is described any more: the urgent one really comes first
        cluster.send(0, 1, [1.0], priority=5)
        cluster.send(0, 1, [2.0], priority=0)
        cluster.run()
        first, second = cluster.receive(0, 1, 1), cluster.receive(0, 1, 1)
        cluster.run()
        assert values_of(first) + values_of(second) == [1.0, 2.0]


def test_a_send_is_done_when_it_has_left_and_a_large_one_when_it_is_wanted() -> None:
    cluster = Cluster(2, eager_bytes=128)
    small, large = cluster.send(0, 1, [1.0]), cluster.send(0, 1, [2.0] * 100, tag=1)
    cluster.run()
    assert small.finished
    assert not large.finished
    got = cluster.receive(0, 1, 100, tag=1)
    cluster.run()
    assert large.finished
    assert values_of(got) == [2.0] * 100


def test_messages_of_different_lengths_are_a_mismatch_and_the_next_ones_meet() -> None:
    cluster = Cluster(2)
    cluster.send(0, 1, [1.0, 2.0])
    wrong = cluster.receive(0, 1, 3)
    cluster.run()
    assert isinstance(wrong.error, MismatchError)
    assert dict(zip(wrong.error.ranks, wrong.error.values, strict=True)) == {
        0: "send_recv of float64[2]",
        1: "send_recv of float64[3]",
    }
    assert values_of(wrong) == [-1.0] * 3
    cluster.send(0, 1, [7.0])
    right = cluster.receive(0, 1, 1)
    cluster.run()
    assert values_of(right) == [7.0]
    assert cluster.engines[1].reception.floating.total_bytes == 0


# -------------------------------------------------------------------------------------------------------- from anybody


@pytest.mark.parametrize("early", [False, True])
def test_a_receive_takes_from_whoever_sends_first(early: bool) -> None:
    cluster = Cluster(4)
    if early:
        cluster.send(2, 0, [20.0])
        cluster.run()
    receives = [cluster.receive_any(0, 1) for _ in range(3)]
    if not early:
        cluster.send(2, 0, [20.0])
        cluster.run()
    cluster.send(1, 0, [10.0])
    cluster.run()
    cluster.send(2, 0, [21.0])
    cluster.run()
    operations = [received(cluster, receive) for receive in receives]
    assert [operation.ranks for operation in operations] == [(2, 0), (1, 0), (2, 0)]
    assert [values_of(operation) for operation in operations] == [[20.0], [10.0], [21.0]]


def test_other_tags_are_left_alone() -> None:
    cluster = Cluster(3)
    receive = cluster.receive_any(0, 1, tag=1)
    cluster.send(1, 0, [1.0], tag=2)
    cluster.run()
    assert cluster.completed[0] == []
    cluster.send(2, 0, [5.0], tag=1)
    cluster.run()
    assert values_of(received(cluster, receive)) == [5.0]


def test_a_message_that_waits_for_its_receiver_is_found_by_its_question() -> None:
    cluster = Cluster(3, eager_bytes=8, floating_bytes_max=64)
    sent = cluster.send(2, 0, [3.0] * 50)
    cluster.run()
    assert cluster.engines[0].reception.floating.total_bytes == 0
    receive = cluster.receive_any(0, 50)
    cluster.run()
    assert sent.finished
    assert values_of(received(cluster, receive)) == [3.0] * 50


def test_a_receive_from_one_rank_takes_its_first_message_before_one_from_anybody() -> None:
    """Whoever posts first: here the receive from anybody has found nobody yet when the other one is posted."""
    cluster = Cluster(3)
    anybody = cluster.receive_any(0, 1)
    named = cluster.receive(1, 0, 1)
    cluster.send(1, 0, [1.0])
    cluster.send(1, 0, [2.0])
    cluster.run()
    assert values_of(named) == [1.0]
    assert values_of(received(cluster, anybody)) == [2.0]


def test_messages_that_overtook_an_earlier_one_are_found() -> None:
    """The second send of a rank may come first, and waits for the first one: its turn must not be missed."""
    cluster = Cluster(2)
    warm_up = cluster.receive_any(0, 1)
    cluster.send(1, 0, [0.0])
    cluster.run()  # from now on the messages are not described any more
    assert values_of(received(cluster, warm_up)) == [0.0]
    receives = [cluster.receive_any(0, 1) for _ in range(3)]
    cluster.send(1, 0, [1.0], priority=9)
    cluster.send(1, 0, [2.0], priority=5)
    cluster.send(1, 0, [3.0], priority=0)
    cluster.run()
    assert [values_of(received(cluster, receive)) for receive in receives] == [[1.0], [2.0], [3.0]]


def test_a_message_whose_turn_comes_by_a_receive_from_its_sender_is_found() -> None:
    cluster = Cluster(2)
    cluster.send(1, 0, [0.0])
    cluster.run()
    cluster.receive(1, 0, 1)
    cluster.run()
    cluster.send(1, 0, [1.0], priority=9)
    cluster.send(1, 0, [2.0], priority=0)
    overtaking = cluster.take_data(1, 0)
    cluster.give(1, 0, overtaking)
    anybody = cluster.receive_any(0, 1)
    cluster.receive(1, 0, 1)
    cluster.run()
    assert values_of(received(cluster, anybody)) == [2.0]


def test_a_length_that_does_not_fit_is_a_mismatch_for_one_from_anybody_too() -> None:
    cluster = Cluster(3)
    receive = cluster.receive_any(0, 2)
    cluster.send(1, 0, [1.0])
    cluster.run()
    assert isinstance(received(cluster, receive).error, MismatchError)
    assert received(cluster, receive).error.ranks in ((0, 1), (1, 0))


def test_receives_from_anybody_end_with_the_group() -> None:
    cluster = Cluster(2)
    receive = cluster.receive_any(0, 1)
    cluster.engines[0].close(cluster.now, tell=[])
    cluster.collect(0)
    assert cluster.completed[0] == [receive]
    assert isinstance(receive.error, GroupClosed)


def test_receives_from_anybody_end_with_a_loss() -> None:
    cluster = Cluster(3)
    receive = cluster.receive_any(0, 1)
    cluster.engines[0].peer_lost(2, "its connection ended", cluster.now)
    cluster.collect(0)
    assert cluster.completed[0] == [receive]
    assert isinstance(receive.error, PeerLost)
    assert receive.error.rank == 2


def test_receives_from_anybody_go_on_while_somebody_is_left() -> None:
    cluster = Cluster(3)
    pending = cluster.receive_any(0, 1)
    cluster.engines[1].close(cluster.now, tell=[0, 2])
    cluster.run()
    later = cluster.receive_any(0, 1)
    assert cluster.completed[0] == []
    for value in (1.0, 2.0):
        cluster.send(2, 0, [value])
    cluster.run()
    assert values_of(received(cluster, pending)) + values_of(received(cluster, later)) == [1.0, 2.0]
    last = cluster.receive_any(0, 1)
    cluster.engines[2].close(cluster.now, tell=[0])
    cluster.run()
    assert isinstance(last.error, PeerLost)
    with pytest.raises(PeerLost):
        cluster.receive_any(0, 1)


# ------------------------------------------------------------------------------------------- blocks of different sizes


def test_every_pair_of_an_alltoall_has_its_own_size() -> None:
    cluster = Cluster(3)
    counts = [[1, 50, 0], [3, 2, 17], [40, 0, 4]]  # from, to
    operations = [
        cluster.blocks(rank, "w", ALLTOALL, [*counts[rank], *(counts[source][rank] for source in range(3))])
        for rank in range(3)
    ]
    for rank, operation in enumerate(operations):
        for target in range(3):
            operation.buffers[target][:] = bytes([10 * rank + target]) * (8 * counts[rank][target])
    cluster.run()
    for rank, operation in enumerate(operations):
        assert operation.error is None
        for source in range(3):
            if source != rank:
                got = bytes(operation.buffers[3 + source])
                assert got == bytes([10 * source + rank]) * (8 * counts[source][rank])


def test_an_alltoall_of_more_ranks_than_its_window() -> None:
    """The last blocks of a rank leave after it has received the first ones of others."""
    size = 2 * WINDOW + 1
    cluster = Cluster(size)
    operations = [cluster.blocks(rank, "w", ALLTOALL, [2] * 2 * size) for rank in range(size)]
    for rank, operation in enumerate(operations):
        for target in range(size):
            operation.buffers[target][:] = bytes([rank, target]) * 8
    cluster.run()
    for rank, operation in enumerate(operations):
        assert operation.error is None
        for source in range(size):
            if source != rank:
                assert bytes(operation.buffers[size + source]) == bytes([source, rank]) * 8


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_pair_that_disagrees_is_a_mismatch_on_every_rank(order: tuple[int, ...]) -> None:
    """Even where everything else of the operation would have been exchanged."""
    cluster = Cluster(3)
    counts = {rank: [4] * 6 for rank in range(3)}
    counts[2][3 + 1] = 5  # rank 2 expects five elements of rank 1
    operations = {}
    for rank in order:
        operations[rank] = cluster.blocks(rank, "w", ALLTOALL, counts[rank])
        cluster.run()
    for rank in (1, 2):
        error = operations[rank].error
        assert isinstance(error, MismatchError)
        assert dict(zip(error.ranks, error.values, strict=True)) == {
            1: "alltoall of float64[4]",
            2: "alltoall of float64[5]",
        }
    error = operations[0].error
    assert error is None or isinstance(error, MismatchError)
    again = [cluster.blocks(rank, "w", ALLTOALL, [4] * 6) for rank in range(3)]
    cluster.run()
    assert all(operation.finished and operation.error is None for operation in again)


def test_one_who_has_given_its_small_block_may_leave_while_large_ones_are_on_their_way() -> None:
    """Lanes that only the large block has do not wait for the small one."""
    cluster = Cluster(3)
    operations = [cluster.blocks(rank, "w", allgather(1, 1, 200), [1, 1, 200]) for rank in range(3)]
    for source, target in ((1, 0), (1, 2), (0, 1), (2, 1)):
        while cluster.move(source, target):
            pass
    assert [operation.finished for operation in operations] == [False, True, False]
    cluster.engines[1].close(cluster.now, tell=[0, 2])
    cluster.run()
    assert [operation.error for operation in operations] == [None] * 3


def test_a_block_without_lanes_is_not_waited_for() -> None:
    """What comes early goes into bounded scratch memory, unless somebody else's message has to come before it."""
    cluster = Cluster(3, lanes_min=1)
    signature = Signature(OpKind.REDUCE_SCATTER, DType.FLOAT64, ReduceOp.SUM, 0, (), (200, 0, 200), Algorithm.DIRECT)
    for rank in range(3):
        cluster.blocks(rank, "w", signature, [200, 0, 200, [200, 0, 200][rank]])
    cluster.run()
    for rank in range(3):
        [operation] = cluster.completed[rank]
        assert operation.error is None
        assert values_of(operation, 3) == [-3.0] * (200 if rank != 1 else 0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_wrong_lengths_are_noticed_by_the_root_of_a_gather(world_size: int) -> None:
    cluster = Cluster(world_size)
    operations = [cluster.blocks(0, "w", GATHER, [3] * world_size)]
    for rank in range(1, world_size):
        counts = [None] * world_size
        counts[rank] = 3 + (rank == 1)
        operations.append(cluster.blocks(rank, "w", GATHER, counts))
    cluster.run()
    assert isinstance(operations[0].error, MismatchError)
    assert set(operations[0].error.ranks) == {0, 1}
    assert all(
        engine.reception.scratch.in_use == engine.reception.floating.total_bytes == 0 for engine in cluster.engines
    )


# -------------------------------------------------------------------------------------------------------------- leaving


@pytest.mark.parametrize("count", [1, 100])
def test_who_sends_to_one_who_has_left_learns_of_it(count: int) -> None:
    """A small message is gone; one that waits for its receiver must not wait for ever."""
    cluster = Cluster(2, eager_bytes=64)
    sent = cluster.send(0, 1, [1.0] * count)
    cluster.run()
    cluster.engines[1].close(cluster.now, tell=[0])
    cluster.run()
    assert sent.finished
    assert (sent.error is None) == (count == 1)
    if count > 1:
        assert isinstance(sent.error, PeerLost)
        assert sent.error.rank == 1


@pytest.mark.parametrize("signature", [GATHER, SCATTER], ids=["gather", "scatter"])
def test_what_waits_for_one_who_has_left_fails(signature: Signature) -> None:
    cluster = Cluster(3, eager_bytes=16)
    counts = [[50, 50, 50], [None, 50, None], [None, None, 50]]
    present = (1, 2) if signature is GATHER else (0, 1)
    first, second = (cluster.blocks(rank, "w", signature, counts[rank]) for rank in present)
    cluster.run()
    leaving = 0 if signature is GATHER else 2
    cluster.engines[leaving].close(cluster.now, tell=[rank for rank in range(3) if rank != leaving])
    cluster.run()
    waiting = (first, second) if signature is GATHER else (first,)
    for operation in waiting:
        assert isinstance(operation.error, PeerLost), operation.error
        assert operation.error.rank == leaving


def test_what_one_who_has_left_has_sent_before_is_still_received() -> None:
    """Its sends were done: it may go, as after the last message of a job."""
    cluster = Cluster(2)
    sent = cluster.send(1, 0, [1.0, 2.0])
    cluster.run()
    assert sent.finished
    cluster.engines[1].close(cluster.now, tell=[0])
    cluster.run()
    got = cluster.receive(1, 0, 2)
    cluster.run()
    assert got.error is None
    assert values_of(got) == [1.0, 2.0]
    assert "rank 1 is lost: it has closed the group" in str(cluster.receive(1, 0, 2).error)


def test_a_gather_succeeds_after_those_who_have_given_their_part_have_left() -> None:
    cluster = Cluster(3)
    for rank in (1, 2):
        counts: list[int | None] = [None] * 3
        counts[rank] = 2
        operation = cluster.blocks(rank, "w", GATHER, counts)
        operation.buffers[rank][:] = bytes([rank]) * 16
        cluster.run()
        assert operation.finished
        cluster.engines[rank].close(cluster.now, tell=[other for other in range(3) if other != rank])
        cluster.run()
    root = cluster.blocks(0, "w", GATHER, [2, 2, 2])
    cluster.run()
    assert root.error is None
    assert [bytes(root.buffers[rank]) for rank in (1, 2)] == [bytes([1]) * 16, bytes([2]) * 16]


def test_a_receive_from_anybody_takes_what_has_come_and_not_what_a_departed_rank_had_announced() -> None:
    cluster = Cluster(3)
    large = cluster.send(0, 2, range(400))  # waits until rank 2 has posted a receive
    assert cluster.move(0, 2)
    cluster.engines[0].close(cluster.now, tell=[2])
    while cluster.move(0, 2):
        pass
    assert large.error is not None
    cluster.send(1, 2, range(3))
    cluster.run()
    receive = cluster.receive_any(2, 3)
    cluster.run()
    got = received(cluster, receive)
    assert got.error is None
    assert list(values_of(got)) == [0.0, 1.0, 2.0]


def test_a_waiting_receive_from_anybody_passes_over_what_a_departed_rank_announces_late() -> None:
    cluster = Cluster(3, eager_bytes=16)
    receive = cluster.receive_any(2, 8)
    cluster.engines[2].members.departed[0] = "it has closed the group"  # as rank 1 has reported
    cluster.send(0, 2, [9.0] * 8)
    while cluster.move(0, 2):
        pass
    cluster.send(1, 2, range(8))
    cluster.run()
    got = received(cluster, receive)
    assert got.error is None
    assert list(values_of(got)) == list(range(8))


def test_a_goodbye_counts_although_another_rank_has_told_of_it() -> None:
    """The other one tells about an operation of its own; this rank's may need the one who left as well."""
    cluster = Cluster(3)
    theirs, mine = cluster.submit(1, "theirs"), cluster.submit(0, "mine")
    cluster.engines[2].close(cluster.now, tell=[0, 1])
    while cluster.move(2, 1) or cluster.move(1, 0):
        pass
    assert isinstance(theirs.error, PeerLost)
    assert mine.error is None
    cluster.run()
    assert isinstance(mine.error, PeerLost)
    assert mine.error.rank == 2


def test_a_rank_that_submits_after_the_others_have_learnt_of_a_departure_learns_of_it_too() -> None:
    """It has nothing to do with the one who left, and would wait for a sum that nobody can send."""
    reduce = Signature(OpKind.REDUCE, DType.FLOAT64, ReduceOp.SUM, 0, (2,), algorithm=Algorithm.CHAIN)
    cluster = Cluster(4)
    cluster.engines[3].close(cluster.now, tell=[0, 1, 2])
    cluster.run()
    waiting = cluster.submit(2, "w", (), reduce)
    cluster.run()
    late = [cluster.submit(rank, "w", (), reduce) for rank in (1, 0)]
    for operation in (waiting, *late):
        assert isinstance(operation.error, PeerLost)
        assert operation.error.rank == 3


def test_descriptions_travel_once_for_repeated_messages() -> None:
    cluster = Cluster(2)
    described = 0
    for _ in range(3):
        cluster.send(0, 1, [1.0])
        cluster.receive(0, 1, 1)
        while (message := cluster.take(0, 1)) is not None:
            described += message[0].frame is Frame.DESCRIBE
            cluster.give(0, 1, message)
    assert described == 1
    assert MESSAGE.describe() == "send_recv of float64[]"


def reported_departure(cluster: Cluster) -> list[Message]:
    """Rank 0 sends to rank 2 and leaves; rank 1's report of that reaches rank 2 first. Returns rank 0's messages."""
    cluster.send(0, 2, [7.0])
    messages = list(drain(cluster, 0, 2))
    assert messages[-1][0].frame is Frame.DATA
    everyones = cluster.submit(1, "w")
    cluster.engines[0].close(cluster.now, tell=[1, 2])
    while cluster.move(0, 1) or cluster.move(1, 2):
        pass
    assert isinstance(everyones.error, PeerLost)
    return messages


@pytest.mark.parametrize("from_any", [False, True])
def test_a_message_is_received_although_the_report_of_its_senders_departure_was_faster(from_any: bool) -> None:
    cluster = Cluster(3)
    messages = reported_departure(cluster)
    receive = cluster.receive_any(2, 1) if from_any else cluster.receive(0, 2, 1)
    for message in messages:
        cluster.give(0, 2, message)
    cluster.run()
    got = received(cluster, receive) if isinstance(receive, AnyReceive) else receive
    assert got.error is None
    assert values_of(got) == [7.0]
    late = cluster.receive(0, 2, 1)  # rank 0's GOODBYE has come
    assert isinstance(late.error, PeerLost)
    assert late.error.rank == 0


def test_messages_of_a_rank_whose_departure_was_reported_are_awaited_for_a_limited_time() -> None:
    cluster = Cluster(3)
    header, _ = reported_departure(cluster)[-1]
    while cluster.take(0, 2) is not None:  # its GOODBYE never arrives
        pass
    waiting = cluster.receive(0, 2, 1, tag=3)
    anybodys = AnyReceive({0: "0 to 2, tag 4"}, MESSAGE, memoryview(bytearray(8)), "", 0, owner=None)
    cluster.engines[2].receive_any(anybodys, cluster.now)
    delivery = cluster.begin_receiving(0, 2, header)
    cluster.tick(100.0)
    assert waiting.error is None, "a message of rank 0 is arriving"
    cluster.end_receiving(2, delivery, bytes(8))
    cluster.tick(101.0)
    assert waiting.error is None
    cluster.tick(103.0)
    assert [waiting.error.rank, anybodys.error.rank] == [0, 0]
    with pytest.raises(PeerLost, match="rank 0"):
        cluster.engines[2].receive_any(anybodys, cluster.now)
    assert cluster.engines[2].members.lost is None


def test_an_operation_that_is_refused_because_a_rank_has_departed_has_used_its_iteration() -> None:
    """So that the next operation without a name is the same one on all ranks that are left."""
    cluster = Cluster(3)
    early = [cluster.submit(1, None), cluster.submit(1, None, [4.0] * 2, broadcast(2, root=1))]
    cluster.engines[0].close(cluster.now, tell=[1, 2])
    for source, target in ((0, 1), (0, 2), (1, 2)):
        while cluster.move(source, target):
            pass
    assert isinstance(early[0].error, PeerLost)
    with pytest.raises(PeerLost, match="rank 0"):
        cluster.submit(2, None)
    assert len(cluster.engines[2].reception.floating) == len(early[1:])
    late = cluster.submit(2, None, [0.0] * 2, broadcast(2, root=1))
    cluster.run()
    assert late.key == early[1].key


@pytest.mark.parametrize("submitted", [True, False])
def test_the_memory_of_a_body_that_a_departed_rank_does_not_complete_is_released(submitted: bool) -> None:
    cluster = Cluster(3, scratch_segments=1)
    mine = [cluster.submit(rank, "w", [1.0] * 3) for rank in range(2 if submitted else 1)]
    message = cluster.take_data(0, 1)
    assert message is not None
    cluster.begin_receiving(0, 1, message[0])
    reception = cluster.engines[1].reception
    assert reception.num_bodies == 1
    cluster.engines[1].members.depart_by_report(0, "it has closed the group", cluster.now)
    cluster.engines[1].peer_lost(0, "its connection ended", cluster.now)
    cluster.collect(1)
    assert reception.num_bodies == 0
    assert reception.scratch.available
    assert not reception.arriving
    assert all(isinstance(operation.error, PeerLost) for operation in mine[1:])
    sent, got = cluster.send(2, 1, [5.0]), cluster.receive(2, 1, 1)
    cluster.run()
    assert sent.error is None
    assert values_of(got) == [5.0]


@pytest.mark.parametrize("submitted", [True, False])
def test_the_error_names_the_rank_that_left_first_if_the_goodbye_of_a_later_one_is_faster(submitted: bool) -> None:
    """Rank 1 leaves because rank 2 has left; rank 0 hears it from rank 1, before anything of rank 2 has arrived."""
    cluster = Cluster(3)
    mine = [cluster.submit(0, "w", [1.0] * 3)] if submitted else []
    cluster.engines[2].close(cluster.now, tell=[0, 1])
    while cluster.move(2, 1):
        pass
    cluster.engines[1].close(cluster.now, tell=[0])
    while cluster.move(1, 0):
        pass
    if submitted:
        assert isinstance(mine[0].error, PeerLost)
        assert mine[0].error.rank == 2
        assert mine[0].error.reason.startswith("it has closed the group (if it had fewer batches: optimizer.join()")
        assert mine[0].error.reason.endswith(" (reported by rank 1)")
    with pytest.raises(PeerLost, match="rank 2"):
        cluster.submit(0, "x", [1.0] * 3)
    while cluster.move(2, 0):
        pass
    assert list(cluster.engines[0].members.departed) == [2, 1]


def test_a_name_in_flight_is_refused_as_such_although_a_rank_has_departed() -> None:
    """Otherwise the refused operation used up an iteration, and the name could be submitted a second time."""
    cluster = Cluster(3)  # the broadcast goes from 0 to 1 to 2, which does not need rank 0
    cluster.submit(2, "w", [0.0] * 2, broadcast(2, root=0))
    cluster.engines[0].close(cluster.now, tell=[2])
    while cluster.move(0, 2):
        pass
    for signature in (None, None, broadcast(2, root=0)):
        with pytest.raises(ConfigurationError, match="already in flight"):
            cluster.submit(2, "w", [0.0] * 2, signature)
