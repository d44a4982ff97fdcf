"""``DistributedOptimizer(sync=...)``: what is sent and what is kept back add up, whatever the loop around does."""

from __future__ import annotations

import copy
import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from optimizer_cases import Net, all_equal, batches, flat, loss_of, shard

from totalreduce.codecs.half import Half
from totalreduce.codecs.plain import Plain
from totalreduce.foundation.errors import ConfigurationError, PlanMismatchError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch import compressed
from totalreduce.pytorch.buckets import ParameterSpec
from totalreduce.pytorch.error_feedback import CompressedPlan, ErrorFeedback, plan_parts
from totalreduce.pytorch.intervals import Interval
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.sparse import auto
from totalreduce.sparse.coded import Coded
from totalreduce.sparse.dense import Dense
from totalreduce.sparse.device import DeviceAccumulator, SideStreams, kernels_for
from totalreduce.sparse.methods import METHODS
from totalreduce.sparse.oktopk import OkTopk
from totalreduce.sparse.powersgd import PowerSGD
from totalreduce.sparse.topka import TopkA
from totalreduce.testing import run_ranks

SIZES = [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4)), 3]
#: Everything with two dimensions is compressed, in several buckets, and the largest matrix is cut.
SMALL = ErrorFeedback(elements_min=0, bucket_elements=100)
FLOAT = torch.float32


def wrap(model: torch.nn.Module, group: Group, sync: object = None, **settings: object) -> DistributedOptimizer:
    settings.setdefault("feedback", SMALL)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return DistributedOptimizer(inner, model, group=group, sync=sync or OkTopk(density=0.1), **settings)


def total_residual(optimizer: DistributedOptimizer, model: torch.nn.Module, group: Group) -> torch.Tensor:
    """The sum over the ranks of what they keep back, in float64, in the order of the model's matrices."""
    kept = [optimizer.residuals[name].double().flatten() for name, p in model.named_parameters() if p.dim() > 1]
    total = torch.cat(kept)
    group.allreduce(total).wait()
    return total


