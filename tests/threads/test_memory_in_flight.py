"""What a program does with the memory of operations in flight: a right result or a typed error, never a crash."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import totalreduce as tr
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, TotalReduceError
from totalreduce.groups import checked
from totalreduce.groups.engine_collectives import EngineCollectives
from totalreduce.testing import run_ranks

#: Several segments, so that messages are under way when the memory is taken away.
COUNT = 1_000_003
TRANSPORTS = ["inproc", "tcp", "shm"]
#: Operations of the engine, and operations of a library in an order on which the ranks agree.
either = pytest.mark.parametrize("coordinated", [False, True], ids=["engine", "coordinated"])


def run(size: int, body: Callable[[tr.Group], Any], *, coordinated: bool, transport: str = "inproc") -> list[Any]:
    """Like ``run_ranks``, with or without a library that carries the collectives out."""

    def with_library(group: tr.Group) -> Any:
        natives = EngineCollectives(group.control.subgroup(range(size), name="natives").operations)
        group.use(natives, tr.CoordinationConfig())
        return body(group)

    return run_ranks(size, with_library if coordinated else body, transport=transport)


def numbers(rank: int) -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.float32) % 1000 + rank


SUM = numbers(0) + numbers(1)


def other_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(3)


def other_storage(tensor: torch.Tensor) -> None:
    tensor.set_(torch.zeros(3))


def grown(tensor: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(4 * COUNT)


def emptied(tensor: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)


def forgotten(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(0)
    del tensor
    gc.collect()
    for _ in range(20):
        torch.full((COUNT,), 7.0)  # whoever takes memory now is given what was freed


@pytest.mark.parametrize(
    ("transport", "coordinated"), [*((transport, False) for transport in TRANSPORTS), ("inproc", True)]
)
@pytest.mark.parametrize(
    ("take_away", "result_is_lost"),
    [(other_data, True), (other_storage, True), (grown, True), (emptied, False), (forgotten, True)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_memory_that_is_taken_away(take_away, result_is_lost: bool, transport: str, coordinated: bool) -> None:
    submitted = threading.Barrier(2)

    def body(group: tr.Group) -> tuple[bool, bool, list[float]]:
        tensor = numbers(group.rank)
        alias = tensor[:]
        if group.rank == 1:
            submitted.wait(30)  # nothing of this rank's can have come before the other one has taken its memory away
        work = group.allreduce(tensor, name="w")
        if group.rank == 0:
            take_away(tensor)
            submitted.wait(30)
        lost = False
        try:
            work.wait()
        except TotalReduceError as error:
            lost = "'w' was given other memory" in str(error)
        after = group.allreduce(torch.ones(2), name="after").wait().tolist()
        return lost, torch.equal(alias, SUM), after

    results = run(2, body, transport=transport, coordinated=coordinated)
    assert results == [(result_is_lost, True, [2.0, 2.0]), (False, True, [2.0, 2.0])]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_source_may_be_replaced(transport: str) -> None:
    """What is only read keeps its old memory; there is no result to lose."""

    def body(group: tr.Group) -> bool:
        tensor = numbers(0) if group.rank == 0 else torch.zeros(COUNT)
        if group.rank == 0:
            work = group.send(tensor, dst=1)
            tensor.data = torch.zeros(3)
            work.wait()
            return True
        return torch.equal(group.recv(tensor, src=0).wait(), numbers(0))

    assert run_ranks(2, body, transport=transport) == [True, True]


@either
def test_storages_are_resizable_again_afterwards(coordinated: bool) -> None:
    def body(group: tr.Group) -> list[float]:
        tensor = torch.ones(3)
        group.allreduce(tensor, name="good").wait()
        with pytest.raises(tr.MismatchError):
            group.allreduce(tensor if group.rank else tensor.double(), name="bad").wait()
        tensor.resize_(1000)
        return tensor[:3].tolist()

    assert run(2, body, coordinated=coordinated) == [[2.0] * 3] * 2


SHARING = {
    "the same tensor": (lambda t: t, lambda t: t),
    "a part of it": (lambda t: t, lambda t: t[3:5]),
    "rows and a column": (lambda t: t.view(4, 5)[1:3], lambda t: t.view(4, 5)[:, 2]),
    "NumPy's view of it": (lambda t: t, lambda t: torch.from_numpy(t.numpy()[2:])),
}


@either
@pytest.mark.parametrize("case", SHARING)
def test_two_operations_on_one_memory_are_an_error(case: str, coordinated: bool) -> None:
    """And nothing has happened: neither to the first operation, nor to the name of the second one."""
    first, second = SHARING[case]

    def body(group: tr.Group) -> list[float]:
        tensor = torch.ones(20)
        if group.rank == 1:
            group.barrier()
        work = group.allreduce(first(tensor), name="first")
        if group.rank == 0:
            with pytest.raises(
                ConfigurationError, match=r"tensor 'second' shares memory with 'first', which is in fli"
            ):
                group.allreduce(second(tensor), name="second")
            group.barrier()
        work.wait()
        group.allreduce(second(tensor), name="second").wait()
        return tensor.tolist()

    expected = torch.ones(20)
    first(expected).mul_(2)
    second(expected).mul_(2)
    assert run(2, body, coordinated=coordinated) == [expected.tolist()] * 2


def test_reading_one_memory_together_is_fine() -> None:
    def body(group: tr.Group) -> list[float]:
        tensor = torch.arange(5.0)
        if group.rank == 0:
            works = [group.send(tensor[place:], dst=rank) for place, rank in ((0, 1), (2, 2))]
            for work in works:
                work.wait()
            return tensor.tolist()
        return group.recv(torch.empty(5 if group.rank == 1 else 3), src=0).wait().tolist()

    assert run_ranks(3, body) == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [2, 3, 4]]


@either
def test_subgroups_share_the_memory_of_the_process(coordinated: bool) -> None:
    def body(group: tr.Group) -> None:
        part, tensor = group.subgroup([0, 1]), torch.ones(4)
        if group.rank == 1:
            group.barrier()
        work = group.allreduce(tensor, name="w")
        if group.rank == 0:
            with pytest.raises(ConfigurationError, match=r"'w' shares memory with 'w'"):
                part.allreduce(tensor, name="w")
            group.barrier()
        work.wait()

    run(2, body, coordinated=coordinated)


def test_one_operation_whose_tensors_overlap() -> None:
    def body(group: tr.Group) -> list[float]:
        block = torch.ones(2)
        with pytest.raises(ConfigurationError, match=r"'w': two of its tensors share memory"):
            group.allgather([block, block], torch.ones(2), name="w")
        with pytest.raises(ConfigurationError, match=r"two of its tensors share memory"):
            group.alltoall([block, torch.zeros(2)], [block, block])
        out = torch.zeros(4)
        out[2 * group.rank :][:2] = group.rank + 1
        group.allgather(out, out[2 * group.rank :][:2], name="in place").wait()  # this rank's own place
        return out.tolist()

    assert run_ranks(2, body) == [[1.0, 1.0, 2.0, 2.0]] * 2


@pytest.mark.parametrize("schedule", ["ring", "direct"])
def test_reduce_scatter_in_place(schedule: str) -> None:
    """As NCCL has it: the result takes the place of this rank's block, and the other blocks stay as they are."""

    def body(group: tr.Group) -> bool:
        whole = numbers(group.rank)[: 3 * 1000]
        before = whole.clone()
        own = whole.view(3, 1000)[group.rank]
        group.reduce_scatter(own, whole, schedule=schedule).wait()
        before.view(3, 1000)[group.rank] = sum(numbers(rank)[: 3 * 1000].view(3, 1000)[group.rank] for rank in range(3))
        with pytest.raises(ConfigurationError, match=r"two of its tensors share memory"):
            group.reduce_scatter(whole.view(3, 1000)[group.rank - 1], whole)
        return torch.equal(whole, before)

    assert run_ranks(3, body) == [True] * 3


