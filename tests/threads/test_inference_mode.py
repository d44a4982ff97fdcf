"""``torch.inference_mode()``: results are written later, in any thread, and what is made in the mode can be changed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from optimizer_cases import Net, all_equal, batches, flat, loss_of, shard

import totalreduce as tr
from totalreduce.groups.group import Group
from totalreduce.recovery.buffers import KeptBuffers
from totalreduce.tensors.work import Work
from totalreduce.testing import run_ranks

SIZE = 3
Make = Callable[[float], torch.Tensor]
#: What an operation has begun, the tensors that take its results, and the value of all elements of each of them.
Started = tuple[list[Work], list[torch.Tensor], list[float]]


def contiguous(value: float) -> torch.Tensor:
    return torch.full((2, 3), value)


def strided(value: float) -> torch.Tensor:
    return torch.full((3, 2), value).t()


TOTAL = float(sum(range(1, SIZE + 1)))
ALL = [float(rank + 1) for rank in range(SIZE)]


def allreduce(group: Group, make: Make) -> Started:
    tensor = make(group.rank + 1.0)
    return [group.allreduce(tensor)], [tensor], [TOTAL]


def reduce(group: Group, make: Make) -> Started:
    tensor = make(group.rank + 1.0)
    return [group.reduce(tensor, root=1)], [tensor], [TOTAL if group.rank == 1 else group.rank + 1.0]


def broadcast(group: Group, make: Make) -> Started:
    tensor = make(group.rank + 1.0)
    return [group.broadcast(tensor, root=1, async_op=True)], [tensor], [2.0]


def allgather(group: Group, make: Make) -> Started:
    outputs = [make(0.0) for _ in range(SIZE)]
    return [group.allgather(outputs, make(group.rank + 1.0))], outputs, ALL


def gather(group: Group, make: Make) -> Started:
    outputs = [make(0.0) for _ in range(SIZE)] if group.rank == 1 else None
    return [group.gather(outputs, make(group.rank + 1.0), root=1)], outputs or [], ALL if outputs else []


def scatter(group: Group, make: Make) -> Started:
    tensor = make(0.0)
    parts = [make(value) for value in ALL] if group.rank == 1 else None
    return [group.scatter(tensor, parts, root=1)], [tensor], [group.rank + 1.0]


def reduce_scatter(group: Group, make: Make) -> Started:
    tensor = make(0.0)
    return [group.reduce_scatter(tensor, [make(group.rank + 1.0)] * SIZE)], [tensor], [TOTAL]


def alltoall(group: Group, make: Make) -> Started:
    outputs = [make(0.0) for _ in range(SIZE)]
    return [group.alltoall(outputs, [make(group.rank + 1.0)] * SIZE)], outputs, ALL


def messages(group: Group, make: Make) -> Started:
    before, after = (group.rank - 1) % SIZE, (group.rank + 1) % SIZE
    works = [group.send(make(group.rank + 1.0), dst=after)]
    received = make(0.0)
    return [*works, group.recv(received, src=before)], [received], [before + 1.0]


def prepared(group: Group, make: Make) -> Started:
    tensor, outputs = make(0.0), [make(0.0) for _ in range(SIZE)]
    reduction = group.prepare_allreduce(tensor, name="sum")
    gathering = group.prepare_allgather(outputs, tensor, name="all")
    for operation in (reduction, gathering):  # within the mode, and later outside of it
        operation.start().wait()
    with torch.inference_mode():
        tensor.fill_(group.rank + 1.0)
    works = [gathering.start()]
    works[0].wait()
    return [*works, reduction.start()], [tensor, *outputs], [TOTAL, *ALL]


def coordinated(group: Group, make: Make) -> Started:
    """Operations that another thread carries out."""
    coordinator = group.coordinate()
    mine, sums, mean, root = (
        make(group.rank + 1.0),
        make(group.rank + 1.0),
        make(group.rank + 1.0),
        make(group.rank + 1.0),
    )
    numbers = torch.full((2, 2), group.rank + 1).t() if make is strided else torch.full((2, 2), group.rank + 1)
    gathered, exchanged, part = [make(0.0) for _ in range(SIZE)], [make(0.0) for _ in range(SIZE)], make(0.0)
    copied = make(group.rank + 1.0)
    works = [
        coordinator.allreduce(mean, name="mean", op=tr.ReduceOp.AVG, prescale=2.0, postscale=0.5),
        *coordinator.grouped_allreduce([sums, numbers], name="two"),
        coordinator.reduce(root, name="root", root=0),
        coordinator.broadcast(copied, name="copy", root=1),
        coordinator.allgather(make(group.rank + 1.0), outputs=gathered, name="gather"),
        coordinator.alltoall(torch.cat([mine.flatten()] * SIZE), [6] * SIZE, outputs=exchanged, name="exchange"),
        coordinator.reduce_scatter(torch.stack([mine] * SIZE), outputs=[part], name="part"),
    ]
    results = [mean, sums, numbers, copied, part, *gathered, *exchanged]
    values = [TOTAL / SIZE, TOTAL, TOTAL, 2.0, TOTAL, *ALL, *ALL]
    return works, [*results, *([root] * (group.rank == 0))], [*values, *([TOTAL] * (group.rank == 0))]


OPERATIONS = [allreduce, reduce, broadcast, allgather, gather, scatter, reduce_scatter, alltoall, messages]
OPERATIONS += [prepared, coordinated]


def wait(works: list[Work]) -> None:
    for work in works:
        work.wait()


def wait_in_a_thread(works: list[Work]) -> None:
    thread = threading.Thread(target=wait, args=(works,))
    thread.start()
    thread.join(30.0)


@pytest.mark.parametrize("end", [wait, wait_in_a_thread])
@pytest.mark.parametrize("make", [contiguous, strided])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_begins_in_the_mode_may_end_outside_of_it(
    operation: Callable[[Group, Make], Started], make: Make, end: Callable[[list[Work]], None]
) -> None:
    def body(group: Group) -> tuple[list[list[float]], list[list[float]]]:
        with torch.inference_mode():
            works, results, values = operation(group, make)
            assert all(result.is_inference() for result in results)
        end(works)
        return [result.unique().tolist() for result in results], [[value] for value in values]

    for results, values in run_ranks(SIZE, body):
        assert results == values


@pytest.mark.parametrize("make", [contiguous, strided])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_tensors_of_the_mode_take_part_outside_of_it(operation: Callable[[Group, Make], Started], make: Make) -> None:
    def of_the_mode(value: float) -> torch.Tensor:
        with torch.inference_mode():
            return make(value)

    def body(group: Group) -> tuple[list[list[float]], list[list[float]]]:
        works, results, values = operation(group, of_the_mode)
        wait(works)
        return [result.unique().tolist() for result in results], [[value] for value in values]

    for results, values in run_ranks(SIZE, body):
        assert results == values


def test_a_result_that_is_written_in_the_mode_counts_as_a_change() -> None:
    def body(group: Group) -> str:
        saved = torch.ones(3, 2, requires_grad=True).exp()
        with torch.inference_mode():
            group.allreduce(saved.t()).wait()
        with pytest.raises(RuntimeError) as caught:
            saved.sum().backward()
        return str(caught.value)

    assert all("modified by an inplace operation" in text for text in run_ranks(2, body))


def test_functions_that_write_parameters_and_lists_of_tensors() -> None:
    """``broadcast_parameters``, ``adasum_`` and ``replayed`` write tensors of the mode outside of it."""

    def body(group: Group) -> list[list[float]]:
        with torch.inference_mode():
            copied, combined, summed, sent = (strided(group.rank + 1.0) for _ in range(4))
        tr.broadcast_parameters({"copied": copied}, group, root=1)
        tr.adasum_(group, [combined], name="adasum")
        with tr.replayed(tr.Checkpoint(total=torch.zeros(1)), group) as job:
            job.allreduce(summed)
            job.broadcast(sent, root=1)
            job.checkpoint()
        return [each.unique().tolist() for each in (copied, combined, summed, sent)]

    assert run_ranks(2, body) == [[[2.0], [1.5], [3.0], [2.0]]] * 2


# -------------------------------------------------------------------------------------- what is made in the mode


class WithBuffers(torch.nn.Module):
    """Its buffers are replaced in the forward pass, in whatever mode that is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("large", torch.zeros(100_000))

    def forward(self, value: float) -> None:
        self.small, self.large = self.small + value, self.large + value


