"""A rank that is far ahead of another one: it waits for room, and what is kept of it stays within its bound.

Every operation that both ranks have submitted ends.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from engines_by_hand import BARRIER, Cluster, broadcast, drain, values_of

from totalreduce.engine import early
from totalreduce.engine.any_receives import AnyReceive
from totalreduce.engine.operation import Operation
from totalreduce.foundation.errors import MismatchError, ProtocolError
from totalreduce.foundation.header import Flag, Frame, Header

#: Entries that a rank may have at another one in these tests.
ENTRIES = 4


@pytest.fixture(autouse=True)
def few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "PEER_BYTES_MAX", ENTRIES * early.ENTRY_COST)
    monkeypatch.setattr(early, "_HINTS_MAX", ENTRIES)


Begin = Callable[[Cluster, int, int], Operation]


def message(cluster: Cluster, rank: int, number: int) -> Operation:
    return cluster.send(0, 1, [1.0 * number] * 3) if rank == 0 else cluster.receive(0, 1, 3)


def tagged(cluster: Cluster, rank: int, number: int) -> Operation:
    values = [1.0 * number] * (1 + number % 5)
    return cluster.send(0, 1, values, tag=number) if rank == 0 else cluster.receive(0, 1, len(values), tag=number)


def of_changing_size(cluster: Cluster, rank: int, number: int) -> Operation:
    values = [1.0 * number] * (1 + number % 7)
    return cluster.send(0, 1, values) if rank == 0 else cluster.receive(0, 1, len(values))


def metric(cluster: Cluster, rank: int, number: int) -> Operation:
    values = [1.0 * number] * 3 if rank == 0 else [0.0] * 3
    return cluster.submit(rank, f"metric {number}", values, broadcast(3, root=0))


def large_metric(cluster: Cluster, rank: int, number: int) -> Operation:
    values = [1.0 * number] * 40 if rank == 0 else [0.0] * 40
    return cluster.submit(rank, f"metric {number}", values, broadcast(40, root=0))


def total(cluster: Cluster, rank: int, number: int) -> Operation:
    return cluster.submit(rank, f"total {number}", [number - 10.0 * rank, number + 10.0 * rank])


KINDS: dict[str, Begin] = {
    "message": message,
    "tag": tagged,
    "size": of_changing_size,
    "metric": metric,
    "large": large_metric,
    "sum": total,
}
ORDERS = {
    "in order": lambda numbers: numbers,
    "reversed": lambda numbers: numbers[::-1],
    "at random": lambda numbers: random.Random(5).sample(numbers, len(numbers)),
}
#: Messages of one name are received in the order in which they were sent.
IN_ORDER_ONLY = {"message", "size"}
WAYS = [(kind, order) for kind in KINDS for order in ORDERS if kind not in IN_ORDER_ONLY or order == "in order"]


@pytest.mark.parametrize("floating_bytes", [1, 4000, 100_000])
@pytest.mark.parametrize(("kind", "order"), WAYS)
def test_every_operation_that_both_ranks_have_submitted_ends(kind: str, order: str, floating_bytes: int) -> None:
    cluster = Cluster(2, floating_bytes_max=floating_bytes, eager_bytes=128)
    begin, numbers = KINDS[kind], list(range(40))
    ahead = [begin(cluster, 0, number) for number in numbers]
    cluster.run()
    sender, receiver = cluster.engines
    assert receiver.table.early.allowance.used(0) <= ENTRIES * early.ENTRY_COST
    assert len(receiver.table.early.records) <= 2 * ENTRIES
    for number in ORDERS[order](numbers):
        late = begin(cluster, 1, number)
        cluster.run()
        assert late.finished, f"{kind} {number}"
        assert ahead[number].finished
        assert late.error is None
        expected = [1.0 * number] * len(values_of(late)) if kind != "sum" else [2.0 * number - 10, 2.0 * number + 10]
        assert values_of(late) == expected
    assert not sender._entries.waiting
    assert not receiver._rendezvous.asking
    assert not receiver.table.early.records
    # What the sender has used came back, or will come back.
    for allowance, used in (
        (receiver.table.early.allowance, sender._entries._used),
        (receiver.reception.floating.allowance, sender._rendezvous._used),
    ):
        assert allowance.used(0) == 0
        assert allowance.take_credit(0) == used.get(1, 0)


def frames_of(cluster: Cluster, source: int, target: int) -> list[tuple[Frame, int, int]]:
    """What leaves now: the frame, the flags and the id of the operation; nothing of it arrives."""
    return [(header.frame, header.flags, header.operation) for header, _ in drain(cluster, source, target)]


def test_frames_wait_in_order_and_leave_by_credit() -> None:
    cluster = Cluster(2)
    ahead = [cluster.send(0, 1, [1.0], tag=number) for number in range(ENTRIES + 3)]
    ids = [operation.key[0] for operation in ahead]
    sent = frames_of(cluster, 0, 1)
    assert sent[:ENTRIES] == [(Frame.DESCRIBE, Flag.EAGER, op_id) for op_id in ids[:ENTRIES]]
    assert sent[ENTRIES : ENTRIES + 3] == [(Frame.REQUEST, Flag.NONE, op_id) for op_id in ids[ENTRIES:]]
    # Their messages wait, too: otherwise the sender could be ahead without end.
    assert {op_id for frame, _, op_id in sent if frame is Frame.DATA} == set(ids[:ENTRIES])
    assert [operation.finished for operation in ahead] == [True] * ENTRIES + [False] * 3
    rendezvous = cluster.engines[0]._rendezvous
    rendezvous.on_credit(1, 0, 2 * early.ENTRY_COST)
    described = [(Frame.DESCRIBE, Flag.EAGER, op_id) for op_id in ids[ENTRIES : ENTRIES + 2]]
    data = [(Frame.DATA, Flag.EAGER, op_id) for op_id in ids[ENTRIES : ENTRIES + 2]]
    assert frames_of(cluster, 0, 1) == described + data
    rendezvous.on_posted(1, ahead[-1].key)  # what the peer has submitted needs no allowance
    last = [(Frame.DESCRIBE, Flag.NONE, ids[-1]), (Frame.REQUEST, Flag.NONE, 0), (Frame.DATA, Flag.NONE, ids[-1])]
    assert frames_of(cluster, 0, 1) == last
    assert not cluster.engines[0]._entries.waiting


def test_a_peer_is_asked_once_about_each_operation() -> None:
    """However often allowance comes back, and however many messages are held."""
    cluster = Cluster(2, floating_bytes_max=4000, eager_bytes=256)
    for number in range(60):
        cluster.send(0, 1, [1.0 * number] * 100)
    asked = Counter(op_id for frame, _, op_id in frames_of(cluster, 0, 1) if frame is Frame.REQUEST)
    assert sum(asked.values()) == 60
    engine = cluster.engines[0]
    for _ in range(10):
        engine._rendezvous.on_credit(1, engine._rendezvous._used[1], 0)
        again = frames_of(cluster, 0, 1)
        assert Frame.REQUEST not in {frame for frame, _, _ in again}


def test_messages_that_wait_for_room_leave_by_credit_before_they_are_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each would take a whole turn between the ranks."""
    monkeypatch.setattr(early, "PEER_BYTES_MAX", 100 * early.ENTRY_COST)
    monkeypatch.setattr(early, "_HINTS_MAX", 100)
    cluster = Cluster(2, floating_bytes_max=8000, eager_bytes=256)
    for number in range(10):
        cluster.send(0, 1, [1.0 * number] * 25)
    cluster.run()
    floating = cluster.engines[1].reception.floating
    num_floating = len(floating)
    assert 2 <= num_floating < 10
    for number in range(3):
        received = cluster.receive(0, 1, 25)
        cluster.run()
        assert values_of(received) == [1.0 * number] * 25
        assert len(floating) >= num_floating - 1