@either
def test_a_group_that_keeps_the_order(coordinated: bool) -> None:
    def body(group: tr.Group) -> list[float]:
        group.keep_order()
        part = group.subgroup([1, 0])
        tensor = torch.ones(COUNT)
        works = [(part if turn % 2 else group).allreduce(tensor, name="w") for turn in range(6)]
        total = group.allgather([torch.empty(1), torch.empty(1)], tensor[:1])  # reads what the others write
        for work in (*works, total):
            work.wait()
        return tensor[:2].tolist()

    assert run(2, body, coordinated=coordinated) == [[64.0, 64.0]] * 2


@either
def test_blocks_are_read_after_the_operations_before(coordinated: bool) -> None:
    """Where a library needs the blocks in one tensor, they are copied when nothing writes to them any more."""

    def body(group: tr.Group) -> list[list[float]]:
        group.keep_order()
        blocks = [torch.full((3,), 1.0 + index) for index in range(2)]
        strided = torch.ones(2, 3).t()
        for index, block in enumerate((*blocks, strided)):
            group.allreduce(block, name=f"sums {index}")
        scattered, summed, received = torch.empty(3), torch.empty(3), [torch.empty(3), torch.empty(3)]
        gathered = [torch.empty(3, 2), torch.empty(3, 2)]
        group.scatter(scattered, blocks if group.rank == 0 else None, root=0).wait()
        group.reduce_scatter(summed, blocks).wait()
        group.alltoall(received, blocks).wait()
        group.allgather(gathered, strided).wait()
        results = (scattered, summed, *received, *gathered)
        return [result.unique().tolist() for result in results]

    wanted = [
        [[2.0 + 2 * rank], [4.0 + 4 * rank], [2.0 + 2 * rank], [2.0 + 2 * rank], [2.0], [2.0]] for rank in range(2)
    ]
    assert run(2, body, coordinated=coordinated) == wanted


