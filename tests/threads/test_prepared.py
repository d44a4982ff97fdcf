"""Prepared operations: the same results, errors and order as ``allreduce``, over every transport."""

import gc
import random
import threading
import time

import pytest
import torch

import totalreduce as tr
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import TotalReduceError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.tensors.memory import Operands
from totalreduce.testing import run_ranks
from totalreduce.testing.ranks import make_groups

TRANSPORTS = ["inproc", "tcp", "shm"]


def run(world_size, body, transport="shm", **options):
    return run_ranks(world_size, body, transport=transport, hosts=[0] * world_size, **options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_start_reduces_what_the_tensor_holds_then(world_size: int, transport: str) -> None:
    def body(group: Group) -> None:
        tensors = [group.empty(5), torch.empty(50_001), torch.empty(0), torch.empty(20, 3).t()]
        prepared = [group.prepare_allreduce(tensor, name=f"t{index}") for index, tensor in enumerate(tensors)]
        average = torch.empty(9, dtype=torch.float64)
        mean = group.prepare_allreduce(average, name="mean", op=ReduceOp.AVG)
        for turn in range(12):
            for tensor in (*tensors, average):
                tensor.fill_(group.rank + turn)
            works = [operation.start() for operation in prepared]
            assert torch.equal(mean.start().wait(), torch.full_like(average, turn + (world_size - 1) / 2))
            total = world_size * turn + sum(range(world_size))
            for tensor, work in zip(tensors, works, strict=True):
                assert work.wait() is tensor
                assert torch.equal(tensor, torch.full_like(tensor, total))

    run(world_size, body, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("lane", [True, False])
def test_starts_meet_usual_operations_of_the_name(transport: str, lane: bool) -> None:
    """Each rank chooses for each operation how it takes part."""

    def body(group: Group) -> None:
        choice = random.Random(group.rank)
        tensor = torch.empty(100)
        operation = group.prepare_allreduce(tensor, name="w")
        for turn in range(150):
            tensor.fill_(group.rank * turn)
            work = operation.start() if choice.random() < 0.7 else group.allreduce(tensor, name="w")
            if choice.random() < 0.05:
                time.sleep(0.002)
            assert work.wait().unique().tolist() == [3.0 * turn]

    run(3, body, transport, engine=EngineConfig(fast_lane=lane, timeout_s=30))


def test_many_prepared_operations_in_any_order_without_waiting() -> None:
    """More than there are entries; every rank starts them in an order of its own, and other things happen meanwhile."""
    count = 160

    def body(group: Group) -> None:
        choice = random.Random(group.rank)
        tensors = [torch.empty(20_000 if index % 9 == 0 else 20) for index in range(count)]
        operations = [group.prepare_allreduce(tensor, name=f"t{index}") for index, tensor in enumerate(tensors)]
        for turn in range(5):
            works = {}
            for index in choice.sample(range(count), count):
                tensors[index].fill_(group.rank + index + turn)
                works[index] = operations[index].start()
            if turn == 2:
                group.barrier()
            for index in choice.sample(range(count), count):
                assert works[index].wait().unique().tolist() == [2 * (index + turn) + 1]

    run(2, body)


def test_two_threads_start_their_operations_at_the_same_time() -> None:
    def body(group: Group) -> None:
        def loop(name: str) -> None:
            tensor = torch.empty(3000)
            operation = group.prepare_allreduce(tensor, name=name)
            for turn in range(200):
                tensor.fill_(turn)
                assert operation.start().wait().unique().tolist() == [2.0 * turn]
            ended.append(name)

        ended: list[str] = []
        threads = [threading.Thread(target=loop, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(ended) == ["a", "b"]

    run(2, body)


def test_a_callback_starts_the_next_one() -> None:
    def body(group: Group) -> None:
        tensor, done = torch.ones(10), threading.Event()
        operation = group.prepare_allreduce(tensor, name="w")
        left = [10]

        def again(work: tr.Work) -> None:
            left[0] -= 1
            if left[0]:
                operation.start().on_done(again)
            else:
                done.set()

        operation.start().on_done(again)
        assert done.wait(20)
        assert tensor.unique().tolist() == [1024.0]

    run(2, body)


def test_a_second_start_before_the_end_is_an_error_and_changes_nothing() -> None:
    def body(group: Group) -> None:
        tensor = torch.ones(100_000)
        operation = group.prepare_allreduce(tensor, name="w")
        for _ in range(3):
            operation.start().wait()
        if group.rank == 0:
            work = operation.start()
            with pytest.raises(tr.ConfigurationError, match="shares memory with 'w'"):
                operation.start()
            barrier.wait()
        else:
            barrier.wait()
            work = operation.start()
        assert work.wait().unique().tolist() == [16.0]

    barrier = threading.Barrier(2)
    run(2, body)


def test_a_tensor_with_other_memory_is_named() -> None:
    def body(group: Group) -> None:
        tensor = torch.ones(10)
        operation = group.prepare_allreduce(tensor, name="w")
        operation.start().wait()
        assert operation.is_current
        tensor.data = torch.ones(10)
        assert not operation.is_current
        with pytest.raises(tr.ConfigurationError, match="'w': the tensor of this prepared operation was given other"):
            operation.start()
        assert group.allreduce(tensor, name="w").wait().tolist() == [2.0] * 10

    run(2, body)


def test_a_tensor_of_a_prepared_operation_cannot_be_resized() -> None:
    def body(group: Group) -> None:
        tensor = torch.ones(10)
        operation = group.prepare_allreduce(tensor, name="w")
        for _ in range(2):
            operation.start().wait()
            with pytest.raises(RuntimeError, match="not resizable"):
                tensor.untyped_storage().resize_(1000)
        del operation
        tensor.untyped_storage().resize_(1000)

    run(2, body)


def test_the_end_of_a_rank_is_named_in_a_start_or_in_a_wait() -> None:
    def body(group: Group) -> None:
        tensor = torch.ones(10)
        operation = group.prepare_allreduce(tensor, name="w")
        for _ in range(50):
            operation.start().wait()
        if group.rank == 1:
            group.close(reason="enough")
            with pytest.raises(tr.GroupClosed):
                operation.start()
            return
        for _ in range(2):
            with pytest.raises(tr.PeerLost, match="enough") as caught:
                operation.start().wait(timeout_s=20)
            assert caught.value.rank == 1

    run(3, body)


def test_closing_fails_a_start_that_waits() -> None:
    groups = make_groups(2, transport="shm", hosts=[0, 0])
    tensors = [torch.ones(10) for _ in groups]
    operations = [group.prepare_allreduce(t, name="w") for group, t in zip(groups, tensors, strict=True)]
    for _ in range(5):
        works = [operation.start() for operation in operations]
        for work in works:
            work.wait()
    work = operations[0].start()
    groups[0].close()
    with pytest.raises(tr.GroupClosed):
        work.wait()
    groups[1].close()


def test_a_deadline_names_the_late_rank_and_the_operation_goes_on() -> None:
    def body(group: Group) -> None:
        tensor = torch.ones(10)
        operation = group.prepare_allreduce(tensor, name="w")
        for _ in range(3):
            operation.start().wait()
        if group.rank == 0:
            work = operation.start()
            with pytest.raises(tr.DeadlineExceededError, match=r"never submitted by rank\(s\) 1"):
                work.wait(timeout_s=0.5)
            barrier.wait()
            work.wait()
        else:
            barrier.wait()
            operation.start().wait()
        assert tensor.tolist() == [16.0] * 10

    barrier = threading.Barrier(2)
    run(2, body)


def test_another_length_is_a_mismatch_and_the_next_start_works() -> None:
    def body(group: Group) -> None:
        tensor = torch.ones(10)
        operation = group.prepare_allreduce(tensor, name="w")
        for _ in range(3):
            operation.start().wait()
        work = group.allreduce(torch.ones(11), name="w") if group.rank == 1 else operation.start()
        with pytest.raises(tr.MismatchError):
            work.wait(timeout_s=20)
        tensor.fill_(1)
        for turn in range(3):
            assert operation.start().wait().unique().tolist() == [3.0 ** (turn + 1)]

    run(3, body)


def test_what_cannot_be_prepared() -> None:
    def body(group: Group) -> None:
        with pytest.raises(tr.UnsupportedError):
            group.prepare_allreduce(torch.ones(2, dtype=torch.complex64))
        with pytest.raises(tr.ConfigurationError):
            group.prepare_allreduce(torch.ones(2), schedule="unknown")
        operation = group.prepare_allreduce(torch.ones(2, 3), name="w")
        assert repr(operation) == "<PreparedOperation 'w': allreduce(sum) of float32[2, 3]>"

    run(1, body)


@pytest.mark.parametrize("elements", [100, 50_000])
@pytest.mark.parametrize("world_size", [2, 3])
def test_operations_of_one_name_on_several_tensors_take_turns(world_size: int, elements: int) -> None:
    """The lane keeps where the tensor of the last operation is."""

    def body(group: Group) -> None:
        tensors = [torch.empty(elements), group.empty(elements), torch.empty(elements), group.empty(elements)]
        operations = [group.prepare_allreduce(tensor, name="w") for tensor in tensors]
        choice = random.Random(7 + group.rank)
        for turn in range(60):
            index = choice.randrange(len(tensors)) if turn % 3 else turn % len(tensors)
            for tensor in tensors:
                tensor.fill_(-1.0)
            tensors[index].fill_(turn + group.rank)
            result = operations[index].start().wait()
            assert result is tensors[index]
            assert result.unique().tolist() == [world_size * turn + sum(range(world_size))]
            assert all(each.unique().tolist() == [-1.0] for each in tensors if each is not result)

    run(world_size, body)


def test_an_operation_that_ends_at_once_may_fail_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the error then, and its memory is free."""
    fails = threading.Event()
    finish = Operands.finish

    def failing(operands: Operands) -> None:
        if fails.is_set() and operands.name == "w":
            raise TotalReduceError("no result")
        finish(operands)

    monkeypatch.setattr(Operands, "finish", failing)

    def body(group: Group) -> int:
        tensor = torch.empty(100)
        operation = group.prepare_allreduce(tensor, name="w")
        for _ in range(20):
            operation.start().wait()
        group.barrier()
        fails.set()
        failed = 0
        for _ in range(20):
            work = operation.start()
            with pytest.raises(TotalReduceError, match="no result"):
                work.wait()
            assert isinstance(work.exception(), TotalReduceError)
            failed += 1
        group.barrier()
        fails.clear()
        tensor.fill_(1.0)
        assert operation.start().wait().unique().tolist() == [2.0]
        return failed

    assert run(2, body) == [20, 20]


def test_a_planned_reduction_is_prepared_again_if_its_tensor_has_another_type_in_the_same_memory() -> None:
    def body(group: Group) -> None:
        planned, tensor = group.planned(["w"]), torch.ones(3)
        assert planned.submit(0, tensor, op=ReduceOp.SUM, priority=0).wait().tolist() == [2.0] * 3
        tensor.data = tensor.data.view(torch.int32)
        tensor.fill_(1_000_000_000)
        assert planned.submit(0, tensor, op=ReduceOp.SUM, priority=0).wait().tolist() == [2_000_000_000] * 3
        assert planned.submit(0, tensor.fill_(8), op=ReduceOp.AVG, priority=4).wait().tolist() == [8] * 3

    run(2, body)


def test_an_allreduce_that_failed_leaves_its_tensor_free_and_the_next_one_works() -> None:
    def body(group: Group) -> None:
        tensor = torch.ones(10)
        group.allreduce(tensor, name="w").wait()
        for _ in range(2):  # the tensor is known, then it is not
            work = group.allreduce(tensor if group.rank else torch.ones(11), name="w")
            with pytest.raises(tr.MismatchError):
                work.wait(timeout_s=20)
            del work
            gc.collect()
            tensor.untyped_storage().resize_(400)  # nothing holds it
        tensor.fill_(1)
        for turn in range(3):
            assert group.allreduce(tensor, name="w").wait().unique().tolist() == [2.0 ** (turn + 1)]

    run(2, body)
