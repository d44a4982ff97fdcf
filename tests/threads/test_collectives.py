"""Every collective as its user calls it: what is wrong here, what ranks disagree about, what forms tensors may have.

What comes out of them is the conformance suite's business.
"""

import re
import threading
import time

import pytest
import torch

import totalreduce as tr
from totalreduce.testing import run_ranks
from totalreduce.testing.ranks import make_groups


def blocks(*sizes: int, value: float = 1.0) -> list[torch.Tensor]:
    return [torch.full((size,), value) for size in sizes]


# ------------------------------------------------------------------------------------------------------------ mismatch

ROOT = 1
#: (submit, sizes of the odd rank, who raises in any case). The others may be done before anybody could tell them.
KINDS = {
    "allreduce": (lambda g, n: g.allreduce(torch.ones(n), name="w"), {0, 1, 2}),
    "allreduce by star": (lambda g, n: g.allreduce(torch.ones(n), name="w", schedule="star"), {0, 1, 2}),
    "allreduce by tree": (lambda g, n: g.allreduce(torch.ones(n), name="w", schedule="tree"), {0, 1, 2}),
    "reduce": (lambda g, n: g.reduce(torch.ones(n), root=ROOT, name="w"), {ROOT}),
    "broadcast": (lambda g, n: g.broadcast(torch.ones(n), root=ROOT, name="w", async_op=True), {ROOT}),
    "allgather": (lambda g, n: g.allgather(blocks(n, n, n), torch.ones(n), name="w"), {0, 1, 2}),
    "reduce_scatter": (lambda g, n: g.reduce_scatter(torch.ones(n), blocks(n, n, n), name="w"), {0, 1, 2}),
    "alltoall": (lambda g, n: g.alltoall(blocks(n, n, n), blocks(n, n, n), name="w"), {0, 1, 2}),
    "gather": (
        lambda g, n: g.gather(blocks(n, n, n) if g.rank == ROOT else None, torch.ones(n), root=ROOT, name="w"),
        {ROOT},
    ),
    "scatter": (
        lambda g, n: g.scatter(torch.ones(n), blocks(n, n, n) if g.rank == ROOT else None, root=ROOT, name="w"),
        set(),
    ),
}


@pytest.mark.parametrize("sizes", [(6, 5), (6, 0), (3, 90_000), (400_000, 6)])
@pytest.mark.parametrize("transport", ["inproc", "tcp"])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_differ(kind: str, transport: str, sizes: tuple[int, int]) -> None:
    submit, must_raise = KINDS[kind]
    usual, odd = sizes

    def body(group: tr.Group) -> tr.MismatchError | None:
        caught: tr.MismatchError | None = None
        try:
            submit(group, odd if group.rank == 2 else usual).wait(timeout_s=20)
        except tr.MismatchError as error:
            caught = error
        for _ in range(2):
            submit(group, usual).wait(timeout_s=20)
        group.barrier(timeout_s=20)
        assert group.statistics().floating_bytes == 0
        return caught

    errors = run_ranks(3, body, transport=transport)
    for rank, error in enumerate(errors):
        assert error is not None or rank not in must_raise, f"rank {rank} has not noticed"
        if error is not None:
            assert error.tensor == "w"
            by_rank = dict(zip(error.ranks, error.values, strict=True))
            assert 2 in by_rank
            assert len(set(error.values)) == 2
    # Where only a pair knows a size, at least the one that receives it raises.
    assert any(errors[rank] is not None for rank in (ROOT, 2))


