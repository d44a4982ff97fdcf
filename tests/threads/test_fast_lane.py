"""The fast lane under real engines: what it takes, that it changes no bit and no error, and how it gives way."""

import contextlib
import functools
import gc
import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from process_reads import skip_without_process_reads

import totalreduce as tr
from totalreduce.fastlane import lane as lane_module
from totalreduce.fastlane.board import STAGE_CLASSES
from totalreduce.fastlane.lane import FastLane
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups import checked
from totalreduce.groups.group import Group
from totalreduce.kernels import exchange
from totalreduce.kernels.exchange import HEAD, PEER
from totalreduce.testing import run_ranks
from totalreduce.testing.ranks import make_groups

WORLD_SIZES = [1, 2, 3, 4, 5, 7, 8]
OFF = EngineConfig(fast_lane=False, timeout_s=30)


def on_one_host(world_size, body, **options):
    return run_ranks(world_size, body, transport="shm", hosts=[0] * world_size, **options)


def find_lane(group: Group) -> FastLane | None:
    carriers = group._runner.engine.carrying.carriers
    return next((carrier for carrier in carriers if isinstance(carrier, FastLane)), None)


def lane_of(group: Group) -> FastLane:
    lane = find_lane(group)
    assert lane is not None
    return lane


def meet(group: Group) -> None:
    """Return when every rank can read the memory of every other rank."""
    deadline = time.monotonic() + 20
    group.barrier()
    while group.world_size > 1 and len(lane_of(group).boards.memories()) < group.world_size:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    group.barrier()


def messages_of(group: Group) -> int:
    return group.statistics().messages_sent


def values_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + size % 97)
    if dtype in INTEGERS:
        return torch.randint(-(1 << 30), 1 << 30, (size,), dtype=dtype, generator=generator)
    return torch.randn(size, dtype=dtype, generator=generator)


def compare(world_size: int, results_of) -> None:
    """Check that ``results_of(group)`` needs no message in the lane, and gives the same bits without the lane."""
    sent: list[int] = []

    def in_lane(group: Group) -> list[torch.Tensor]:
        meet(group)
        before = messages_of(group)
        results = results_of(group)
        group.barrier()
        sent.append(messages_of(group) - before)
        return results

    with_lane = on_one_host(world_size, in_lane)
    assert sum(sent) == 0

    def by_messages(group: Group) -> list[torch.Tensor]:
        results = results_of(group)
        sent.append(messages_of(group))
        return results

    without = on_one_host(world_size, by_messages, engine=OFF)
    assert sum(sent) > 0 or world_size == 1
    for mine, theirs in zip(with_lane, without, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)


FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int32, torch.int64]


@pytest.mark.parametrize(
    "world_size",
    [size if size in (1, 2, 4) else pytest.param(size, marks=pytest.mark.slow) for size in WORLD_SIZES],
)
def test_no_bit_of_an_allreduce_depends_on_the_lane(world_size: int) -> None:
    """Small tensors and large ones, in memory of their own and in shared memory.

    The longest tensors, of more stages than one, are for two and three ranks, and the rarer types for up to four.
    """
    sizes = (0, 1, 3, 1000, 50_000, 700_001) if world_size in (2, 3) else (0, 1, 3, 1000, 50_000)

    def results_of(group: Group) -> list[torch.Tensor]:
        results = []
        for dtype in (*FLOATS, *INTEGERS) if world_size < 5 else (torch.float32, torch.bfloat16, torch.int64):
            ops = [ReduceOp.SUM, ReduceOp.PRODUCT]
            ops += [ReduceOp.AVG] if dtype in FLOATS else [ReduceOp.MIN, ReduceOp.MAX]
            for size in sizes:
                for op in ops if size <= 50_000 or dtype in FLOATS[:2] else ops[-1:]:
                    for shared in (False, True):
                        tensor = values_of(group.rank, size, dtype)
                        if shared:
                            tensor = group.empty(size, dtype=dtype).copy_(tensor)
                        results.append(group.allreduce(tensor, op=op).wait().clone())
        return results

    compare(world_size, results_of)