def alone(num_steps: int) -> torch.Tensor:
    """What one process makes of whole batches."""
    model = Net(FLOAT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(num_steps, dtype=FLOAT):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("name", ["oktopk", "powersgd"])
def test_a_device_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none here, so torch's operations work in the CPU's memory as they would in that of an accelerator."""
    sync = PowerSGD(rank=1) if name == "powersgd" else OkTopk(density=0.1)
    settings = ErrorFeedback(elements_min=0, bucket_elements=100, momentum=0.9, clip_norm=1.0)

    def train(group: Group) -> list[torch.Tensor]:
        model = Net(FLOAT)
        optimizer = wrap(model, group, sync, feedback=settings)
        for step, batch in enumerate(batches(4, dtype=FLOAT)):
            optimizer.zero_grad()
            if step == 3:
                optimizer.flush_residuals()
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
        return [flat(model), *optimizer.residuals.values()]

    here = run_ranks(3, train)

    def accumulator_of(tensors: list[torch.Tensor], streams: SideStreams) -> DeviceAccumulator:
        return DeviceAccumulator(tensors, streams, kernels_for(torch.device("cpu")))

    monkeypatch.setattr(compressed, "accumulator_of", accumulator_of)
    there = run_ranks(3, train)
    for mine, theirs in zip(here, there, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def matrices(tensors: dict[str, torch.Tensor], group: Group) -> torch.Tensor:
    total = torch.cat([tensor.double().flatten() for tensor in tensors.values()])
    group.allreduce(total).wait()
    return total


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("powersgd", "gaussiank")])
def test_with_everything_sent_training_is_that_of_one_process(world_size: int, name: str) -> None:
    settings = {"dense": {}, "coded": {"codec": Plain()}}.get(name, {"density": 1.0})
    if name in ("oktopk", "topka", "gtopk", "topkdsa"):
        settings["values"] = "float32"

    def body(group: Group) -> torch.Tensor:
        model = Net(FLOAT)
        optimizer = wrap(model, group, METHODS[name](**settings))
        for batch in batches(10, dtype=FLOAT):
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
        return flat(model)

    results = run_ranks(world_size, body)
    assert all_equal(results)
    torch.testing.assert_close(results[0], alone(10), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_applied_or_kept_back(world_size: int, name: str) -> None:
    settings = {} if name in ("dense", "powersgd", "coded") else {"density": 0.05}

    def body(group: Group) -> torch.Tensor:
        model = Net(FLOAT)
        optimizer = wrap(model, group, METHODS[name](**settings))
        before = torch.zeros(sum(p.numel() for p in model.parameters() if p.dim() > 1), dtype=torch.float64)
        for batch in batches(6, dtype=FLOAT):
            optimizer.zero_grad()
            twin = copy.deepcopy(model)
            loss_of(twin, shard(batch, group)).backward()
            own = {n: p.grad for n, p in twin.named_parameters() if p.dim() > 1}
            loss_of(model, shard(batch, group)).backward()
            optimizer.synchronize()
            applied = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.dim() > 1])
            optimizer.step()
            after = total_residual(optimizer, model, group)
            expected = before + matrices(own, group)
            torch.testing.assert_close(applied * group.world_size + after, expected, rtol=1e-6, atol=1e-6)
            before = after
        return flat(model)

    results = run_ranks(world_size, body)
    assert all_equal(results)


@pytest.mark.parametrize(
    ("millions", "buckets"),
    [
        ((13.8, 0.1), [13.9]),
        ((2.0, 12.0), [7.0] * 2),
        ((14.6,), [7.3] * 2),
        ((24.0,), [8.0] * 3),
        ((40, 60), [25.0] * 4),
    ],
)
def test_buckets_are_as_large_as_each_other(millions: tuple[float, ...], buckets: list[float]) -> None:
    specs = [ParameterSpec.of("p", (), torch.empty(round(million * 1000), 1000, device="meta")) for million in millions]
    plan = CompressedPlan.of([], specs, ErrorFeedback(), whole=False)
    assert [shape.num_elements for shape in plan.shapes()] == [round(size * 1_000_000) for size in buckets]


def test_parameters_are_cut_into_buckets() -> None:
    def spec(*shape: int) -> ParameterSpec:
        return ParameterSpec.of("p", (), torch.empty(shape))

    specs = [spec(10, 10), spec(5, 5), spec(16, 16)]
    assert plan_parts(specs, 100, whole=False) == (
        (Interval(2, 0, 100),),
        (Interval(2, 100, 200),),
        (Interval(2, 200, 256), Interval(1, 0, 25), Interval(0, 0, 19)),
        (Interval(0, 19, 100),),
    )
    assert plan_parts(specs, 300, whole=True) == (
        (Interval(2, 0, 256), Interval(1, 0, 25)),
        (Interval(0, 0, 100),),
    )
    assert plan_parts([], 100, whole=False) == ()
    elsewhere = [spec(5, 5), replace(spec(10, 5), device="cuda"), spec(2, 2)]
    for whole in (False, True):
        assert plan_parts(elsewhere, 100, whole=whole) == (
            (Interval(2, 0, 4),),
            (Interval(1, 0, 50),),
            (Interval(0, 0, 25),),
        )


class Recorder:
    """Keeps copies of what must not change."""

    def __init__(self, optimizer: DistributedOptimizer, model: torch.nn.Module) -> None:
        self.residuals = {name: kept.clone() for name, kept in optimizer.residuals.items()}
        self.parameters = flat(model)

    def same(self, optimizer: DistributedOptimizer, model: torch.nn.Module) -> bool:
        kept = optimizer.residuals
        return torch.equal(self.parameters, flat(model)) and all(
            torch.equal(kept[name], was) for name, was in self.residuals.items()
        )


@pytest.mark.filterwarnings("ignore:a step was skipped:RuntimeWarning")
@pytest.mark.parametrize("world_size", [1, 3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bad", [math.nan, -math.inf, pytest.param(math.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layer", ["first", "third"])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(world_size: int, bad: float, layer: str) -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net(FLOAT)
        optimizer = wrap(model, group)
        for step, batch in enumerate(batches(8, dtype=FLOAT)):
            optimizer.zero_grad()
            loss = loss_of(model, shard(batch, group))
            if step == 4:
                before = Recorder(optimizer, model)
                if group.rank == world_size - 1:
                    loss = loss + getattr(model, layer).weight[1, 1] * bad
                loss.backward()
                optimizer.step()
                assert before.same(optimizer, model)
                assert any(report.skipped for report in optimizer.reports)
            else:
                loss.backward()
                optimizer.step()
        assert optimizer.skipped_steps == 1
        return flat(model)

    assert all_equal(run_ranks(world_size, body))


@pytest.mark.filterwarnings("ignore:a step was skipped:RuntimeWarning")
def test_a_skipped_step_leaves_the_gradients_of_a_joined_rank() -> None:
    def body(group: Group) -> bool:
        model = Net(FLOAT)
        optimizer = wrap(model, group)
        for step, batch in enumerate(batches(2, dtype=FLOAT)):
            optimizer.zero_grad()
            if step and group.rank == 1:
                break
            loss = loss_of(model, batch)
            (loss + model.first.weight[1, 1] * math.nan if step else loss).backward()
            optimizer.step()
        optimizer.join()
        assert optimizer.skipped_steps == 1
        return any(parameter.grad is not None for parameter in model.parameters())

    assert run_ranks(2, body) == [True, False]


def test_a_skipped_step_warns_although_an_earlier_skip_was_noticed_by_synchronize() -> None:
    def body(group: Group) -> None:
        model = Net(FLOAT)
        optimizer = wrap(model, group)
        for batch in batches(2, dtype=FLOAT):
            optimizer.zero_grad()
            (loss_of(model, batch) + model.first.weight[1, 1] * math.nan).backward()
            optimizer.synchronize()
        with pytest.warns(RuntimeWarning, match="a step was skipped on all ranks"):
            optimizer.step()
        assert optimizer.skipped_steps == 2

    run_ranks(1, body)


@pytest.mark.filterwarnings("ignore:a step was skipped:RuntimeWarning")
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_step_with_a_closure_is_skipped_too(world_size: int) -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net(FLOAT)
        optimizer = wrap(model, group)
        for step, batch in enumerate(batches(4, dtype=FLOAT)):

            def closure(batch: torch.Tensor = batch, *, spoilt: bool = step == 2) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, shard(batch, group))
                if spoilt and group.rank == world_size - 1:
                    loss = loss + model.first.weight[1, 1] * math.nan
                loss.backward()
                return loss

            before = Recorder(optimizer, model)
            loss = optimizer.step(closure)
            assert loss.isfinite() == (step != 2)
            assert before.same(optimizer, model) == (step == 2)
        assert optimizer.skipped_steps == 1
        return flat(model)

    assert all_equal(run_ranks(world_size, body))


def test_the_first_skipped_step_is_told() -> None:
    def body(group: Group) -> None:
        model = Net(FLOAT)
        optimizer = wrap(model, group)
        for step in range(3):
            (model.first.weight.sum() * (math.nan if step else 1)).backward()
            if step == 1:
                with pytest.warns(RuntimeWarning, match="skipped on all ranks"):
                    optimizer.step()
            else:
                optimizer.step()

    run_ranks(1, body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_with_a_grad_scaler_residuals_are_unscaled(world_size: int) -> None:
    def body(group: Group) -> None:
        plain_model, model = Net(FLOAT), Net(FLOAT)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        plain = wrap(plain_model, group, name="plain")
        scaled = wrap(model, group, name="scaled", grad_scaler=scaler)
        for step, batch in enumerate(batches(8, dtype=FLOAT)):
            part = shard(batch, group)
            scaled.zero_grad()
            loss = scaler.scale(loss_of(model, part))
            if step == 5 and group.rank == 0:
                loss = loss * math.inf
            before = Recorder(scaled, model)
            loss.backward()
            scaler.unscale_(scaled)
            scaler.step(scaled)
            scaler.update()
            if step == 5:
                assert before.same(scaled, model)
                continue
            plain.zero_grad()
            loss_of(plain_model, part).backward()
            plain.step()
            for name, kept in plain.residuals.items():
                torch.testing.assert_close(scaled.residuals[name], kept, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(flat(model), flat(plain_model), rtol=1e-5, atol=1e-6)
        assert scaler.get_scale() != 1024.0
        assert (plain.skipped_steps, scaled.skipped_steps) == (0, 1)

    run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("how", ["no_sync", "passes_per_step"])
def test_accumulated_gradients_are_compressed_once(world_size: int, how: str) -> None:
    def body(group: Group) -> torch.Tensor:
        model, once = Net(FLOAT), Net(FLOAT)
        optimizer = wrap(model, group, name="parts", backward_passes_per_step=2 if how == "passes_per_step" else 1)
        whole = wrap(once, group, name="whole")
        for batch in batches(5, dtype=FLOAT):
            inputs, targets = shard(batch, group)
            halves = [(inputs[i::2], targets[i::2]) for i in range(2)]
            optimizer.zero_grad()
            if how == "no_sync":
                with optimizer.no_sync():
                    loss_of(model, halves[0]).backward()
            else:
                loss_of(model, halves[0]).backward()
            loss_of(model, halves[1]).backward()
            optimizer.step()
            whole.zero_grad()
            (loss_of(once, halves[0]) + loss_of(once, halves[1])).backward()
            whole.step()
        torch.testing.assert_close(flat(model), flat(once), rtol=1e-5, atol=1e-6)
        return flat(model)

    assert all_equal(run_ranks(world_size, body))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_comes_late_is_kept(world_size: int) -> None:
    def body(group: Group) -> None:
        model = Net(FLOAT)
        optimizer = wrap(model, group, OkTopk(density=0.05), overlap="step")
        first, second = batches(2, dtype=FLOAT)
        expected = []
        for batch in (first, second):
            twin = copy.deepcopy(model)
            loss_of(twin, shard(batch, group)).backward()
            expected.append(matrices({n: p.grad for n, p in twin.named_parameters() if p.dim() > 1}, group))
        loss_of(model, shard(first, group)).backward()
        loss_of(model, shard(second, group)).backward()
        optimizer.synchronize()
        optimizer._round.commit()
        applied = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.dim() > 1])
        kept = total_residual(optimizer, model, group)
        torch.testing.assert_close(applied * group.world_size + kept, sum(expected), rtol=1e-6, atol=1e-6)

    run_ranks(world_size, body)


class Branching(torch.nn.Module):
    """Only one of two layers is used, and a third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6, bias=False) for _ in range(3))
        generator = torch.Generator().manual_seed(3)  # the global one belongs to all ranks of the process
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(6, 6, generator=generator))

    def forward(self, inputs: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](inputs).square().sum()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_branches_taken_by_some_ranks_only(world_size: int) -> None:
    def body(group: Group) -> torch.Tensor:
        model = Branching()
        inner = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.5)
        optimizer = DistributedOptimizer(inner, model, group=group, sync=TopkA(density=0.1), feedback=SMALL)
        generator = torch.Generator().manual_seed(group.rank)
        unused = model.layers[2].weight.detach().clone()
        for step in range(6):
            optimizer.zero_grad()
            which = (group.rank + step) % 2
            model(torch.randn(4, 6, generator=generator), which).backward()
            optimizer.step()
            assert model.layers[2].weight.grad is None
        assert torch.equal(model.layers[2].weight, unused)  # not even decayed
        return flat(model)

    assert all_equal(run_ranks(world_size, body))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_accumulate_in_float32(dtype: torch.dtype) -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net(FLOAT).to(dtype)
        optimizer = wrap(model, group, OkTopk(density=0.2))
        for batch in batches(5, dtype=dtype):
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            optimizer.synchronize()
            assert all(p.grad.dtype is dtype for p in model.parameters())
            optimizer.step()
        assert all(kept.dtype is torch.float32 for kept in optimizer.residuals.values())
        assert any(bool(kept.any()) for kept in optimizer.residuals.values())
        return flat(model)

    assert all_equal(run_ranks(2, body))