@pytest.mark.parametrize("late", [None, 0], ids=["together", "rank 0 late"])
@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        (lambda g: g.reduce(torch.ones(4), root=0, name="w"), lambda g: g.reduce(torch.ones(4), root=1, name="w")),
        (lambda g: g.reduce(torch.ones(4), name="w"), lambda g: g.reduce(torch.ones(4), name="w", op=tr.ReduceOp.MAX)),
        (lambda g: g.allreduce(torch.ones(4), name="w"), lambda g: g.reduce(torch.ones(4), root=2, name="w")),
        (
            lambda g: g.allreduce(torch.ones(4), name="w", schedule="ring"),
            lambda g: g.allreduce(torch.ones(4), name="w", schedule="tree"),
        ),
        (
            lambda g: g.allgather(blocks(1, 2, 3), torch.ones(g.rank + 1), name="w"),
            lambda g: g.allgather(blocks(3, 2, 3), torch.ones(g.rank + 1), name="w"),
        ),
        (
            lambda g: g.allgather(blocks(2, 2, 2), torch.ones(2), name="w"),
            lambda g: g.allgather([b.int() for b in blocks(2, 2, 2)], torch.ones(2, dtype=torch.int32), name="w"),
        ),
        (
            lambda g: g.broadcast(torch.ones(4, dtype=torch.complex64), name="w", async_op=True),
            lambda g: g.broadcast(torch.ones(4, dtype=torch.complex128), name="w", async_op=True),
        ),
    ],
    ids=["root", "reduction", "kind", "schedule", "sizes of blocks", "dtype", "complex dtype"],
)
def test_other_things_that_differ(usual, odd, late: int | None) -> None:
    """Also if the others are done with this and what follows when rank 0, which waits for them, begins."""

    def body(group: tr.Group) -> bool:
        raised = False
        if group.rank == late:
            time.sleep(0.3)
        work = odd(group) if group.rank == 2 else usual(group)
        try:
            work.wait(timeout_s=20)
        except tr.MismatchError:
            raised = True
        for _ in range(2):
            usual(group).wait(timeout_s=20)
        group.barrier(timeout_s=20)
        return raised

    raised = run_ranks(3, body)
    assert raised[0] or raised[2]


# ------------------------------------------------------------------------------------------------------- bad arguments

