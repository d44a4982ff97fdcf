"""Ranks that mean different things: an error with both values on every rank, and the group goes on."""

import itertools
from collections.abc import Sequence

import pytest
from engines_by_hand import BARRIER, Cluster, allreduce, broadcast, drain, values_of

from totalreduce.engine.operation import Operation
from totalreduce.foundation.errors import MismatchError
from totalreduce.foundation.header import Frame, Header
from totalreduce.foundation.types import Algorithm, DType, OpKind, ReduceOp, Signature

ODD = [
    (allreduce(4), allreduce(4, dtype=DType.FLOAT32), "allreduce(sum) of float32[4]"),
    (allreduce(2, 3), allreduce(3, 2), "allreduce(sum) of float64[3, 2]"),
    (allreduce(4), allreduce(5), "allreduce(sum) of float64[5]"),
    (allreduce(4), allreduce(4, reduction=ReduceOp.AVG), "allreduce(avg) of float64[4]"),
    (allreduce(4), broadcast(4, root=0), "broadcast(root=0) of float64[4]"),
    (allreduce(4), BARRIER, "barrier"),
    (broadcast(4, root=0), broadcast(4, root=1), "broadcast(root=1) of float64[4]"),
    (broadcast(4, root=0), broadcast(4, root=2), "broadcast(root=2) of float64[4]"),
    (broadcast(4, root=1), allreduce(4), "allreduce(sum) of float64[4]"),
    (allreduce(200), allreduce(0), "allreduce(sum) of float64[0]"),
]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("odd_rank", [0, 1, 2])
@pytest.mark.parametrize(("usual", "odd", "shown"), ODD)
def test_every_rank_learns_what_both_wanted(
    usual: Signature, odd: Signature, shown: str, odd_rank: int, order: tuple[int, ...]
) -> None:
    cluster = Cluster(3)
    operations = {}
    for rank in order:
        operations[rank] = cluster.submit(rank, "w", (), odd if rank == odd_rank else usual)
        cluster.run()
    for rank in range(3):
        error = operations[rank].error
        assert isinstance(error, MismatchError), f"rank {rank}: {error}"
        assert error.tensor == "w"
        assert odd_rank in error.ranks
        by_rank = dict(zip(error.ranks, error.values, strict=True))
        assert by_rank.pop(odd_rank) == shown
        assert list(by_rank.values()) == [usual.describe()]
    _check_usable(cluster)


@pytest.mark.parametrize("further", [0, 1])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_calls_itself_or_the_next_one_the_root(world_size: int, further: int) -> None:
    """In the second case nobody has anything to send, and only the descriptions tell."""
    cluster = Cluster(world_size)
    for attempt in range(3):  # the same mistake again is found again
        operations = [
            cluster.submit(rank, "w", (), broadcast(4, root=(rank + further) % world_size))
            for rank in range(world_size)
        ]
        cluster.run()
        assert all(isinstance(operation.error, MismatchError) for operation in operations), attempt
    _check_usable(cluster)


def test_a_mismatch_in_a_later_iteration() -> None:
    cluster = Cluster(2)
    for _ in range(2):
        operations = [cluster.submit(rank, "w", [1.0], broadcast(1, root=0)) for rank in range(2)]
        cluster.run()
        assert all(operation.error is None for operation in operations)
    operations = [cluster.submit(rank, "w", [1.0], broadcast(1, root=rank)) for rank in range(2)]
    cluster.run()
    assert all(isinstance(operation.error, MismatchError) for operation in operations)
    _check_usable(cluster)


def test_a_rank_that_submits_after_the_others_have_failed() -> None:
    cluster = Cluster(3)
    cluster.submit(0, "w", (), allreduce(4))
    cluster.submit(1, "w", (), allreduce(5))
    cluster.run()
    assert len(cluster.completed[0]) == len(cluster.completed[1]) == 1
    late = cluster.submit(2, "w", (), allreduce(4))
    assert isinstance(late.error, MismatchError)
    cluster.run()
    _check_usable(cluster)


def test_an_addition_under_way_delays_the_error() -> None:
    """Or the caller would use the tensor again while the addition still writes into it."""
    cluster = Cluster(3)
    usual = [cluster.submit(rank, "w", [1.0] * 4) for rank in (0, 1)]
    cluster.give(0, 1, cluster.take_data(0, 1))
    computation = cluster.begin_computing(1)
    cluster.submit(2, "w", (), allreduce(5))
    while cluster.move(1, 2) or cluster.move(2, 1):
        pass
    assert isinstance(usual[1].error, MismatchError)
    assert cluster.completed[1] == []
    cluster.end_computing(1, computation)
    assert cluster.completed[1] == [usual[1]]
    cluster.run()
    _check_usable(cluster)


