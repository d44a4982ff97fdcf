"""Adasum on several ranks equals the tree of pairwise combinations, and trains."""

from __future__ import annotations

import pytest
import torch
from optimizer_cases import OPTIMIZERS, Net, all_equal, batches, flat, loss_of, shard, train_alone

from totalreduce.foundation.errors import (
    ConfigurationError,
    DeadlineExceededError,
    MismatchError,
    PlanMismatchError,
    UnsupportedError,
)
from totalreduce.groups.group import Group
from totalreduce.pytorch.adasum import Adasum, AdasumOptimizer, adasum_
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.testing import run_ranks

#: The second is smaller than the number of ranks, the third is empty, the last is halved within.
SHAPES = [(3, 5), (2,), (0, 4), (), (7, 1, 3), (40,)]
WORLD_SIZES = [1, 2, 3, 4, 5, 8]


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The paper's formula, in float64."""
    if not a.norm() or not b.norm():
        return a + b
    dot = (a * b).sum()
    return (1 - dot / (2 * a.square().sum())) * a + (1 - dot / (2 * b.square().sum())) * b


def tree(vectors: list[torch.Tensor]) -> torch.Tensor:
    """What beyond a power of two joins its partner first; then neighbours, neighbours of neighbours, ..."""
    power = 1 << (len(vectors).bit_length() - 1)
    level = [
        pair(vectors[rank], vectors[power + rank]) if power + rank < len(vectors) else vectors[rank]
        for rank in range(power)
    ]
    while len(level) > 1:
        level = [pair(*level[place : place + 2]) for place in range(0, len(level), 2)]
    return level[0]


def draw(rank: int, dtype: torch.dtype = torch.float64, shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    """This rank's tensors: related to the other ranks' and of other lengths, so that every weight counts."""
    common, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + rank)
    return [
        (torch.randn(shape, generator=common) + (0.5 + rank) * torch.randn(shape, generator=own)).to(dtype)
        for shape in shapes
    ]