def test_momentum_correction_is_that_of_its_paper() -> None:
    """Lin et al. 2018, section 3.2 and 3.3, written out for one rank and one matrix."""
    momentum, density, steps = 0.9, 0.1, 6
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(10, 10, generator=generator) for _ in range(steps)]
    velocity, kept, position = torch.zeros(100), torch.zeros(100), torch.zeros(100)
    for gradient in gradients:
        velocity = momentum * velocity + gradient.flatten()
        kept = kept + velocity
        chosen = kept.abs().topk(round(density * 100)).indices
        position[chosen] -= 0.1 * kept[chosen]
        kept[chosen] = 0
        velocity[chosen] = 0

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.nn.Parameter(torch.zeros(10, 10))
        optimizer = DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1),
            group=group,
            sync=TopkA(density=density, values="float32"),
            feedback=ErrorFeedback(momentum=momentum, elements_min=0),
        )
        for gradient in gradients:
            optimizer.zero_grad()
            (weight * gradient).sum().backward()
            optimizer.step()
        (left,) = optimizer.residuals.values()
        return weight.detach().flatten(), left.flatten()

    [(got, left)] = run_ranks(1, body)
    torch.testing.assert_close(got, position)
    torch.testing.assert_close(left, kept)


@pytest.mark.parametrize("world_size", [1, 4])
def test_local_gradients_are_clipped_before_they_are_kept(world_size: int) -> None:
    limit = 0.01

    def body(group: Group) -> None:
        model = Net(FLOAT)
        feedback = ErrorFeedback(clip_norm=limit, elements_min=0, bucket_elements=100)
        optimizer = wrap(model, group, Dense(), feedback=feedback)
        batch = shard(batches(1, dtype=FLOAT)[0], group)
        twin = copy.deepcopy(model)
        loss_of(twin, batch).backward()
        own = torch.cat([p.grad.double().flatten() for p in twin.parameters() if p.dim() > 1])
        own *= limit / math.sqrt(group.world_size) / own.norm()
        group.allreduce(own).wait()
        loss_of(model, batch).backward()
        optimizer.synchronize()
        got = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.dim() > 1])
        torch.testing.assert_close(got * group.world_size, own, rtol=1e-5, atol=1e-9)

    run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_without_data_join(world_size: int) -> None:
    def body(group: Group) -> tuple[int, torch.Tensor]:
        model = Net(FLOAT)
        optimizer = wrap(model, group, OkTopk(density=0.3))
        data = batches(3 + group.rank, dtype=FLOAT)
        for batch in data:
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
        last = optimizer.join()
        parameters = flat(model)
        group.broadcast(parameters, root=last)
        return last, parameters

    results = run_ranks(world_size, body)
    assert {last for last, _ in results} == {world_size - 1}
    assert all_equal([parameters for _, parameters in results])


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_round_in_which_all_ranks_have_joined_takes_nothing_from_the_residuals(
    world_size: int, *, flushed: bool
) -> None:
    def body(group: Group) -> None:
        model = Net(FLOAT)
        optimizer = wrap(model, group, OkTopk(density=0.05))
        for batch in batches(2, dtype=FLOAT):
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
        before, parameters = total_residual(optimizer, model, group), flat(model)
        assert before.abs().max() > 1e-3
        if flushed:
            optimizer.flush_residuals()
        optimizer.join()
        assert torch.equal(flat(model), parameters)
        assert torch.allclose(total_residual(optimizer, model, group), before, rtol=1e-5, atol=1e-7)

    run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("begun", [False, True])