def test_additions_that_have_not_begun_are_not_carried_out() -> None:
    cluster = Cluster(2)
    for rank in range(2):
        cluster.submit(rank, "w", [1.0] * 40)
    for _ in range(3):
        cluster.give(0, 1, cluster.take_data(0, 1))
    assert cluster.engines[1].computations.peek() is not None
    cluster.engines[1].close(cluster.now, tell=[])
    assert cluster.begin_computing(1) is None
    assert cluster.engines[1].reception.scratch.in_use == 0


def test_a_body_that_was_going_into_the_tensor_is_redirected() -> None:
    cluster = Cluster(2)
    operations = [cluster.submit(rank, "w", [float(rank)], broadcast(1, root=0)) for rank in range(2)]
    header, body = cluster.take_data(0, 1)
    delivery = cluster.begin_receiving(0, 1, header)
    cluster.engines[1].close(cluster.now, tell=[])
    cluster.end_receiving(1, delivery, body)
    assert values_of(operations[1]) == [1.0]


def test_the_description_travels_once_per_change() -> None:
    cluster = Cluster(2)
    described = 0
    for _ in range(3):
        operations = [cluster.submit(rank, "w") for rank in range(2)]
        while (message := cluster.take(0, 1)) is not None:
            described += message[0].frame is Frame.DESCRIBE
            cluster.give(0, 1, message)
        cluster.run()
        assert all(operation.error is None for operation in operations)
    assert described == 1


def gathered(*sizes: int) -> Signature:
    return Signature(OpKind.ALLGATHER, DType.FLOAT64, ReduceOp.NONE, 0, (), sizes, Algorithm.DIRECT)


EXCHANGED = Signature(OpKind.ALLTOALL, DType.FLOAT64, ReduceOp.NONE, 0, ())


@pytest.mark.parametrize("kind", [OpKind.ALLGATHER, OpKind.ALLTOALL])
def test_new_sizes_of_blocks_are_not_described_where_a_message_tells_them(kind: OpKind) -> None:
    cluster = Cluster(3)
    described = 0
    for count in (1, 2, 3):
        for rank in range(3):
            if kind is OpKind.ALLGATHER:
                cluster.blocks(rank, "w", gathered(count, 1, 1), [count, 1, 1])
            else:
                cluster.blocks(rank, "w", EXCHANGED, [count] * 6)
        while (message := cluster.take(0, 1)) is not None:
            described += message[0].frame is Frame.DESCRIBE
            cluster.give(0, 1, message)
        cluster.run()
    assert all(len(done) == 3 and all(operation.error is None for operation in done) for done in cluster.completed)
    assert described == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize(("odd", "added"), [((4, 4, 5), ""), ((4, 5, 3), ", of another shape")])
def test_sizes_that_differ_and_were_not_described(odd: tuple[int, ...], added: str, order: tuple[int, ...]) -> None:
    """One of two ranks finds it: it knows its own sizes, and of the other's what the header says."""
    usual = (4, 4, 4)

    def ways(sizes: tuple[int, ...]) -> set[str]:
        return {gathered(*sizes).describe(), f"allgather of float64[{sum(sizes)}] by direct{added}"}

    cluster = Cluster(3)
    for _ in range(2):  # the second time they have described themselves anew
        for rank in range(3):
            cluster.blocks(rank, "w", gathered(1, 1, 1), [1, 1, 1])
        cluster.run()
        operations = {}
        for rank in order:
            sizes = odd if rank == 2 else usual
            operations[rank] = cluster.blocks(rank, "w", gathered(*sizes), sizes)
            cluster.run()
        for rank in range(3):
            error = operations[rank].error
            assert isinstance(error, MismatchError), f"rank {rank}: {error}"
            by_rank = dict(zip(error.ranks, error.values, strict=True))
            theirs, (mine,) = by_rank.pop(2), by_rank.values()
            assert theirs in ways(odd)
            assert mine in ways(usual)
            assert theirs != mine
    _check_usable(cluster)


def _check_usable(cluster: Cluster) -> None:
    for name in ("w", "another"):
        for _ in range(2):
            operations = [cluster.submit(rank, name, [float(rank)] * 4) for rank in range(cluster.world_size)]
            cluster.run()
            for operation in operations:
                assert operation.error is None
                assert values_of(operation) == [float(sum(range(cluster.world_size)))] * 4
    assert all(engine.reception.scratch.in_use == 0 for engine in cluster.engines)
    assert all(engine.reception.floating.total_bytes == 0 for engine in cluster.engines)