def check(results: list[list[torch.Tensor]], inputs: list[list[torch.Tensor]], tolerance: float) -> None:
    """Bit-equal on all ranks, and right to a tolerance that is relative to the longest vector: they may cancel."""
    for index, first in enumerate(results[0]):
        assert all_equal([result[index] for result in results]), index
        vectors = [tensors[index].detach().double() for tensors in inputs]
        expected = tree(vectors)
        assert first.shape == expected.shape
        assert (first.double() - expected).norm() <= tolerance * max(vector.norm() for vector in vectors), index


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_equals_the_tree(world_size: int, dtype: torch.dtype) -> None:
    def body(group: Group) -> list[torch.Tensor]:
        tensors = draw(group.rank, dtype)
        adasum_(group, tensors, name="gradients")
        assert all(tensor.dtype is dtype for tensor in tensors)
        return tensors

    inputs = [draw(rank, dtype) for rank in range(world_size)]
    # Each of at most four levels rounds once.
    check(run_ranks(world_size, body), inputs, 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_over_other_transports(transport: str) -> None:
    shapes = [(300, 500), (1000,)]

    def body(group: Group) -> list[torch.Tensor]:
        tensors = draw(group.rank, shapes=shapes)
        adasum_(group, tensors, name="gradients")
        return tensors

    check(run_ranks(3, body, transport=transport), [draw(rank, shapes=shapes) for rank in range(3)], 1e-13)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_equal_gradients_stay_as_they_are_and_orthogonal_ones_add_up(world_size: int) -> None:
    def body(group: Group) -> list[torch.Tensor]:
        equal = draw(7, torch.float32)[-1]
        orthogonal = torch.zeros(world_size, dtype=torch.float32)
        orthogonal[group.rank] = group.rank + 1.0
        adasum_(group, [equal, orthogonal], name="gradients")
        return [equal, orthogonal]

    for equal, orthogonal in run_ranks(world_size, body):
        assert torch.equal(equal, draw(7, torch.float32)[-1])
        assert torch.equal(orthogonal, torch.arange(1.0, world_size + 1))


def test_parallel_gradients_of_different_length_are_averaged() -> None:
    def body(group: Group) -> torch.Tensor:
        # The squares of the short one are below float32's smallest number.
        gradient = torch.full((4,), 1e-24 if group.rank else 1.0)
        adasum_(group, [gradient], name="gradients")
        return gradient

    for gradient in run_ranks(2, body):
        assert (gradient - 0.5).abs().max() < 1e-6


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_zeros_take_the_other_sides_value(world_size: int) -> None:
    def body(group: Group) -> list[torch.Tensor]:
        mine = [tensor * (group.rank == 1) for tensor in draw(group.rank)]
        nothing = torch.zeros(5)
        adasum_(group, [*mine, nothing], name="gradients")
        return [*mine, nothing]

    for *values, nothing in run_ranks(world_size, body):
        assert all(torch.equal(value, expected) for value, expected in zip(values, draw(1), strict=True))
        assert torch.equal(nothing, torch.zeros(5))


def test_not_a_number_reaches_all_ranks() -> None:
    def body(group: Group) -> list[torch.Tensor]:
        tensors = [torch.ones(3), torch.ones(3)]
        if group.rank == 2:
            tensors[0][1] = float("nan")
        adasum_(group, tensors, name="gradients")
        return tensors

    for broken, sound in run_ranks(3, body):
        assert broken.isnan().any()
        assert torch.equal(sound, torch.ones(3))


@pytest.mark.parametrize("world_size", [3, 4])
def test_mixed_dtypes_and_strides_call_after_call(world_size: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float64]
    shapes = [(4, 6), (9,), (5,), (2, 3, 4)]

    def make(rank: int, step: int) -> list[torch.Tensor]:
        return [tensor.to(dtype) for tensor, dtype in zip(draw(rank + 9 * step, shapes=shapes), dtypes, strict=True)]

    def body(group: Group) -> list[list[torch.Tensor]]:
        adasum = Adasum(group, "gradients")
        steps = []
        for step in range(4):
            tensors = make(group.rank, step)
            tensors[0] = tensors[0].t().contiguous().t()
            tensors[3] = tensors[3].requires_grad_()
            before = [tensor.data_ptr() for tensor in tensors]
            adasum.combine_(tensors)
            assert [tensor.data_ptr() for tensor in tensors] == before
            steps.append([tensor.detach() for tensor in tensors])
        return steps

    results = run_ranks(world_size, body)
    for step in range(4):
        inputs = [make(rank, step) for rank in range(world_size)]
        check([result[step] for result in results], inputs, 8 * torch.finfo(torch.bfloat16).eps)
        exact = [[tensors[3]] for tensors in inputs]
        check([[result[step][3]] for result in results], exact, 1e-14)


def test_messages_of_the_user_are_not_mistaken() -> None:
    def body(group: Group) -> tuple[torch.Tensor, list[torch.Tensor]]:
        other = 1 - group.rank
        sent, received = torch.full((8,), float(group.rank)), torch.empty(8)
        works = [group.send(sent, dst=other)]
        tensors = draw(group.rank)
        adasum_(group, tensors, name="gradients")
        works.append(group.recv(received, src=other))
        for work in works:
            work.wait()
        return received, tensors

    results = run_ranks(2, body)
    assert [float(received[0]) for received, _ in results] == [1.0, 0.0]
    check([tensors for _, tensors in results], [draw(0), draw(1)], 1e-14)


def test_a_rank_sends_less_than_twice_the_tensors() -> None:
    num_elements = 64 * 1024

    def body(group: Group) -> int:
        adasum = Adasum(group, "gradients")
        adasum.combine_([torch.ones(4)])
        before = group.statistics().bytes_sent
        adasum.combine_([torch.ones(num_elements)])
        return group.statistics().bytes_sent - before

    for sent in run_ranks(8, body):
        assert sent < 2 * 4 * num_elements


def test_on_a_subgroup() -> None:
    def body(group: Group) -> list[torch.Tensor] | None:
        if group.rank not in (3, 0, 1):
            return None
        tensors = draw(group.rank)
        adasum_(group.subgroup([3, 0, 1]), tensors, name="gradients")
        return tensors

    results = run_ranks(4, body)
    assert results[2] is None
    check([results[rank] for rank in (3, 0, 1)], [draw(rank) for rank in (3, 0, 1)], 1e-14)


def test_other_sizes_are_an_error_and_leave_the_tensors_as_they_are() -> None:
    def body(group: Group) -> None:
        tensors = [torch.full((6,), 1.0 + group.rank), torch.ones(4 if group.rank else 8)]
        with pytest.raises(MismatchError, match="message"):
            adasum_(group, tensors, name="gradients")
        assert torch.equal(tensors[0], torch.full((6,), 1.0 + group.rank))
        assert torch.equal(tensors[1], torch.ones_like(tensors[1]))

    run_ranks(2, body)


def test_a_missing_rank_is_a_deadline_and_leaves_the_tensors_as_they_are() -> None:
    def body(group: Group) -> None:
        tensors = [torch.full((6,), 1.0 + group.rank)]
        if group.rank != 1:
            with pytest.raises(DeadlineExceededError):
                adasum_(group, tensors, name="gradients", timeout_s=0.2)
            assert torch.equal(tensors[0], torch.full((6,), 1.0 + group.rank))
        group.barrier()

    run_ranks(4, body)


def test_what_cannot_be_combined_is_refused() -> None:
    def body(group: Group) -> None:
        for wrong in (torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.complex64), torch.eye(2).to_sparse()):
            with pytest.raises(UnsupportedError, match="Adasum combines dense tensors of"):
                adasum_(group, [torch.ones(2), wrong], name="gradients")
        adasum_(group, [], name="gradients")
        assert group.statistics().operations == 0

    run_ranks(2, body)