@pytest.mark.parametrize(
    "world_size", [size if size in (1, 3) else pytest.param(size, marks=pytest.mark.slow) for size in WORLD_SIZES]
)
def test_no_bit_of_a_reduce_depends_on_the_lane(world_size: int) -> None:
    """By the order of either schedule, small and in pieces, staged and not. Only the root gets the result."""

    def results_of(group: Group) -> list[torch.Tensor]:
        results = []
        for dtype, op in ((torch.float32, ReduceOp.AVG), (torch.bfloat16, ReduceOp.SUM), (torch.int64, ReduceOp.MIN)):
            for size, schedule in itertools.product((0, 1, 1000, 200_001, 900_001), ("chain", "direct")):
                for root in {0, world_size - 1}:
                    tensor = values_of(group.rank, size, dtype)
                    before = tensor.clone()
                    if size == 200_001:
                        tensor = group.empty(size, dtype=dtype).copy_(tensor)
                    name = f"{dtype} {size} {schedule} {root}"
                    group.reduce(tensor, root=root, op=op, name=name, schedule=schedule).wait()
                    if group.rank != root:
                        assert torch.equal(tensor, before)
                    results.append(tensor.clone())
                    if group.rank == root and dtype is torch.int64:
                        expected = torch.stack([values_of(rank, size, dtype) for rank in range(world_size)]).amin(dim=0)
                        assert torch.equal(tensor, expected)
        return results

    compare(world_size, results_of)


def blocks_of(group: Group, sizes: list[int], dtype: torch.dtype, memory: str) -> list[torch.Tensor]:
    """Return tensors of these sizes: apart, or one after the other in usual or in shared memory."""
    if memory == "apart":
        return [torch.zeros(size, dtype=dtype) for size in sizes]
    total = sum(sizes)
    tensor = group.empty(total, dtype=dtype) if memory == "shared" else torch.empty(total, dtype=dtype)
    return list(tensor.zero_().split(sizes))