def submit_rooted(
    cluster: Cluster, rank: int, kind: OpKind, root: int, *, name: str | None = "w", count: int = 2
) -> Operation:
    whole = kind in (OpKind.REDUCE, OpKind.BROADCAST)
    reduction = ReduceOp.SUM if kind is OpKind.REDUCE else ReduceOp.NONE
    signature = Signature(kind, DType.FLOAT64, reduction, root, (count,) if whole else ())
    if whole:
        return cluster.submit(rank, name, [1.0] * count, signature)
    counts = [count if rank in (root, peer) else None for peer in range(cluster.world_size)]
    return cluster.blocks(rank, name, signature, counts)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("roots", [(0, 0, 1), (0, 0, 2), (0, 1, 2), (1, 2, 0), (1, 1, 0), (2, 0, 0)])
@pytest.mark.parametrize("kind", [OpKind.REDUCE, OpKind.GATHER, OpKind.SCATTER])
def test_nobody_waits_for_ever_when_roots_differ(kind: OpKind, roots: tuple[int, ...], order: tuple[int, ...]) -> None:
    """Ranks that only give something may be done at once, but whoever waits must learn of it."""
    cluster = Cluster(3)
    for _ in range(2):
        operations = {}
        for rank in order:
            operations[rank] = submit_rooted(cluster, rank, kind, roots[rank])
            cluster.run()
        assert all(operation.finished for operation in operations.values())
        errors = [operation.error for operation in operations.values() if operation.error is not None]
        assert errors
        assert all(isinstance(error, MismatchError) and error.tensor == "w" for error in errors)
    again = [submit_rooted(cluster, rank, kind, 0) for rank in range(3)]
    cluster.run()
    assert all(operation.finished and operation.error is None for operation in again)
    _check_usable(cluster)


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("change", [0, 1])
@pytest.mark.parametrize("kind", [OpKind.REDUCE, OpKind.GATHER])
def test_ranks_that_are_ahead_still_tell_of_another_root(kind: OpKind, change: int, ahead: int) -> None:
    """Ranks 1 and 2 are done with their parts of all of them when they hear of each other's first one."""

    cluster = Cluster(3)
    sizes = [2 + change * i for i in range(ahead)]
    on_the_way = []
    for rank in (1, 2):
        for i, size in enumerate(sizes):
            submit_rooted(cluster, rank, kind, 1 if (rank, i) == (2, 0) else 0, count=size)
            while (message := cluster.take(2, 1)) is not None:
                on_the_way.append(message)
            while cluster.move(rank, 0):  # which has not begun, and so tells nobody what it is going to want
                pass
    assert [len(done) for done in cluster.completed] == [0, ahead, ahead]
    for message in on_the_way:
        cluster.give(2, 1, message)
    cluster.run()
    waiting = submit_rooted(cluster, 0, kind, 0)
    assert isinstance(waiting.error, MismatchError)
    assert waiting.error.ranks == (1, 2)
    assert len(set(waiting.error.values)) == 2
    assert cluster.engines[1].counters.mismatches == 1, "its description and its data say the same"
    for size in sizes[1:]:
        operation = submit_rooted(cluster, 0, kind, 0, count=size)
        cluster.run()
        assert operation.finished
        assert operation.error is None
    _check_usable(cluster)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_a_rank_that_is_ahead_hears_what_the_root_wanted(ahead: int) -> None:
    """Rank 2 had taken rank 1 for the root, which has not begun; rank 0's description comes when it is further."""
    cluster = Cluster(3)
    for i in range(ahead):
        submit_rooted(cluster, 2, OpKind.REDUCE, 1 if i == 0 else 0)
        while cluster.move(2, 0) or cluster.move(2, 1):
            pass
    assert len(cluster.completed[2]) == ahead
    waiting = submit_rooted(cluster, 0, OpKind.REDUCE, 0)
    cluster.run()
    assert isinstance(waiting.error, MismatchError)
    assert waiting.error.ranks == (2, 0)
    late = submit_rooted(cluster, 1, OpKind.REDUCE, 0)
    assert isinstance(late.error, MismatchError)


def test_what_is_remembered_of_operations_that_ended_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("totalreduce.engine.signatures._ENDED_MAX", 10)
    cluster = Cluster(3)
    for _ in range(12):
        operations = [submit_rooted(cluster, rank, OpKind.REDUCE, 0) for rank in range(3)]
        cluster.run()
        assert all(operation.error is None for operation in operations)
    assert [len(engine._signatures._ended) for engine in cluster.engines] == [0, 10, 10], (
        "the root has heard from everybody"
    )


def check_ended(cluster: Cluster, wrong: Sequence[bool]) -> None:
    """All have ended, and of each operation somebody has been told, or nobody, that it was another one elsewhere."""
    assert [len(done) for done in cluster.completed] == [len(wrong)] * cluster.world_size
    for number, is_wrong in enumerate(wrong):
        errors = [
            op.error for done in cluster.completed for op in done if isinstance(op, Operation) and op.key[1] == number
        ]
        assert len(errors) == cluster.world_size
        assert all(error is None or isinstance(error, MismatchError) for error in errors)
        assert any(error is not None for error in errors) == is_wrong


