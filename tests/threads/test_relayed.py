"""The relay under real engines: what it takes, that it changes no bit and no error, and operations beside it."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from shared_hosts import hosts_of

import totalreduce as tr
from totalreduce.foundation.config import EngineConfig, TcpConfig
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.relay.relay import Relay
from totalreduce.schedules.spec import LinkModel
from totalreduce.testing import run_ranks

WORLD_SIZES = [2, 3, 4, 5, 7, 8]
#: Short segments, so that a few thousand elements are many messages; a small eager allowance, so that ranks say early
#: that they have submitted an operation.
SHORT = EngineConfig(
    segment_bytes=4096, segment_bytes_min=1024, bulk_bytes=256, eager_bytes=2048, fast_lane=False, timeout_s=30
)
#: The ranks share one interpreter.
PATIENT = TcpConfig(silence_s=20.0)
ALONE = TcpConfig(silence_s=20.0, relay=False)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the operations that the relays have taken."""
    names: list[str] = []
    take = Relay.take

    def noting(relay: Relay, task):
        names.append(task.owner.name)
        return take(relay, task)

    monkeypatch.setattr(Relay, "take", noting)
    return names


def values_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + size)
    if dtype.is_floating_point:
        return torch.randn(size, dtype=dtype, generator=generator)
    return torch.randint(-(1 << 30), 1 << 30, (size,), dtype=dtype, generator=generator)


def exchange_blocks(group: Group) -> list[torch.Tensor]:
    """Return the results of an alltoall, a gather and a scatter of blocks of different sizes; check the alltoall's."""

    def block(source: int, target: int) -> torch.Tensor:
        return values_of(source, 5003 + 37 * source + 11 * target, torch.float64)

    rank, ranks = group.rank, range(group.world_size)
    received = [torch.empty_like(block(source, rank)) for source in ranks]
    group.alltoall(received, [block(rank, target) for target in ranks], name="alltoall").wait()
    assert all(torch.equal(tensor, block(source, rank)) for source, tensor in enumerate(received))
    gathered = [torch.empty_like(block(source, 0)) for source in ranks] if rank == 1 else None
    group.gather(gathered, block(rank, 0), root=1, name="gather").wait()
    scattered = torch.empty_like(block(1, rank))
    group.scatter(
        scattered, [block(1, target) for target in ranks] if rank == 1 else None, root=1, name="scatter"
    ).wait()
    return [*received, *(gathered or []), scattered]


#: Name, element type, reduction and schedule of an allreduce.
REDUCTIONS = [
    ("sum", torch.float32, ReduceOp.SUM, "ring"),
    ("average", torch.float32, ReduceOp.AVG, "ring"),
    ("product", torch.float64, ReduceOp.PRODUCT, "ring"),
    ("integers", torch.int32, ReduceOp.SUM, "ring"),
    ("least", torch.int64, ReduceOp.MIN, "ring"),
    ("greatest", torch.int32, ReduceOp.MAX, "ring"),
    ("bfloat16", torch.bfloat16, ReduceOp.SUM, "ring"),
    ("average of bfloat16", torch.bfloat16, ReduceOp.AVG, "ring"),
    ("float16", torch.float16, ReduceOp.AVG, "ring"),
    ("product of float16", torch.float16, ReduceOp.PRODUCT, "ring"),
    ("direct", torch.float32, ReduceOp.AVG, "direct"),
    ("direct bfloat16", torch.bfloat16, ReduceOp.AVG, "direct"),
    ("direct float16", torch.float16, ReduceOp.SUM, "direct"),
    ("halving", torch.float64, ReduceOp.SUM, "halving_doubling"),
    ("halving bfloat16", torch.bfloat16, ReduceOp.SUM, "halving_doubling"),
    ("tree", torch.bfloat16, ReduceOp.AVG, "tree"),
]


#: Between hosts that are so near, an operation waits in the relay until its receiver has submitted it.
NEAR = LinkModel(latency_s=1e-9)


def come_near(group: Group) -> None:
    """Let all ranks use ``NEAR``, while no operation is in flight."""
    group.barrier()
    group._runner.engine.planner.use_links(NEAR)
    group.barrier()