# ------------------------------------------------------------------------------------------------------- optimizer


def wrap(model: torch.nn.Module, group: Group, kind: str = "sgd") -> AdasumOptimizer:
    return AdasumOptimizer(OPTIMIZERS[kind](list(model.parameters())), model, group=group)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 3))])
def test_equal_data_train_as_one_process_does(world_size: int, kind: str) -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap(model, group, kind)
        for batch in batches(20):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        return flat(model)

    results = run_ranks(world_size, body)
    assert all_equal(results)
    assert (results[0] - train_alone(OPTIMIZERS[kind])).abs().max() <= 1e-12


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_is_the_tree_of_the_ranks_changes(world_size: int) -> None:
    steps = batches(3)

    def local_change(start: dict[str, torch.Tensor], group: Group, step: int) -> list[torch.Tensor]:
        model = Net()
        model.load_state_dict(start)
        optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
        loss_of(model, shard(steps[step], group)).backward()
        optimizer.step()
        return [after.detach() - start[name] for name, after in model.named_parameters()]

    def body(group: Group) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]], torch.Tensor]:
        model = Net()
        optimizer = wrap(model, group)
        local, combined = [], []
        for step, batch in enumerate(steps):
            start = {name: value.clone() for name, value in model.state_dict().items()}
            local.append(local_change(start, group, step))
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
            combined.append([value - start[name] for name, value in model.state_dict().items()])
        return local, combined, flat(model)

    results = run_ranks(world_size, body)
    assert all_equal([parameters for _, _, parameters in results])
    for step in range(len(steps)):
        for index, change in enumerate(results[0][1][step]):
            expected = tree([local[step][index] for local, _, _ in results])
            assert (change - expected).abs().max() <= 1e-14
            assert expected.abs().max() > 1e-5


def test_what_got_no_gradient_here_takes_the_others_change() -> None:
    def body(group: Group) -> dict[str, torch.Tensor]:
        model = Net()
        model.first.weight.requires_grad_(False)
        if group.rank == 1:
            model.second.requires_grad_(False)
        optimizer = wrap(model, group, "momentum")
        inputs, targets = batches(1)[0]
        if group.rank == 1:
            targets = targets + 1
        loss_of(model, (inputs, targets)).backward()
        optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    alone = Net()
    optimizer = OPTIMIZERS["momentum"](list(alone.parameters()))
    loss_of(alone, batches(1)[0]).backward()
    optimizer.step()
    results = run_ranks(2, body)
    for name, value in Net().state_dict().items():
        assert all_equal([result[name] for result in results])
        change = results[0][name] - value
        if name == "first.weight":
            assert not change.any()
        elif name.startswith("second"):
            assert (results[0][name] - alone.state_dict()[name]).abs().max() <= 1e-15
        else:
            assert change.abs().max() > 1e-5


