"""Batch normalisation on several ranks equals one process on the joint batch."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import torch
from optimizer_cases import Submissions, all_equal

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.pytorch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from totalreduce.testing import run_ranks

CHANNELS = 4
#: Batch sizes by rank, for each world size; one is empty where there are four.
SIZES = {1: [5], 2: [3, 2], 3: [1, 4, 2], 4: [1, 3, 0, 5], 5: [0, 0, 2, 1, 3]}
TORCH_LAYERS = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}
TRAILING = {0: (), 1: (7,), 2: (3, 2), 3: (2, 3, 2)}


def draw(sizes: list[int], trailing: tuple[int, ...], seed: int = 3, channels: int = CHANNELS) -> list[torch.Tensor]:
    """A batch for each rank, every channel with another mean and spread."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(sum(sizes), channels, *trailing, generator=generator, dtype=torch.float64)
    shape = (1, -1) + (1,) * len(trailing)
    spread = torch.linspace(0.5, 3.0, channels, dtype=torch.float64).view(shape)
    return list((batch * spread + 2 * spread.flip(1)).split(sizes))


def fill(layer: torch.nn.Module) -> torch.nn.Module:
    """Weights and buffers that are not the usual ones and zeros."""
    with torch.no_grad():
        for index, tensor in enumerate(each for each in layer.state_dict().values() if each.is_floating_point()):
            tensor.copy_(torch.linspace(0.5, 1.5 + index, tensor.numel()))
    return layer


def train_step(layer: torch.nn.Module, inputs: torch.Tensor, factors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Everything a forward and backward pass makes."""
    inputs = inputs.clone().requires_grad_()
    outputs = layer(inputs)
    (outputs * factors + outputs.square()).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    return {"outputs": outputs.detach(), "inputs": inputs.grad, **gradients, **buffers}


def check(ranks: list[dict[str, torch.Tensor]], joint: dict[str, torch.Tensor], tolerance: float = 1e-10) -> None:
    """Outputs and input gradients follow one another, parameters' gradients add up, buffers are equal everywhere."""
    for key, expected in joint.items():
        each = [results[key] for results in ranks]
        if key in ("outputs", "inputs"):
            actual = torch.cat(each)
        elif key in ("weight", "bias"):
            actual = torch.stack(each).sum(0)
        else:
            assert all_equal(each), key
            actual = each[0]
        assert actual.shape == expected.shape, key
        assert (actual - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max())), key


@pytest.mark.parametrize("num_trailing", TRAILING)
@pytest.mark.parametrize("world_size", SIZES)
def test_equals_one_process_on_the_joint_batch(world_size: int, num_trailing: int) -> None:
    sizes, trailing = SIZES[world_size], TRAILING[num_trailing]
    steps = [draw(sizes, trailing, seed) for seed in (1, 2)]
    factors = draw(sizes, trailing, 9)

    def body(group: Group) -> list[dict[str, torch.Tensor]]:
        layer = fill(SyncBatchNorm(CHANNELS, dtype=torch.float64, group=group, name="bn"))
        return [train_step(layer, step[group.rank], factors[group.rank]) for step in steps]

    results = run_ranks(world_size, body)
    reference = fill(TORCH_LAYERS[num_trailing](CHANNELS, dtype=torch.float64))
    for number, step in enumerate(steps):
        joint = train_step(reference, torch.cat(step), torch.cat(factors))
        check([result[number] for result in results], joint)
        assert joint["inputs"].abs().max() > 1e-3