@either
def test_waiting_for_memory_has_a_deadline(coordinated: bool) -> None:
    def body(group: tr.Group) -> None:
        if group.rank == 0:
            group.keep_order()
            tensor = torch.ones(4)
            work = group.allreduce(tensor, name="first")
            with pytest.raises(DeadlineExceededError, match=r"'second' waited 0\.2 s for 'first', which uses the same"):
                group.allreduce(tensor, name="second", timeout_s=0.2)
            group.barrier()
            work.wait()
        else:
            group.barrier()
            group.allreduce(torch.ones(4), name="first").wait()

    run(2, body, coordinated=coordinated)


# --------------------------------------------------------------------------------------- with coordination, specially


def test_coordinated_blocks_that_are_known_to_be_zero() -> None:
    """Torch gives such tensors no memory; the library gets zeros in their place."""

    def body(group: tr.Group) -> list[float]:
        result = torch.full((3,), 5.0)
        group.reduce_scatter(result, [torch._efficientzerotensor((3,)), torch.ones(3)]).wait()
        return result.tolist()

    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert run(2, body, coordinated=True) == [[0.0] * 3, [2.0] * 3]
    finally:
        torch.use_deterministic_algorithms(False)


def test_coordinated_operations_that_read_one_memory() -> None:
    """Contributions that are only read may be shared; a place for a result may not."""

    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        tensor = torch.full((4,), group.rank + 1.0)
        if group.rank == 1:
            group.barrier()
        works = [coordinator.allgather(tensor, name=f"{turn}") for turn in range(2)]
        works.append(coordinator.alltoall(tensor, name="all to all"))
        if group.rank == 0:
            with pytest.raises(ConfigurationError, match=r"'w' shares memory with '.+', which is in flight"):
                coordinator.allreduce(tensor, name="w")
            with pytest.raises(ConfigurationError, match=r"'b' shares memory with '.+', which is in flight"):
                coordinator.broadcast(tensor[1:], root=1, name="b")
            with pytest.raises(ConfigurationError, match=r"'g\.1of2' shares memory with 'g\.0of2'"):
                coordinator.grouped_allreduce([(both := torch.ones(3)), both[1:]], name="g")
            group.barrier()
        assert [work.wait().tolist() for work in works[:2]] == [[1.0] * 4 + [2.0] * 4] * 2
        assert works[2].wait().tolist() == [1.0, 1.0, 2.0, 2.0]
        assert coordinator.allreduce(tensor, name="w").wait().tolist() == [3.0] * 4
        group_of_two = coordinator.grouped_allreduce([torch.ones(2), torch.ones(3)], name="g")
        assert [work.wait().tolist() for work in group_of_two] == [[2.0] * 2, [2.0] * 3]

    run_ranks(2, body)


