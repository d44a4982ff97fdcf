"""``Group.coordinate``: operations that the ranks agree on, carried out by the engine. Every value against a plain
reference; every error on every rank; and the next operation works."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import totalreduce as tr
from totalreduce import ReduceOp
from totalreduce.coordination import stall
from totalreduce.coordination.config import CoordinationConfig
from totalreduce.foundation.types import OpKind
from totalreduce.groups.engine_collectives import EngineCollectives
from totalreduce.native import agreement, failures
from totalreduce.native.coordinator import Coordinator
from totalreduce.native.describing import Describer
from totalreduce.runner import runner
from totalreduce.testing import run_ranks

SIZES = [1, 2, 3, 4, 5, 8]
WORLDS = [*((size, "inproc") for size in SIZES), *((size, kind) for kind in ("shm", "tcp") for size in (2, 4))]
#: Four ranks are tried over shared memory, five ranks without it.
SLOW_WORLDS = {(4, "inproc"), (8, "inproc"), (4, "tcp")}
worlds = pytest.mark.parametrize(
    ("size", "transport"),
    [pytest.param(*world, marks=[pytest.mark.slow] * (world in SLOW_WORLDS)) for world in WORLDS],
)
some_worlds = pytest.mark.parametrize(("size", "transport"), [(2, "inproc"), (3, "inproc"), (5, "inproc"), (2, "tcp")])

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*INTEGERS, *FLOATS, torch.bool)


# -------------------------------------------------------------------------------------------------- a plain reference


def brought(rank: int, index: int, dtype: torch.dtype, op: ReduceOp) -> float:
    """Element ``index`` of a rank's tensor: a number whose reductions every dtype holds exactly."""
    if dtype is torch.bool:
        return (rank + index) % 3 > 0
    number = (7 * rank + 5 * index) % 11
    if op is ReduceOp.PRODUCT and dtype.is_floating_point:
        return (-1, 0.5, 2, 1)[number % 4]
    if op is ReduceOp.SUM and dtype in (torch.uint8, torch.int8):
        return 60 + number  # wraps around
    return number if dtype is torch.uint8 else number - 4


def reduced(numbers: list[float], dtype: torch.dtype, op: ReduceOp) -> float:
    """One element of the result, by Python's arithmetic."""
    if dtype is torch.bool:
        conjunction = op in (ReduceOp.MIN, ReduceOp.PRODUCT, ReduceOp.BAND)
        parity = sum(map(bool, numbers)) % 2 == 1
        return parity if op is ReduceOp.BXOR else all(numbers) if conjunction else any(numbers)
    result: Any = numbers[0]
    for number in numbers[1:]:
        match op:
            case ReduceOp.SUM | ReduceOp.AVG:
                result += number
            case ReduceOp.MIN:
                result = min(result, number)
            case ReduceOp.MAX:
                result = max(result, number)
            case ReduceOp.PRODUCT:
                result *= number
            case ReduceOp.BAND:
                result &= number
            case ReduceOp.BOR:
                result |= number
            case ReduceOp.BXOR:
                result ^= number
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        result = (result - limits.min) % (limits.max - limits.min + 1) + limits.min
    return result


def averaged(total: float, dtype: torch.dtype, count: int) -> float:
    """What was added up in the dtype, divided once; integers towards zero, halves by way of float32."""
    if not dtype.is_floating_point:
        return abs(total) // count * (1 if total >= 0 else -1)
    total = float(torch.tensor(total, dtype=torch.float64).to(dtype))
    if dtype in (torch.float16, torch.bfloat16):
        return float(torch.tensor(total / count, dtype=torch.float32).to(dtype))
    return float(torch.tensor(total / count, dtype=torch.float64).to(dtype))


def defined(dtype: torch.dtype, op: ReduceOp) -> bool:
    if op is ReduceOp.NONE or (op.is_bitwise and dtype.is_floating_point):
        return False
    return not (dtype is torch.bool and op is ReduceOp.AVG)


COMBINATIONS = [(dtype, op) for dtype in DTYPES for op in ReduceOp if defined(dtype, op)]
COUNT = 13


def make(rank: int, dtype: torch.dtype, op: ReduceOp, count: int = COUNT) -> torch.Tensor:
    return torch.tensor([brought(rank, index, dtype, op) for index in range(count)], dtype=dtype)


def expected(ranks: Any, dtype: torch.dtype, op: ReduceOp, divisor: int = 0, count: int = COUNT) -> list[float]:
    """The result where these ranks have data."""
    return list(_expected(tuple(ranks), dtype, op, divisor, count))


@functools.cache
def _expected(ranks: tuple[int, ...], dtype: torch.dtype, op: ReduceOp, divisor: int, count: int) -> list[float]:
    results = []
    for index in range(count):
        number = reduced([brought(rank, index, dtype, op) for rank in ranks], dtype, op)
        results.append(averaged(number, dtype, divisor or len(ranks)) if op is ReduceOp.AVG else number)
    return results


def together(size: int, body: Callable[[tr.Group], Any], transport: str = "inproc", **options: Any) -> list[Any]:
    return run_ranks(size, body, transport=transport, **options)


def begun_by_waiting(**settings: Any) -> CoordinationConfig:
    """Settings with which a cycle begins when a rank waits for an operation, and not because time has passed.

    Users can have operations collected for a second at most, in which a slow machine may not submit those of all ranks.
    """
    config = CoordinationConfig(**settings)
    object.__setattr__(config, "cycle_s", 3600.0)
    return config


# -------------------------------------------------------------------------------------------------------- allreduce


@worlds
def test_every_reduction_of_every_dtype(size: int, transport: str) -> None:
    """Many in flight, of all dtypes, in another order on every rank; twice: asked for, and from the cache."""

    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        for step in range(2):
            order = random.Random(10 * step + group.rank).sample(COMBINATIONS, len(COMBINATIONS))
            tensors = {pair: make(group.rank, *pair) for pair in COMBINATIONS}
            works = {
                (dtype, op): coordinator.allreduce(tensors[dtype, op], name=f"{dtype} {op.name}", op=op)
                for dtype, op in order
            }
            for dtype, op in random.Random(group.rank - step).sample(COMBINATIONS, len(COMBINATIONS)):
                result = works[dtype, op].wait()
                assert result is tensors[dtype, op]
                assert result.tolist() == expected(range(size), dtype, op), (dtype, op)
                assert works[dtype, op].done()
                assert works[dtype, op].exception() is None
        assert coordinator.counters.misses == len(COMBINATIONS)
        assert coordinator.counters.hits == len(COMBINATIONS)
        snapshots = group.allgather_object([f"{name}: {bit}" for name, bit in coordinator.cache_snapshot()])
        assert all(snapshot == snapshots[0] for snapshot in snapshots)
        assert len(snapshots[0]) == len(COMBINATIONS)

    together(size, body, transport)


@worlds
def test_factors_before_and_after(size: int, transport: str) -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        works = {}
        for dtype in (torch.int32, torch.int64, *FLOATS):
            for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
                for before, after in ((0.5, 1.0), (1.0, 0.5), (2.5, 4.0), (2, -1)):
                    for count in (1, 6):
                        tensor = torch.tensor([3 * group.rank + index for index in range(count)], dtype=dtype)
                        key = dtype, op, before, after, count
                        works[key] = coordinator.allreduce(
                            tensor, name=str(key), op=op, prescale=before, postscale=after
                        )
        for (dtype, op, before, after, count), work in works.items():
            whole = not dtype.is_floating_point
            results = []
            for index in range(count):
                parts: list[float] = [(3 * rank + index) * before for rank in range(size)]
                parts = [int(part) for part in parts] if whole else parts
                number = max(parts) if op is ReduceOp.MAX else sum(parts)
                if op is ReduceOp.AVG:
                    number = averaged(number, dtype, size)
                results.append(int(number * after) if whole else number * after)
            wanted = torch.tensor(results, dtype=torch.float64).to(dtype)
            assert work.wait().tolist() == wanted.tolist(), work.name

    together(size, body, transport)


@worlds
def test_layouts(size: int, transport: str) -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        base = torch.arange(24.0).view(4, 6) * (group.rank + 1)
        factor = size * (size + 1) // 2
        whole = torch.arange(24.0).view(4, 6) * factor
        layouts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "whole": lambda tensor: tensor,
            "transposed": lambda tensor: tensor.t(),
            "every second column": lambda tensor: tensor[:, ::2],
            "a column": lambda tensor: tensor[:, 1],
            "a row": lambda tensor: tensor[2],
            "a scalar": lambda tensor: tensor[3, 5],
            "nothing": lambda tensor: tensor[:0],
            "nothing, of no rows": lambda tensor: tensor[:, :0],
            "one element": lambda tensor: tensor[1:2, 1:2],
        }
        for step in range(2):
            tensors = {name: base.clone() for name in layouts}
            works = {}
            for name in random.Random(group.rank + step).sample(list(layouts), len(layouts)):
                works[name] = coordinator.allreduce(layouts[name](tensors[name]), name=name)
            for name, work in works.items():
                result = work.wait()
                wanted = base.clone()
                layouts[name](wanted).copy_(layouts[name](whole))
                assert torch.equal(tensors[name], wanted), f"{name}: and nothing else of the memory"
                assert result.shape == layouts[name](whole).shape
        parameter = torch.nn.Parameter(torch.full((3,), 1.0))
        assert coordinator.allreduce(parameter, name="parameter").wait().tolist() == [size] * 3
        images = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last) * group.rank
        coordinator.allreduce(images, name="images").wait()
        assert images.unique().tolist() == [size * (size - 1) / 2]

    together(size, body, transport)


@worlds
def test_groups_of_operations(size: int, transport: str) -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate(config=CoordinationConfig(fusion_bytes=64))
        for step in range(3):
            mixed = [
                torch.full((2,), group.rank + 1.0),
                torch.full((3, 2), group.rank, dtype=torch.int64),
                torch.full((100,), step + 0.5 * group.rank),
                torch.full((), group.rank * 2.0),
            ]
            works = coordinator.grouped_allreduce(mixed, name="mixed", op=ReduceOp.SUM, prescale=2)
            others = coordinator.grouped_allreduce([torch.ones(2) * group.rank] * 1, name="alone")
            assert coordinator.grouped_allreduce([], name="none") == []
            unnamed = coordinator.grouped_allreduce([torch.ones(1), torch.ones(2)])
            results = [work.wait() for work in works]
            assert [work.name for work in works] == [f"mixed.{index}of4" for index in range(4)]
            ranks = range(size)
            assert results[0].tolist() == [2.0 * sum(rank + 1 for rank in ranks)] * 2
            assert results[1].tolist() == [[2 * sum(ranks)] * 2] * 3
            assert results[2].tolist() == [2.0 * sum(step + 0.5 * rank for rank in ranks)] * 100
            assert results[3].item() == 4.0 * sum(ranks)
            assert others[0].name == "alone"
            assert others[0].wait().tolist() == [sum(ranks)] * 2
            assert [work.wait().tolist() for work in unnamed] == [[size], [size, size]]

    together(size, body, transport)