@pytest.mark.parametrize(
    ("memory", "world_size"),
    [
        ("shared", 2),
        ("apart", 3),
        ("apart", 1),
        pytest.param("together", 4, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("apart", 2), ("together", 2), ("together", 3), ("shared", 3)),
                *(("shared", 5), ("apart", 7), ("shared", 8)),
            )
        ),
    ],
)
def test_no_bit_of_blocks_depends_on_the_lane(memory: str, world_size: int) -> None:
    """Equal, unequal and empty blocks; float32 three times by one name, so that the third one repeats the words."""

    def results_of(group: Group) -> list[torch.Tensor]:
        results, rank = [], group.rank
        # The largest ones are exchanged in pieces.
        total = 1_200_000 if world_size == 2 else 320_000
        equal_max, unequal_max = total // world_size, total // world_size**2
        equal = [[size] * world_size for size in (1, 900, equal_max)]
        unequal = [[size * other for other in range(world_size)] for size in (3, unequal_max)]
        dtypes = [torch.float32] * 3
        if world_size <= 5 and (memory == "together" or world_size == 2):
            dtypes[1:1] = [torch.bfloat16, torch.int64]
        for dtype, sizes in itertools.product(dtypes, [*equal, *unequal]):
            name = f"{sum(sizes)} {dtype}"
            outputs, own = blocks_of(group, sizes, dtype, memory), values_of(rank, sizes[rank], dtype)
            group.allgather(outputs, own, name=name).wait()
            for other, output in enumerate(outputs):
                assert torch.equal(output, values_of(other, sizes[other], dtype))
            inputs, result = blocks_of(group, sizes, dtype, memory), torch.zeros(sizes[rank], dtype=dtype)
            for index, block in enumerate(inputs):
                block.copy_(values_of(rank + 7 * index, sizes[index], dtype))
            kept = [block.clone() for block in inputs]
            group.reduce_scatter(result, inputs, name=f"{name}, sums").wait()
            assert all(map(torch.equal, inputs, kept))
            results.append(result.clone())
            group.reduce_scatter(inputs[rank], inputs, name=f"{name}, in place").wait()
            assert torch.equal(inputs[rank], result)
            for root in {0, world_size - 1}:
                tensor = values_of(rank, sum(sizes), dtype)
                if memory == "shared":
                    tensor = group.empty(sum(sizes), dtype=dtype).copy_(tensor)
                group.broadcast(tensor, root=root, name=f"{name}, root {root}").wait()
                assert torch.equal(tensor, values_of(root, sum(sizes), dtype))
        return results

    compare(world_size, results_of)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_large_tensors_are_read_where_they_are(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation has a stage, none is sent as messages, and no bit changes; a name is used three times."""
    skip_without_process_reads()
    for name in ("_UNSTAGED_BYTES_MIN", "_UNSTAGED_BYTES_MIN_OF_TWO"):
        monkeypatch.setattr(lane_module, name, 64 * 1024)
    staged: list[bool] = []

    def results_of(group: Group) -> list[torch.Tensor]:
        rank, results, sizes = group.rank, [], [300_000 + other for other in range(world_size)]
        lane = find_lane(group)
        if lane is not None:
            offer = lane.take

            def offered(operation):
                carriage = offer(operation)
                if carriage is not None and carriage.plan.publishes:
                    staged.append(carriage.words[HEAD.source] >= 0)
                return carriage

            lane.take = offered
        for turn in range(3):
            tensor = values_of(rank, 400_000 + turn, torch.float32)[turn:]
            results.append(group.allreduce(tensor, op=ReduceOp.AVG, name="sum").wait())
            outputs = [torch.zeros(size) for size in sizes]
            group.allgather(outputs, values_of(rank, sizes[rank], torch.float32), name="gather").wait()
            inputs = list(values_of(rank, sum(sizes), torch.float32).split(sizes))
            group.reduce_scatter(result := torch.zeros(sizes[rank]), inputs, name="scatter").wait()
            tensor = values_of(rank, 400_000, torch.float32)
            group.broadcast(tensor, root=turn % world_size, name=f"root {turn}").wait()
            results += [*outputs, result, tensor]
        return results

    compare(world_size, results_of)
    assert (
        len(staged) >= 3 * world_size + 3
    )  # a broadcast's root publishes; a name that comes again need not be offered
    assert not any(staged)


def test_blocks_that_lie_apart_and_memory_that_cannot_be_read_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_UNSTAGED_BYTES_MIN", "_UNSTAGED_BYTES_MIN_OF_TWO"):
        monkeypatch.setattr(lane_module, name, 64 * 1024)

    def results_of(group: Group) -> list[torch.Tensor]:
        inputs = [values_of(group.rank + 7 * index, 300_000, torch.float32) for index in range(2)]
        group.reduce_scatter(apart := torch.zeros(300_000), inputs).wait()
        if find_lane(group) is not None:
            # As the system answers for the memory of some devices.
            lane_of(group).boards._reads.can_be_read = lambda *_: False
        tensor = values_of(group.rank, 400_000, torch.float32)
        return [apart, group.allreduce(tensor).wait()]

    compare(2, results_of)


@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 5))])
def test_any_order_and_more_operations_than_room(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no entry or no stage on one rank is carried out by messages on all."""
    monkeypatch.setattr(lane_module, "_home", lambda key: key[0] % 128)  # 135 entries
    count = 384

    def body(group: Group) -> float:
        order = random.Random(group.rank).sample(range(count), count)
        tensors = {index: torch.full((40_000 if index % 7 == 0 else 10,), float(group.rank + index)) for index in order}
        works = {index: group.allreduce(tensors[index], name=f"t{index}", priority=index % 3) for index in order}
        for index, work in works.items():
            total = world_size * index + sum(range(world_size))
            assert torch.equal(work.wait(timeout_s=30), torch.full_like(tensors[index], float(total)))
        return 0.0

    on_one_host(world_size, body)


@pytest.mark.parametrize(("places", "count"), [(None, 161), (16, 40)])
def test_names_that_come_again_have_room_in_the_lane(
    places: int | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model has many tensors. Names of 16 places have 23 entries, of which 40 names would keep 80."""
    if places is not None:
        monkeypatch.setattr(lane_module, "_home", lambda key: key[0] % places)
    found, original = [], FastLane.place_of_next

    def noted(lane, *at):  # not the last one of the list, which may be the other rank's
        place = original(lane, *at)
        found.append(place)
        return place

    monkeypatch.setattr(FastLane, "place_of_next", noted)

    def body(group: Group) -> int:
        meet(group)
        before = messages_of(group)
        tensors = [torch.empty(1000 if index % 3 else 10) for index in range(count)]
        for turn in range(4):
            for index, tensor in enumerate(tensors):
                tensor.fill_(turn + index * group.rank)
                assert group.allreduce(tensor, name=f"t{index}").wait().unique().tolist() == [2.0 * turn + index]
        return messages_of(group) - before

    assert on_one_host(2, body) == [0, 0]
    assert len(found) > 4 * count  # of two ranks with three turns each, but for some when another thread was at work
    assert None not in found


def test_operations_without_a_name_meet_in_their_order() -> None:
    def body(group: Group) -> None:
        tensors = [torch.full((5000 if turn % 5 == 0 else 5,), float(turn)) for turn in range(200)]
        works = [group.allreduce(tensor) for tensor in tensors]
        for turn, work in enumerate(works):
            assert work.wait().unique().tolist() == [2.0 * turn]

    on_one_host(2, body)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_without_room_may_be_any_rank_of_the_schedule(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root of a star sends nothing by itself, so the others would wait for it for ever."""
    original = FastLane._free_entry

    def on_some_ranks(lane: FastLane, *arguments, **options):
        return None if lane._rank == 1 else original(lane, *arguments, **options)

    monkeypatch.setattr(FastLane, "_free_entry", on_some_ranks)

    def body(group: Group) -> None:
        meet(group)
        for turn in range(3):
            for name in "abcdefgh":  # each has another root
                tensor = torch.full((10,), float(group.rank * turn))
                if group.rank == 1:
                    time.sleep(0.002)
                total = turn * sum(range(world_size))
                assert group.allreduce(tensor, name=name).wait(20).unique().tolist() == [total]

    on_one_host(world_size, body)


@pytest.mark.parametrize("method", ["_free_entry", "_free_stage"])
def test_a_rank_without_room_has_all_ranks_use_messages(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(FastLane, method)

    def on_some_ranks(lane: FastLane, *arguments, **options):
        return None if lane._rank == 1 else original(lane, *arguments, **options)

    monkeypatch.setattr(FastLane, method, on_some_ranks)

    def body(group: Group) -> int:
        before = messages_of(group)
        for turn in range(20):
            tensor = torch.full((100_000,), float(group.rank * turn))
            if group.rank == turn % 3:
                time.sleep(0.01)
            assert group.allreduce(tensor, name="w").wait().unique().tolist() == [3.0 * turn]
        assert not group._runner.engine.carrying.carried
        return messages_of(group) - before

    assert all(sent > 0 for sent in on_one_host(3, body))


def test_another_schedule_on_one_rank_is_a_mismatch_for_all() -> None:
    def body(group: Group) -> None:
        for turn in range(3):
            schedule = "ring" if group.rank == turn else "auto"
            with pytest.raises(tr.MismatchError):
                group.allreduce(torch.ones(100), name="w", schedule=schedule).wait(timeout_s=20)
            assert group.allreduce(torch.ones(100), name="w").wait().unique().tolist() == [3.0]

    on_one_host(3, body)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_another_length_is_a_mismatch_whoever_is_last(late: int) -> None:
    def body(group: Group) -> None:
        if group.rank == late:
            time.sleep(0.1)
        with pytest.raises(tr.MismatchError):
            group.allreduce(torch.ones(101 if group.rank == 1 else 100), name="w").wait(timeout_s=20)
        assert group.allreduce(torch.ones(100), name="w").wait().unique().tolist() == [3.0]

    on_one_host(3, body)


def test_a_deadline_names_the_late_rank_and_the_operation_goes_on() -> None:
    def body(group: Group) -> str:
        tensor, text = torch.ones(10), ""
        if group.rank == 1:
            barrier.wait()
            group.allreduce(tensor, name="late").wait()
        else:
            work = group.allreduce(tensor, name="late")
            both_others.wait(20)
            with pytest.raises(tr.DeadlineExceededError) as caught:
                work.wait(timeout_s=0.5)
            text = str(caught.value)
            barrier.wait()
            work.wait()
        assert tensor.tolist() == [3.0] * 10
        return text

    barrier, both_others = threading.Barrier(3), threading.Barrier(2)
    for rank, text in enumerate(on_one_host(3, body)):
        if rank != 1:
            assert "never submitted by rank(s) 1" in text


def test_a_rank_that_leaves_after_its_part_costs_the_others_nothing() -> None:
    """The others find in its memory what they need of it."""
    groups = make_groups(3, transport="shm", hosts=[0, 0, 0])
    tensors = [torch.full((60_000,), float(rank)) for rank in range(3)]
    for group in groups:
        for thread in [threading.Thread(target=group.barrier)]:
            thread.start()
    small = [group.allreduce(torch.ones(4), name="small") for group in groups]
    for work in small:
        assert work.wait().tolist() == [3.0] * 4
    works = [group.allreduce(tensor, name="last") for group, tensor in zip(groups, tensors, strict=True)]
    for group, work, tensor in zip(groups, works, tensors, strict=True):
        assert work.wait(timeout_s=20).unique().tolist() == [3.0]
        group.close()
        assert tensor.unique().tolist() == [3.0]


def test_a_rank_that_leaves_before_it_takes_part_is_named() -> None:
    def body(group: Group) -> None:
        group.barrier()
        if group.rank == 1:
            group.close(reason="enough")
            return
        for size in (10, 100_000):
            with pytest.raises(tr.PeerLost) as caught:
                group.allreduce(torch.ones(size)).wait(timeout_s=20)
            assert caught.value.rank == 1
            assert "enough" in str(caught.value)

    on_one_host(3, body)


def test_closing_fails_what_is_pending() -> None:
    groups = make_groups(2, transport="shm", hosts=[0, 0])
    threads = [threading.Thread(target=group.barrier) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    works = [groups[0].allreduce(torch.ones(size)) for size in (4, 400_000)]
    assert groups[0]._runner.engine.carrying.carried
    groups[0].close()
    for work in works:
        with pytest.raises(tr.GroupClosed):
            work.wait()
    groups[1].close()


def test_a_subgroup_and_the_whole_group_at_the_same_time() -> None:
    def body(group: Group) -> None:
        pair = group.subgroup([0, 2] if group.rank != 1 else [1, 3]) if group.rank != 3 else group.subgroup([1, 3])
        for turn in range(20):
            one, all_of = torch.full((20_000,), float(group.rank)), torch.full((9,), float(turn))
            works = [pair.allreduce(one, name="w"), group.allreduce(all_of, name="w")]
            if group.rank % 2:
                works.reverse()
            for work in works:
                work.wait()
            assert one.unique().tolist() == [2.0 if group.rank % 2 == 0 else 4.0]
            assert all_of.unique().tolist() == [4.0 * turn]

    on_one_host(4, body)


def test_a_tensor_that_is_not_contiguous() -> None:
    def body(group: Group) -> None:
        whole = torch.arange(200_000.0).view(2, 100_000)
        part = whole[:, ::2]
        group.allreduce(part).wait()
        assert torch.equal(part, 2 * torch.arange(200_000.0).view(2, 100_000)[:, ::2])
        assert torch.equal(whole[:, 1::2], torch.arange(200_000.0).view(2, 100_000)[:, 1::2])

    on_one_host(2, body)


LIES = {
    "a tensor beyond the end": {HEAD.source: 1 << 60},
    "a tensor that begins within the board": {HEAD.source: 4096},
    "a tensor between elements": {HEAD.source: (1 << 30) + 1},
    "a stage beyond the board": {HEAD.stage: 1 << 40},
    "a negative stage": {HEAD.stage: -64},
}


#: Lies about a tensor that is exchanged in pieces, and about one that is exchanged as a whole.
LIES_BY_COUNT = [(lie, 300_000) for lie in LIES] + [(lie, 20_000) for lie in LIES if "stage" in lie]


@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
@pytest.mark.parametrize(("lie", "count"), LIES_BY_COUNT)
def test_an_announcement_that_no_correct_rank_makes_is_the_loss_of_its_rank(
    lie: str, count: int, collective: str
) -> None:
    if collective == "broadcast":
        count *= 2  # so many are exchanged in the same way

    def body(group: Group) -> None:
        group.barrier()
        tensor = torch.ones(count)
        begin = functools.partial(getattr(group, collective), tensor, name="w")
        if group.rank == 0:
            lane, offer = lane_of(group), lane_of(group).take

            def lying(operation):
                carriage = offer(operation)
                for word, value in LIES[lie].items():
                    carriage.words[word] = value
                # Rank 0 announces, and neither copies nor reads its tensor.
                carriage.words[HEAD.turns] = carriage.words[HEAD.count] = 0
                carriage.words[carriage.plan.peers[0] + PEER.part_count] = 0
                lane.exchange(exchange.ADVANCE, carriage.address, 0, 0)
                lane._wake(carriage)
                lane.announce = lane.advance = lambda *_, **__: exchange.PENDING
                return carriage

            lane.take = lying
            with pytest.raises(tr.PeerLost):
                begin().wait(timeout_s=20)
            return
        with pytest.raises(tr.PeerLost) as caught:
            begin().wait(timeout_s=20)
        assert caught.value.rank == 0
        assert "announcement" in str(caught.value)

    on_one_host(2, body)


@pytest.mark.parametrize("count", [30_000, 100_000])
def test_more_large_tensors_than_stages_in_a_row(count: int) -> None:
    largest = STAGE_CLASSES[-1]
    num_tensors = 2 * (largest.stop - largest.first)

    def body(group: Group) -> None:
        for turn in range(4):
            tensors = [torch.full((count,), float(index + turn)) for index in range(num_tensors)]
            works = [group.allreduce(tensor, name=f"t{index}") for index, tensor in enumerate(tensors)]
            for index, work in enumerate(works):
                assert work.wait().unique().tolist() == [3.0 * (index + turn)], turn

    on_one_host(3, body)


def test_a_stage_serves_operations_of_a_name_that_follow_at_once() -> None:
    """A rank that is a step ahead writes the half of the stage that the other ranks do not read."""

    def body(group: Group) -> None:
        tensor = torch.empty(15_000)
        for turn in range(300):
            tensor.fill_(turn + group.rank)
            group.allreduce(tensor, name="t").wait()
            assert tensor.unique().tolist() == [3.0 * turn + 3.0]

    on_one_host(3, body)


def test_the_next_operation_of_a_name_may_have_another_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    repeated, original = [], FastLane.repeat
    monkeypatch.setattr(FastLane, "repeat", lambda lane, *rest: repeated.append(lane._rank) or original(lane, *rest))

    def body(group: Group) -> None:
        choice = random.Random(group.rank)
        large = [group.empty(60_000), torch.empty(60_000), group.empty(60_000), torch.empty(60_000)]
        small = [torch.empty(9), group.empty(9), torch.empty(9)]
        others = [torch.empty(3, 3), torch.empty(60_000, dtype=torch.float64)]
        for turn in range(60):
            for name, tensors in (("large", large), ("small", small), ("other", others)):
                # The ranks agree on the shape, and each takes any of its tensors.
                tensor = others[turn // 20 % 2] if tensors is others else choice.choice(tensors)
                tensor.fill_(group.rank + turn)
                assert group.allreduce(tensor, name=name).wait().unique().tolist() == [3.0 * turn + 3]

    on_one_host(3, body)
    assert all(repeated.count(rank) > 150 for rank in range(3)), [repeated.count(rank) for rank in range(3)]


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """Collections look only at objects that are made from now on; those of all modules take half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_no_tensor_is_kept_after_its_operation(quick_collections: None) -> None:
    def body(group: Group) -> None:
        for size in (10, 50_000):
            for _ in range(6):
                tensor = torch.ones(size)
                storage = weakref.ref(tensor.untyped_storage())
                last = weakref.ref(tensor)
                group.allreduce(tensor, name=f"t{size}").wait()
                del tensor
                gc.collect()
                assert last() is None
                assert storage() is None

    on_one_host(2, body)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_a_barrier_holds_every_rank_and_needs_no_message(world_size: int) -> None:
    arrived: list[int] = []

    def body(group: Group) -> int:
        meet(group)
        before, choice = messages_of(group), random.Random(group.rank)
        for turn in range(100):  # more than there are names of barriers
            if choice.random() < 0.05:
                time.sleep(0.003)
            arrived.append(group.rank)
            group.barrier()
            assert len(arrived) >= world_size * (turn + 1)
        return messages_of(group) - before

    assert on_one_host(world_size, body) == [0] * world_size


def test_a_barrier_meets_ranks_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FastLane.take
    monkeypatch.setattr(FastLane, "take", lambda lane, op: None if lane._rank == 1 else original(lane, op))
    arrived: list[int] = []

    def body(group: Group) -> None:
        for turn in range(20):
            if group.rank == turn % 3:
                time.sleep(0.01)
            arrived.append(group.rank)
            group.barrier(timeout_s=20)
            assert len(arrived) >= 3 * (turn + 1)

    on_one_host(3, body)


@contextlib.contextmanager
def announced_and_not_read(group: Group, submit: Callable[[], tr.Work]) -> Iterator[tr.Work]:
    """Announce an operation, and read nothing of what the other ranks announce until the end of the context."""
    with group._runner._moving:
        work = submit()
        (carriage,) = group._runner.engine.carrying.carried.values()
        lane_of(group).announce(carriage)
        yield work


def test_a_mismatch_takes_nothing_from_a_rank_that_is_still_at_the_operation_before() -> None:
    """Rank 1 has announced an operation and reads late what the others announced, who have gone on and failed."""
    late_may_read, is_announced = threading.Event(), threading.Event()

    def body(group: Group) -> None:
        def reduce(tensor: torch.Tensor) -> tr.Work:
            return group.allreduce(tensor, name="w", schedule="ring")  # in which rank 2 sends to rank 0

        meet(group)
        tensor = torch.empty(10)
        for turn in range(4):  # then two entries of the name are used in turn
            tensor.fill_(turn)
            reduce(tensor).wait()
        tensor.fill_(group.rank + 7.0)
        if group.rank == 1:
            with announced_and_not_read(group, lambda: reduce(tensor)) as work:
                is_announced.set()
                assert late_may_read.wait(20)
            assert work.wait(20).unique().tolist() == [24.0]
            return
        assert is_announced.wait(20)
        assert reduce(tensor).wait(20).unique().tolist() == [24.0]
        with pytest.raises(tr.MismatchError):
            reduce(tensor if group.rank == 0 else torch.ones(11)).wait(20)
        for _ in range(3):  # these never end, because rank 1 takes no part
            with contextlib.suppress(tr.TotalReduceError):
                reduce(tensor).wait(0.2)
        late_may_read.set()

    on_one_host(3, body, tcp=tr.TcpConfig(silence_s=50))


@pytest.mark.parametrize("count", [10, 15_000])
def test_an_operation_that_fails_keeps_the_entry_that_another_rank_has_to_read(count: int) -> None:
    """As before, but a report of a third rank ends the operation that follows, and nothing takes it back before."""
    late_may_read, is_announced, both_have_ended = threading.Event(), threading.Event(), threading.Barrier(2)

    def body(group: Group) -> None:
        def reduce(tensor: torch.Tensor) -> tr.Work:
            return group.allreduce(tensor, name="w", schedule="ring")

        meet(group)
        tensor, runner = torch.empty(count), group._runner
        for turn in range(4):
            tensor.fill_(turn)
            reduce(tensor).wait()
        tensor.fill_(group.rank + 7.0)
        if group.rank == 1:
            with announced_and_not_read(group, lambda: reduce(tensor)) as work:
                is_announced.set()
                assert late_may_read.wait(20)
            assert work.wait(20).unique().tolist() == [24.0]
            return
        assert is_announced.wait(20)
        assert reduce(tensor).wait(20).unique().tolist() == [24.0]
        both_have_ended.wait(20)
        if group.rank == 2:
            tensor.fill_(100.0)
            work = reduce(tensor)
            with runner._lock:  # what the engine does when such a report has come
                runner._endpoint.adopt(time.monotonic())
                (key,) = runner.engine.table.active
                runner.engine._fail(0, key, tr.MismatchError("w", (0, 1), ("a", "b")), time.monotonic())
            runner._endpoint.complete_ended()
            with pytest.raises(tr.MismatchError):
                work.wait(5)
            with pytest.raises(tr.DeadlineExceededError):
                reduce(torch.full((count,), 1000.0)).wait(0.2)
            late_may_read.set()
        assert late_may_read.wait(20)

    on_one_host(3, body, tcp=tr.TcpConfig(silence_s=50))


@pytest.mark.parametrize("collective", ["allgather", "broadcast"])
def test_the_end_of_a_rank_that_has_only_announced_is_no_result(collective: str) -> None:
    """Rank 1 closes its group at any instant: rank 0 gets all elements or an error."""
    count, chance = 400_000, random.Random(1)
    outcomes = set()
    for _ in range(15):
        groups = make_groups(2, transport="shm", hosts=[0, 0])
        begin = threading.Barrier(2)
        delays = [chance.random() * 1e-3 * chance.randrange(2) for _ in groups]
        outputs = [torch.full((2 * count,), 10.0 * rank) for rank in range(2)]

        def submit(group: Group, outputs: list[torch.Tensor] = outputs) -> tr.Work:
            output = outputs[group.rank]
            if collective == "broadcast":
                return group.broadcast(output, root=1, name="w", async_op=True)
            return group.allgather(output, torch.full((count,), 10.0), name="w")

        def stays(group: Group, begin: threading.Barrier = begin, delay_s: float = delays[0]) -> None:
            meet(group)
            begin.wait(20)
            time.sleep(delay_s)
            try:
                outcomes.add(tuple(submit(group).wait(10).unique().tolist()))
            except tr.PeerLost as error:
                outcomes.add(error.rank)

        def leaves(group: Group, begin: threading.Barrier = begin, delay_s: float = delays[1]) -> None:
            meet(group)
            begin.wait(20)
            submit(group)
            time.sleep(delay_s)
            group.close(1.0)

        threads = [
            threading.Thread(target=body, args=(group,)) for body, group in zip((stays, leaves), groups, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for group in groups:
            group.close(1.0)
    assert outcomes <= {1, (10.0,)}
    assert 1 in outcomes


def test_broadcasts_that_the_root_gives_back_hang_no_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    """By messages a receiver ends before another one has begun: that receiver may be at the broadcast before."""
    offer, place_of_next = FastLane.take, FastLane.place_of_next
    gives_way: set[int] = set()
    monkeypatch.setattr(FastLane, "take", lambda lane, *at: None if lane._rank in gives_way else offer(lane, *at))
    monkeypatch.setattr(
        FastLane, "place_of_next", lambda lane, *at: None if lane._rank in gives_way else place_of_next(lane, *at)
    )

    def body(group: Group) -> None:
        meet(group)
        chance = random.Random(group.rank)
        for turn in range(600):
            tensor = torch.full((10,), float(turn) if group.rank == 0 else -1.0)
            if group.rank == 0 and chance.random() < 0.3:
                gives_way.add(0)
            work = group.broadcast(tensor, name="w", schedule="tree", async_op=True)
            gives_way.discard(group.rank)
            if chance.random() < 0.02:
                time.sleep(chance.random() * 0.004)
            assert work.wait(20).unique().tolist() == [turn]

    on_one_host(3, body)


def test_sums_of_denormal_numbers_are_equal_where_threads_have_different_modes() -> None:
    def body(group: Group) -> list[float]:
        meet(group)
        torch.set_flush_denormal(group.rank == 0)
        try:
            return group.allreduce(torch.full((8,), 1e-40), name="w").wait().view(torch.int32).tolist()
        finally:
            torch.set_flush_denormal(False)

    with_lane = on_one_host(3, body)
    assert with_lane[0][0] > 0
    assert with_lane == [with_lane[0]] * 3


def test_a_block_that_nobody_may_write() -> None:
    def body(group: Group) -> list[bytes]:
        meet(group)
        own = memoryview(bytes([group.rank] * 5))
        blocks = [own if rank == group.rank else memoryview(bytearray(5)) for rank in range(2)]
        group.operations.submit(checked.allgather_bytes(blocks), "w", 0).wait(20)
        return [bytes(block) for block in blocks]

    assert on_one_host(2, body) == [[b"\0" * 5, b"\1" * 5]] * 2