ONE, TWO = torch.ones(1), torch.ones(2)
BAD = {
    "fewer outputs": (lambda g: g.allgather([ONE], ONE), "outputs must be 2 tensors, one per rank, not 1"),
    "outputs that do not divide": (lambda g: g.allgather(torch.ones(3), ONE), "3 elements, which do not divide into 2"),
    "a whole that is not contiguous": (lambda g: g.allgather(torch.ones(2, 2).t(), TWO), "outputs must be contiguous"),
    "another dtype": (lambda g: g.allgather([ONE.int(), ONE.int()], ONE), "block 0 is torch.int32, but the tensor is"),
    "a block that is too large": (lambda g: g.allgather([TWO, TWO], ONE), r"outputs\[0\] and the tensor must be equal"),
    "a block that is no tensor": (lambda g: g.allgather([ONE, 1.0], ONE), "block 1' is a float, not a torch.Tensor"),
    "a block elsewhere": (
        lambda g: g.alltoall([ONE, torch.empty(1, device="meta")], [ONE, ONE]),
        "block 3' is on meta and has no values",
    ),
    "an expanded output": (lambda g: g.scatter(ONE.expand(3), [ONE.expand(3)] * 2), "several elements share memory"),
    "fewer inputs": (lambda g: g.reduce_scatter(ONE, [ONE] * 3), "inputs must be 2 tensors, one per rank, not 3"),
    "inputs of another size": (
        lambda g: g.reduce_scatter(TWO, [ONE, ONE]),
        r"inputs\[0\] and the tensor must be equal",
    ),
    "a sum of complex numbers": (
        lambda g: g.reduce_scatter(ONE.to(torch.complex64), [ONE.to(torch.complex64)] * 2),
        "has dtype torch.complex64; it must be one of",
    ),
    "bits of floats": (lambda g: g.reduce(ONE, op=tr.ReduceOp.BXOR), "BXOR of float32 is not defined"),
    "no outputs on the root": (lambda g: g.gather(None, ONE), r"the root \(rank 0\) must pass outputs: 2 tensors"),
    "outputs elsewhere": (lambda g: g.gather([ONE, ONE], ONE, root=1), r"outputs are for the root \(rank 1\) only"),
    "no inputs on the root": (lambda g: g.scatter(ONE, None), r"the root \(rank 0\) must pass inputs: 2 tensors"),
    "inputs elsewhere": (lambda g: g.scatter(ONE, [ONE, ONE], root=1), r"inputs are for the root \(rank 1\) only"),
    "unequal blocks for oneself": (lambda g: g.alltoall([ONE, ONE], [TWO, ONE]), r"inputs\[0\] and outputs\[0\] must"),
    "a root that there is not": (lambda g: g.reduce(ONE, root=2), "root 2 is no rank of a group of 2"),
    "a negative root": (lambda g: g.gather(None, ONE, root=-1), "root -1 is no rank"),
    "a message to oneself": (lambda g: g.send(ONE, dst=0), "0 is not another rank than 0"),
    "a message to nobody": (lambda g: g.send(ONE, dst=2), "2 is not another rank than 0 of a group of 2"),
    "a message from nobody": (lambda g: g.recv(ONE, src=5), "5 is not another rank"),
    "a schedule nobody knows": (lambda g: g.allreduce(ONE, schedule="carrier pigeon"), "'carrier pigeon' is not known"),
    "another kind's schedule": (
        lambda g: g.reduce(ONE, schedule="ring"),
        "reduce has no schedule 'ring'; there is tree, chain",
    ),
    "a number as schedule": (lambda g: g.allreduce(ONE, schedule=1), "schedule 1 is not known"),
    "no time": (lambda g: g.alltoall([ONE, ONE], [ONE, ONE], timeout_s=-1.0), "timeout_s must be positive"),
    "a priority out of range": (lambda g: g.recv(ONE, src=None, priority=2**31), "does not fit into 32 bits"),
    "ranks twice": (lambda g: g.subgroup([0, 0]), r"\[0, 0\] are not different ranks"),
    "ranks that there are not": (lambda g: g.subgroup([0, 2]), r"\[0, 2\] are not different ranks of a group of 2"),
    "a subgroup of others": (lambda g: g.subgroup([1]), r"rank 0 is not among \[1\]"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_mistakes_are_found_where_they_are_made(mistake: str) -> None:
    call, match = BAD[mistake]
    first, second = make_groups(2)
    with first, second:
        with pytest.raises(tr.ConfigurationError, match=match):
            call(first)
        works = [group.allreduce(torch.ones(1), name="w") for group in (first, second)]
        assert [work.wait().item() for work in works] == [2.0, 2.0]


OBJECT = r"rank 1 has an object that cannot be sent\. value\['a'\]: a object cannot be sent"
REFUSED_OBJECTS = {
    "broadcast": (lambda g, bad: g.broadcast_object(bad, root=1), OBJECT, {0, 1, 2}),
    "allgather": (lambda g, bad: g.allgather_object(bad), OBJECT, {0, 1, 2}),
    "gather": (lambda g, bad: g.gather_object(bad, root=2), OBJECT, {1, 2}),
    "scatter": (lambda g, bad: g.scatter_object([0, 1, bad], root=1), OBJECT, {0, 1, 2}),
    "scatter of too few": (
        lambda g, bad: g.scatter_object([0], root=1),
        "rank 1 has an object that cannot be sent. the root must pass 3 values, one per rank",
        {0, 1, 2},
    ),
    "scatter of nothing": (
        lambda g, bad: g.scatter_object(None, root=1),
        "rank 1 has an object that cannot be sent. the root must pass 3 values, one per rank",
        {0, 1, 2},
    ),
    "more than a gibibyte": (
        lambda g, bad: g.broadcast_object(torch.empty(1, 1).expand(1 << 15, 1 << 14) if g.rank == 1 else 0, root=1),
        r"rank 1 has an object that cannot be sent\. it takes \d+ bytes; the limit is 1073741824",
        {0, 1, 2},
    ),
}


@pytest.mark.parametrize("name", REFUSED_OBJECTS)
def test_an_object_that_cannot_be_sent_fails_on_every_rank_that_would_get_it(name: str) -> None:
    call, words, raising = REFUSED_OBJECTS[name]

    def body(group: tr.Group) -> str:
        said = ""
        try:
            call(group, {"a": object()} if group.rank == 1 else {"a": 1})
        except tr.ConfigurationError as error:
            said = str(error)
        # Names, order and everything else are as before.
        assert group.allgather_object({group.rank}) == [{0}, {1}, {2}]
        return said

    said = run_ranks(3, body)
    assert {rank for rank in range(3) if re.match(words, said[rank])} == raising, said
    assert len({said[rank] for rank in raising}) == 1


def test_nobody_can_send_to_a_rank_that_is_alone() -> None:
    [group] = make_groups(1)
    with group, pytest.raises(tr.ConfigurationError, match="there is no other rank"):
        group.recv(torch.ones(1), src=None)


# ---------------------------------------------------------------------------------------------------- forms of tensors


def test_one_tensor_for_all_blocks() -> None:
    def body(group: tr.Group) -> list[list[float]]:
        size, rank = group.world_size, group.rank
        mine = torch.full((2,), float(rank))
        gathered = torch.empty(size, 2)
        assert group.allgather(gathered, mine).wait() is gathered
        on_root = torch.empty(size, 2) if rank == 1 else None
        group.gather(on_root, mine, root=1).wait()
        part = torch.empty(2)
        everything = torch.arange(2.0 * size).reshape(size, 2) if rank == 0 else None
        assert group.scatter(part, everything).wait() is part
        exchanged = torch.empty(2 * size)
        group.alltoall(exchanged, torch.arange(2.0 * size) + 100 * rank).wait()
        total = torch.empty(2)
        group.reduce_scatter(total, torch.arange(2.0 * size)).wait()
        results = [gathered, part, exchanged, total, *([on_root] if on_root is not None else [])]
        return [result.flatten().tolist() for result in results]

    for rank, (gathered, part, exchanged, total, *on_root) in enumerate(run_ranks(3, body)):
        assert gathered == [0, 0, 1, 1, 2, 2]
        assert part == [2 * rank, 2 * rank + 1]
        assert exchanged == [100 * source + 2 * rank + offset for source in range(3) for offset in (0, 1)]
        assert total == [3 * 2 * rank, 3 * (2 * rank + 1)]
        assert on_root == ([[0, 0, 1, 1, 2, 2]] if rank == 1 else [])


def test_blocks_that_are_not_contiguous() -> None:
    def body(group: tr.Group) -> bool:
        rank, size = group.rank, group.world_size
        matrix = torch.zeros(4, size)
        columns = [matrix[:, index] for index in range(size)]
        mine = (torch.arange(8.0) + 10 * rank)[::2]
        group.allgather(columns, mine).wait()
        assert matrix.t().tolist() == [[10.0 * r + 2 * i for i in range(4)] for r in range(size)]
        sent = torch.arange(4.0 * size).reshape(4, size) + 100 * rank
        before = sent.clone()
        received = torch.zeros(4, size)
        group.alltoall([received[:, i] for i in range(size)], [sent[:, i] for i in range(size)]).wait()
        assert torch.equal(sent, before)
        assert received.t().tolist() == [[100.0 * r + size * i + rank for i in range(4)] for r in range(size)]
        total = torch.zeros(4, 2)[:, 0]
        group.reduce_scatter(total, [sent[:, i] for i in range(size)]).wait()
        wanted = before - 100 * rank
        assert torch.equal(total, size * wanted[:, rank] + 100 * sum(range(size)))
        assert torch.equal(sent, before)
        strided = torch.ones(6)[::2] * (rank + 1)
        group.reduce(strided, root=2).wait()
        assert strided.tolist() == ([6.0] * 3 if rank == 2 else [rank + 1.0] * 3)
        if rank == 0:
            group.send(torch.arange(6.0)[::3], dst=1).wait()
        elif rank == 1:
            got = torch.zeros(4)
            group.recv(got[1::2], src=0).wait()
            assert got.tolist() == [0.0, 0.0, 0.0, 3.0]
        return True

    assert run_ranks(3, body) == [True] * 3


@pytest.mark.parametrize(
    "one",
    [torch.ones(4)[::2][:1], torch.ones(2, 2).t()[:1, :1], torch.ones(()).expand(1), torch.ones(())],
    ids=["every other", "a corner", "an expanded scalar", "a scalar"],
)
def test_one_element_with_any_strides(one: torch.Tensor) -> None:
    def body(group: tr.Group) -> float:
        tensor = one.as_strided(one.shape, one.stride())
        copied = group.allgather_object(tensor)
        assert all(torch.equal(each, tensor) for each in copied)
        mine = torch.empty_strided(one.shape, one.stride()).fill_(1.0)
        return float(group.allreduce(mine).wait())

    assert run_ranks(2, body) == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.uint16, torch.uint64, torch.float8_e5m2])
