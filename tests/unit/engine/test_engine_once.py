"""Operations whose names are used once: any order, late frames, nothing kept."""

import numpy as np
import pytest
from engines_by_hand import Cluster, allreduce, drain, values_of

from totalreduce.engine import names as names_module
from totalreduce.engine.operation import Operation
from totalreduce.engine.submission import Submission
from totalreduce.foundation.errors import ConfigurationError, MismatchError
from totalreduce.foundation.header import Frame
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature


def submit_once(
    cluster: Cluster, rank: int, once: str, values: list[float], signature: Signature | None = None
) -> Operation:
    data = memoryview(bytearray(np.asarray(values, np.float64).tobytes()))
    submission = Submission(None, signature or allreduce(len(values)), [data], title=f"call {once}", once=once)
    operation = cluster.engines[rank].submit(submission, cluster.now)
    cluster.collect(rank)
    return operation


def what_is_kept(cluster: Cluster, rank: int) -> dict[str, int]:
    engine = cluster.engines[rank]
    names, signatures = engine.table.names, engine._signatures
    return {
        "records": len(names) + len(names.once) + len(names.by_name),
        "told names": len(signatures._names),
        "descriptions": len(signatures._descriptions),
        "early": len(engine.table.early.records),
        "floating": engine.reception.floating.total_bytes,
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_they_meet_in_any_order_and_leave_nothing_behind(world_size: int) -> None:
    cluster = Cluster(world_size)
    orders = [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]]
    operations = []
    for rank in range(world_size):
        made = {index: submit_once(cluster, rank, f"a/{index}", [10.0 * index + rank] * 9) for index in orders[rank]}
        operations.append(made)
        if rank == 0:
            cluster.run()  # its messages float on the others
    cluster.run()
    for made in operations:
        for index, operation in made.items():
            assert operation.name == f"call a/{index}"
            assert values_of(operation) == [world_size * 10.0 * index + sum(range(world_size))] * 9
    for rank in range(world_size):
        assert set(what_is_kept(cluster, rank).values()) == {0}, what_is_kept(cluster, rank)


def reduce(*shape: int) -> Signature:
    return Signature(OpKind.REDUCE, DType.FLOAT64, ReduceOp.SUM, 0, shape)


def test_frames_about_one_that_has_ended_are_late_and_are_not_kept() -> None:
    cluster = Cluster(2)
    early = submit_once(cluster, 1, "x", [7.0] * 4, reduce(4))
    cluster.run()
    assert cluster.completed[1] == [early], "a rank that only sends ends before the root has submitted the reduce"
    root = submit_once(cluster, 0, "x", [1.0] * 4, reduce(4))
    messages = drain(cluster, 0, 1)
    assert Frame.DESCRIBE in [header.frame for header, _ in messages]
    for message in messages:
        cluster.give(0, 1, message)
    cluster.run()
    assert values_of(root) == [8.0] * 4
    assert [set(what_is_kept(cluster, rank).values()) for rank in range(2)] == [{0}, {0}]
    assert cluster.engines[1].table.was_submitted(early.key)


def test_of_those_that_have_ended_a_bounded_number_of_ids_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "_ENDED_ONCE_MAX", 10)
    cluster = Cluster(2)
    keys = []
    for index in range(25):
        operations = [submit_once(cluster, rank, f"n/{index}", [1.0]) for rank in range(2)]
        keys.append(operations[0].key)
        cluster.run()
    names = cluster.engines[0].table.names
    assert len(names._ended_once) == len(names._order_of_ends) == 10
    assert [names.was_submitted(key) for key in keys] == [False] * 15 + [True] * 10


def test_a_name_cannot_be_used_twice() -> None:
    cluster = Cluster(2)
    for rank in range(2):
        submit_once(cluster, rank, "x", [1.0])
    with pytest.raises(ConfigurationError, match="call x: an operation with the same id was submitted before"):
        submit_once(cluster, 0, "x", [1.0])
    cluster.run()
    with pytest.raises(ConfigurationError, match="submitted before"):
        submit_once(cluster, 0, "x", [1.0])
    assert values_of(cluster.completed[0][0]) == [2.0]


def test_a_mismatch_shows_what_they_are_called_on_both_ranks() -> None:
    cluster = Cluster(2)
    operations = [submit_once(cluster, rank, "x", [1.0] * (3 + rank)) for rank in range(2)]
    cluster.run()
    for operation in operations:
        assert isinstance(operation.error, MismatchError)
        assert operation.error.tensor == "call x"
        assert "float64[3]" in str(operation.error)
        assert "float64[4]" in str(operation.error)
    assert set(what_is_kept(cluster, 0).values()) == {0}


def test_a_late_rank_learns_of_a_mismatch_with_one_that_has_ended() -> None:
    cluster = Cluster(2)
    submit_once(cluster, 1, "x", [7.0] * 4, reduce(4))
    cluster.run()
    root = submit_once(cluster, 0, "x", [0.0] * 5, reduce(5))
    cluster.run()
    assert isinstance(root.error, MismatchError)
    assert root.error.tensor == "call x"


def test_the_planner_decides_the_same_for_all_of_them() -> None:
    # Otherwise the order of the additions, and with it the bits of a sum, would depend on the number of the call.
    cluster = Cluster(5, schedules={})
    roots = {
        submit_once(cluster, 0, f"r/{index}", [1.0], allreduce(1, algorithm="star")).program.targets
        for index in range(20)
    }
    assert len(roots) == 1
