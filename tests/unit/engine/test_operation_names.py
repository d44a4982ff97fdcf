"""Names of operations, and what is kept of those that are not in use."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from engines_by_hand import Cluster, broadcast, values_of

from totalreduce.engine import names as names_module
from totalreduce.engine.names import NameTable
from totalreduce.engine.operation import Operation
from totalreduce.foundation.errors import ConfigurationError, MismatchError
from totalreduce.foundation.types import operation_id
from totalreduce.kernels.counts import Counts


@pytest.fixture
def few_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table looks for idle names after four new records, and always so."""
    monkeypatch.setattr(names_module, "_NEW_RECORDS", 4)
    monkeypatch.setattr(names_module, "_NEW_RECORDS_MAX", 4)


def test_a_table_of_counts_is_like_a_dictionary() -> None:
    table, expected, generator = Counts(), {0: 5, 2**64 - 1: 2**32 - 1, 2**63: 0}, random.Random(3)
    table.update(expected)
    for _ in range(50):
        new = {generator.getrandbits(64): generator.getrandbits(32) for _ in range(generator.randrange(30))}
        new |= dict.fromkeys(generator.sample([*expected], 3), generator.getrandbits(32))
        table.update(new)
        expected |= new
        assert len(table) == len(expected)
    assert {op_id: table.get(op_id) for op_id in expected} == expected
    for _ in range(100):
        other = generator.getrandbits(64)
        assert table.get(other) == expected.get(other)


@pytest.mark.usefixtures("few_records")
def test_how_often_a_name_was_submitted_is_never_forgotten() -> None:
    table, generator, expected = NameTable(()), random.Random(7), dict.fromkeys(range(100), 0)
    for _ in range(3000):
        name = min(generator.randrange(100), generator.randrange(100))
        record = table.record("", str(name))
        assert (record.name, record.next_iteration) == (str(name), expected[name])
        record.next_iteration = expected[name] = expected[name] + generator.randrange(3)
        assert len(table) <= 13
    for name, count in expected.items():
        op_id = operation_id(f"n:{name}")
        assert not table.was_submitted((op_id, count))
        assert not count or table.was_submitted((op_id, count - 1))


@pytest.mark.usefixtures("few_records")
def test_names_in_use_keep_their_records() -> None:
    in_flight = {(operation_id("n:in flight"), 0): None}
    table = NameTable(in_flight.keys())
    flying, used, idle = (table.record("", name) for name in ("in flight", "used", "idle"))
    for index in range(50):
        used.next_iteration += 1
        table.record("", f"other {index}")
    assert table.record("", "in flight") is flying
    assert table.record("", "used") is used
    assert table.get(idle.op_id) is None
    assert table.get(flying.op_id) is flying