def test_what_cannot_be_added_can_be_moved(dtype: torch.dtype) -> None:
    def body(group: tr.Group) -> bool:
        rank, size = group.rank, group.world_size

        def of(*numbers: float) -> torch.Tensor:
            return torch.tensor(numbers).to(dtype)

        got = [torch.empty(1 + r, dtype=dtype) for r in range(size)]
        group.allgather(got, of(*[float(rank)] * (1 + rank))).wait()
        assert [each.to(torch.complex64).real.tolist() for each in got] == [[float(r)] * (1 + r) for r in range(size)]
        tensor = of(float(rank))
        group.broadcast(tensor, root=1)
        assert torch.equal(tensor.to(torch.complex64), of(1.0).to(torch.complex64))
        swapped = [torch.empty(1, dtype=dtype) for _ in range(size)]
        group.alltoall(swapped, [of(float(rank + r)) for r in range(size)]).wait()
        assert [each.to(torch.complex64).real.item() for each in swapped] == [float(rank + r) for r in range(size)]
        if rank == 0:
            group.send(of(3.0), dst=1).wait()
        elif rank == 1:
            assert group.recv(tensor, src=0).wait().to(torch.complex64).real.item() == 3.0
        with pytest.raises(tr.UnsupportedError, match="it must be one of"):
            group.allreduce(tensor)
        return True

    assert run_ranks(3, body) == [True] * 3