def test_small_operations_share_native_ones() -> None:
    class Counting:
        """The engine's collectives, counted."""

        def __init__(self, natives: EngineCollectives) -> None:
            self._natives, self.world_size, self.counts = natives, natives.world_size, []

        def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> Any:
            self.counts.append(tensor.numel())
            return self._natives.allreduce(tensor, op)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._natives, name)

    def body(group: tr.Group) -> list[int]:
        natives = Counting(EngineCollectives(group.subgroup(range(3), name="natives").operations))
        config = CoordinationConfig(fusion_bytes=400)
        coordinator = Coordinator(group.operations, natives, config, scope="mine")
        for _ in range(3):
            natives.counts.clear()
            works = coordinator.grouped_allreduce(
                [torch.full((10,), float(index)) for index in range(25)], name="g", op=ReduceOp.AVG
            )
            assert [work.wait()[3].item() for work in works] == list(range(25))
        coordinator.close()
        return natives.counts

    assert together(3, body) == [[100, 100, 50]] * 3


# --------------------------------------------------------------------------------------------- the other collectives


@worlds
def test_allgather_of_ragged_parts(size: int, transport: str) -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        for step in range(3):
            rows = [(rank + (step == 2)) % 3 * (step > 0) + (step == 0) for rank in range(size)]
            parts = [torch.full((rows[rank], 2), rank + 10 * step, dtype=torch.int16) for rank in range(size)]
            work = coordinator.allgather(parts[group.rank], name="ragged")
            scalar = coordinator.allgather(torch.tensor(float(group.rank)), name="scalar")
            strided = coordinator.allgather(torch.arange(6).view(2, 3).t() + group.rank, name="strided")
            nothing = coordinator.allgather(torch.empty(0, 4), name="nothing")
            places = [torch.empty(rows[rank], 2, dtype=torch.int16) for rank in range(size)]
            into = coordinator.allgather(parts[group.rank], outputs=places, name="into places")
            assert torch.equal(work.wait(), torch.cat(parts))
            assert scalar.wait().tolist() == list(range(size))
            assert torch.equal(strided.wait(), torch.cat([torch.arange(6).view(2, 3).t() + r for r in range(size)]))
            assert nothing.wait().shape == (0, 4)
            into.wait()
            assert all(torch.equal(place, part) for place, part in zip(places, parts, strict=True))

    together(size, body, transport)


@worlds
def test_broadcast_from_each_root(size: int, transport: str) -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        for _ in range(2):
            works = {}
            for root in range(size):
                for dtype in DTYPES:
                    tensor = torch.full((3, 2), group.rank + 1).to(dtype)
                    works[root, dtype] = coordinator.broadcast(tensor, root=root, name=f"{root} {dtype}")
                matrix = torch.arange(6.0).view(2, 3).t() + group.rank
                works[root, None] = coordinator.broadcast(matrix, root=root, name=f"{root} strided")
            for (root, dtype), work in works.items():
                if dtype is None:
                    assert torch.equal(work.wait(), torch.arange(6.0).view(2, 3).t() + root)
                else:
                    assert torch.equal(work.wait(), torch.full((3, 2), root + 1).to(dtype))
        for wrong in (-1, size):
            with pytest.raises(tr.ConfigurationError):
                coordinator.broadcast(torch.ones(1), root=wrong)

    together(size, body, transport)