@pytest.mark.parametrize("kind", ["sgd", "lbfgs"])
def test_closures(kind: str) -> None:
    def body(group: Group) -> tuple[float, float, torch.Tensor]:
        model = Net()
        parameters = list(model.parameters())
        inner = torch.optim.LBFGS(parameters, max_iter=3) if kind == "lbfgs" else torch.optim.SGD(parameters, lr=0.1)
        optimizer = AdasumOptimizer(inner, model, group=group)
        batch = shard(batches(1)[0], group)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        return losses[0], loss_of(model, batch).item(), flat(model)

    results = run_ranks(3, body)
    assert all_equal([parameters for _, _, parameters in results])
    rows = batches(1)[0][0].shape[0] // 3
    assert [before for before, _, _ in results] == pytest.approx(
        [loss_of(Net(), tuple(part[rank * rows :][:rows] for part in batches(1)[0])).item() for rank in range(3)]
    ), "each rank has the loss of its own batch"
    assert sum(after for _, after, _ in results) < sum(before for before, _, _ in results)


def test_schedulers_state_and_groups() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        inner = torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9)
        optimizer = AdasumOptimizer(inner, model, group=group)
        optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.5})
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
        before = flat(model)
        loss_of(model, shard(batches(1)[0], group)).backward()
        optimizer.step()
        scheduler.step()
        assert [param_group["lr"] for param_group in inner.param_groups] == pytest.approx([0.01, 0.05])
        assert optimizer.state_dict() == inner.state_dict()
        assert (flat(model) - before).abs().max() > 1e-5
        with pytest.raises(ConfigurationError, match=r"1 parameter\(s\) of the optimizer are not in the model"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        optimizer.step()
        assert repr(optimizer).startswith("AdasumOptimizer(SGD")
        inner.add_param_group({"params": list(model.third.parameters())})
        with pytest.raises(ConfigurationError, match="add_param_group"):
            optimizer.step()
        return flat(model)

    assert all_equal(run_ranks(2, body))


def test_ranks_with_different_models_are_told_so() -> None:
    class Turned(torch.nn.Module):
        """The same names and shapes in another order."""

        def __init__(self, turned: bool) -> None:
            super().__init__()
            for name in ("b", "a") if turned else ("a", "b"):
                self.register_parameter(name, torch.nn.Parameter(torch.ones(3)))

    def body(group: Group) -> None:
        for model in (torch.nn.Linear(2, 2 + group.rank), Turned(group.rank == 1)):
            with pytest.raises(PlanMismatchError, match=r"adasum\.plan"):
                wrap(model, group)
        model = Net()
        if group.rank == 0:
            model.float()
        with pytest.raises(PlanMismatchError, match=r"torch\.float"):
            wrap(model, group)

    run_ranks(2, body)


def test_optimizers_that_are_distributed_already_are_refused() -> None:
    def body(group: Group) -> None:
        model = Net()
        optimizer = wrap(model, group)
        with pytest.raises(ConfigurationError, match="distributed already"):
            AdasumOptimizer(optimizer, model, group=group)
        distributed = DistributedOptimizer(OPTIMIZERS["sgd"](list(model.parameters())), model, group=group)
        with pytest.raises(ConfigurationError, match="distributed already"):
            AdasumOptimizer(distributed, model, group=group)

    run_ranks(1, body)


@pytest.mark.parametrize("initial", ["broadcast", "check"])
def test_ranks_begin_with_the_parameters_of_rank_0_or_are_told_that_they_differ(initial: str) -> None:
    def body(group: Group) -> torch.Tensor | str:
        model = Net()
        with torch.no_grad():
            model.first.weight.add_(group.rank)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            AdasumOptimizer(inner, model, group=group, initial=initial)
        except PlanMismatchError as error:
            return str(error)
        return flat(model)

    first, second = run_ranks(2, body)
    if initial == "check":
        assert "first.weight: rank 0 has" in first
        assert first == second
    else:
        assert torch.equal(first, flat(Net()))
        assert torch.equal(first, second)