def test_buffers_that_an_evaluation_replaces_are_kept_and_restored() -> None:
    model = WithBuffers()
    kept = KeptBuffers(model)
    with torch.inference_mode():
        model(1.0)
        kept.keep()
    kept.keep()
    with torch.inference_mode():
        model.small.add_(1.0)
        model.large.add_(1.0)
    kept.restore()
    assert [model.small.unique().tolist(), model.large.unique().tolist()] == [[1.0], [1.0]]
    kept.load({"small": torch.ones(3) * 5})
    assert model.small.tolist() == [5.0] * 3


@pytest.mark.parametrize("sync", [None, tr.ParameterServer()], ids=["gradients", "servers"])
def test_updates_that_an_evaluation_applies_leave_a_state_that_training_can_change(sync: object) -> None:
    """With overlap="iterations" the evaluation waits for the update, and makes the state of the torch optimizer."""

    def train(group: Group, *, evaluates: bool) -> torch.Tensor:
        model = Net()
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        options = {"sync": sync} if sync else {}
        optimizer = tr.DistributedOptimizer(inner, model, group=group, overlap="iterations", **options)
        for number, batch in enumerate(batches(3)):
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluates and number == 0:
                model.eval()
                with torch.inference_mode():
                    assert torch.is_inference(model(batch[0]))
                model.train()
        optimizer.close()
        return flat(model)

    def body(group: Group) -> bool:
        return torch.equal(train(group, evaluates=True), train(group, evaluates=False))

    assert run_ranks(2, body) == [True] * 2