def test_outputs_of_coordinated_operations() -> None:
    def body(group: tr.Group) -> list[float]:
        out = torch.zeros(4)
        mine = out[2 * group.rank :][:2]
        mine.fill_(group.rank + 1)
        group.allgather(out, mine, name="in place").wait()  # this rank's own place
        block = torch.ones(2)
        with pytest.raises(ConfigurationError, match=r"'w': two of its tensors share memory"):
            group.allgather([block, block], torch.ones(2), name="w")
        if group.rank == 1:
            group.barrier()
        work = group.allreduce(block, name="first")
        if group.rank == 0:
            for begin in (
                lambda: group.allgather(torch.zeros(4), block, name="second"),
                lambda: group.allgather(torch.zeros(4).view(2, 2), block.view(1, 2), name="second"),
                lambda: group.alltoall([torch.zeros(1), torch.zeros(1)], [block[:1], block[1:]], name="second"),
                lambda: group.alltoall([block[:1], block[1:]], [torch.zeros(1), torch.zeros(1)], name="second"),
                lambda: group.reduce_scatter(torch.zeros(1), block, name="second"),
                lambda: group.reduce_scatter(block[:1], torch.zeros(2), name="second"),
                lambda: group.broadcast(block, root=0, name="second", async_op=True),
            ):
                with pytest.raises(ConfigurationError, match=r"'second' shares memory with 'first'"):
                    begin()
            group.barrier()
        work.wait()
        return out.tolist()

    assert run(2, body, coordinated=True) == [[1.0, 1.0, 2.0, 2.0]] * 2


def test_outputs_that_are_given_other_memory() -> None:
    def body(group: tr.Group) -> tuple[str, list[list[float]]]:
        places = [torch.zeros(2), torch.zeros(2)]
        aliases = [place[:] for place in places]
        if group.rank == 1:
            group.barrier()
        work = group.allgather(places, torch.full((2,), group.rank + 1.0), name="w")
        message = ""
        if group.rank == 0:
            places[1].data = torch.zeros(2)
            group.barrier()
        try:
            work.wait()
        except TotalReduceError as error:
            message = str(error)
        return message[:41], [alias.tolist() for alias in aliases]

    results = run(2, body, coordinated=True)
    assert results == [("tensor 'w' was given other memory while t", [[1, 1], [2, 2]]), ("", [[1, 1], [2, 2]])]


