"""Subgroups: ranks of their own, names of their own, over the parent's engine."""

import gc
import itertools
import threading
import tracemalloc

import pytest
import torch

import totalreduce as tr
from totalreduce.engine import names, signatures
from totalreduce.testing import run_ranks
from totalreduce.testing.ranks import make_groups

TRANSPORTS = pytest.mark.parametrize("transport", ["inproc", "tcp"])


def test_ranks_are_counted_in_the_order_given() -> None:
    def body(group: tr.Group) -> tuple[int, int, tuple[int, ...], float] | None:
        if group.rank == 0:
            return None
        sub = group.subgroup([3, 1, 2], name="odd one out")
        tensor = torch.tensor([float(group.rank)])
        sub.broadcast(tensor, root=0)
        assert repr(sub) == f"<Group 'test/odd one out' rank {sub.rank} of 3>"
        return sub.rank, sub.world_size, sub.ranks, tensor.item()

    ranks = (3, 1, 2)
    assert run_ranks(4, body) == [None, (1, 3, ranks, 3.0), (2, 3, ranks, 3.0), (0, 3, ranks, 3.0)]


@TRANSPORTS
def test_every_collective_counts_the_subgroups_ranks_only(transport: str) -> None:
    def body(group: tr.Group) -> bool:
        members = [0, 2, 3] if group.rank != 1 else [1]
        sub = group.subgroup(members)
        size, place, mine = len(members), members.index(group.rank), float(group.rank)
        average = torch.full((100,), mine)
        sub.allreduce(average, op=tr.ReduceOp.AVG).wait()
        assert average.unique().item() == pytest.approx(sum(members) / size)
        total = torch.full((3,), mine)
        sub.reduce(total, root=size - 1).wait()
        assert total.tolist() == [float(sum(members)) if place == size - 1 else mine] * 3
        gathered = torch.empty(size)
        sub.allgather(gathered, torch.tensor([mine])).wait()
        assert gathered.tolist() == [float(rank) for rank in members]
        swapped = torch.empty(size)
        sub.alltoall(swapped, torch.arange(float(size)) + 10 * place).wait()
        assert swapped.tolist() == [10.0 * other + place for other in range(size)]
        part = torch.empty(1)
        sub.reduce_scatter(part, torch.arange(float(size)), op=tr.ReduceOp.AVG).wait()
        assert part.item() == place
        assert sub.allgather_object(("rank", group.rank)) == [("rank", rank) for rank in members]
        assert sub.broadcast_object(group.rank, root=size - 1) == members[-1]
        sub.barrier(timeout_s=20)
        plan = sub.plan("steps", [tr.TensorSpec("w", (4,), torch.float32)])
        tensor = torch.full((4,), mine)
        with plan.step() as step:
            step.submit("w", tensor)
        assert tensor.tolist() == [pytest.approx(sum(members) / size)] * 4
        return True

    assert run_ranks(4, body, transport=transport) == [True] * 4


@TRANSPORTS
def test_messages_speak_of_the_subgroups_ranks(transport: str) -> None:
    def body(group: tr.Group) -> list[int] | None:
        if group.rank == 1:
            return None
        sub = group.subgroup([3, 2, 0])
        if sub.rank == 0:
            sources = []
            for _ in range(2):
                tensor = torch.empty(1, dtype=torch.int64)
                work = sub.recv(tensor, src=None, tag=4)
                work.wait()
                assert sub.ranks[work.source] == tensor.item()
                sources.append(work.source)
            return sorted(sources)
        sub.send(torch.tensor([group.rank]), dst=0, tag=4).wait()
        return None

    assert run_ranks(4, body, transport=transport)[3] == [1, 2]


def test_names_of_different_subgroups_do_not_meet() -> None:
    def body(group: tr.Group) -> list[float]:
        rank = group.rank
        pair = [0, 1] if rank < 2 else [2, 3]
        subs = [
            group,
            group.subgroup(pair),
            group.subgroup(pair),
            group.subgroup(pair, name="mine"),
            group.subgroup(pair, name="0"),  # what the first one might be called
            group.subgroup(pair[::-1]),
            group.subgroup(range(4)),
        ]
        values = [torch.tensor([float(10**index)]) for index in range(len(subs))]
        # The same name in all of them at the same time, and operations without one, in opposite orders.
        places = range(len(subs)) if rank % 2 else reversed(range(len(subs)))
        works = {index: subs[index].allreduce(values[index], name="w") for index in places}
        unnamed = [torch.tensor([float(index)]) for index in range(len(subs))]
        places = reversed(range(len(subs))) if rank % 2 else range(len(subs))
        works_unnamed = {index: subs[index].allreduce(unnamed[index]) for index in places}
        for work in (*works.values(), *works_unnamed.values()):
            work.wait(timeout_s=20)
        sizes = [sub.world_size for sub in subs]
        assert [value.item() for value in unnamed] == [float(index * size) for index, size in enumerate(sizes)]
        return [value.item() / 10**index for index, value in enumerate(values)]

    assert run_ranks(4, body) == [[4.0, 2.0, 2.0, 2.0, 2.0, 2.0, 4.0]] * 4


def test_a_subgroup_of_a_subgroup() -> None:
    def body(group: tr.Group) -> tuple[tuple[int, ...], float] | None:
        if group.rank in (0, 2, 4):
            return None
        inner = group.subgroup([4, 3, 2, 1]).subgroup([1, 3])
        return inner.ranks, inner.allreduce(torch.tensor([float(group.rank)])).wait(timeout_s=20).item()

    assert run_ranks(5, body) == [None, ((3, 1), 4.0), None, ((3, 1), 4.0), None]