@pytest.mark.parametrize(
    "settings", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.3, "momentum": 0.7}]
)
def test_settings(settings: dict[str, object]) -> None:
    steps = [draw(SIZES[4], (3,), seed) for seed in (1, 2, 3)]
    factors = draw(SIZES[4], (3,), 9)

    def body(group: Group) -> list[dict[str, torch.Tensor]]:
        layer = fill(SyncBatchNorm(CHANNELS, **settings, dtype=torch.float64, group=group, name="bn"))
        return [train_step(layer, step[group.rank], factors[group.rank]) for step in steps]

    results = run_ranks(4, body)
    reference = fill(torch.nn.BatchNorm1d(CHANNELS, **settings, dtype=torch.float64))
    for number, step in enumerate(steps):
        check([result[number] for result in results], train_step(reference, torch.cat(step), torch.cat(factors)))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_over_other_transports(transport: str) -> None:
    batch, factors = draw(SIZES[3], (2, 2)), draw(SIZES[3], (2, 2), 9)

    def body(group: Group) -> dict[str, torch.Tensor]:
        layer = SyncBatchNorm(CHANNELS, dtype=torch.float64, group=group, name="bn")
        return train_step(layer, batch[group.rank], factors[group.rank])

    reference = torch.nn.BatchNorm2d(CHANNELS, dtype=torch.float64)
    check(run_ranks(3, body, transport=transport), train_step(reference, torch.cat(batch), torch.cat(factors)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parameters_too", [False, True])
def test_narrow_inputs(dtype: torch.dtype, parameters_too: bool) -> None:
    batch = [each.to(dtype) for each in draw(SIZES[4], (5,))]
    factors = [each.to(dtype) for each in draw(SIZES[4], (5,), 9)]

    def body(group: Group) -> dict[str, torch.Tensor]:
        kept = dtype if parameters_too else torch.float32
        layer = fill(SyncBatchNorm(CHANNELS, dtype=kept, group=group, name="bn"))
        result = train_step(layer, batch[group.rank], factors[group.rank])
        assert result["outputs"].dtype is result["inputs"].dtype is dtype
        assert result["weight"].dtype is result["running_var"].dtype is kept
        return {name: value.double() for name, value in result.items()}

    reference = fill(torch.nn.BatchNorm1d(CHANNELS, dtype=torch.float64))
    joint = train_step(reference, torch.cat(batch).double(), torch.cat(factors).double())
    # Parameters' gradients are sums of up to 45 rounded products.
    check(run_ranks(4, body), joint, 16 * torch.finfo(dtype).eps)


def test_on_a_subgroup() -> None:
    members = [3, 0]
    batch, factors = draw(SIZES[2], (2,)), draw(SIZES[2], (2,), 9)

    def body(group: Group) -> dict[str, torch.Tensor] | None:
        if group.rank not in members:
            return None
        subgroup = group.subgroup(members)
        layer = SyncBatchNorm(CHANNELS, dtype=torch.float64, group=subgroup, name="bn")
        return train_step(layer, batch[subgroup.rank], factors[subgroup.rank])

    results = run_ranks(4, body)
    reference = torch.nn.BatchNorm1d(CHANNELS, dtype=torch.float64)
    check([results[rank] for rank in members], train_step(reference, torch.cat(batch), torch.cat(factors)))


def test_large_means_and_counts_do_not_lose_the_variance() -> None:
    generator = torch.Generator().manual_seed(5)
    batch = (1e4 + torch.randn(4, 300, CHANNELS, generator=generator, dtype=torch.float64)).float()

    def body(group: Group) -> torch.Tensor:
        layer = SyncBatchNorm(CHANNELS, momentum=1.0, group=group, name="bn")
        layer(batch[group.rank])
        return layer.running_var

    expected = batch.double().flatten(0, 1).var(0)
    for running_var in run_ranks(4, body):
        assert (running_var - expected).abs().max() < 1e-4  # 1e4 ** 2 has 8 as its last bit in float32


def test_a_step_costs_two_operations_and_evaluation_none() -> None:
    def body(group: Group) -> tuple[list[int], list[tuple[str, int]]]:
        submissions = Submissions(group)
        layer = SyncBatchNorm(CHANNELS, group=group, name="bn")
        inputs = torch.randn(3, CHANNELS, requires_grad=True)
        counts = [group.statistics().operations]
        outputs = layer(inputs)
        counts.append(group.statistics().operations)
        outputs.sum().backward()
        counts.append(group.statistics().operations)
        layer(inputs.detach()).sum().backward()  # the parameters' gradients are local
        counts.append(group.statistics().operations)
        layer.eval()(inputs).sum().backward()
        counts.append(group.statistics().operations)
        return counts, submissions.take()

    names = [("bn.statistics", -1), ("bn.gradients", -1), ("bn.statistics", -1)]
    assert run_ranks(3, body) == [([0, 1, 2, 3, 3], names)] * 3


def test_evaluation_is_torchs() -> None:
    def body(group: Group) -> None:
        inputs = torch.randn(3, CHANNELS, 2)
        for settings in ({}, {"track_running_stats": False}):
            layer = fill(SyncBatchNorm(CHANNELS, **settings, group=group, name="bn")).eval()
            reference = fill(torch.nn.BatchNorm1d(CHANNELS, **settings)).eval()
            assert torch.equal(layer(inputs), reference(inputs))

    run_ranks(2, body)


class Net(torch.nn.Module):
    """Layers of several widths, one of them under two names and one used twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(2, 6, 3, padding=1), torch.nn.BatchNorm2d(6))
        self.twice = torch.nn.BatchNorm2d(6, momentum=None)
        self.again = self.stem[1]
        self.branches = torch.nn.ModuleDict({"left": torch.nn.BatchNorm1d(6), "right": torch.nn.BatchNorm1d(6)})
        self.head = torch.nn.Linear(6, 1)
        self.double()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.stem(inputs))
        hidden = self.twice(hidden + torch.tanh(self.twice(hidden)))
        hidden = self.again(hidden).mean((2, 3))
        return self.head(self.branches["left"](hidden) * self.branches["right"](hidden.square()))


def test_a_converted_model_trains_as_one_process_does() -> None:
    sizes = [2, 3, 1]
    steps = [draw(sizes, (4, 4), seed, channels=2) for seed in range(5)]

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int | None) -> dict[str, torch.Tensor]:
        for step in steps:
            batch = torch.cat(step) if rank is None else step[rank]
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
        return model.state_dict()

    def body(group: Group) -> dict[str, torch.Tensor]:
        model = Net()
        inner = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
        assert convert_sync_batchnorm(model, group) is model
        optimizer = DistributedOptimizer(inner, model, group=group, op=ReduceOp.SUM, bucket_bytes=256)
        return train(model, optimizer, group.rank)

    reference = Net()
    expected = train(reference, torch.optim.SGD(reference.parameters(), lr=1e-3, momentum=0.5), None)
    assert (expected["head.weight"] - Net().head.weight).abs().max() > 1e-3, "the reference did train"
    results = run_ranks(3, body)
    for key, value in expected.items():
        each = [result[key] for result in results]
        assert all_equal(each), key
        assert (each[0] - value).abs().max() <= 1e-10, key


def test_conversion_keeps_what_there_is() -> None:
    def body(group: Group) -> None:
        model = Net()
        model.branches["left"].eval()
        tensors = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        state = {name: value.clone() for name, value in model.state_dict().items()}
        assert convert_sync_batchnorm(model, group, name="net") is model
        assert {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]} == tensors
        assert list(model.state_dict()) == list(state)
        layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, SyncBatchNorm)}
        assert {path: layer.name for path, layer in layers.items()} == {
            path: f"net.{path}" for path in ("stem.1", "twice", "branches.left", "branches.right")
        }
        assert model.again is model.stem[1]
        assert [layer.training for layer in layers.values()] == [True, True, False, True]
        assert layers["twice"].momentum is None
        before = list(layers.values())
        convert_sync_batchnorm(model, group)
        assert [each for each in model.modules() if isinstance(each, SyncBatchNorm)] == before
        alone = convert_sync_batchnorm(torch.nn.BatchNorm3d(2, affine=False, track_running_stats=False), group)
        assert isinstance(alone, SyncBatchNorm)
        assert not alone.state_dict()
        assert isinstance(convert_sync_batchnorm(torch.nn.SyncBatchNorm(2), group), SyncBatchNorm)

    run_ranks(2, body)


def test_conversion_refuses_what_it_would_break() -> None:
    class Activated(torch.nn.BatchNorm2d):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs).relu()

    def body(group: Group) -> None:
        for strange in (Activated(3), torch.nn.LazyBatchNorm1d()):
            model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), strange)
            with pytest.raises(ConfigurationError, match=rf"'model\.1' is a {type(strange).__name__}"):
                convert_sync_batchnorm(model, group)
            assert type(model[0]) is torch.nn.BatchNorm1d

    run_ranks(1, body)


def test_ranks_may_disagree_about_the_inputs_gradient() -> None:
    batch, factors = draw(SIZES[3], (2,)), draw(SIZES[3], (2,), 9)

    def body(group: Group) -> dict[str, torch.Tensor]:
        layer = fill(SyncBatchNorm(CHANNELS, dtype=torch.float64, group=group, name="bn"))
        if group.rank != 1:
            return train_step(layer, batch[group.rank], factors[group.rank])
        outputs = layer(batch[1])
        (outputs * factors[1] + outputs.square()).sum().backward()
        return {"outputs": outputs.detach(), "weight": layer.weight.grad, "bias": layer.bias.grad}

    results = run_ranks(3, body)
    joint = train_step(fill(torch.nn.BatchNorm1d(CHANNELS, dtype=torch.float64)), torch.cat(batch), torch.cat(factors))
    gradients = joint.pop("inputs").split(SIZES[3])
    check(results, {key: joint[key] for key in ("outputs", "weight", "bias")})
    for rank in (0, 2):
        assert (results[rank]["inputs"] - gradients[rank]).abs().max() <= 1e-10


def test_a_rank_without_gradients_is_an_error_on_all_ranks_and_the_layer_goes_on() -> None:
    def body(group: Group) -> None:
        layer = SyncBatchNorm(CHANNELS, group=group, name="bn")
        inputs = torch.randn(3, CHANNELS, requires_grad=True)
        with (
            torch.set_grad_enabled(group.rank != 1),
            pytest.raises(ConfigurationError, match=r"'bn' runs without gradients on rank\(s\) \[1\]"),
        ):
            layer(inputs)
        assert layer.num_batches_tracked == 0
        layer(inputs).sum().backward()

    run_ranks(3, body)


def test_one_value_per_channel_is_an_error_on_all_ranks_and_none_is_not() -> None:
    def body(group: Group) -> None:
        layer = SyncBatchNorm(CHANNELS, group=group, name="bn")
        with pytest.raises(ConfigurationError, match="one value per channel"):
            layer(torch.randn(int(group.rank == 1), CHANNELS))
        nothing = torch.empty(0, CHANNELS, requires_grad=True)
        layer(nothing).sum().backward()
        assert nothing.grad.shape == (0, CHANNELS)
        assert torch.equal(layer.running_mean, torch.zeros(CHANNELS))
        assert torch.equal(layer.weight.grad, torch.zeros(CHANNELS))

    run_ranks(2, body)


def test_wrong_inputs_are_refused_before_anything_is_sent() -> None:
    def body(group: Group) -> None:
        layer = SyncBatchNorm(CHANNELS, group=group, name="bn")
        for wrong in (torch.randn(4), torch.randn(2, CHANNELS + 1), torch.ones(2, CHANNELS, dtype=torch.int64)):
            with pytest.raises(ConfigurationError, match="layer 'bn'"):
                layer(wrong)
        assert group.statistics().operations == 0

    run_ranks(2, body)


def test_channels_last_strided_inputs_and_a_late_rank() -> None:
    batch, factors = draw([2, 3], (4, 4)), draw([2, 3], (4, 4), 9)

    def body(group: Group) -> dict[str, torch.Tensor]:
        layer = SyncBatchNorm(CHANNELS, dtype=torch.float64, group=group, name="bn")
        time.sleep(0.05 * group.rank)
        inputs = batch[group.rank].to(memory_format=torch.channels_last)[..., ::2]
        return train_step(layer, inputs, factors[group.rank][..., ::2])

    reference = torch.nn.BatchNorm2d(CHANNELS, dtype=torch.float64)
    check(run_ranks(2, body), train_step(reference, torch.cat(batch)[..., ::2], torch.cat(factors)[..., ::2]))


def test_the_gradient_is_right_by_finite_differences() -> None:
    inputs = draw([4], (2,), channels=2)[0]

    def body(group: Group) -> bool:
        layer = fill(SyncBatchNorm(2, dtype=torch.float64, track_running_stats=False, group=group, name="bn"))
        # Both ranks move the same elements of equal batches: what one's loss gains from the other's batch is what the
        # other's loss gains from this one's, which is what the gradient holds.
        return torch.autograd.gradcheck(lambda mine: layer(mine).pow(3).sum(), inputs.clone().requires_grad_())

    assert run_ranks(2, body) == [True, True]


def test_copies_share_the_group_and_pickling_is_refused() -> None:
    def body(group: Group) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, CHANNELS), torch.nn.BatchNorm1d(CHANNELS))
        convert_sync_batchnorm(model, group)
        twin = copy.deepcopy(model)
        assert twin[1].group is group
        assert twin[1].weight is not model[1].weight
        inputs = torch.randn(3, 2)
        assert torch.equal(twin(inputs), model(inputs))
        twin.load_state_dict(model.state_dict())
        with pytest.raises(TypeError, match=r"save the model's state_dict\(\)"):
            pickle.dumps(model)

    run_ranks(2, body)


def test_checkpointing_and_second_derivatives() -> None:
    batch, factors = draw(SIZES[2], ()), draw(SIZES[2], (), 9)

    def body(group: Group) -> dict[str, torch.Tensor]:
        layer = SyncBatchNorm(CHANNELS, dtype=torch.float64, track_running_stats=False, group=group, name="bn")

        def checkpointed(inputs: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(layer, inputs, use_reentrant=False)

        inputs = batch[group.rank].clone().requires_grad_()
        outputs = checkpointed(inputs)
        (outputs * factors[group.rank] + outputs.square()).sum().backward()
        again = batch[group.rank].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(layer(again).square().sum(), again, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()
        return {"outputs": outputs.detach(), "inputs": inputs.grad, "weight": layer.weight.grad}

    reference = torch.nn.BatchNorm1d(CHANNELS, dtype=torch.float64, track_running_stats=False)
    joint = train_step(reference, torch.cat(batch), torch.cat(factors))
    check(run_ranks(2, body), {key: joint[key] for key in ("outputs", "inputs", "weight")})