def test_an_allgather_in_place() -> None:
    def body(group: tr.Group) -> list[float]:
        whole = torch.full((3, 4), -1.0)
        whole[group.rank] = group.rank
        group.allgather(whole, whole[group.rank]).wait()
        return whole.flatten().tolist()

    assert run_ranks(3, body) == [[0.0] * 4 + [1.0] * 4 + [2.0] * 4] * 3


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_a_rank_may_leave_when_its_part_is_done(transport: str) -> None:
    """The last thing of a job is often a gather; only the root has to wait for it."""

    def body(group: tr.Group) -> list[list[int]] | None:
        mine = torch.full((1000,), group.rank)
        if group.rank:
            group.gather(None, mine).wait()
            group.close()
            return None
        while len(group._runner.engine.members.departed) < 2:
            threading.Event().wait(0.005)
        outputs = [torch.empty(1000, dtype=torch.int64) for _ in range(3)]
        group.gather(outputs, mine).wait()
        return [output.unique().tolist() for output in outputs]

    assert run_ranks(3, body, transport=transport)[0] == [[0], [1], [2]]


@pytest.mark.slow
@pytest.mark.parametrize("door", ["engine", "coordinator"])
def test_more_than_two_gigabytes(door: str) -> None:
    """Lengths and offsets beyond 31 bits, in elements and in bytes; 2.1 GB a rank."""
    count = (1 << 31) + 5

    def body(group: tr.Group) -> list[int]:
        tensor = torch.zeros(count, dtype=torch.uint8)
        places = [0, (1 << 30) + 1, (1 << 31) - 1, 1 << 31, count - 1]
        tensor[places] = torch.arange(1, 6, dtype=torch.uint8) * (group.rank + 1)
        who = group if door == "engine" else group.coordinate()
        who.allreduce(tensor, name="large").wait(300)
        assert int(tensor.count_nonzero()) == 5
        return tensor[places].tolist()

    assert run_ranks(2, body, transport="shm", timeout_s=600) == [[3, 6, 9, 12, 15]] * 2