@pytest.mark.parametrize(
    "world_size", [size if size == 3 else pytest.param(size, marks=pytest.mark.slow) for size in WORLD_SIZES]
)
def test_no_bit_depends_on_the_relay(world_size: int, taken: list[str]) -> None:
    """Collectives of every kind, several times each: from the second one on all connections are known.

    In the first three rounds, messages of the engine begin every operation; in the last two only those of which the
    relay cannot take all.
    """

    def body(group: Group) -> list[torch.Tensor]:
        results = []
        for iteration in range(5):
            if iteration == 3:
                come_near(group)
            for name, dtype, op, schedule in REDUCTIONS:
                tensor = values_of(group.rank, 20_011, dtype)
                group.allreduce(tensor, name=name, op=op, schedule=schedule).wait()
                results.append(tensor)
            tensor = values_of(group.rank, 20_011, torch.bfloat16)
            group.broadcast(tensor, root=1, name="broadcast", schedule="chain")
            results.append(tensor)
            tensor = values_of(group.rank, 20_011, torch.float32)
            group.reduce(tensor, root=1, name="reduce", op=ReduceOp.AVG, schedule="chain").wait()
            results.append(tensor)
            parts = [values_of(group.rank, 5003 + rank, torch.float64) for rank in range(group.world_size)]
            tensor = torch.empty(5003 + group.rank, dtype=torch.float64)
            group.reduce_scatter(tensor, parts, name="reduce_scatter", schedule="ring").wait()
            results += [tensor, *parts]
            blocks = [torch.empty(5003 + rank, dtype=torch.float16) for rank in range(group.world_size)]
            mine = values_of(group.rank, 5003 + group.rank, torch.float16)
            group.allgather(blocks, mine, name="allgather", schedule="ring").wait()
            results += blocks
            results += exchange_blocks(group)
        return results

    relayed = run_ranks(world_size, body, transport="tcp", engine=SHORT, tcp=PATIENT)
    # Which operations are taken depends on how late a rank is. All kinds of them are in three rounds of all ranks.
    assert {name for name, *_ in REDUCTIONS} | {"broadcast", "reduce", "reduce_scatter", "allgather"} <= set(taken)
    assert {"alltoall", "gather", "scatter"} <= set(taken)
    taken.clear()
    alone = run_ranks(world_size, body, transport="tcp", engine=SHORT, tcp=ALONE)
    assert not taken
    for ours, theirs in zip(relayed, alone, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("world_size", "ranks_per_host"), [(4, 2), pytest.param(7, 3, marks=pytest.mark.slow)])