def test_residuals_outlive_a_new_plan(world_size: int, begun: bool) -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net(FLOAT)
        optimizer = wrap(model, group, OkTopk(density=0.05), overlap="step")
        first, second = batches(2, dtype=FLOAT)
        loss_of(model, shard(first, group)).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = total_residual(optimizer, model, group)
        if begun:
            twin = copy.deepcopy(model)
            loss_of(twin, shard(second, group)).backward()
            own = {n: p.grad for n, p in twin.named_parameters() if p.dim() > 1}
            before = before + matrices(own, group)
            loss_of(model, shard(second, group)).backward()
        model.head.bias.requires_grad_(False)
        model.head.bias.grad = None
        optimizer.replan()
        after = total_residual(optimizer, model, group)
        waiting = {
            n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.dim() > 1
        }
        torch.testing.assert_close(after + matrices(waiting, group), before, rtol=1e-5, atol=1e-6)
        optimizer.step()
        return flat(model)

    assert all_equal(run_ranks(world_size, body))


@pytest.mark.parametrize("method", [OkTopk(density=0.05), TopkA(density=0.05), PowerSGD(rank=1), Coded(codec=Half())])
def test_a_new_plan_leaves_the_residuals_of_each_rank_where_no_rank_has_gradients(method) -> None:
    """The ranks exchange nothing but zeros, so a rank that is lost meanwhile has lost nothing of its residuals."""

    def body(group: Group) -> None:
        model = Net(FLOAT)
        optimizer = wrap(model, group, method, feedback=ErrorFeedback(elements_min=0, momentum=0.5))
        for batch in batches(2, dtype=FLOAT):
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = optimizer.compressed.residuals
        before = [[flat.clone() for flat in flats.values()] for flats in (kept.kept, kept.velocities)]
        assert all(flat.any() for flats in before for flat in flats)
        model.head.bias.requires_grad_(False)
        optimizer.replan()
        for flats, were in zip((kept.kept, kept.velocities), before, strict=True):
            assert all(map(torch.equal, flats.values(), were))

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"overlap": "iterations"}, "needs overlap='backward' or 'step'"),
        ({"on_missing": "error"}, "needs overlap='backward' or 'step'"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, object], match: str) -> None:
    def body(group: Group) -> None:
        with pytest.raises(ConfigurationError, match=match):
            wrap(Net(FLOAT), group, **settings)

    run_ranks(1, body)