def test_views_that_are_conjugate_or_negative() -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        for step in range(2):
            base = torch.tensor([1 + 2j, 3 - 4j]) * (group.rank + 1)
            negative = torch.conj(base.clone()).imag
            assert negative.is_neg()
            wanted = negative.clone() * 3 / (group.rank + 1)
            work = coordinator.allreduce(negative, name="negative")
            if step:  # fused with another one
                coordinator.allreduce(torch.ones(3), name="beside").wait()
            assert work.wait().tolist() == wanted.tolist()
            root = torch.conj(torch.tensor([1 + 2j, 3 - 4j]) if group.rank == 0 else torch.zeros(2, dtype=torch.cfloat))
            assert root.is_conj()
            assert coordinator.broadcast(root, name="conjugate").wait().tolist() == [1 - 2j, 3 + 4j]
            parts = coordinator.allgather(torch.conj(base), name="parts").wait()
            assert parts.tolist() == [1 - 2j, 3 + 4j, 2 - 4j, 6 + 8j]
            exchanged = coordinator.alltoall(torch.conj(base), name="exchanged").wait()
            assert exchanged.tolist() == [[1 - 2j, 2 - 4j], [3 + 4j, 6 + 8j]][group.rank]

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore")  # torch calls nested tensors a prototype
def test_what_is_not_dense_is_refused_by_a_coordinator() -> None:
    def body(group: tr.Group) -> None:
        coordinator = group.coordinate()
        quantised = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        for tensor, words in (
            (quantised, "is quantised"),
            (nested, "is nested"),
            (torch.ones(3).to_sparse(), "has layout"),
            (torch.ones(1).expand(4), "is expanded"),
            ([1.0], "is a list"),
        ):
            for begin in (
                coordinator.allreduce,
                lambda tensor, name: coordinator.broadcast(tensor, root=1 - group.rank, name=name),
            ):
                with pytest.raises(tr.UnsupportedError, match=f"'w'.* {words}"):
                    begin(tensor, name="w")
            if words != "is expanded":  # which may be read
                for begin in (coordinator.allgather, coordinator.alltoall, coordinator.reduce_scatter):
                    with pytest.raises(tr.UnsupportedError, match=f"'w'.* {words}"):
                        begin(tensor, name="w")
        assert coordinator.allreduce(torch.ones(2), name="w").wait().tolist() == [2.0, 2.0]

    run_ranks(2, body)


def test_a_coordinator_keeps_no_tensor_of_operations_that_have_ended() -> None:
    def body(group: tr.Group) -> bool:
        coordinator = group.coordinate()
        tensor = torch.ones(3)
        coordinator.allreduce(tensor, name="w").wait()
        storage = weakref.ref(tensor.untyped_storage())
        group.barrier()
        del tensor
        deadline = time.monotonic() + 5
        while storage() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.001)
        return storage() is None

    assert run_ranks(2, body) == [True, True]


def test_an_allreduce_is_checked_again_if_anything_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, original = [], checked.reduction  # the threads of the ranks that have checked something
    monkeypatch.setattr(checked, "reduction", lambda *a, **k: checks.append(threading.get_ident()) or original(*a, **k))

    def body(group: tr.Group) -> None:
        tensor, other = torch.ones(2, 3), torch.ones(2, 3)

        def reduce(tensor: torch.Tensor, expected: list[float], is_checked: bool, **options: Any) -> None:
            me = threading.get_ident()
            before = checks.count(me)
            tensor.fill_(group.rank + 1)
            result = group.allreduce(tensor, name="t", **options).wait()
            assert result is tensor
            assert tensor.flatten().tolist() == expected
            assert checks.count(me) == before + is_checked

        three = [3.0] * 6
        reduce(tensor, three, True)
        reduce(tensor, three, False)
        reduce(tensor, three, False)
        reduce(other, three, True)
        reduce(other, [1.5] * 6, True, op=tr.ReduceOp.AVG)
        reduce(other, [1.5] * 6, False, op=tr.ReduceOp.AVG)
        reduce(other, three, True, priority=3)
        reduce(other, three, True)
        other.t_()  # the same memory, in another order
        reduce(other, three, True)
        other.data = torch.ones(2, 3)
        reduce(other, three, True)
        other.data = other.data.view(torch.int32)
        reduce(other, [3] * 6, True)
        reduce(other, [3] * 6, False)
        other.resize_(2)
        reduce(other, [3] * 2, True)
        with pytest.raises(ConfigurationError, match="schedule 'no' is not known"):
            group.allreduce(other, name="t", schedule="no")
        reduce(other, [3] * 2, False)  # a call that was refused changes nothing
        group.barrier()
        group.close()
        with pytest.raises(tr.GroupClosed):
            group.allreduce(other, name="t")

    run_ranks(2, body)