def test_no_bit_depends_on_the_relay_between_hosts_of_several_ranks(
    world_size: int, ranks_per_host: int, taken: list[str]
) -> None:
    """The relay has the ring between hosts; messages in shared memory are the engine's, also those of a rank outside.

    Of seven ranks on hosts of three, one is alone on its host, so that two of each other host are in no ring.
    """
    hosts = [rank // ranks_per_host for rank in range(world_size)]

    def body(group: Group) -> list[torch.Tensor]:
        results = []
        for iteration in range(5):
            if iteration == 3:
                come_near(group)
            for name, dtype, op, _ in REDUCTIONS:
                tensor = values_of(group.rank, 20_011, dtype)
                group.allreduce(tensor, name=name, op=op, schedule="hierarchical").wait()
                results.append(tensor)
            others = [(torch.full((20_011 + size,), group.rank + size), size) for size in range(4)]
            works = [group.allreduce(tensor, name=f"{size}", schedule="hierarchical") for tensor, size in others]
            for work in works:
                work.wait()
            results += [tensor for tensor, _ in others]
        return results

    results = [
        run_ranks(
            world_size,
            body,
            transport=lambda size, config=config: hosts_of(ranks_per_host, size, config),
            engine=SHORT,
            hosts=hosts,
        )
        for config in (PATIENT, ALONE)
    ]
    kept_apart = (torch.bfloat16, torch.float16)  # their sums are not in the tensor: these go by messages
    assert {name for name, dtype, *_ in REDUCTIONS if dtype not in kept_apart} <= set(taken)
    for ours, theirs in zip(*results, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("world_size", "seed", "near"),
    [(2, 1, False), (3, 2, True), (4, 3, False), (5, 5, True), pytest.param(7, 4, True, marks=pytest.mark.slow)],
)
def test_operations_in_any_order_beside_those_of_the_engine(
    world_size: int, seed: int, near: bool, taken: list[str]
) -> None:
    """Names, types, sizes and priorities by chance; every rank submits and waits in an order of its own."""
    chance = random.Random(seed)
    types = [torch.float32, torch.float64, torch.int32, torch.bfloat16]
    operations = [
        (chance.choice(types), chance.choice([100, 1000, 5000, 20_000, 100_003]), chance.randrange(4))
        for _ in range(30)
    ]

    def body(group: Group) -> None:
        mine = random.Random(100 * seed + group.rank)
        if near:
            come_near(group)
        for iteration in range(3):
            order = list(range(len(operations)))
            mine.shuffle(order)
            works = {}
            for number in order:
                dtype, size, priority = operations[number]
                tensor = (torch.arange(size) % 61 + group.rank + iteration).to(dtype)
                works[number] = tensor, group.allreduce(tensor, name=f"operation {number}", priority=priority)
            mine.shuffle(order)
            for number in order:
                tensor, work = works[number]
                work.wait()
                ranks = group.world_size
                expected = (torch.arange(len(tensor)) % 61 + iteration) * ranks + ranks * (ranks - 1) // 2
                assert torch.equal(tensor, expected.to(tensor.dtype)), f"operation {number}, iteration {iteration}"

    run_ranks(world_size, body, transport="tcp", engine=SHORT, tcp=PATIENT)
    assert len(taken) > 20


def test_an_operation_of_a_rank_that_only_sends_ends_when_all_has_left(taken: list[str]) -> None:
    """The last rank of a chain has no more to do than to send, and may change its tensor when that has happened."""
    size = 3_000_000  # more than the sockets hold

    def body(group: Group) -> list[bool]:
        equal = []
        for iteration in range(3):
            tensor = (torch.arange(size) % 61 + iteration).to(torch.float32)
            group.reduce(tensor, root=0, name="reduce", schedule="chain").wait()
            equal.append(torch.equal(tensor, (torch.arange(size) % 61 + iteration) * 3.0))
            tensor.fill_(torch.nan)
            group.barrier()
        return equal

    engine = replace(SHORT, segment_bytes=1 << 16, segment_bytes_min=1 << 16)
    assert run_ranks(3, body, transport="tcp", engine=engine, tcp=PATIENT)[0] == [True, True, True]
    assert taken.count("reduce") > 6  # more than the two other ranks can have taken


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_rank_that_leaves_fails_what_the_relay_has(taken: list[str]) -> None:
    """Rank 2 leaves when the relay of rank 0 has the operation: its receiver, rank 1, has submitted it.

    The tensors change no more after the error.
    """
    submitted = threading.Barrier(3)

    def body(group: Group) -> tuple[str, bool] | None:
        tensor = torch.ones(100_003)
        for _ in range(2):
            group.allreduce(tensor, name="known").wait()
        submitted.wait(20)
        if group.rank == 2:
            until(lambda: "late" in taken)
            group.close()
            return None
        work = group.allreduce(tensor, name="late")
        with pytest.raises(tr.PeerLost, match="rank 2") as caught:
            work.wait()
        before = tensor.clone()
        other = torch.ones(100_003)
        with pytest.raises(tr.PeerLost):
            group.allreduce(other, name="known").wait()
        return str(caught.value), torch.equal(tensor, before)

    first, second, _ = run_ranks(3, body, transport="tcp", engine=SHORT, tcp=PATIENT)
    assert first is not None
    assert second is not None
    assert first[1]
    assert second[1]


def test_a_rank_that_leaves_fails_what_the_relay_has_between_hosts_of_several_ranks(taken: list[str]) -> None:
    """Rank 3 leaves when the relay of rank 0 has the operation: its ring is with rank 2, and rank 1 is near."""
    submitted = threading.Barrier(4)

    def body(group: Group) -> tuple[str, bool, int] | None:
        tensor = torch.ones(100_003)
        for _ in range(2):
            group.allreduce(tensor, name="known", schedule="hierarchical").wait()
        submitted.wait(20)
        if group.rank == 3:
            until(lambda: "late" in taken)
            group.close()
            return None
        work = group.allreduce(tensor, name="late", schedule="hierarchical")
        with pytest.raises(tr.PeerLost, match="rank 3") as caught:
            work.wait()
        before = tensor.clone()
        with pytest.raises(tr.PeerLost):
            group.allreduce(torch.ones(100_003), name="known").wait()
        return str(caught.value), torch.equal(tensor, before), group._runner.engine.reception.num_bodies

    results = run_ranks(4, body, transport=lambda size: hosts_of(2, size, PATIENT), engine=SHORT, hosts=[0, 0, 1, 1])
    assert [result and result[1:] for result in results] == [(True, 0)] * 3 + [None]


@pytest.mark.parametrize("kind", ["allreduce", "alltoall"])
def test_a_late_rank_delays_an_operation_in_the_relay_and_changes_no_value(kind: str, taken: list[str]) -> None:
    """Ranks 0 and 2 have it in the relay before rank 1 submits it."""
    late, together = threading.Event(), threading.Barrier(3)

    def body(group: Group) -> list[float]:
        rank, results = group.rank, []
        come_near(group)
        for iteration in range(3):
            if iteration == 2 and together.wait(20) == 0:
                taken.clear()
            together.wait(20)
            if iteration == 2 and rank == 1:
                assert late.wait(20)
            if kind == "allreduce":
                tensors = [torch.full((20_011,), rank + iteration + 1.0)]
                work = group.allreduce(tensors[0], name=kind)
            else:
                tensors = [torch.empty(20_011) for _ in range(3)]
                work = group.alltoall(tensors, [torch.full((20_011,), rank + iteration + 1.0)] * 3, name=kind)
            if iteration == 2 and rank == 0:
                until(lambda: taken.count(kind) == 2)
                assert not work.done()
                late.set()
            work.wait()
            results += [float(tensor.sum()) / 20_011 for tensor in tensors]
            group.barrier()
        return results

    expected = {
        "allreduce": [[6.0, 9.0, 12.0]] * 3,
        "alltoall": [[source + iteration + 1.0 for iteration in range(3) for source in range(3)]] * 3,
    }
    assert run_ranks(3, body, transport="tcp", engine=SHORT, tcp=PATIENT) == expected[kind]


def test_another_size_of_a_block_is_found_though_its_receiver_does_not_say_that_it_has_begun(taken: list[str]) -> None:
    """Rank 1 suddenly expects of rank 0 no more than the eager allowance, and rank 0 sends as much as before."""

    def body(group: Group) -> str:
        come_near(group)
        for iteration in range(3):
            if iteration == 2 and group.rank == 0:
                taken.clear()
            received = [torch.empty(100 if (iteration, group.rank, rank) == (2, 1, 0) else 5003) for rank in range(3)]
            work = group.alltoall(received, [torch.ones(5003)] * 3, name="exchange", timeout_s=20)
            if iteration < 2:
                work.wait()
                group.barrier()
        try:
            work.wait()
        except tr.MismatchError as error:
            return str(error)
        return ""

    # The blocks of rank 2 are as they should be. Rank 0 may have sent everything before rank 1 finds the difference.
    first, second, third = run_ranks(3, body, transport="tcp", engine=SHORT, tcp=PATIENT)
    assert "5003" in second
    assert "100" in second
    assert "'exchange'" in second
    assert first in ("", second)
    assert third in ("", second)
    assert "exchange" in taken


def test_a_neighbour_that_has_ended_may_leave(taken: list[str]) -> None:
    """In a reduce-scatter, a rank ends while its predecessor still waits for its own last message."""

    def body(group: Group) -> int:
        rank, world_size = group.rank, group.world_size
        for _ in range(2):
            parts, result = [torch.full((50_003,), float(rank)) for _ in range(world_size)], torch.empty(50_003)
            group.reduce_scatter(result, parts, name="ends", schedule="ring").wait()
        group.close()
        return int(result[0])

    for _ in range(8):
        assert run_ranks(3, body, transport="tcp", engine=SHORT, tcp=PATIENT) == [3, 3, 3]
    assert taken


def test_observed_operations_are_not_taken(taken: list[str]) -> None:
    """An observer sees every message."""

    class Count(tr.Observer):
        def __init__(self) -> None:
            self.received_messages = 0

        def received(self, *_: object, **__: object) -> None:
            self.received_messages += 1

    def body(group: Group) -> tuple[int, int]:
        count = Count()
        group._runner.engine.observers.append(count)
        for _ in range(3):
            group.allreduce(torch.ones(100_003), name="seen").wait()
        return count.received_messages, group.statistics().messages_received

    for seen, counted in run_ranks(2, body, transport="tcp", engine=SHORT, tcp=PATIENT):
        assert seen == counted > 0
    assert not taken


def test_messages_are_counted_alike(taken: list[str]) -> None:
    def body(group: Group) -> tuple[int, int, int]:
        for _ in range(4):
            group.allreduce(torch.ones(100_003), name="counted").wait()
        group.barrier()
        statistics = group.statistics()
        return statistics.messages_sent, statistics.messages_received, statistics.payload_bytes

    relayed = run_ranks(3, body, transport="tcp", engine=SHORT, tcp=PATIENT)
    assert taken
    assert relayed == run_ranks(3, body, transport="tcp", engine=SHORT, tcp=ALONE)