@worlds
def test_reduce_gather_and_scatter_from_each_root(size: int, transport: str) -> None:
    def body(group: tr.Group) -> None:
        coordinator, rank = group.coordinate(), group.rank
        for step in range(3):  # other sizes in the last step
            for root in range(size):
                matrix = (torch.arange(6.0).view(2, 3) + rank).t()
                result = coordinator.reduce(matrix, root=root, op=ReduceOp.AVG, name=f"reduce {root}").wait()
                assert result is matrix
                mean = (size - 1) / 2 if rank == root else rank
                assert torch.equal(matrix, (torch.arange(6.0).view(2, 3) + mean).t())
                sizes = [(other + root + step // 2) % 3 for other in range(size)]
                blocks = [torch.full((sizes[other],), 10 * root + other, dtype=torch.int16) for other in range(size)]
                places = [torch.empty_like(block) for block in blocks] if rank == root else None
                gathered = coordinator.gather(blocks[rank], outputs=places, root=root, name=f"gather {root}").wait()
                assert not len(gathered)
                for place, block in zip(places or (), blocks, strict=False):
                    assert torch.equal(place, block)
                mine = torch.empty_like(blocks[rank])
                parts = blocks if rank == root else None
                assert coordinator.scatter(mine, inputs=parts, root=root, name=f"scatter {root}").wait() is mine
                assert torch.equal(mine, blocks[rank])
        assert coordinator.counters.misses == 3 * size + 2 * size
        for wrong in (-1, size):
            with pytest.raises(tr.ConfigurationError):
                coordinator.gather(torch.ones(1), root=wrong)

    together(size, body, transport)


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_blocks_that_no_rank_can_use_are_refused_at_once(kind: str) -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()

        def call(blocks: list[torch.Tensor] | None) -> tr.Work:
            argument = {"outputs" if kind == "gather" else "inputs": blocks}
            return getattr(coordinator, kind)(torch.ones(2), **argument)

        good = [torch.ones(2) for _ in range(3)]
        with pytest.raises(tr.ConfigurationError, match="only the root"):
            call([*good, good[0]] if group.rank == 0 else good)
        if group.rank == 0:
            with pytest.raises(tr.ConfigurationError, match=r"block 1 is torch.float64 on cpu.*torch.float32 on cpu"):
                call([good[0], good[1].double(), good[2]])
        with pytest.raises(tr.MismatchError):
            call(good[:2] if group.rank == 0 else None).wait()
        call(good if group.rank == 0 else None).wait()  # a refused call has used up no number

    together(3, body)


def test_outputs_of_another_number_than_there_are_results_are_refused_at_once() -> None:
    def body(group: tr.Group) -> None:
        coordinator, rows = group.coordinate(), torch.ones(3)
        beside = coordinator.allgather(rows, name="beside")
        for count in (0, 1, 2, 4):
            outputs = [torch.empty(3) for _ in range(count)]
            for begin in (coordinator.allgather, coordinator.alltoall):
                with pytest.raises(tr.ConfigurationError, match=f"outputs has {count} tensors.* need 3 tensors, one"):
                    begin(rows, outputs=outputs, name="w")
            if count != 1:
                with pytest.raises(tr.ConfigurationError, match=f"outputs has {count} tensors.* need one tensor"):
                    coordinator.reduce_scatter(rows, outputs=outputs, name="w")
        assert beside.wait().tolist() == [1.0] * 9
        for count in (0, 2):  # blocks of no elements, too: the root lacks outputs, and the others pass none
            work = coordinator.gather(torch.empty(count), outputs=[], name="w")
            with pytest.raises(tr.MismatchError, match=rf"no block for rank 0.*a tensor of {count} elements"):
                work.wait()
        outputs = [torch.empty(2) for _ in range(3)] if group.rank == 0 else []
        coordinator.gather(torch.full((2,), group.rank + 1.0), outputs=outputs, name="w").wait()
        assert [output.tolist() for output in outputs] == ([[1.0] * 2, [2.0] * 2, [3.0] * 2] if outputs else [])

    together(3, body)


def test_an_output_of_the_wrong_size_is_an_error_that_names_the_ranks() -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        short = group.rank == 2  # has an output that is too small for the part of rank 1
        places = [torch.empty(4), torch.empty(3 if short else 4), torch.empty(4)]
        work = coordinator.allgather(torch.ones(4), outputs=places, name="gather")
        scattered = coordinator.reduce_scatter(torch.ones(6), outputs=[torch.empty(1 if short else 2)], name="scatter")
        if not short:
            work.wait()
            scattered.wait()
            return
        with pytest.raises(tr.MismatchError, match=r"rank 1 submitted 4 elements; rank 2 submitted a place for 3") as e:
            work.wait()
        assert e.value.ranks == (1, 2)
        with pytest.raises(tr.MismatchError, match=r"rank 2 submitted 2 elements; rank 2 submitted a place for 1"):
            scattered.wait()

    together(3, body)


@pytest.mark.parametrize("keeps_order", [False, True])
def test_operations_that_begin_together_do_not_wait_for_each_other(*, keeps_order: bool) -> None:
    def body(group: tr.Group) -> list[float]:
        if keeps_order:
            group.keep_order()
        coordinator, tensor = group.coordinate(), torch.ones(4)
        with pytest.raises(
            tr.ConfigurationError, match=r"'g\.1of2' shares memory with 'g\.0of2', which begins together"
        ):
            coordinator.grouped_allreduce([tensor[:3], tensor[2:]], name="g", timeout_s=20.0)
        works = coordinator.grouped_allreduce([tensor[:2], tensor[2:]], name="g", timeout_s=20.0)
        return [value for work in works for value in work.wait().tolist()]

    begin = time.monotonic()
    assert together(2, body) == [[2.0] * 4] * 2
    assert time.monotonic() - begin < 15.0


def test_a_reduction_that_the_library_refuses_changes_no_tensor() -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        tensors = [torch.full((3,), 4.0), torch.full((2, 2), 6.0)]
        works = [coordinator.allreduce(tensors[0], op=ReduceOp.BAND, prescale=0.5, name="alone")]
        works += coordinator.grouped_allreduce(tensors[1:], op=ReduceOp.BOR, prescale=0.5, name="one")
        for work in works:
            with pytest.raises(tr.ConfigurationError, match="not defined"):
                work.wait()
        assert [tensor.unique().tolist() for tensor in tensors] == [[4.0], [6.0]]
        assert coordinator.allreduce(tensors[0], prescale=0.5, name="alone").wait().tolist() == [4.0] * 3

    together(2, body)


def test_parts_are_not_copied_into_a_tensor_in_flight() -> None:
    def body(group: tr.Group) -> list[float]:
        coordinator, tensor = group.coordinate(), torch.zeros(2)
        if group.rank:
            group.barrier()
        work = coordinator.allgather(tensor, parts=[torch.full((2,), group.rank + 1.0)], name="x")
        if group.rank == 0:
            with pytest.raises(tr.ConfigurationError, match=r"'y' shares memory with 'x', which is in flight"):
                coordinator.allgather(tensor, parts=[torch.full((2,), 7.0)], name="y")
            with pytest.raises(tr.ConfigurationError, match=r"'y' shares memory with 'x', which is in flight"):
                coordinator.allgather(tensor, name="y")
            group.barrier()
        return work.wait().tolist()

    assert together(2, body) == [[1.0, 1.0, 2.0, 2.0]] * 2


def test_parts_need_a_contiguous_tensor() -> None:
    def body(group: tr.Group) -> list[list[float]]:
        coordinator = group.coordinate()
        kinds = (coordinator.allgather, coordinator.alltoall, coordinator.reduce_scatter)
        part = torch.full((6,), group.rank + 1.0)
        if group.rank == 0:
            turned = torch.zeros(3, 2).T
            for begin in kinds:
                for name in ("w", None):  # a refused operation without a name does not count
                    with pytest.raises(
                        tr.ConfigurationError, match=r"not contiguous \(shape \(2, 3\), strides \(1, 2\)"
                    ):
                        begin(turned, parts=[part], name=name)
            assert not turned.any()
        works = [begin(torch.empty(2, 3), parts=[part]) for begin in kinds]
        return [work.wait(timeout_s=5.0).flatten().tolist() for work in works]

    assert together(2, body) == [[[1.0] * 6 + [2.0] * 6, [1.0] * 3 + [2.0] * 3, [3.0] * 3]] * 2


def test_close_waits_for_the_threads_of_coordinators() -> None:
    """A thread in a function of torch when the interpreter ends aborts the process."""

    def body(group: tr.Group) -> None:
        for owner in (group, group.subgroup(range(2))):
            executor = owner.coordinate()._agreement._executor
            executor.finish(lambda: time.sleep(0.3))
            executors.append(executor)
        group.barrier()
        group.close()

    executors = []
    run_ranks(2, body)
    assert [executor.thread.is_alive() for executor in executors] == [False] * 4


def test_threads_that_submit_unnamed_operations_get_different_numbers() -> None:
    describer, seen = Describer(0, 1), []

    def body() -> None:
        for _ in range(2_000):
            with describer.label(None, OpKind.ALLREDUCE) as label:
                seen.append(label.name)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=body) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(set(seen)) == len(seen) == 8_000


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_blocks_of_another_size_than_the_ranks_tensor_are_an_error_on_every_rank(kind: str) -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        for sizes in ((2, 3, 4), (2, 3, 9)):
            blocks = [torch.ones(size) for size in sizes] if group.rank == 0 else None
            tensor = torch.zeros(group.rank + 2)
            argument = {"outputs" if kind == "gather" else "inputs": blocks}
            work = getattr(coordinator, kind)(tensor, name="blocks", **argument)
            if sizes[2] == 4:
                work.wait()
            else:
                with pytest.raises(
                    tr.MismatchError, match=r"a block of 9 elements for rank 2.* a tensor of 4 elem"
                ) as e:
                    work.wait()
                assert e.value.sets == ((0,), (2,))

    together(3, body)


@worlds
def test_allgathers_of_one_type_share_native_ones(size: int, transport: str) -> None:
    class Counting:
        def __init__(self, natives: EngineCollectives) -> None:
            self._natives, self.world_size, self.device, self.counts = natives, natives.world_size, natives.device, []

        def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Any:
            self.counts.append((tensor.dtype, tensor.numel()))
            return self._natives.allgather(output, tensor)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._natives, name)

    def body(group: tr.Group) -> None:
        natives = Counting(EngineCollectives(group.subgroup(range(size), name="natives").operations))
        config = begun_by_waiting(stall_warning_s=0.0, stall_abort_s=0.0)
        coordinator = Coordinator(group.operations, natives, config, scope="mine")
        dtypes = (torch.float32, torch.int64)
        for step in range(3):
            natives.counts.clear()
            rows = [[(index + rank + step // 2) % 4 for rank in range(size)] for index in range(12)]
            parts = [
                [
                    torch.full((rows[index][rank], index), 100 * step + rank, dtype=dtypes[index % 2])
                    for rank in range(size)
                ]
                for index in range(12)
            ]
            places = [torch.empty_like(part) for part in parts[5]]
            wrong = [torch.empty(len(part) + 1, 7) for part in parts[7]]
            works = [
                coordinator.allgather(
                    parts[index][group.rank],
                    outputs={5: places, 7: wrong if group.rank == 0 else None}.get(index),
                    name=f"part {index}",
                )
                for index in random.Random(group.rank + step).sample(range(12), 12)
            ]
            group.barrier()  # all ranks have submitted everything before one of them begins a cycle
            for work in works:
                index = int(work.name.split()[1])
                if index == 7 and group.rank == 0:
                    with pytest.raises(tr.MismatchError, match="a place for"):
                        work.wait()
                    continue
                result = work.wait() if index != 5 else (work.wait(), torch.cat(places))[1]
                assert torch.equal(result, torch.cat(parts[index])), (step, index)
            longest = [
                max(sum(parts[index][rank].numel() for index in range(first, 12, 2)) for rank in range(size))
                for first in range(2)
            ]
            assert sorted(natives.counts, key=str) == [(torch.float32, longest[0]), (torch.int64, longest[1])]
        coordinator.close()

    together(size, body, transport)


@worlds
def test_alltoall(size: int, transport: str) -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        for step in range(3):
            splits = [[(source + 2 * target + step // 2) % 4 for target in range(size)] for source in range(size)]
            mine = splits[group.rank]
            tensor = torch.cat([torch.full((mine[target], 2), 100 * group.rank + target) for target in range(size)])
            received: list[int] = []
            work = coordinator.alltoall(tensor, mine, received=received, name="uneven")
            even = coordinator.alltoall(torch.arange(2 * size) + 1000 * group.rank, name="even")
            wanted = torch.cat(
                [torch.full((splits[source][group.rank], 2), 100 * source + group.rank) for source in range(size)]
            )
            assert torch.equal(work.wait(), wanted)
            assert received == [splits[source][group.rank] for source in range(size)]
            assert even.wait().tolist() == [
                1000 * source + 2 * group.rank + place for source in range(size) for place in range(2)
            ]
        nothing = coordinator.alltoall(torch.empty(0, 3), [0] * size, name="nothing")
        assert nothing.wait().shape == (0, 3)

    together(size, body, transport)


@worlds
def test_reduce_scatter_of_uneven_rows(size: int, transport: str) -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        rank, ranks = group.rank, range(size)
        for _ in range(2):
            for rows in (0, 1, size, 2 * size - 1, 3 * size + 1):
                counts = [rows // size + (place < rows % size) for place in ranks]
                begin = sum(counts[:rank])
                for op, dtype, scale in (
                    (ReduceOp.SUM, torch.float32, 1.0),
                    (ReduceOp.AVG, torch.int32, 1.0),
                    (ReduceOp.MAX, torch.int64, 1.0),
                    (ReduceOp.SUM, torch.float64, 0.5),
                ):
                    tensor = (torch.arange(rows * 3).view(rows, 3) + 10 * rank).to(dtype)
                    result = coordinator.reduce_scatter(
                        tensor, op=op, prescale=scale, postscale=scale, name=f"{rows} {op.name} {scale}"
                    ).wait()
                    everything = [
                        [[3 * row + column + 10 * other for column in range(3)] for row in range(rows)]
                        for other in ranks
                    ]
                    wanted = []
                    for row in range(begin, begin + counts[rank]):
                        cells = [[everything[other][row][column] for other in ranks] for column in range(3)]
                        match op:
                            case ReduceOp.SUM:
                                wanted.append([sum(cell) * scale * scale for cell in cells])
                            case ReduceOp.AVG:
                                wanted.append([sum(cell) // size for cell in cells])
                            case _:
                                wanted.append([max(cell) for cell in cells])
                    assert result.shape == (counts[rank], 3)
                    assert result.dtype is dtype
                    assert result.tolist() == wanted, (rows, op)
        with pytest.raises(tr.ConfigurationError):
            coordinator.reduce_scatter(torch.tensor(1.0))
        with pytest.raises(tr.ConfigurationError):
            coordinator.reduce_scatter(torch.ones(3), op=ReduceOp.NONE)

    together(size, body, transport)


@worlds
def test_a_barrier_waits(size: int, transport: str) -> None:
    arrived = [[False] * size for _ in range(size)]

    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        for late in range(size):
            pending = coordinator.allreduce(torch.ones(5), name="beside")
            if group.rank == late:
                time.sleep(0.05)
            arrived[late][group.rank] = True
            coordinator.barrier()
            assert all(arrived[late])
            assert pending.wait().tolist() == [size] * 5

    together(size, body, transport)


def test_a_barrier_that_somebody_misses_runs_out_of_time() -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        if group.rank:
            with pytest.raises(tr.DeadlineExceededError, match="barrier"):
                coordinator.barrier(timeout_s=0.1)
            group.barrier()
        else:
            group.barrier()

    together(3, body)


@pytest.mark.parametrize("of_group", [True, False])
def test_a_barrier_that_is_repeated_has_its_own_deadline(of_group: bool) -> None:
    """A refused repetition does not lose the barrier that is still pending."""
    late = threading.Event()

    def body(group: tr.Group) -> None:
        barrier = group.barrier if of_group else group.coordinate().barrier
        if group.rank:
            late.wait(10.0)
        else:
            with pytest.raises(tr.DeadlineExceededError, match="barrier"):
                barrier(timeout_s=0.05)
            with pytest.raises(tr.ConfigurationError, match="timeout_s"):
                barrier(timeout_s=-1.0)
            threading.Timer(0.3, late.set).start()
        barrier()  # by the group's time-out
        barrier()

    together(2, body)


def test_a_barrier_that_has_run_out_of_time_is_waited_for_again() -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        if group.rank:
            for _ in range(2):
                with pytest.raises(tr.DeadlineExceededError, match="barrier"):
                    coordinator.barrier(timeout_s=0.05)
        group.barrier()
        coordinator.barrier(timeout_s=20.0)
        if group.rank == 1:
            with pytest.raises(tr.DeadlineExceededError, match="barrier"):
                coordinator.barrier(timeout_s=0.05)
        group.barrier()
        if group.rank != 1:
            coordinator.barrier(timeout_s=20.0)
        assert coordinator.join(timeout_s=20.0) in range(3)  # rank 1 waits for the barrier here
        if group.rank == 0:
            time.sleep(0.1)
        arrived[group.rank] = True
        coordinator.barrier(timeout_s=20.0)
        assert all(arrived)

    arrived = [False] * 3
    together(3, body)


@pytest.mark.parametrize("when", ["pending", "ended"])
@pytest.mark.parametrize("of_group", [True, False])
def test_a_barrier_that_was_interrupted_is_waited_for_again(
    of_group: bool, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is interrupted once. The other rank calls the barrier once meanwhile, so the ranks must not be shifted."""
    arrived = [False] * 2

    def body(group: tr.Group) -> None:
        coordinator = None if of_group else group.coordinate()
        barrier = group.barrier if coordinator is None else coordinator.barrier
        if group.rank == 0:
            waiter: Any = group._runner if coordinator is None else coordinator._agreement
            wait = waiter.wait

            def interrupted(handle: Any, timeout_s: float) -> None:
                if when == "ended":
                    wait(handle, timeout_s)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(waiter, "wait", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    barrier(timeout_s=20.0)
        barrier(timeout_s=20.0)
        if group.rank == 0:
            time.sleep(0.1)
        arrived[group.rank] = True
        barrier(timeout_s=20.0)
        assert all(arrived)

    together(2, body)


@pytest.mark.parametrize("of_group", [True, False])
def test_a_barrier_that_has_failed_is_not_waited_for_again(of_group: bool) -> None:
    def body(group: tr.Group) -> None:
        coordinator = None if of_group else group.coordinate()
        barrier = group.barrier if coordinator is None else coordinator.barrier
        if group.rank == 0:
            for _ in range(2):
                with pytest.raises(tr.PeerLost, match="rank 1 is lost"):
                    barrier(timeout_s=20.0)
            late = (group.operations if coordinator is None else coordinator)._barriers._late
            assert not late
        else:
            time.sleep(0.05)
            group.close()

    together(2, body)


# ------------------------------------------------------------------------------------------------------------- join


@pytest.mark.parametrize(
    ("size", "transport", "divisor"),
    [
        *(
            pytest.param(
                *world,
                "world",
                marks=[pytest.mark.slow] * (world not in ((1, "inproc"), (5, "inproc"), (2, "shm"), (4, "tcp"))),
            )
            for world in WORLDS
        ),
        (3, "inproc", "active"),
        *(pytest.param(*case, "active", marks=pytest.mark.slow) for case in ((2, "inproc"), (5, "inproc"), (2, "tcp"))),
    ],
)
def test_uneven_epochs(size: int, transport: str, divisor: str) -> None:
    """Ranks in turn are the first to have no more data; then it all begins again."""
    pairs = [(dtype, op) for dtype, op in COMBINATIONS if dtype in (torch.int8, torch.float32)]
    pairs += [(torch.bool, ReduceOp.MIN), (torch.bool, ReduceOp.MAX), (torch.uint8, ReduceOp.BAND)]

    def body(group: tr.Group) -> list[int]:
        coordinator = group.coordinate(config=CoordinationConfig(join_divisor=divisor))  # type: ignore[arg-type]
        last = []
        for epoch in range(min(size, 4) if size < 8 else 2):
            steps = [1 + (rank - epoch) % size for rank in range(size)]
            for step in range(steps[group.rank]):
                active = [rank for rank in range(size) if steps[rank] > step]
                known = {
                    pair: coordinator.allreduce(make(group.rank, *pair), name=f"{pair[0]} {pair[1].name}", op=pair[1])
                    for pair in pairs
                }
                new = coordinator.allreduce(torch.full((3,), 1.0), name=f"epoch {epoch} step {step}")
                unnamed = coordinator.allreduce(torch.full((2,), 2.0))
                both = coordinator.grouped_allreduce([torch.ones(2), torch.ones(3, dtype=torch.int16)], name="both")
                strided = coordinator.allreduce(torch.ones(4, 2).t(), name="strided")
                for (dtype, op), work in known.items():
                    count = size if divisor == "world" else len(active)
                    # Epochs are told apart by who is late, so ranks that have joined are known before the step.
                    wanted = expected(active, dtype, op, count)
                    assert work.wait().tolist() == wanted, (dtype, op, epoch, step)
                assert new.wait().tolist() == [len(active)] * 3
                assert unnamed.wait().tolist() == [2.0 * len(active)] * 2
                assert [work.wait()[0].item() for work in both] == [len(active)] * 2
                assert strided.wait().unique().tolist() == [len(active)]
                group.barrier()
                ended = sum(1 for rank in range(size) if steps[rank] == step + 1)
                if steps[group.rank] > step + 1:  # those who have joined are heard of before the next step
                    deadline = time.monotonic() + 20
                    gone = size - len(active) + ended
                    while len(coordinator.joined) < gone and time.monotonic() < deadline:
                        time.sleep(0.001)
                    assert len(coordinator.joined) == gone
            waiting = max(steps) - steps[group.rank]
            joiner = ThreadPoolExecutor(1)
            future = joiner.submit(coordinator.join)
            for _ in range(waiting):
                group.barrier()
            last.append(future.result(30))
            joiner.shutdown()
        return last

    (results,) = {tuple(last) for last in together(size, body, transport)}
    assert all(steps == (epoch - 1) % size for epoch, steps in enumerate(results)), "whoever had the most steps"


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.AVG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.int32])
def test_what_a_rank_without_data_lends_is_neutral_whatever_the_factors(dtype: torch.dtype, op: ReduceOp) -> None:
    def body(group: tr.Group) -> list[list[float]]:
        coordinator = group.coordinate()
        results = []
        if group.rank != 1:
            deadline = time.monotonic() + 20
            while coordinator.joined != (1,) and time.monotonic() < deadline:
                time.sleep(0.001)
            for before, after in ((2.0, 1.0), (0.5, 1.0), (-1.0, 2.0), (0.0, 1.0)):
                for number in (-8, 8):
                    tensor = torch.full((2,), number + 2 * group.rank, dtype=dtype)
                    work = coordinator.allreduce(tensor, name="x", op=op, prescale=before, postscale=after)
                    results.append(work.wait().tolist())
        coordinator.join()
        return results

    wanted = []
    for before, after in ((2.0, 1.0), (0.5, 1.0), (-1.0, 2.0), (0.0, 1.0)):
        for number in (-8, 8):
            parts = [(number + 2 * rank) * before for rank in (0, 2)]
            total = reduced(parts, torch.float64, op)
            if op is ReduceOp.AVG:
                total = averaged(total, dtype, 3)
            if dtype is torch.int8:
                total = (int(total) + 128) % 256 - 128
                total = (int(total * after) + 128) % 256 - 128
            else:
                total = total * after
            wanted.append([float(torch.tensor(total, dtype=torch.float64).to(dtype))] * 2)
    results = together(3, body)
    assert results[0] == results[2]
    assert results[0] == wanted


def test_what_is_refused_while_a_rank_has_joined_is_refused_everywhere() -> None:
    def body(group: tr.Group) -> list[str]:
        coordinator = group.coordinate()
        messages = []
        if group.rank != 1:
            calls: list[Callable[[], tr.Work]] = [
                lambda: coordinator.allgather(torch.ones(2), name="gather"),
                lambda: coordinator.broadcast(torch.ones(2), name="broadcast"),
                lambda: coordinator.alltoall(torch.ones(3), name="all to all"),
                lambda: coordinator.reduce_scatter(torch.ones(3), name="scatter"),
            ]
            while coordinator.joined != (1,):
                time.sleep(0.001)
            for call in calls:
                with pytest.raises(tr.UnsupportedError, match=r"rank\(s\) 1 have joined") as caught:
                    call().wait()
                messages.append(str(caught.value))
                assert coordinator.allreduce(torch.ones(2), name="x").wait().tolist() == [2.0, 2.0]
            # what the library refuses is no reason for the rank without data to fail
            for op in (ReduceOp.BAND, ReduceOp.BOR):
                with pytest.raises(tr.ConfigurationError):
                    coordinator.allreduce(torch.ones(2), name="bits", op=op).wait()
            with pytest.raises(tr.UnsupportedError, match="no average"):
                coordinator.allreduce(torch.ones(2, dtype=torch.bool), name="no average", op=ReduceOp.AVG).wait()
            assert coordinator.allreduce(torch.ones(2), name="x").wait().tolist() == [2.0, 2.0]
            coordinator.barrier()
        coordinator.join()
        assert coordinator.allgather(torch.ones(1), name="gather").wait().tolist() == [1.0] * 3
        return messages

    results = together(3, body)
    assert results[0] == results[2]
    assert len(results[0]) == 4


def test_a_join_that_runs_out_of_time_goes_on() -> None:
    early = threading.Event()

    def body(group: tr.Group) -> int:
        coordinator = group.coordinate()
        if group.rank == 0:
            with pytest.raises(tr.DeadlineExceededError):
                coordinator.join(timeout_s=0.05)
            early.set()
            time.sleep(0.2)  # the others join meanwhile: it ends while nobody here waits for it
            last = coordinator.join(timeout_s=10.0)
        else:
            early.wait(10.0)
            last = coordinator.join()
        assert coordinator.allreduce(torch.ones(1), name="x").wait().item() == 3.0
        second = coordinator.join()
        assert second in range(3)
        return last

    (last,) = set(together(3, body))
    assert last in (1, 2)


def test_threads_of_one_rank_that_join_start_the_numbers_over_once() -> None:
    """Both wait for one join. The second thread may wake after the first one has submitted other operations."""
    other_has_submitted = threading.Event()

    def body(group: tr.Group) -> list[float]:
        coordinator = group.coordinate()
        coordinator.allreduce(torch.ones(1)).wait()
        if group.rank == 0:
            wait = coordinator._agreement.wait
            late = threading.Event()

            def wait_long(handle: Any, timeout_s: float) -> None:
                wait(handle, timeout_s)
                if threading.current_thread().name == "late":
                    late.set()
                    assert other_has_submitted.wait(5.0)

            coordinator._agreement.wait = wait_long  # type: ignore[method-assign]
            second = threading.Thread(target=coordinator.join, name="late")
            second.start()
            coordinator.join()
            assert late.wait(5.0)
        else:
            coordinator.join()
        first = coordinator.allreduce(torch.full((1,), 1.0))
        if group.rank == 0:
            other_has_submitted.set()
            second.join(5.0)
        results = [first.wait(5.0).item()]
        results += [coordinator.allreduce(torch.full((1,), number)).wait(5.0).item() for number in (2.0, 3.0)]
        return results

    assert together(2, body) == [[2.0, 4.0, 6.0]] * 2


# ----------------------------------------------------------------------------------------------------------- errors


def usual(coordinator: Coordinator) -> tr.Work:
    return coordinator.allreduce(torch.ones(6), name="w")


ODD: dict[str, tuple[Callable[[Coordinator], tr.Work], str]] = {
    "shape": (lambda c: c.allreduce(torch.ones(7), name="w"), "allreduce(sum) of float32[7]"),
    "shape of as many elements": (
        lambda c: c.allreduce(torch.ones(2, 3), name="w"),
        "allreduce(sum) of float32[2, 3]",
    ),
    "dtype": (lambda c: c.allreduce(torch.ones(6).double(), name="w"), "allreduce(sum) of float64[6]"),
    "reduction": (lambda c: c.allreduce(torch.ones(6), name="w", op=ReduceOp.MAX), "allreduce(max) of float32[6]"),
    "kind": (lambda c: c.broadcast(torch.ones(6), name="w"), "broadcast(root=0) of float32[6]"),
    "gather": (lambda c: c.allgather(torch.ones(6), name="w"), "allgather of float32[any]"),
    "prescale": (
        lambda c: c.allreduce(torch.ones(6), name="w", prescale=0.5),
        "allreduce(sum, prescale=0.5) of float32[6]",
    ),
    "postscale": (
        lambda c: c.allreduce(torch.ones(6), name="w", postscale=1.0000001),
        "allreduce(sum, postscale=1.0000001) of float32[6]",
    ),
}


@some_worlds
@pytest.mark.parametrize("case", ODD)
def test_ranks_that_differ_raise_the_same_on_every_rank(size: int, transport: str, case: str) -> None:
    odd, shown = ODD[case]
    plain = "allreduce(sum) of float32[6]"

    def body(group: tr.Group) -> list[tuple[Any, ...]]:
        coordinator = group.coordinate()
        seen = []
        for step, culprit in enumerate((size - 1, 0, 1)):
            others = tuple(rank for rank in range(size) if rank != culprit)
            if step:  # the name is known
                assert usual(coordinator).wait().tolist() == [float(size)] * 6
            beside = coordinator.allreduce(torch.ones(2), name="beside")
            work = odd(coordinator) if group.rank == culprit else usual(coordinator)
            with pytest.raises(tr.MismatchError, match="'w'") as caught:
                work.wait()
            error = caught.value
            assert error.tensor == "w"
            by_set = dict(zip(error.sets, error.values, strict=True))
            assert set(by_set) == {others, (culprit,)}
            assert by_set[culprit,].endswith(shown)
            assert (plain in by_set[others]) or case == "gather"
            assert isinstance(work.exception(), tr.MismatchError)
            seen.append((error.sets, error.values, str(error)))
            assert beside.wait().tolist() == [float(size)] * 2, "nothing else is harmed"
            assert usual(coordinator).wait().tolist() == [float(size)] * 6
        return seen

    results = together(size, body, transport)
    assert all(result == results[0] for result in results)


@some_worlds
def test_roots_that_differ(size: int, transport: str) -> None:
    def body(group: tr.Group) -> tuple[Any, ...]:
        coordinator = group.coordinate()
        with pytest.raises(tr.MismatchError) as caught:
            coordinator.broadcast(torch.ones(2), root=group.rank % 2, name="w").wait()
        tensor = torch.full((2,), float(group.rank))
        assert coordinator.broadcast(tensor, root=1, name="w").wait().tolist() == [1.0, 1.0]
        return caught.value.sets, caught.value.values

    for sets, values in together(size, body, transport):
        assert sets == (tuple(range(0, size, 2)), tuple(range(1, size, 2)))
        assert values == ("broadcast(root=0) of float32[2]", "broadcast(root=1) of float32[2]")


@some_worlds
def test_one_bad_member_fails_the_group(size: int, transport: str) -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        for step in range(4):
            bad = step in (1, 2) and group.rank == size - 1
            tensors = [torch.ones(2), torch.ones(9 if bad else 3), torch.ones(4)]
            works = coordinator.grouped_allreduce(tensors, name="g")
            beside = coordinator.grouped_allreduce([torch.ones(1), torch.ones(1)], name="beside")
            for work in works:
                if step in (1, 2):
                    with pytest.raises(tr.MismatchError, match=r"g\.1of3") as caught:
                        work.wait()
                    assert caught.value.tensor == "g.1of3"
                    assert caught.value.sets == (tuple(range(size - 1)), (size - 1,))
                else:
                    assert work.wait()[0].item() == size
            assert [work.wait().item() for work in beside] == [size, size]

    together(size, body, transport)


def test_ranks_that_group_differently() -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        for _ in range(2):
            if group.rank == 1:
                works = [coordinator.allreduce(torch.ones(2), name=f"g.{index}of2") for index in range(2)]
            else:
                works = coordinator.grouped_allreduce([torch.ones(2), torch.ones(2)], name="g")
            for work in works:
                with pytest.raises(tr.MismatchError, match="in the group 'g' of 2"):
                    work.wait()
            assert usual(coordinator).wait()[0].item() == 3.0

    together(3, body)


def test_gathers_that_differ_behind_the_first_dimension() -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        with pytest.raises(tr.MismatchError, match=r"float32\[any, 3\]"):
            coordinator.allgather(torch.ones(2, 3 if group.rank else 4), name="w").wait()
        assert coordinator.allgather(torch.ones(group.rank, 3), name="w").wait().shape == (3, 3)

    together(3, body)


@pytest.mark.filterwarnings("ignore:.*(quantiz|TypedStorage)")
def test_what_is_refused_at_once() -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        if group.rank == 0:
            first = coordinator.allreduce(torch.ones(2), name="w")
            for again in (
                lambda: coordinator.allreduce(torch.ones(2), name="w"),
                lambda: coordinator.broadcast(torch.ones(2), name="w"),
                lambda: coordinator.allgather(torch.ones(2), name="w"),
            ):
                with pytest.raises(tr.ConfigurationError, match="'w' is in flight"):
                    again()
            held = coordinator.allreduce(torch.ones(1), name="g.1of2")
            with pytest.raises(tr.ConfigurationError, match=r"'g\.1of2' is in flight"):
                coordinator.grouped_allreduce([torch.ones(1), torch.ones(1)], name="g")
            fine = coordinator.allreduce(torch.ones(1), name="g.0of2")  # nothing of that group was begun
            for splits in ([1], [1, 2], [3, -1], [1, 1, 1], []):
                with pytest.raises(tr.ConfigurationError, match="splits must be 2 numbers"):
                    coordinator.alltoall(torch.ones(2), splits, name="s")
            with pytest.raises(tr.ConfigurationError, match="pass splits"):
                coordinator.alltoall(torch.ones(3), name="s")
            for splits in (None, [0, 0]):
                with pytest.raises(tr.ConfigurationError, match="'s': a scalar has no rows"):
                    coordinator.alltoall(torch.tensor(1.0), splits, name="s")
            with pytest.raises(tr.ConfigurationError, match="NONE"):
                coordinator.allreduce(torch.ones(2), op=ReduceOp.NONE)
            for begin in (coordinator.allreduce, coordinator.reduce, coordinator.reduce_scatter):
                for op in ("sum", None, 99, [ReduceOp.SUM]):
                    with pytest.raises(tr.ConfigurationError, match=r"is no reduction.*; there are ReduceOp's SUM"):
                        begin(torch.ones(2), op=op)  # type: ignore[operator]
            with pytest.raises(tr.UnsupportedError, match="sparse"):
                coordinator.allreduce(torch.eye(2).to_sparse(), name="s")
            quantised = torch.quantize_per_tensor(torch.ones(2), 0.5, 3, torch.qint8)
            for refused in (coordinator.allreduce, coordinator.broadcast, coordinator.allgather):
                with pytest.raises(tr.UnsupportedError, match=r"'s' is quantised"):
                    refused(quantised, name="s")
            with pytest.raises(tr.ConfigurationError, match="timeout_s"):
                coordinator.allreduce(torch.ones(2), name="s", timeout_s=0.0)
        else:
            time.sleep(0.05)
            first, held, fine = (
                coordinator.allreduce(torch.ones(count), name=name)
                for name, count in (("w", 2), ("g.1of2", 1), ("g.0of2", 1))
            )
        assert [work.wait()[0].item() for work in (first, held, fine)] == [2.0] * 3
        assert coordinator.allreduce(torch.ones(1), name="w").wait().item() == 2.0, "the name is free again"

    together(2, body)


def test_an_operation_that_is_refused_at_once_does_not_count() -> None:
    """Unnamed operations meet by their number: those after a refusal on one rank still meet the same ones."""

    def body(group: tr.Group) -> None:
        coordinator, rows = group.coordinate(), torch.arange(4.0)
        sparse = torch.eye(2).to_sparse()
        if group.rank == 1:
            for refused in (
                lambda: coordinator.allreduce(sparse),
                lambda: coordinator.allreduce(rows, timeout_s=-1.0),
                lambda: coordinator.grouped_allreduce([rows, sparse]),
                lambda: coordinator.broadcast(sparse),
                lambda: coordinator.allgather(sparse),
                lambda: coordinator.alltoall(rows, [3, 2]),
                lambda: coordinator.alltoall(rows[:3]),
                lambda: coordinator.reduce_scatter(torch.tensor(1.0)),
                lambda: coordinator.barrier(timeout_s=0.0),
            ):
                with pytest.raises(tr.ConfigurationError):
                    refused()
        works = [
            coordinator.allreduce(torch.ones(1)),
            coordinator.broadcast(torch.full((1,), float(group.rank))),
            coordinator.allgather(torch.full((1,), float(group.rank))),
            coordinator.alltoall(torch.arange(2.0) + group.rank),
            coordinator.reduce_scatter(torch.arange(2.0)),
        ]
        rank = float(group.rank)
        wanted = [[2.0], [0.0], [0.0, 1.0], [rank, rank + 1], [2 * rank]]
        assert [work.wait(timeout_s=5).tolist() for work in works] == wanted
        coordinator.barrier(timeout_s=5)

    together(2, body)


def test_a_callback_that_fails_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()

        def fail(work: tr.Work) -> None:
            raise RuntimeError("a mistake in somebody's callback")

        if group.rank:
            group.barrier()
        bad = coordinator.allreduce(torch.ones(2), name="bad")
        if group.rank == 0:
            bad.on_done(fail)
            group.barrier()
        assert bad.wait().tolist() == [2.0, 2.0]
        assert coordinator.allreduce(torch.ones(2), name="next").wait(timeout_s=10).tolist() == [2.0, 2.0]

    together(2, body)
    assert [record.getMessage() for record in caplog.records] == ["rank 0: a callback of a finished operation failed"]


def test_configurations_that_differ() -> None:
    def body(group: tr.Group) -> None:
        for field, value in (("cache_capacity", 7), ("fusion_bytes", 7), ("join_divisor", "active"), ("cycle_s", 0.5)):
            config = CoordinationConfig(**({field: value} if group.rank == 1 else {}))
            with pytest.raises(tr.PlanMismatchError, match=field):
                group.coordinate(config=config)
        # who watches for how long is everybody's own business
        coordinator = group.coordinate(config=CoordinationConfig(stall_warning_s=5.0 + group.rank))
        assert coordinator.allreduce(torch.ones(1), name="x").wait().item() == 3.0

    together(3, body)


# ---------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("size", "transport"), [(2, "inproc"), (3, "inproc"), (5, "inproc"), (2, "shm"), (4, "shm"), (2, "tcp"), (4, "tcp")]
)
@pytest.mark.parametrize("how", ["close", "exception", "nothing submitted", "joined"])
def test_a_rank_that_goes_away(size: int, transport: str, how: str) -> None:
    ended: dict[int, list[BaseException]] = {}

    class Mistake(Exception):
        """Of the program."""

    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        assert coordinator.allreduce(torch.ones(2), name="w").wait()[0].item() == size
        if group.rank == 1:
            if how != "nothing submitted":
                coordinator.allreduce(torch.ones(2), name="half")
            time.sleep(0.05)
            if how == "exception":
                raise Mistake
            group.close()
            return
        mine: list[BaseException] = []
        if how == "joined":
            with pytest.raises((tr.PeerLost, tr.GroupClosed)) as caught:
                coordinator.join(timeout_s=20.0)
            mine.append(caught.value)
        works = []
        try:
            works = [coordinator.allreduce(torch.ones(2), name=name) for name in ("w", "x", "y")]
        except tr.PeerLost as error:
            mine.append(error)
        begin = time.monotonic()
        for work in works:
            with pytest.raises((tr.PeerLost, tr.GroupClosed)) as caught:
                work.wait(timeout_s=20.0)
            mine.append(caught.value)
        assert time.monotonic() - begin < 10.0
        with pytest.raises((tr.PeerLost, tr.GroupClosed)) as caught:
            coordinator.allreduce(torch.ones(2), name="later").wait(timeout_s=20.0)
        ended[group.rank] = [*mine, caught.value]

    if how == "exception":
        with pytest.raises(Mistake):
            together(size, body, transport)
    else:
        together(size, body, transport)
    assert sorted(ended) == [rank for rank in range(size) if rank != 1]
    for errors in ended.values():
        assert all(isinstance(error, tr.PeerLost) and error.rank == 1 for error in errors)


@pytest.mark.parametrize("how", ["group", "subgroup", "coordinator"])
@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_a_rank_that_closes_ends_what_the_others_wait_for(how: str, transport: str) -> None:
    """Also where the job goes on: the time-outs of a stall are far away."""

    def body(group: tr.Group) -> tuple[list[str], list[float]]:
        members = group if how == "group" else group.subgroup([2, 0, 1], name="turned")  # index 0 is rank 2
        if how != "coordinator":
            natives = EngineCollectives(members.control.subgroup(range(3), name="natives").operations)
            coordinator = members.use(natives, CoordinationConfig())
        else:
            coordinator = members.coordinate()
        assert coordinator.allreduce(torch.ones(2), name="w").wait().tolist() == [3.0, 3.0]
        if group.rank == 2:
            pending = coordinator.allreduce(torch.ones(2), name="only here")
            (coordinator if how == "coordinator" else members).close()
            with pytest.raises(tr.GroupClosed, match=r"rank . has closed the group"):
                pending.wait()
            said = ["", ""]
        else:
            begin, said = time.monotonic(), []
            for name in ("w", "later"):
                with pytest.raises(tr.PeerLost) as caught:
                    coordinator.allreduce(torch.ones(2), name=name).wait(timeout_s=20.0)
                assert caught.value.rank == 2
                said.append(caught.value.reason)
            assert time.monotonic() - begin < 15.0
        return said, [] if how == "group" else group.allreduce(torch.ones(1), name="goes on").wait().tolist()

    results = together(3, body, transport)
    name = results[0][0][0].split("'")[1]
    assert name.endswith("turned") == (how != "group")
    reason = f"it has closed the group {name!r}"
    assert results[:2] == [([reason, reason], [] if how == "group" else [3.0])] * 2


def test_closing_says_after_which_exception() -> None:
    def body(group: tr.Group) -> str:
        group.use(EngineCollectives(group.control.subgroup(range(2), name="natives").operations), CoordinationConfig())
        if group.rank == 1:
            with pytest.raises(KeyError), group:
                raise KeyError("lost key")
            return ""
        with pytest.raises(tr.PeerLost) as caught:
            group.allreduce(torch.ones(2), name="w").wait(timeout_s=20.0)
        return caught.value.reason

    said = together(2, body)[0]
    assert said.startswith("it has closed the group ")
    assert said.endswith(" after KeyError: 'lost key'")


def test_closing_happens_at_the_time_of_the_clock() -> None:
    def body(group: tr.Group) -> None:
        coordinator, times = group.coordinate(), []
        agreement = coordinator._agreement
        take_output = agreement._take_output
        agreement._take_output = lambda now: times.append(now) or take_output(now)
        before = time.monotonic()
        coordinator.close()
        assert len(times) == 1
        assert before <= times[0] <= time.monotonic()

    together(1, body)


def test_who_leaves_after_the_last_operation_harms_nobody() -> None:
    def body(group: tr.Group) -> list[float]:
        coordinator = group.coordinate()
        results = []
        for step in range(20):
            works = [coordinator.allreduce(torch.full((50,), 1.0), name=f"{step} {index}") for index in range(4)]
            results += [work.wait().sum().item() for work in works]
        group.close()
        return results

    for _ in range(5):
        assert together(4, body) == [[200.0] * 80] * 4


def test_closing_ends_what_is_pending_here() -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        if group.rank == 0:
            work = coordinator.allreduce(torch.ones(2), name="w")
            coordinator.close()
            coordinator.close()
            with pytest.raises(tr.GroupClosed):
                work.wait()
            with pytest.raises(tr.GroupClosed):
                coordinator.allreduce(torch.ones(2), name="w")
        group.barrier()

    together(2, body)


def test_what_was_agreed_gets_memory_while_the_group_is_closed() -> None:
    """Scaled tensors travel in buffers of the group."""

    def body(group: tr.Group) -> list[list[float]]:
        natives = EngineCollectives(group.control.subgroup(range(2), name="natives").operations)
        coordinator = group.use(_Slow(natives, 0.02), CoordinationConfig(fusion_bytes=1, stall_warning_s=0.0))
        tensors = [torch.full((count,), group.rank + 1.0) for count in range(1, 7)]
        works = coordinator.grouped_allreduce(tensors, name="w", op=ReduceOp.SUM, prescale=2.0)
        works[0].wait()
        if group.rank:
            group.close()
        return [work.wait(timeout_s=20.0).tolist() for work in works]

    for results in together(2, body):
        assert results == [[6.0] * count for count in range(1, 7)]


@pytest.mark.parametrize("timeout_s", [20.0, 0.0])
def test_a_rank_that_closes_carries_out_what_was_agreed_or_its_operations_fail_everywhere(timeout_s: float) -> None:
    """All operations are agreed on in one cycle; the closing rank has waited for the first one.

    With a time-out of 0 s, its library begins most of the others only when it has closed.
    """
    names, closed = [f"{number}" for number in range(8)], threading.Event()

    class Held(_Slow):
        """A slow library, which begins the third allreduce only when the rank has closed."""

        def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> Any:
            if next(calls) == 2:  # which begins when the first one has ended
                assert closed.wait(20.0)
            return super().allreduce(tensor, op)

    calls = itertools.count()

    def body(group: tr.Group) -> list[Any]:
        natives = EngineCollectives(group.control.subgroup(range(2), name="natives").operations)
        config = CoordinationConfig(fusion_bytes=1, stall_warning_s=0.0)
        library = (Held if group.rank == 1 and not timeout_s else _Slow)(natives, 0.02)
        coordinator = Coordinator(group.operations, library, config, scope="mine")
        works = coordinator.grouped_allreduce([torch.full((2,), group.rank + 1.0) for _ in names], name="w")
        first = works[0].wait().tolist()
        if group.rank == 1:
            begin = time.monotonic()
            coordinator.close(timeout_s)
            assert time.monotonic() - begin < 15.0
            closed.set()
            with pytest.raises(tr.GroupClosed):
                coordinator.allreduce(torch.ones(2), name="later")
        results: list[Any] = [first]
        begin = time.monotonic()
        for work in works[1:]:
            try:
                results.append(work.wait(timeout_s=20.0).tolist())
            except (tr.PeerLost, tr.GroupClosed) as error:
                results.append(error)
        assert time.monotonic() - begin < 15.0
        group.barrier()
        return results

    results = together(2, body)
    if timeout_s:
        assert results == [[[3.0, 3.0]] * 8] * 2
    for rank, kind in enumerate((tr.PeerLost, tr.GroupClosed)):
        failed = [result for result in results[rank] if not isinstance(result, list)]
        assert bool(failed) != bool(timeout_s)
        assert all(isinstance(error, kind) for error in failed)
        assert all(error.rank == 1 and "has closed" in error.reason for error in failed if rank == 0)


def test_the_library_is_not_released_while_it_is_in_use() -> None:
    events: list[str] = []

    class Busy:
        """A library whose allreduces block until they are let go."""

        def __init__(self, natives: EngineCollectives) -> None:
            self._natives, self.begun, self.let_go = natives, threading.Event(), threading.Event()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._natives, name)

        def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> Any:
            self.begun.set()
            assert self.let_go.wait(5.0)
            events.append("used")
            return self._natives.allreduce(tensor, op)

        def close(self) -> None:
            events.append("released")

    def body(group: tr.Group) -> None:
        natives = Busy(EngineCollectives(group.control.subgroup(range(1), name="natives").operations))
        coordinator = Coordinator(group.operations, natives, CoordinationConfig(cycle_s=0.0), scope="mine")
        coordinator.allreduce(torch.ones(2), name="w")
        assert natives.begun.wait(5.0)
        coordinator.close(timeout_s=0.0)
        natives.let_go.set()
        coordinator._agreement._executor.thread.join(5.0)
        assert events == ["used", "released"]

    together(1, body)


def test_reductions_of_a_plan_end_when_a_rank_has_closed_its_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "GRACE_S", 0.2)

    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        planned = coordinator.planned(["a", "b"])
        planned.begin()
        submit = functools.partial(planned.submit, op=ReduceOp.SUM, priority=0)
        assert submit(0, torch.ones(2)).wait().tolist() == [2.0, 2.0]
        if group.rank == 1:
            coordinator.close()
        else:
            with pytest.raises(tr.PeerLost, match="rank 1 is lost: it has closed the group"):
                submit(1, torch.ones(2)).wait(timeout_s=5.0)
            assert coordinator.ended is None
        group.barrier()

    together(2, body)


def test_a_coordinator_that_has_ended_plans_no_reductions() -> None:
    def body(group: tr.Group) -> None:
        closed = group.coordinate()
        closed.close()
        with pytest.raises(tr.GroupClosed, match=f"rank {group.rank} has closed the group"):
            closed.planned(["a"])
        stalled = group.coordinate(config=CoordinationConfig(stall_warning_s=0.1, stall_abort_s=0.3))
        if group.rank:
            with pytest.raises(tr.StallError):
                stalled.allreduce(torch.ones(2), name="late").wait(timeout_s=5.0)
        while stalled.ended is None:
            time.sleep(0.01)
        with pytest.raises(tr.StallError, match="late") as caught:
            stalled.planned(["a"])
        assert caught.value is stalled.ended
        group.barrier(timeout_s=5.0)  # no rank has begun the barrier of ``planned``

    together(2, body)


@pytest.mark.parametrize("when", ["begin", "wait"])
def test_a_rank_that_cannot_carry_an_operation_out_ends_the_agreement_everywhere(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "GRACE_S", 0.1)

    class Exhausted:
        """A library that has no memory for an allreduce of seven elements."""

        def __init__(self, natives: Any) -> None:
            self._natives = natives

        def __getattr__(self, name: str) -> Any:
            return getattr(self._natives, name)

        def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> Any:
            if tensor.numel() != 7:
                return self._natives.allreduce(tensor, op)
            if when == "begin":
                raise MemoryError("seven")
            return self

        def wait(self, timeout_s: float) -> bool:
            raise MemoryError("seven")

    def body(group: tr.Group) -> str:
        natives: Any = EngineCollectives(group.control.subgroup(range(3), name="natives").operations)
        if group.rank == 1:
            natives = Exhausted(natives)
        coordinator = Coordinator(group.operations, natives, CoordinationConfig(), scope="mine")
        assert coordinator.allreduce(torch.ones(2), name="fine").wait().tolist() == [3.0, 3.0]
        kind = MemoryError if group.rank == 1 else tr.PeerLost
        begin = time.monotonic()
        with pytest.raises(kind, match="seven"):
            coordinator.allreduce(torch.ones(7), name="w").wait(timeout_s=20.0)
        with pytest.raises(tr.TotalReduceError, match="seven"):
            coordinator.allreduce(torch.ones(2), name="fine")
        assert time.monotonic() - begin < 15.0
        group.barrier()
        return str(coordinator.ended)

    reason = "it could not carry an operation out: MemoryError('seven')"
    lost = f"rank 1 is lost: {reason}"
    assert together(3, body) == [lost, f"rank 1: the coordinator has ended, because {reason}", lost]


def test_no_thread_is_left_when_the_group_has_ended() -> None:
    def body(group: tr.Group) -> None:
        for _ in range(3):
            coordinator = group.coordinate()
            coordinator.allreduce(torch.ones(2), name="w").wait()

    def natives() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.endswith("-native")]

    before = len(natives())
    together(3, body)
    deadline = time.monotonic() + 5
    while len(natives()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(natives()) <= before


@pytest.mark.parametrize("door", ["coordinator", "group"])
def test_the_urgent_go_to_the_library_first(door: str) -> None:
    class Listing:
        """The engine's collectives; lists the numbers of elements."""

        def __init__(self, natives: EngineCollectives) -> None:
            self._natives, self.listed = natives, []

        def __getattr__(self, name: str) -> Any:
            return getattr(self._natives, name)

        def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> Any:
            self.listed.append(tensor.numel())
            return self._natives.allreduce(tensor, op)

        def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
            self.listed.append(tensor.numel())
            return self._natives.broadcast(tensor, root)

    def body(group: tr.Group) -> list[int]:
        natives = Listing(EngineCollectives(group.control.subgroup(range(2), name="natives").operations))
        config = begun_by_waiting()  # operations of different types are not fused
        dtypes = {1: torch.float32, 2: torch.float64, 3: torch.int32, 4: torch.int64}
        who = group.coordinate(natives, config) if door == "coordinator" else group
        if door == "group":
            group.use(natives, config)
        for _ in range(2):  # the second time the answers come from the cache
            works = [
                who.allreduce(torch.ones(size, dtype=dtypes[size]), name=f"{size}", priority=priority + group.rank)
                for size, priority in ((1, 5), (2, -5), (3, 0), (4, -5))
            ]
            further = {"async_op": True} if door == "group" else {}
            works.append(who.broadcast(torch.ones(5), root=0, name="5", priority=-9, **further))
            group.control.barrier()  # everything is submitted before a rank waits, which begins a cycle
            assert [work.wait()[0].item() for work in works] == [2.0] * 4 + [1.0]
            group.control.barrier()  # no rank begins the second time while the other one waits
        return natives.listed

    assert together(2, body) == [[5, 2, 4, 3, 1] * 2] * 2


def test_bytes_that_no_correct_rank_sends() -> None:
    def body(group: tr.Group) -> str:
        coordinator = group.coordinate()
        try:
            coordinator.allreduce(torch.ones(2), name="w").wait()
            if group.rank == 1:
                garbage = b'\x04\0\1\0\0\0\0\0\0\0["'
                group._runner.act(
                    lambda now: group._runner.engine.channels.post(0, coordinator._agreement.number, garbage) is None
                )
            coordinator.allreduce(torch.ones(2), name="later").wait(timeout_s=20.0)
            coordinator.allreduce(torch.ones(2), name="still later").wait(timeout_s=20.0)
        except tr.PeerLost as error:
            return f"{error.rank}"
        except tr.GroupClosed:
            return "closed"
        return "nothing"

    results = together(3, body)
    assert results[0] == "1"
    assert results[1] != "nothing"
    assert results[2] in ("0", "1"), "whoever told it first"


@some_worlds
def test_a_stall_is_reported_and_then_ends_the_agreement(
    size: int, transport: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall, "_ANSWER_S", 20.0)  # an answer that comes late is no missing answer
    others = threading.Barrier(size - 1)

    def watch(group: tr.Group, coordinator: Coordinator, warning_s: float, abort_s: float) -> None:
        """Begin to watch: a rank that was late before is none that has stalled."""

        def begin(now: float) -> bool:
            stalls = coordinator._agreement.negotiator._stalls
            stalls._warning_s, stalls._abort_s = warning_s, abort_s
            return True

        group._runner.act(begin)

    def body(group: tr.Group) -> tr.StallError:
        coordinator = group.coordinate(config=CoordinationConfig(stall_warning_s=0.0, stall_abort_s=0.0))
        begin = time.monotonic()  # before any rank has come to "late", which not all have while "fine" is not done
        coordinator.allreduce(torch.ones(2), name="fine").wait()
        if group.rank == 0:
            while coordinator._agreement.negotiator.ended is None:  # busy with something else
                time.sleep(0.01)
            with pytest.raises(tr.StallError) as caught:
                coordinator.allreduce(torch.ones(2), name="late")
        else:
            work = coordinator.allreduce(torch.ones(2), name="late")
            others.wait(20)  # rank 0 is to be the only one that is late
            watch(group, coordinator, 0.2, 0.0)
            while "late" not in coordinator._agreement.negotiator._stalls._missing:
                time.sleep(0.01)
            others.wait(20)  # every rank has reported the stall before one of them ends the agreement
            watch(group, coordinator, 0.2, 0.8)
            with pytest.raises(tr.StallError) as caught:
                work.wait(timeout_s=20.0)
        assert 0.7 < time.monotonic() - begin < 15.0
        with pytest.raises(tr.StallError):
            coordinator.allreduce(torch.ones(2), name="fine")
        with pytest.raises(tr.StallError):
            coordinator.join()
        assert group.allreduce(torch.ones(2), name="the group itself").wait().tolist() == [float(size)] * 2
        return caught.value

    with caplog.at_level(logging.WARNING, logger="totalreduce"):
        errors = together(size, body, transport)
    for error in errors:
        assert error.tensor == "late"
        assert error.ranks == (0,)
        assert "test_coordinator.py:" in error.where
        assert error.waited_s >= 0.8
    messages = [record.getMessage() for record in caplog.records]
    warnings = [message for message in messages if "stalled" in message]
    for rank in range(size):
        mine = [warning for warning in warnings if warning.startswith(f"rank {rank}: ")]
        assert mine, f"rank {rank} has not reported it"
        assert len(mine) <= 4 * size, "a log must not fill with one stall"
        for warning in mine:
            assert "'late'" in warning
            assert "not submitted by rank(s) 0" in warning
            assert "test_coordinator.py:" in warning


def test_different_operations_stall_each_other() -> None:
    """One extra operation on one rank: both are named."""
    config = CoordinationConfig(stall_warning_s=0.1, stall_abort_s=0.4)

    def body(group: tr.Group) -> str:
        coordinator = group.coordinate(config=config)
        with pytest.raises(tr.StallError) as caught:
            coordinator.allreduce(torch.ones(2), name="a" if group.rank == 1 else "b").wait(timeout_s=20.0)
        return caught.value.tensor

    assert set(together(3, body)) <= {"a", "b"}


def test_a_deadline_says_who_is_missing() -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate(config=CoordinationConfig(stall_warning_s=0.1, stall_abort_s=30.0))
        if group.rank:
            work = coordinator.allreduce(torch.ones(2), name="w")
            with pytest.raises(tr.DeadlineExceededError, match=r"'w'.*not submitted by rank\(s\) 0.*submitted at"):
                work.wait(timeout_s=2.0)
            group.barrier()
        else:
            group.barrier()
            work = coordinator.allreduce(torch.ones(2), name="w")
        assert work.wait().tolist() == [3.0, 3.0]

    together(3, body)


# ----------------------------------------------------------------------------------------------- names and arguments


def test_names_of_the_program_never_meet_operations_without_a_name() -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        for name in ("allreduce#1", "n:allreduce#1", "n:n:allreduce#1", "n:", "allreduce#", "broadcast#1"):
            works = [
                coordinator.allreduce(torch.ones(2), name=name),
                coordinator.allreduce(torch.ones(3)),
                coordinator.broadcast(torch.ones(4), root=0),
            ]
            assert [work.wait().tolist() for work in works] == [[2.0] * 2, [2.0] * 3, [1.0] * 4]
        assert coordinator._describer._unnamed[OpKind.ALLREDUCE] == 6
        if group.rank == 0:  # which meets nothing here, and not the operation without a name of the other rank
            late = coordinator.allreduce(torch.ones(2), name="allreduce#7")
            group.barrier()
            assert not late.done()
            unnamed = coordinator.allreduce(torch.full((2,), 10.0))
        else:
            unnamed = coordinator.allreduce(torch.full((2,), 20.0))
            with pytest.raises(tr.DeadlineExceededError):
                unnamed.wait(timeout_s=0.2)
            group.barrier()
            late = coordinator.allreduce(torch.ones(2), name="allreduce#7")
        assert unnamed.wait().tolist() == [30.0, 30.0]
        assert late.wait().tolist() == [2.0, 2.0]
        members = [coordinator.allreduce(torch.ones(1), name=f"allreduce#8.{index}of2") for index in range(2)]
        unnamed_group = coordinator.grouped_allreduce([torch.ones(2), torch.ones(2)])
        assert [work.wait().tolist() for work in (*members, *unnamed_group)] == [[2.0]] * 2 + [[2.0, 2.0]] * 2

    together(2, body)


@pytest.mark.parametrize("name", [7, "x" * 1025, "\ud800"], ids=["number", "long", "surrogate"])
def test_names_are_checked(name: Any) -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        for begin in (coordinator.allreduce, coordinator.broadcast, coordinator.allgather, coordinator.alltoall):
            with pytest.raises(tr.ConfigurationError, match="name"):
                begin(torch.ones(2), name=name)
        assert coordinator.allreduce(torch.ones(1), name="x" * 1024).wait().item() == 2.0

    together(2, body)


@pytest.mark.parametrize("priority", [2**31, "high", 0.5, True])
def test_a_priority_is_checked_although_a_library_has_no_use_for_it(priority: Any) -> None:
    def body(group: tr.Group) -> None:
        group.use(EngineCollectives(group.control.subgroup(range(2), name="natives").operations), CoordinationConfig())
        two = torch.ones(2)
        for begin in (
            lambda: group.allreduce(two, priority=priority),
            lambda: group.broadcast(two, priority=priority),
            lambda: group.allgather(torch.ones(4), two, priority=priority),
            lambda: group.reduce_scatter(torch.ones(1), two, priority=priority),
            lambda: group.alltoall([torch.ones(1)] * 2, [two[:1], two[1:]], priority=priority),
        ):
            with pytest.raises(tr.ConfigurationError, match="priority"):
                begin()
        assert group.allreduce(two, priority=-(2**31)).wait().tolist() == [2.0, 2.0]

    together(2, body)


# ------------------------------------------------------------------------------------------------------ side by side


@pytest.mark.parametrize(("size", "transport"), [(4, "inproc"), (5, "inproc"), (4, "shm"), (4, "tcp")])
def test_coordinators_of_subgroups(size: int, transport: str) -> None:
    def body(group: tr.Group) -> None:
        members = [rank for rank in range(size) if rank % 2 == group.rank % 2]
        whole = group.coordinate()
        half = group.subgroup(members).coordinate()
        alone = group.subgroup([group.rank]).coordinate()
        for step in range(10):
            works = [
                whole.allreduce(torch.full((3,), float(step)), name="w"),
                half.allreduce(torch.full((4,), group.rank + 1.0), name="w", op=ReduceOp.MAX),
                alone.allreduce(torch.full((5,), 7.0), name="w"),
                half.broadcast(torch.tensor([group.rank]), root=len(members) - 1, name="root"),
            ]
            random.Random(step + group.rank).shuffle(order := list(range(4)))
            results: dict[int, list[float]] = {}
            for place in order:
                results[place] = works[place].wait().tolist()
            assert results == {
                0: [size * float(step)] * 3,
                1: [members[-1] + 1.0] * 4,
                2: [7.0] * 5,
                3: [members[-1]],
            }
        if group.rank % 2:  # a mismatch here is none of the others' business
            with pytest.raises(tr.MismatchError) as caught:
                half.allreduce(torch.ones(1 + members.index(group.rank)), name="odd").wait()
            assert caught.value.sets == tuple((place,) for place in range(len(members)))
        assert whole.allreduce(torch.ones(1), name="w").wait().item() == size

    together(size, body, transport)


class _Slow:
    """A library that takes its time before it begins an allreduce."""

    def __init__(self, natives: Any, seconds: float) -> None:
        self._natives, self._seconds, self.world_size = natives, seconds, natives.world_size

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> Any:
        time.sleep(self._seconds)
        return self._natives.allreduce(tensor, op)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._natives, name)


def test_two_coordinators_of_one_group_at_the_same_time() -> None:
    def body(group: tr.Group) -> None:
        first, second = group.coordinate(), group.coordinate()
        slow = first if group.rank else second
        slow._agreement._executor._packer._natives = _Slow(slow.natives, 0.2)  # one is slow here, the other one there
        one = first.allreduce(torch.full((5,), 1.0), name="w")
        two = second.allreduce(torch.full((5,), 100.0), name="w")
        assert one.wait(timeout_s=5.0).tolist() == [2.0] * 5
        assert two.wait(timeout_s=5.0).tolist() == [200.0] * 5

    together(2, body)


def test_two_coordinators_with_libraries_of_their_own() -> None:
    def body(group: tr.Group) -> None:
        both = [
            Coordinator(
                group.operations,
                EngineCollectives(group.subgroup(range(3), name=f"natives {number}").operations),
                CoordinationConfig(),
                scope=f"number {number}",
            )
            for number in range(2)
        ]
        for step in range(40):
            order = [0, 1] if (group.rank + step) % 2 else [1, 0]
            works = {number: both[number].allreduce(torch.full((5,), 10.0**number), name="w") for number in order}
            assert works[0].wait().tolist() == [3.0] * 5
            assert works[1].wait().tolist() == [30.0] * 5
        for coordinator in both:
            coordinator.close()

    together(3, body)


def test_many_threads_of_one_rank() -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()

        def work(thread: int) -> None:
            for step in range(15):
                tensor = torch.full((thread + 1,), float(step + group.rank))
                assert coordinator.allreduce(tensor, name=f"thread {thread}").wait().tolist() == [
                    sum(step + rank for rank in range(3))
                ] * (thread + 1)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))

    together(3, body)


def test_counters_that_were_read_do_not_change() -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        before = coordinator.counters
        group.barrier()  # no rank begins before all have looked
        coordinator.allreduce(torch.ones(2), name="w").wait()
        after = coordinator.counters
        assert (before.cycles, before.messages, before.misses) == (0, 0, 0)
        assert after.cycles >= 1
        assert after.messages >= 1
        assert after.misses == 1
        after.misses = 1000
        assert coordinator.counters.misses == 1, "a change of the copy does not change the coordinator's counters"

    together(2, body)


def test_observers_are_told() -> None:
    class Notes(tr.Observer):
        def __init__(self) -> None:
            self.told: list[tuple[Any, ...]] = []

        def coordinated(self, name: str, iteration: int, **facts: Any) -> None:
            times = [facts[key] for key in ("submitted", "agreed", "begun", "packed", "ended", "unpacked")]
            assert times == sorted(times), name
            self.told.append((name, iteration, facts["kind"], facts["num_bytes"], facts["error"] is None))

    def body(group: tr.Group) -> list[tuple[Any, ...]]:
        notes = Notes()
        group.observers.append(notes)
        coordinator = group.coordinate()
        for _ in range(2):
            coordinator.allreduce(torch.ones(3), name="w").wait()
        with pytest.raises(tr.MismatchError):
            coordinator.allreduce(torch.ones(3 + group.rank), name="w").wait()
        coordinator.barrier()
        return notes.told

    for rank, told in enumerate(together(2, body)):
        kinds = OpKind.ALLREDUCE.name.lower(), OpKind.BARRIER.name.lower()
        assert told == [
            ("w", 0, kinds[0], 12, True),
            ("w", 1, kinds[0], 12, True),
            ("w", 2, kinds[0], 12 + 4 * rank, False),
            ("barrier#1", 0, kinds[1], 0, True),
        ]


def test_operations_are_carried_out_only_when_the_messages_of_the_agreement_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "_LEAVE_S", 10.0)

    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        agreement = coordinator._agreement

        def agree(now: float) -> bool:
            agreement.negotiator.hurry(now)
            return agreement._take_output(now)

        with group._runner._moving:  # as a thread has it that sends these messages
            work = coordinator.allreduce(torch.ones(1), name="a")
            agreement._runner.act(agree)
            assert agreement.negotiator.counters.cycles == 1
            time.sleep(0.05)
            assert not work.done()
        assert work.wait(10.0).item() == 1.0

    run_ranks(1, body)