def test_what_is_first_asked_for_in_the_mode_can_be_changed_by_training() -> None:
    """Buckets, residuals and the state of an optimizer are made in the mode; so are gradients, by the program."""

    def train(group: Group, mode: bool) -> torch.Tensor:
        model = Net(torch.float32)
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        feedback = tr.ErrorFeedback(elements_min=100, bucket_elements=100)
        with torch.inference_mode(mode):
            optimizer = tr.DistributedOptimizer(
                inner, model, group=group, sync=tr.TopkA(density=0.1), feedback=feedback
            )
            assert not any(each.is_inference() for each in optimizer.residuals.values())
        for number, batch in enumerate(batches(3, dtype=torch.float32)):
            loss_of(model, shard(batch, group)).backward()
            with torch.inference_mode(mode and number == 1):
                for parameter in model.parameters():
                    if parameter.grad is not None:  # a gradient that is compressed was taken away
                        parameter.grad = parameter.grad * 0.5
            optimizer.step()
            optimizer.zero_grad()
            with torch.inference_mode(mode):
                tr.broadcast_optimizer_state(optimizer, group)
        optimizer.close()
        return flat(model)

    results = run_ranks(2, lambda group: [train(group, False), train(group, True)])
    assert all_equal([each for result in results for each in result])


def test_batch_norm_in_the_mode_has_the_results_of_no_grad() -> None:
    def body(group: Group) -> bool:
        found = []
        for mode in (torch.no_grad, torch.inference_mode):
            layer = tr.SyncBatchNorm(2, group=group, name=mode.__name__)
            with mode():
                outputs = layer(torch.arange(8.0).view(4, 2) * (1 + group.rank))
            found.append([outputs.tolist(), layer.running_mean.tolist(), layer.running_var.tolist()])
        return found[0] == found[1]

    assert run_ranks(2, body) == [True] * 2