def test_optimizers_that_cannot_be_used() -> None:
    def body(group: Group) -> None:
        model = Net(FLOAT)
        with pytest.raises(ConfigurationError, match="LBFGS"):
            DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model, group=group, sync=OkTopk())
        feedback = ErrorFeedback(momentum=0.9, elements_min=0)
        groups = feedback.param_groups(model.parameters())
        assert [group["momentum"] for group in groups] == [0.0, 0.9]
        assert [{p.dim() > 1 for p in group["params"]} for group in groups] == [{True}, {False}]
        assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
        fit = torch.optim.SGD(groups, lr=0.1)
        DistributedOptimizer(fit, model, group=group, sync=OkTopk(), feedback=feedback, name="fit").close()
        with pytest.raises(ConfigurationError, match="param_groups"):
            DistributedOptimizer(
                torch.optim.SGD(model.parameters(), momentum=0.9),
                model,
                group=group,
                sync=OkTopk(),
                feedback=feedback,
            )

    run_ranks(1, body)


@pytest.mark.parametrize(
    "bad", [{"momentum": 1.0}, {"clip_norm": 0.0}, {"elements_min": -1}, {"bucket_elements": 0}, {"xi_every": -1}]
)
def test_feedback_that_makes_no_sense(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(bad))):
        ErrorFeedback(**bad)


