"""A program gets an error when the frames that tell the other ranks of it have left, and each rank passes a loss on."""

from __future__ import annotations

import json

import pytest
from engines_by_hand import Cluster, allreduce, drain

from totalreduce.engine.operation import Operation
from totalreduce.foundation.errors import MismatchError, PeerLost
from totalreduce.foundation.header import Frame

ENDED = "its connection ended"


def connected_rack(world_size: int) -> Cluster:
    """Ranks that are all connected with each other."""
    cluster = Cluster(world_size)
    for engine in cluster.engines:
        engine.telling.connected = lambda: range(world_size)
    return cluster


def lose(cluster: Cluster, rank: int, lost: int) -> None:
    cluster.engines[rank].peer_lost(lost, ENDED, cluster.now)
    cluster.collect(rank)


def reports(cluster: Cluster, source: int, target: int) -> list[dict[str, object]]:
    """Let everything leave; return the reports of a loss among it."""
    return [json.loads(body) for header, body in drain(cluster, source, target) if header.frame is Frame.LOST]


def assert_lost(operation: Operation, rank: int) -> None:
    assert isinstance(operation.error, PeerLost)
    assert operation.error.rank == rank


def test_operations_fail_when_the_reports_have_left() -> None:
    cluster = connected_rack(4)
    pending = cluster.submit(1, "pending")
    lose(cluster, 1, 3)
    late = cluster.submit(1, "late")  # nor is it refused: that would be the same error
    assert len(reports(cluster, 1, 0)) == 1
    assert cluster.completed[1] == []
    messages = []
    while (message := cluster.begin_sending(1, 2)) is not None:
        messages.append(message)
    assert cluster.completed[1] == []  # the transport has not taken them completely
    for message in messages:
        cluster.end_sending(1, message)
    assert cluster.completed[1] == [pending, late]
    assert_lost(pending, 3)
    assert_lost(late, 3)
    with pytest.raises(PeerLost, match=f"rank 3 is lost: {ENDED}"):
        cluster.submit(1, "next")


def test_a_rank_passes_a_report_on_once_before_its_own_operations_fail() -> None:
    cluster = connected_rack(5)
    pending = cluster.submit(0, "w")
    lose(cluster, 1, 4)
    report = cluster.take(1, 0)
    cluster.give(1, 0, report)
    cluster.give(1, 0, report)
    assert cluster.completed[0] == []
    assert [reports(cluster, 0, target) for target in (1, 4)] == [[], []]
    assert [reports(cluster, 0, target) for target in (2, 3)] == [[{"rank": 4, "reason": ENDED, "reporter": 1}]] * 2
    assert cluster.completed[0] == [pending]
    assert str(pending.error) == f"rank 4 is lost: {ENDED} (reported by rank 1)"
    cluster.give(1, 0, report)
    lose(cluster, 0, 2)
    assert reports(cluster, 0, 3) == []


def test_a_report_is_passed_on_to_connected_ranks_only() -> None:
    cluster = Cluster(4)
    cluster.engines[0].telling.connected = lambda: (1, 2)
    lose(cluster, 1, 3)
    assert len(reports(cluster, 1, 2)) == 1  # the rank that has found the loss tells all
    cluster.give(1, 0, cluster.take(1, 0))
    assert len(reports(cluster, 0, 2)) == 1
    assert cluster.engines[0].outbox.ready == set()


def test_a_rank_that_does_not_read_is_waited_for_a_quarter_of_a_second() -> None:
    cluster = connected_rack(3)
    pending = cluster.submit(0, "w")
    lose(cluster, 0, 2)
    for now in (0.1, 0.24):
        cluster.engines[0].tick(now)
        cluster.collect(0)
        assert cluster.completed[0] == []
    cluster.engines[0].tick(0.25)
    cluster.collect(0)
    assert cluster.completed[0] == [pending]
    assert len(reports(cluster, 0, 1)) == 1  # it gets the report as soon as it reads


def test_a_rank_that_ends_meanwhile_is_neither_waited_for_nor_blamed() -> None:
    cluster = connected_rack(3)
    pending = cluster.submit(0, "w")
    lose(cluster, 0, 2)
    lose(cluster, 0, 1)
    assert cluster.completed[0] == [pending]
    assert_lost(pending, 2)


def test_a_rank_that_leaves_because_of_the_loss_is_neither_waited_for_nor_blamed() -> None:
    cluster = connected_rack(3)
    pending = [cluster.submit(rank, "w") for rank in range(2)]
    lose(cluster, 0, 2)
    lose(cluster, 1, 2)
    cluster.engines[1].close(cluster.now, tell=[0])
    for message in drain(cluster, 1, 0):
        cluster.give(1, 0, message)
    assert cluster.completed[0] == [pending[0]]
    assert_lost(pending[0], 2)


def test_nothing_begins_in_the_carrier_while_the_others_are_told() -> None:
    """The engine could not fail an operation that only the carrier knows."""
    cluster = connected_rack(3)
    operation = cluster.submit(0, "w")
    lose(cluster, 0, 2)
    assert cluster.engines[0].carrying.begin_again(operation.layout, operation.key[0]) is None


def test_a_disagreement_reaches_the_program_when_the_others_are_told() -> None:
    cluster = connected_rack(3)
    mine, theirs = cluster.submit(0, "w", [1.0] * 4), cluster.submit(1, "w", [1.0] * 5, allreduce(5))
    described = next(message for message in drain(cluster, 1, 0) if message[0].frame is Frame.DESCRIBE)
    cluster.give(1, 0, described)
    assert cluster.engines[0].table.num_active == 0
    assert cluster.completed[0] == []
    for target in (1, 2):
        frames = [header.frame for header, _ in drain(cluster, 0, target)]
        assert Frame.MISMATCH in frames
        assert cluster.completed[0] == ([mine] if target == 2 else [])
    assert isinstance(mine.error, MismatchError)
    assert theirs.error is None
    # The group goes on, and the name with it.
    again = [cluster.submit(rank, "w", [2.0] * 4) for rank in (0, 2)]
    assert not any(operation.finished for operation in again)


def test_a_group_that_is_closed_while_the_others_are_told_fails_everything_at_once() -> None:
    cluster = connected_rack(3)
    pending = cluster.submit(0, "w")
    mismatched = cluster.submit(0, "x", [1.0] * 4)
    cluster.submit(1, "x", [1.0] * 5, allreduce(5))
    cluster.give(1, 0, next(message for message in drain(cluster, 1, 0) if message[0].operation == mismatched.key[0]))
    lose(cluster, 0, 2)
    assert cluster.completed[0] == []
    cluster.engines[0].close(cluster.now, tell=[1])
    cluster.collect(0)
    assert cluster.completed[0] == [pending, mismatched]
    frames = [header.frame for header, _ in drain(cluster, 0, 1)]
    assert frames.index(Frame.LOST) < frames.index(Frame.GOODBYE)
    cluster.engines[0].tick(1.0)
    cluster.collect(0)
    assert len(cluster.completed[0]) == 2