def test_names_that_are_used_in_turn_keep_their_records_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each of them would be described to the peers again and again."""
    monkeypatch.setattr(names_module, "_NEW_RECORDS", 4)
    table = NameTable(())
    for _ in range(20):
        records = []
        for name in range(50):
            records.append(table.record("", str(name)))
            records[-1].next_iteration += 1
    again = [table.record("", str(name)) for name in range(50)]
    assert all(new is old for new, old in zip(again, records, strict=True))
    assert {record.next_iteration for record in again} == {20}


@pytest.mark.usefixtures("few_records")
@pytest.mark.parametrize(("are_in_flight", "num_looks_max"), [(True, 30), (False, 500)])
def test_looks_for_idle_names_become_rarer_with_the_number_of_names(
    monkeypatch: pytest.MonkeyPatch, *, are_in_flight: bool, num_looks_max: int
) -> None:
    """A look goes through all records and merges the idle names: at a fixed distance, their cost would be quadratic."""
    looks, look = [], NameTable._give_up_idle_records
    monkeypatch.setattr(NameTable, "_give_up_idle_records", lambda table: (looks.append(len(table)), look(table)))
    in_flight: dict[tuple[int, int], None] = {}
    table = NameTable(in_flight.keys())
    for name in range(4000):
        record = table.record("", str(name))
        if are_in_flight:
            in_flight[record.op_id, 0] = None
    assert 5 < len(looks) <= num_looks_max  # always after four new names there would be a thousand


def test_too_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "_NAMES_MAX", 20)
    monkeypatch.setattr(names_module, "_NEW_RECORDS", 4)
    table = NameTable(())
    for name in range(20):
        table.record("", str(name)).next_iteration = 1
    assert table.record("", "0").next_iteration == 1
    with pytest.raises(ConfigurationError, match="20 different names in one group: reuse names, one per tensor"):
        table.record("", "one more")


def use_up(cluster: Cluster, rank: int) -> None:
    """Have one rank give up the records of all names that are not in flight."""
    names = cluster.engines[rank].table.names
    for index in range(12):
        names.record("", f"{rank}, {len(names)}, {index}")


@pytest.mark.usefixtures("few_records")
@pytest.mark.parametrize("givers", [(), (0,), (1,), (0, 1)])
def test_messages_of_names_that_were_given_up(givers: tuple[int, ...]) -> None:
    """By the sender, by the receiver, or by both; also while a message floats."""
    cluster = Cluster(2)
    for turn in range(5):
        sent = cluster.send(0, 1, [float(turn)] * 2, tag=9)
        if turn % 2:
            cluster.run()
        for rank in givers:
            use_up(cluster, rank)
            assert cluster.engines[rank].table.names.get(sent.key[0]) is None or not sent.finished
        received = cluster.receive(0, 1, 2, tag=9)
        cluster.run()
        assert values_of(received) == [float(turn)] * 2
        assert received.key[1] == turn


@pytest.mark.usefixtures("few_records")
@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_receive_from_anybody_of_a_name_that_was_given_up(*, is_waiting: bool) -> None:
    cluster = Cluster(2)
    for turn in range(5):
        if is_waiting:
            cluster.receive_any(1, 1, tag=4)
        for rank in (0, 1):
            use_up(cluster, rank)
        cluster.send(0, 1, [float(turn)], tag=4)
        cluster.run()
        if not is_waiting:
            use_up(cluster, 1)
            cluster.receive_any(1, 1, tag=4)
            cluster.run()
        last = cluster.completed[1][-1]
        assert isinstance(last, Operation)
        assert (values_of(last), last.key[1]) == ([float(turn)], turn)


@pytest.mark.usefixtures("few_records")
def test_a_late_message_of_a_name_that_was_given_up_is_dropped() -> None:
    """Its operation has failed here, and its allowance goes back."""
    cluster = Cluster(2)
    sent = cluster.send(0, 1, [1.0] * 3)
    failed = cluster.receive(0, 1, 2)
    cluster.give(0, 1, cluster.take(0, 1))  # the description
    assert isinstance(failed.error, MismatchError)
    use_up(cluster, 1)
    engine = cluster.engines[1]
    assert engine.table.names.get(sent.key[0]) is None
    assert engine.table.was_submitted(sent.key)
    cluster.run()
    assert engine.counters.dropped_messages == 1
    assert engine.reception.floating.allowance.used(0) == 0
    again = [cluster.send(0, 1, [5.0]), cluster.receive(0, 1, 1)]
    cluster.run()
    assert [values_of(operation) for operation in again] == [[5.0], [5.0]]


@pytest.mark.usefixtures("few_records")
def test_a_mismatch_with_an_operation_whose_name_was_given_up_is_reported() -> None:
    cluster = Cluster(2)
    cluster.submit(0, "metric", [1.0] * 2, broadcast(2, root=0))
    cluster.run()
    use_up(cluster, 0)
    late = cluster.submit(1, "metric", [0.0] * 3, broadcast(3, root=0))
    cluster.run()
    assert isinstance(late.error, MismatchError)
    assert late.error.tensor == "metric"


@pytest.mark.usefixtures("few_records")
def test_an_operation_whose_name_was_given_up_is_submitted_to_the_engine() -> None:
    cluster = Cluster(1)
    operation = cluster.submit(0, "w", [1.0])
    engine, op_id = cluster.engines[0], operation.key[0]
    assert engine.carrying.begin_again(operation.layout, op_id) == (op_id, 1)
    use_up(cluster, 0)
    assert engine.carrying.begin_again(operation.layout, op_id) is None
    assert cluster.submit(0, "w", [1.0]).key == (op_id, 2)


def test_names_that_are_not_used_again_take_little_memory() -> None:
    """A record takes 750 bytes; 20,000 of them would take 15 MB."""
    table = NameTable(())
    tracemalloc.start()
    for index in range(20_000):
        table.record("message/", f"{index}").next_iteration = 1
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(table) < 10_000
    assert taken < 7 * 2**20
