"""A program gets an error when the frames that tell the other ranks of it have left, and each rank passes a loss on."""

from __future__ import annotations

import json

import pytest
from rack import Rack, allreduce, drain

from totalreduce.engine.operation import Operation
from totalreduce.foundation.errors import MismatchError, PeerLost
from totalreduce.foundation.header import Frame

ENDED = "its connection ended"


def connected_rack(world_size: int) -> Rack:
    """Ranks that are all connected with each other."""
    rack = Rack(world_size)
    for engine in rack.engines:
        engine.telling.connected = lambda: range(world_size)
    return rack


def lose(rack: Rack, rank: int, lost: int) -> None:
    rack.engines[rank].peer_lost(lost, ENDED, rack.now)
    rack.collect(rank)


def reports(rack: Rack, source: int, target: int) -> list[dict[str, object]]:
    """Let everything leave; return the reports of a loss among it."""
    return [json.loads(body) for header, body in drain(rack, source, target) if header.frame is Frame.LOST]


def assert_lost(operation: Operation, rank: int) -> None:
    assert isinstance(operation.error, PeerLost)
    assert operation.error.rank == rank


def test_operations_fail_when_the_reports_have_left() -> None:
    rack = connected_rack(4)
    pending = rack.submit(1, "pending")
    lose(rack, 1, 3)
    late = rack.submit(1, "late")  # nor is it refused: that would be the same error
    assert len(reports(rack, 1, 0)) == 1
    assert rack.completed[1] == []
    messages = []
    while (message := rack.begin_sending(1, 2)) is not None:
        messages.append(message)
    assert rack.completed[1] == []  # the transport has not taken them completely
    for message in messages:
        rack.end_sending(1, message)
    assert rack.completed[1] == [pending, late]
    assert_lost(pending, 3)
    assert_lost(late, 3)
    with pytest.raises(PeerLost, match=f"rank 3 is lost: {ENDED}"):
        rack.submit(1, "next")


def test_a_rank_passes_a_report_on_once_before_its_own_operations_fail() -> None:
    rack = connected_rack(5)
    pending = rack.submit(0, "w")
    lose(rack, 1, 4)
    report = rack.take(1, 0)
    rack.give(1, 0, report)
    rack.give(1, 0, report)
    assert rack.completed[0] == []
    assert [reports(rack, 0, target) for target in (1, 4)] == [[], []]
    assert [reports(rack, 0, target) for target in (2, 3)] == [[{"rank": 4, "reason": ENDED, "reporter": 1}]] * 2
    assert rack.completed[0] == [pending]
    assert str(pending.error) == f"rank 4 is lost: {ENDED} (reported by rank 1)"
    rack.give(1, 0, report)
    lose(rack, 0, 2)
    assert reports(rack, 0, 3) == []


def test_a_report_is_passed_on_to_connected_ranks_only() -> None:
    rack = Rack(4)
    rack.engines[0].telling.connected = lambda: (1, 2)
    lose(rack, 1, 3)
    assert len(reports(rack, 1, 2)) == 1  # the rank that has found the loss tells all
    rack.give(1, 0, rack.take(1, 0))
    assert len(reports(rack, 0, 2)) == 1
    assert rack.engines[0].outbox.ready == set()


def test_a_rank_that_does_not_read_is_waited_for_a_quarter_of_a_second() -> None:
    rack = connected_rack(3)
    pending = rack.submit(0, "w")
    lose(rack, 0, 2)
    for now in (0.1, 0.24):
        rack.engines[0].tick(now)
        rack.collect(0)
        assert rack.completed[0] == []
    rack.engines[0].tick(0.25)
    rack.collect(0)
    assert rack.completed[0] == [pending]
    assert len(reports(rack, 0, 1)) == 1  # it gets the report as soon as it reads


def test_a_rank_that_ends_meanwhile_is_neither_waited_for_nor_blamed() -> None:
    rack = connected_rack(3)
    pending = rack.submit(0, "w")
    lose(rack, 0, 2)
    lose(rack, 0, 1)
    assert rack.completed[0] == [pending]
    assert_lost(pending, 2)


def test_a_rank_that_leaves_because_of_the_loss_is_neither_waited_for_nor_blamed() -> None:
    rack = connected_rack(3)
    pending = [rack.submit(rank, "w") for rank in range(2)]
    lose(rack, 0, 2)
    lose(rack, 1, 2)
    rack.engines[1].close(rack.now, tell=[0])
    for message in drain(rack, 1, 0):
        rack.give(1, 0, message)
    assert rack.completed[0] == [pending[0]]
    assert_lost(pending[0], 2)


def test_nothing_begins_in_the_carrier_while_the_others_are_told() -> None:
    """The engine could not fail an operation that only the carrier knows."""
    rack = connected_rack(3)
    operation = rack.submit(0, "w")
    lose(rack, 0, 2)
    assert rack.engines[0].begin_again(operation.layout, operation.key[0]) is None


def test_a_disagreement_reaches_the_program_when_the_others_are_told() -> None:
    rack = connected_rack(3)
    mine, theirs = rack.submit(0, "w", [1.0] * 4), rack.submit(1, "w", [1.0] * 5, allreduce(5))
    described = next(message for message in drain(rack, 1, 0) if message[0].frame is Frame.DESCRIBE)
    rack.give(1, 0, described)
    assert rack.engines[0].table.num_active == 0
    assert rack.completed[0] == []
    for target in (1, 2):
        frames = [header.frame for header, _ in drain(rack, 0, target)]
        assert Frame.MISMATCH in frames
        assert rack.completed[0] == ([mine] if target == 2 else [])
    assert isinstance(mine.error, MismatchError)
    assert theirs.error is None
    # The group goes on, and the name with it.
    again = [rack.submit(rank, "w", [2.0] * 4) for rank in (0, 2)]
    assert not any(operation.finished for operation in again)


def test_a_group_that_is_closed_while_the_others_are_told_fails_everything_at_once() -> None:
    rack = connected_rack(3)
    pending = rack.submit(0, "w")
    mismatched = rack.submit(0, "x", [1.0] * 4)
    rack.submit(1, "x", [1.0] * 5, allreduce(5))
    rack.give(1, 0, next(message for message in drain(rack, 1, 0) if message[0].operation == mismatched.key[0]))
    lose(rack, 0, 2)
    assert rack.completed[0] == []
    rack.engines[0].close(rack.now, tell=[1])
    rack.collect(0)
    assert rack.completed[0] == [pending, mismatched]
    frames = [header.frame for header, _ in drain(rack, 0, 1)]
    assert frames.index(Frame.LOST) < frames.index(Frame.GOODBYE)
    rack.engines[0].tick(1.0)
    rack.collect(0)
    assert len(rack.completed[0]) == 2