def test_of_several_frames_about_an_operation_that_wait_the_first_one_uses_the_allowance() -> None:
    """As the receiver counts them: it makes one entry of an operation."""
    cluster = Cluster(2, eager_bytes=1)
    ahead = [cluster.send(0, 1, [1.0 * number] * 3) for number in range(ENTRIES + 2)]
    engine = cluster.engines[0]
    frames_of(cluster, 0, 1)
    engine._signatures.describe_late(ahead[ENTRIES:])  # as the stall watch does
    op_id = ahead[0].key[0]
    engine._rendezvous.on_credit(1, 0, early.ENTRY_COST)
    first, *others = frames_of(cluster, 0, 1)
    assert (first, others[0]) == ((Frame.REQUEST, Flag.EAGER, op_id), (Frame.DESCRIBE, Flag.NONE, op_id))
    assert {flags for _, flags, _ in others} == {Flag.NONE}
    engine._rendezvous.on_posted(1, ahead[-1].key)  # this answers the request that waits
    left = [frame for frame in frames_of(cluster, 0, 1) if frame[0] is not Frame.DATA]
    assert left == [(Frame.DESCRIBE, Flag.NONE, op_id), (Frame.REQUEST, Flag.NONE, 0)]


def test_nothing_is_asked_while_nobody_is_ahead() -> None:
    """Small operations that are submitted at nearly the same time cost no control frame."""
    cluster = Cluster(2)
    for turn in range(40):
        for rank in (turn % 2, 1 - turn % 2):
            total(cluster, rank, 0)
            if turn:
                for peer in (0, 1):
                    for header, body in drain(cluster, peer, 1 - peer):
                        assert header.frame is Frame.DATA
                        cluster.give(peer, 1 - peer, (header, body))
        cluster.run()