@TRANSPORTS
def test_overlapping_subgroups_at_the_same_time_in_different_orders(transport: str) -> None:
    """All pairs, all threes: every rank submits in an order of its own and waits in another."""

    def body(group: tr.Group) -> bool:
        rank = group.rank
        memberships = [m for size in (2, 3) for m in itertools.combinations(range(4), size) if rank in m]
        subs = {members: group.subgroup(members) for members in memberships}
        order = memberships[rank:] + memberships[:rank]
        works = {}
        for members in order if rank % 2 else order[::-1]:
            tensor = torch.full((500,), float(rank + 1))
            works[members] = subs[members].allreduce(tensor, name="w", op=tr.ReduceOp.AVG)
        for members in memberships:
            result = works[members].wait(timeout_s=20)
            assert result.unique().item() == pytest.approx(sum(m + 1 for m in members) / len(members))
        return True

    assert run_ranks(4, body, transport=transport) == [True] * 4


def test_a_subgroup_that_is_closed_leaves_the_others_alone() -> None:
    def body(group: tr.Group) -> float:
        sub, other = group.subgroup([0, 1]), group.subgroup([0, 1])
        flushed = []
        sub.at_close(lambda: flushed.append(True))
        sub.close()
        assert flushed == [True]
        for call in (
            lambda: sub.allreduce(torch.ones(1)),
            lambda: sub.send(torch.ones(1), dst=1 - group.rank),
            lambda: sub.recv(torch.ones(1), src=None),
        ):
            with pytest.raises(tr.GroupClosed, match="has closed the subgroup"):
                call()
        return other.allreduce(torch.ones(1)).wait().item() + group.allreduce(torch.ones(1)).wait().item()

    assert run_ranks(2, body) == [4.0, 4.0]


def test_mismatches_and_losses_speak_of_the_whole_groups_ranks() -> None:
    left = threading.Event()

    def body(group: tr.Group) -> tuple[set[int], int] | None:
        if group.rank < 2:
            group.barrier()
            return None
        sub = group.subgroup([2, 3, 4])
        with pytest.raises(tr.MismatchError) as mismatch:
            sub.allreduce(torch.ones(3 if sub.rank == 1 else 2), name="w").wait(timeout_s=20)
        sub.barrier()
        group.barrier()
        if sub.rank == 2:
            group.close()
            left.set()
            return None
        assert left.wait(20)
        with pytest.raises(tr.PeerLost) as lost:
            sub.allreduce(torch.ones(2)).wait(timeout_s=20)
        return set(mismatch.value.ranks), lost.value.rank

    results = run_ranks(5, body)
    for mismatched, lost in results[2:4]:
        assert 3 in mismatched
        assert mismatched <= {2, 3, 4}
        assert lost == 4


def test_ranks_outside_a_subgroup_may_leave() -> None:
    left = threading.Event()

    def body(group: tr.Group) -> float | None:
        group.barrier()
        if group.rank == 2:
            group.close()
            left.set()
            return None
        sub = group.subgroup([0, 1])
        assert left.wait(20)
        return sub.allreduce(torch.ones(1)).wait(timeout_s=20).item()

    assert run_ranks(3, body) == [2.0, 2.0, None]


def test_barriers_of_different_groups_do_not_meet() -> None:
    def body(group: tr.Group) -> bool:
        sub = group.subgroup([0, 1]) if group.rank < 2 else None
        for _ in range(70):
            if sub is not None:
                sub.barrier(timeout_s=20)
        group.barrier(timeout_s=20)
        return True

    assert run_ranks(3, body) == [True] * 3


def test_statistics_are_the_whole_groups() -> None:
    first, second = make_groups(2)
    with first, second:
        subs = [group.subgroup([0, 1]) for group in (first, second)]
        for work in [sub.allreduce(torch.ones(1)) for sub in subs]:
            work.wait()
        assert first.statistics().operations == subs[0].statistics().operations == 1


def test_groups_that_were_closed_leave_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of what is kept for all groups are small, so that the first groups reach them."""
    monkeypatch.setattr(names, "_NEW_RECORDS", 16)
    monkeypatch.setattr(names, "_NEW_RECORDS_MAX", 16)
    monkeypatch.setattr(signatures, "_TEXT_BYTES_MAX", 16 * 1024)
    monkeypatch.setattr(signatures, "_ENDED_MAX", 16)
    taken = 0

    def use_groups(group: tr.Group, numbers: range) -> None:
        for number in numbers:
            sub, tensor = group.subgroup([0, 1], name=f"{number}"), torch.full((3,), float(number))
            sub.barrier()
            sub.allreduce(tensor, name="x").wait()
            sub.broadcast(tensor, name="y")
            assert tensor.eq(2 * number).all()
            message = torch.tensor([7.0])
            work = sub.send(message, dst=1, tag=number) if group.rank == 0 else sub.recv(message, src=0, tag=number)
            work.wait()
            sub.close()
        group.barrier()

    def body(group: tr.Group) -> None:
        nonlocal taken
        use_groups(group, range(20))
        if group.rank == 0:
            gc.collect()
            tracemalloc.start()
        group.barrier()
        use_groups(group, range(20, 80))
        if group.rank == 0:
            gc.collect()
            taken, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        group.barrier()

    run_ranks(2, body, transport="inproc")
    assert taken < 2 * 60 * 1500  # bytes for each group and rank; a record for each name would make it 3,000