@pytest.mark.parametrize("kind", [OpKind.REDUCE, OpKind.GATHER, OpKind.SCATTER, OpKind.BROADCAST])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_roots_that_differ_and_stay_as_they_are(kind: OpKind, world_size: int) -> None:
    """All is submitted before anybody hears of the first disagreement, and nothing new is said of what comes after."""
    for roots in itertools.product(range(world_size), repeat=world_size):
        cluster = Cluster(world_size)
        for _ in range(3):
            for rank, root in enumerate(roots):
                submit_rooted(cluster, rank, kind, root, name=None)
        cluster.run()
        check_ended(cluster, [len(set(roots)) > 1] * 3)


@pytest.mark.parametrize("kind", [OpKind.REDUCE, OpKind.BROADCAST])
@pytest.mark.parametrize("world_size", [3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_roots_that_were_agreed_on_once(kind: OpKind, world_size: int) -> None:
    """Who keeps the last root says nothing, and waits for ranks that wait for it, though they have gone back to one."""
    for roots in itertools.product(range(world_size), repeat=world_size):
        cluster = Cluster(world_size)
        for row in ([1] * world_size, [0] * world_size, roots):
            for rank, root in enumerate(row):
                submit_rooted(cluster, rank, kind, root, name=None)
            cluster.run()
        check_ended(cluster, [False, False, len(set(roots)) > 1])


def test_disagreements_that_are_heard_of_out_of_order() -> None:
    """By chain, so everybody waits for the one before it; what is in the middle was never described."""
    cluster = Cluster(3)
    for further in (1, 1, 0):
        for rank in range(3):
            submit_rooted(cluster, rank, OpKind.BROADCAST, (rank + further) % 3, name=None)
    for rank in range(3):
        assert cluster.move(rank, (rank + 1) % 3)
    assert all(engine.counters.mismatches == 1 for engine in cluster.engines), "of the last operation"
    cluster.run()
    check_ended(cluster, [True] * 3)


@pytest.mark.parametrize("asked", [False, True])
def test_the_only_rank_that_was_told_leaves_without_reading_it(asked: bool) -> None:
    cluster = Cluster(3)
    for rank in range(3):
        submit_rooted(cluster, rank, OpKind.REDUCE, 0, name=None)
    cluster.run()
    for rank, root in enumerate((0, 0, 1)):
        submit_rooted(cluster, rank, OpKind.REDUCE, root, name=None)
    drain(cluster, 2, 1)
    while cluster.move(1, 0):
        pass
    assert [len(done) for done in cluster.completed] == [1, 2, 2]
    if asked:
        cluster.tick(cluster.config.stall_warning_s + 1.0)
    else:
        cluster.engines[1].close(cluster.now, tell=[0, 2])
        cluster.run()
    (error,) = [operation.error for operation in cluster.completed[0][1:]]
    assert isinstance(error, MismatchError)
    assert set(error.ranks) == {0, 2}


@pytest.mark.parametrize("ended", [False, True])
def test_a_question_about_another_operation_is_answered(ended: bool) -> None:
    """A large message waits for the answer, and only its header says what it is."""
    cluster = Cluster(3)
    key = submit_rooted(Cluster(3), 1, OpKind.REDUCE, 0).key
    question = Header(Frame.REQUEST, 0, *key), b""
    if not ended:
        cluster.give(0, 1, question)
    operation = submit_rooted(cluster, 1, OpKind.REDUCE, 0)  # for which rank 0 has nothing
    frames = [header.frame for header, _ in drain(cluster, 1, 0)]
    assert operation.finished
    if ended:
        cluster.give(0, 1, question)
        frames = [header.frame for header, _ in drain(cluster, 1, 0)]
    assert Frame.POSTED in frames


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.GATHER])
def test_what_comes_late_of_a_failed_operation_is_no_second_disagreement(kind: OpKind) -> None:
    cluster = Cluster(3)
    for rank, odd in enumerate((0, 1, 0)):
        if kind is OpKind.ALLREDUCE:
            cluster.submit(rank, "w", (), allreduce(4 + odd))
        else:
            submit_rooted(cluster, rank, kind, odd)
    cluster.run()
    assert any(engine.counters.mismatches for engine in cluster.engines)
    assert all(engine.counters.mismatches <= 1 for engine in cluster.engines)


def test_a_name_that_means_something_else_the_next_time_is_no_disagreement() -> None:
    cluster = Cluster(3)
    for size in (2, 40, 2):
        operations = [cluster.submit(rank, None, [1.0] * size) for rank in (2, 0, 1)]
        cluster.run()
        assert all(operation.error is None for operation in operations)
    assert sum(engine.counters.mismatches for engine in cluster.engines) == 0