@pytest.mark.parametrize("floating_bytes", [1, 100_000])
@pytest.mark.parametrize("waiting", [False, True], ids=["received later", "received before"])
def test_a_receive_from_anybody_takes_a_message_whose_announcement_waits(*, waiting: bool, floating_bytes: int) -> None:
    cluster = Cluster(3, floating_bytes_max=floating_bytes)

    def receive() -> list[AnyReceive]:
        receives = [cluster.receive_any(1, 2, tag=99) for _ in range(3)]
        cluster.run()
        return receives

    receives = receive() if waiting else []
    ahead = [cluster.send(0, 1, [1.0 * number], tag=number) for number in range(20)]
    cluster.run()
    last = [cluster.send(0, 1, [7.0 + turn] * 2, tag=99) for turn in range(2)]
    cluster.run()
    receives = receives or receive()
    completed = [operation for operation in cluster.completed[1] if isinstance(operation, Operation)]
    taken = {operation.owner: values_of(operation) for operation in completed}
    assert [taken.get(receive) for receive in receives] == [[7.0, 7.0], [8.0, 8.0], None]
    assert all(operation.finished for operation in last)
    last.append(cluster.send(0, 1, [9.0, 9.0], tag=99))
    cluster.run()
    assert values_of(cluster.completed[1][-1]) == [9.0, 9.0]
    assert cluster.completed[1][-1].owner is receives[2]
    for number in reversed(range(20)):
        late = cluster.receive(0, 1, 1, tag=number)
        cluster.run()
        assert values_of(late) == [1.0 * number]
    assert all(operation.finished for operation in ahead)


def test_a_mismatch_of_an_operation_whose_frames_wait_is_reported() -> None:
    cluster = Cluster(2)
    ahead = [total(cluster, 0, number) for number in range(20)]
    cluster.run()
    late = cluster.submit(1, "total 19", [1.0] * 3)
    cluster.run()
    for operation in (ahead[19], late):
        assert isinstance(operation.error, MismatchError)
        assert operation.error.tensor == "total 19"
    for number in range(19):
        assert values_of(total(cluster, 1, number))
        cluster.run()
    assert [operation.error for operation in ahead[:19]] == [None] * 19


def test_a_late_rank_learns_of_every_operation_that_has_failed() -> None:
    """Two ranks disagree about more operations than the third one keeps entries of."""
    cluster = Cluster(3)
    for number in range(30):
        failed = [cluster.submit(rank, f"w{number}", [1.0] * (2 + rank)) for rank in (0, 2)]
        cluster.run()
        assert all(isinstance(operation.error, MismatchError) for operation in failed)
    assert cluster.engines[1].table.early.allowance.used(0) <= ENTRIES * early.ENTRY_COST
    for number in reversed(range(30)):
        late = cluster.submit(1, f"w{number}", [1.0] * 2)
        cluster.run()
        assert isinstance(late.error, MismatchError)
    assert not cluster.engines[0]._entries.waiting
    assert not cluster.engines[2]._entries.waiting


def test_what_waits_for_a_rank_that_leaves_is_forgotten() -> None:
    cluster = Cluster(2)
    ahead = [tagged(cluster, 0, number) for number in range(20)]
    cluster.run()
    cluster.engines[1].close(0.0, tell=[0])
    cluster.run()
    assert [operation.error is None for operation in ahead] == [True] * ENTRIES + [False] * 16
    assert not cluster.engines[0]._entries.waiting


def test_barriers_of_a_rank_that_is_ahead() -> None:
    cluster = Cluster(3)
    names = [f"barrier {number}" for number in range(20)]
    barriers = [cluster.submit(0, name, (), BARRIER) for name in names]
    cluster.run()
    for name, barrier in reversed([*zip(names, barriers, strict=True)]):
        assert not barrier.finished
        others = [cluster.submit(rank, name, (), BARRIER) for rank in (1, 2)]
        cluster.run()
        assert all(operation.finished for operation in (barrier, *others))


def test_a_peer_that_returns_entries_which_it_has_not_got_is_refused() -> None:
    cluster = Cluster(2)
    with pytest.raises(ProtocolError, match="rank 0 gave back 5 bytes of an allowance of which 0 are used"):
        cluster.give(0, 1, (Header(Frame.CREDIT, 0, 0, 5), b""))


def test_frames_without_allowance_are_forgotten() -> None:
    """A hostile peer cannot have anything kept beyond its allowance by saying that it uses none."""
    cluster = Cluster(2)
    engine = cluster.engines[1]
    bodies = {Frame.DESCRIBE: b'{"name": "w", "is": "?"}', Frame.REQUEST: b"", Frame.LOST: b'{"rank": 0}'}
    for number in range(100):
        for frame, body in bodies.items():
            cluster.give(0, 1, (Header(frame, 0, 1000 + number, body_bytes=len(body)), body))
    assert not engine.table.early.records
    assert engine.members.lost is None