def test_ranks_with_other_settings_are_told() -> None:
    def body(group: Group) -> None:
        with pytest.raises(PlanMismatchError, match="density"):
            wrap(Net(FLOAT), group, OkTopk(density=0.1 if group.rank else 0.2))

    run_ranks(2, body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_instead_of_averages(world_size: int) -> None:
    def body(group: Group) -> None:
        batch = shard(batches(1, dtype=FLOAT)[0], group)
        gradients = []
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            model = Net(FLOAT)
            optimizer = wrap(model, group, PowerSGD(rank=2), op=op, name=op.name)
            loss_of(model, batch).backward()
            optimizer.synchronize()
            gradients.append(model.second.weight.grad.clone())
            optimizer.close()
        torch.testing.assert_close(gradients[0], gradients[1] * group.world_size)

    run_ranks(world_size, body)


def step(optimizer: DistributedOptimizer, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_a_saved_state_goes_on_with_the_same_bits(world_size: int, name: str, tmp_path: Path) -> None:
    settings = {} if name in ("dense", "powersgd", "coded") else {"density": 0.1, "warmup_steps": 4}
    feedback = ErrorFeedback(momentum=0.5, elements_min=0, bucket_elements=100)

    def body(group: Group) -> None:
        model = Net(FLOAT)
        optimizer = wrap(model, group, METHODS[name](**settings), name="first", feedback=feedback)
        data = [shard(batch, group) for batch in batches(8, dtype=FLOAT)]
        for batch in data[:3]:
            step(optimizer, model, batch)
        path = tmp_path / f"{group.rank}.pt"
        torch.save((model.state_dict(), optimizer.state_dict(), optimizer.residual_state_dict()), path)
        for batch in data[3:]:
            step(optimizer, model, batch)
        kept = list(optimizer.residuals.values())
        optimizer.close()
        again = Net(FLOAT)
        resumed = wrap(again, group, METHODS[name](**settings), name="first", feedback=feedback)
        weights, state, residuals = torch.load(path, weights_only=True)
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
        resumed.load_residual_state_dict(residuals)
        for batch in data[3:]:
            step(resumed, again, batch)
        assert torch.equal(flat(again), flat(model))
        for mine, theirs in zip(resumed.residuals.values(), kept, strict=True):
            assert torch.equal(mine, theirs)

    run_ranks(world_size, body)


@pytest.mark.parametrize(("old", "new"), [(1, 3), (4, 2), (3, 4), (2, 1), (5, 3)])
def test_the_sum_of_residuals_outlives_a_change_of_ranks(old: int, new: int) -> None:
    def save(group: Group) -> tuple[dict[str, object], torch.Tensor]:
        model = Net(FLOAT)
        optimizer = wrap(model, group, OkTopk(density=0.05))
        for batch in batches(4, size=60, dtype=FLOAT):
            step(optimizer, model, shard(batch, group))
        return optimizer.residual_state_dict(), total_residual(optimizer, model, group)

    saved = run_ranks(old, save)
    states, total = [state for state, _ in saved], saved[0][1]

    def load(group: Group) -> torch.Tensor:
        model = Net(FLOAT)
        optimizer = wrap(model, group, OkTopk(density=0.05))
        optimizer.load_residual_state_dict(*states)
        torch.testing.assert_close(total_residual(optimizer, model, group), total, rtol=1e-6, atol=1e-7)
        for batch in batches(2, size=60, dtype=FLOAT):
            step(optimizer, model, shard(batch, group))
        if old > 1:
            with pytest.raises(ConfigurationError, match=f"saved by {old} ranks and there are {new}"):
                optimizer.load_residual_state_dict(states[0])
        return flat(model)

    assert all_equal(run_ranks(new, load))


def test_a_state_of_another_model_is_refused() -> None:
    def body(group: Group) -> None:
        model = Net(FLOAT)
        state = wrap(model, group).residual_state_dict()
        state["residuals"]["second.weight"] = torch.zeros(3, 3)
        optimizer = wrap(Net(FLOAT), group, name="other")
        with pytest.raises(ConfigurationError, match=r"'second.weight' is \(3, 3\)"):
            optimizer.load_residual_state_dict(state)

    run_ranks(1, body)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_flush_sends_all_that_was_kept_back(world_size: int) -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net(FLOAT)
        optimizer = wrap(model, group, OkTopk(density=0.05))
        first, second, third = (shard(batch, group) for batch in batches(3, dtype=FLOAT))
        step(optimizer, model, first)
        assert bool(total_residual(optimizer, model, group).any())
        optimizer.flush_residuals()
        step(optimizer, model, second)
        assert not bool(total_residual(optimizer, model, group).any())
        assert {report.method for report in optimizer.reports} == {"dense"}
        step(optimizer, model, third)
        assert {report.method for report in optimizer.reports} == {"oktopk"}
        state = optimizer.residual_state_dict()
        loss_of(model, first).backward()
        for call in [optimizer.flush_residuals, lambda: optimizer.load_residual_state_dict(state)]:
            with pytest.raises(ConfigurationError, match=r"before backward\(\), or after step"):
                call()
        optimizer.step()
        return flat(model)

    assert all_equal(run_ranks(world_size, body))


@pytest.mark.parametrize("begun", [False, True])
def test_a_flush_outlives_a_new_plan(begun: bool) -> None:
    """Also if the round that was to send everything has begun, on one of the ranks."""

    def body(group: Group) -> torch.Tensor:
        model = Net(FLOAT)
        optimizer = wrap(model, group, OkTopk(density=0.05), overlap="step")
        first, second = (shard(batch, group) for batch in batches(2, dtype=FLOAT))
        step(optimizer, model, first)
        optimizer.flush_residuals()
        if begun and group.rank == 0:
            loss_of(model, second).backward()
        optimizer.replan()
        step(optimizer, model, second)
        assert not bool(total_residual(optimizer, model, group).any())
        return flat(model)

    assert all_equal(run_ranks(2, body))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("faster", ["dense", "oktopk", "topka"])
def test_auto_takes_what_is_faster(world_size: int, faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is made up: whatever is to be fast takes no time."""

    def seconds(trial: auto._Trial) -> float:
        return 0.5 if trial.rounds.sessions[0].report.method == faster else 2.0

    monkeypatch.setattr(auto._Trial, "seconds", seconds)
    monkeypatch.setattr("totalreduce.pytorch.compression.time", _Clock(0.5 if faster == "dense" else 1.0))

    def body(group: Group) -> torch.Tensor:
        model = Net(FLOAT)
        optimizer = wrap(model, group, auto.Auto(density=0.1))
        for batch in batches(3, dtype=FLOAT):
            step(optimizer, model, shard(batch, group))
        methods = {report.method for report in optimizer.reports}
        assert methods == (set() if faster == "dense" else {faster})
        assert all(choice.dense_s > 0 and set(choice.sparse_s) == {"oktopk", "topka"} for choice in optimizer.choices)
        decided = "sent whole" if faster == "dense" else f"compressed by {faster}"
        assert all(decided in choice.describe() for choice in optimizer.choices)
        return flat(model)

    assert all_equal(run_ranks(world_size, body))


class _Clock:
    """Every second look at it is so much later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._looks = threading.local()

    def monotonic(self) -> float:
        looks = self._looks.count = getattr(self._looks, "count", 0) + 1
        return looks * self._seconds


def test_auto_measures_for_itself() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net(FLOAT)
        optimizer = wrap(model, group, auto.Auto(density=0.1))
        for batch in batches(2, dtype=FLOAT):
            step(optimizer, model, shard(batch, group))
        return flat(model)

    assert all_equal(run_ranks(2, body))


def test_auto_refuses_what_it_cannot_try() -> None:
    with pytest.raises(ConfigurationError, match="'magic' is no method"):
        auto.Auto(methods=("magic",))


def test_what_happened_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    feedback = ErrorFeedback(elements_min=0, bucket_elements=200, report_every=2, xi_every=2)

    def body(group: Group) -> None:
        model = Net(FLOAT)
        optimizer = wrap(model, group, OkTopk(density=0.1), feedback=feedback)
        for number, batch in enumerate(batches(4, dtype=FLOAT)):
            step(optimizer, model, shard(batch, group))
            assert [report.k for report in optimizer.reports] == [report.selected for report in optimizer.reports]
            assert all(("xi" in report.extra) == (number % 2 == 1) for report in optimizer.reports)
        assert all(0 < report.extra["xi"] < 10 and report.sent_bytes > 0 for report in optimizer.reports)
        kept = torch.cat([part.flatten() for part in optimizer.residuals.values()])
        assert optimizer.residual_norm() == pytest.approx(float(kept.norm()), rel=1e-5)

    with caplog.at_level("INFO", logger="totalreduce"):
        run_ranks(2, body)
    lines = [record.getMessage() for record in caplog.records if "bucket" in record.getMessage()]
    assert len(lines) == 2 * 3
    assert all("selected above" in line and "xi" in line for line in lines)


@pytest.mark.parametrize("world_size", [1, 2])
def test_xi_is_that_of_its_definition(world_size: int) -> None:
    gradients = [torch.randn(12, 12, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
    k = 14

    def body(group: Group) -> tuple[float, torch.Tensor]:
        weight = torch.nn.Parameter(torch.zeros(12, 12))
        optimizer = DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            group=group,
            sync=TopkA(density=k / 144),
            feedback=ErrorFeedback(elements_min=0, xi_every=1),
        )
        (weight * gradients[group.rank]).sum().backward()
        optimizer.step()
        return optimizer.reports[0].extra["xi"], -weight.detach()

    results = run_ranks(world_size, body)
    mean = sum(gradients) / world_size
    best = torch.zeros(144)
    chosen = mean.flatten().abs().topk(k).indices
    best[chosen] = mean.flatten()[chosen]
    expected = float((best - results[0][1].flatten()).norm() / mean.norm())
    assert [xi for xi, _ in results] == pytest.approx([expected] * world_size, rel=1e-5)
