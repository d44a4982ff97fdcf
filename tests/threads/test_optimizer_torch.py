"""What else in PyTorch touches an optimizer: schedulers, scalers, closures, checkpoints, hooks, copies."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from optimizer_cases import (
    OPTIMIZERS,
    Net,
    all_equal,
    batches,
    flat,
    impatient,
    loss_of,
    repeat_until_done,
    shard,
    train_alone,
    wrap,
)

from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import (
    ConfigurationError,
    DeadlineExceededError,
    PeerLost,
    PlanMismatchError,
    UnsupportedError,
)
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.testing import run_ranks

MODES = ["backward", "iterations"]


@pytest.mark.parametrize("overlap", MODES)
def test_learning_rate_schedulers(overlap: str) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> list[torch.optim.lr_scheduler.LRScheduler]:
        return [
            torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3),
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4),
        ]

    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap(model, group, OPTIMIZERS["momentum"], overlap=overlap)
        assert isinstance(optimizer, torch.optim.Optimizer)
        schedulers = schedule(optimizer)
        for batch in batches(8):
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            optimizer.zero_grad()
        optimizer.flush()
        return flat(model)

    results = run_ranks(2, body)
    model = Net()
    optimizer = OPTIMIZERS["momentum"](list(model.parameters()))
    schedulers = schedule(optimizer)
    for batch in batches(8):
        loss_of(model, batch).backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        optimizer.zero_grad()
    assert (results[0] - flat(model)).abs().max() <= 1e-12
    assert all_equal(results)


@pytest.mark.parametrize("overlap", MODES)
def test_grad_scaler_skips_on_all_ranks_when_one_overflows(overlap: str) -> None:
    def body(group: Group) -> tuple[torch.Tensor, list[bool], list[float]]:
        model = Net(torch.float32)
        optimizer = wrap(model, group, overlap=overlap)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
        moved, scales = [], []
        for step, batch in enumerate(batches(4, dtype=torch.float32)):
            optimizer.zero_grad()
            loss = loss_of(model, shard(batch, group))
            if step == 2 and group.rank == 1:
                loss = loss * float("inf")
            before = flat(model)
            scaler.scale(loss).backward()
            if step == 1:  # once with explicit unscaling and clipping in between
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            moved.append(not torch.equal(flat(model), before))
            scales.append(scaler.get_scale())
        return flat(model), moved, scales

    results = run_ranks(2, body)
    assert all_equal([result[0] for result in results])
    assert bool(results[0][0].isfinite().all())
    for _, moved, scales in results:
        assert moved == [True, True, False, True]
        assert scales == [256.0, 256.0, 128.0, 128.0]


def test_a_fused_optimizer_is_not_handed_the_scale_twice() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net(torch.float32)
        optimizer = wrap(model, group, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for batch in batches(3, dtype=torch.float32):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, shard(batch, group))).backward()
            scaler.step(optimizer)
            scaler.update()
        return flat(model)

    results = run_ranks(2, body)
    model = Net(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches(3, dtype=torch.float32):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    assert all_equal(results)
    assert (results[0] - flat(model)).abs().max() <= 1e-5


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_decides_equally_on_all_ranks(line_search: str | None, overlap: str) -> None:
    def run(
        model: Net, optimizer: torch.optim.Optimizer, parts: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[float]:
        losses = []
        for batch in parts:

            def closure(batch: tuple[torch.Tensor, torch.Tensor] = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            losses.append(float(optimizer.step(closure).detach()))
        return losses

    def factory(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=6, line_search_fn=line_search)

    def body(group: Group) -> tuple[torch.Tensor, list[float]]:
        model = Net()
        optimizer = wrap(model, group, factory, overlap=overlap)
        losses = run(model, optimizer, [shard(batch, group) for batch in batches(3)])
        return flat(model), losses

    results = run_ranks(3, body)
    model = Net()
    losses = run(model, factory(list(model.parameters())), batches(3))
    assert all_equal([result[0] for result in results])
    assert (results[0][0] - flat(model)).abs().max() <= 1e-9  # a line search amplifies the last bits
    assert results[0][1] == results[1][1] == results[2][1]
    assert max(abs(a - b) for a, b in zip(results[0][1], losses, strict=True)) <= 1e-9


def test_a_closure_that_returns_a_plain_number() -> None:
    def body(group: Group) -> float:
        model = Net()
        optimizer = wrap(model, group)

        def closure() -> float:
            optimizer.zero_grad()
            loss_of(model, shard(batches(1)[0], group)).backward()
            return float(group.rank)

        return optimizer.step(closure)

    assert run_ranks(3, body) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("overlap", MODES)
def test_state_dict_saves_and_resumes_with_and_without_the_wrapper(overlap: str) -> None:
    data = batches(6)

    def steps(model: Net, optimizer: torch.optim.Optimizer, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for batch in parts:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    def body(group: Group) -> tuple[torch.Tensor, bytes]:
        model = Net()
        optimizer = wrap(model, group, OPTIMIZERS["adamw"], overlap=overlap)
        steps(model, optimizer, [shard(batch, group) for batch in data[:3]])
        stream = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
        saved = torch.load(io.BytesIO(stream.getvalue()))
        optimizer.close()
        resumed = Net()
        resumed.load_state_dict(saved["model"])
        optimizer = wrap(resumed, group, OPTIMIZERS["adamw"], overlap=overlap, name="resumed")
        optimizer.load_state_dict(saved["optimizer"])
        steps(resumed, optimizer, [shard(batch, group) for batch in data[3:]])
        optimizer.flush()
        return flat(resumed), stream.getvalue()

    results = run_ranks(2, body)
    model = Net()
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    steps(model, optimizer, data)
    assert (results[0][0] - flat(model)).abs().max() <= 1e-12
    # A single process continues from the checkpoint without this library's classes.
    saved = torch.load(io.BytesIO(results[0][1]))
    alone = Net()
    alone.load_state_dict(saved["model"])
    plain = OPTIMIZERS["adamw"](list(alone.parameters()))
    plain.load_state_dict(saved["optimizer"])
    steps(alone, plain, data[3:])
    assert (flat(alone) - flat(model)).abs().max() <= 1e-12


@pytest.mark.parametrize("overlap", MODES)
def test_several_groups_and_one_added_later(overlap: str) -> None:
    def build(model: Net) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": model.first.parameters(), "lr": 0.02},
                {"params": [model.second.weight, model.third.bias], "weight_decay": 0.0},
                {"params": [model.third.weight, model.second.bias], "betas": (0.5, 0.9)},
            ],
            lr=0.01,
        )

    def run(model: Net, optimizer: torch.optim.Optimizer, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for step, batch in enumerate(parts):
            if step == 2:
                optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.005})
            model.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = DistributedOptimizer(build(model), model, group=group, bucket_bytes=1024, overlap=overlap)
        run(model, optimizer, [shard(batch, group) for batch in batches(5)])
        optimizer.flush()
        assert [param_group["lr"] for param_group in optimizer.param_groups] == [0.02, 0.01, 0.01, 0.005]
        return flat(model)

    results = run_ranks(2, body)
    model = Net()
    run(model, build(model), batches(5))
    assert (results[0] - flat(model)).abs().max() <= 1e-12
    assert all_equal(results)


def test_adding_different_groups_is_refused_on_every_rank_and_undone() -> None:
    def body(group: Group) -> int:
        model = Net()
        inner = torch.optim.SGD(model.first.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, group=group)
        added = model.second.weight if group.rank else torch.nn.Parameter(torch.ones(3))
        with pytest.raises((PlanMismatchError, ConfigurationError), match=r"not in the model|do not agree"):
            optimizer.add_param_group({"params": [added]})
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        return len(optimizer.param_groups)

    assert run_ranks(2, body) == [1, 1]


def test_different_models_or_settings_are_explained_on_every_rank() -> None:
    def body(group: Group) -> tuple[str, str]:
        model = Net()
        if group.rank == 1:
            model.third = torch.nn.Linear(12, 12, bias=False, dtype=torch.float64)
        with pytest.raises(PlanMismatchError) as models:
            wrap(model, group)
        with pytest.raises(PlanMismatchError) as settings:
            wrap(Net(), group, bucket_bytes=1000 + group.rank)
        wrap(Net(), group)  # the group is still good
        return str(models.value), str(settings.value)

    for models, settings in run_ranks(2, body):
        assert "third.bias: rank 0 has" in models
        assert "settings.bucket_bytes: rank 0 has 1000, rank 1 has 1001" in settings


def test_one_rank_that_refuses_its_model_does_not_leave_the_others_waiting() -> None:
    def body(group: Group) -> str:
        model = Net()
        for parameter in model.parameters() if group.rank == 1 else []:
            parameter.requires_grad_(False)
        with pytest.raises((ConfigurationError, PlanMismatchError)) as caught:
            wrap(model, group)
        return type(caught.value).__name__ + str(caught.value)

    results = run_ranks(2, body)
    assert results[0].startswith("PlanMismatchError")
    assert "nothing to synchronise" in results[0]
    assert results[1].startswith("ConfigurationError")


def test_parameters_outside_the_model_and_outside_the_optimizer() -> None:
    def body(group: Group) -> tuple[bool, bool]:
        model = Net()
        stranger = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(ConfigurationError, match=r"1 parameter\(s\) of the optimizer are not in the model"):
            DistributedOptimizer(torch.optim.SGD([model.head.weight, stranger]), model, group=group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.first.parameters(), lr=0.1), model, group=group)
        loss_of(model, shard(batches(1)[0], group)).backward()
        optimizer.synchronize()
        return model.head.weight.grad, model.first.weight.grad

    (head_0, first_0), (head_1, first_1) = run_ranks(2, body)
    assert torch.equal(first_0, first_1), "the optimizer's parameters are synchronised"
    assert not torch.equal(head_0, head_1), "the others' gradients stay local"


def test_frozen_parameters_are_left_alone_until_a_new_plan() -> None:
    def body(group: Group) -> tuple[int, torch.Tensor]:
        model = Net()
        model.second.requires_grad_(False)
        optimizer = wrap(model, group, overlap="step")
        before = model.second.weight.detach().clone()
        loss_of(model, shard(batches(1)[0], group)).backward()
        optimizer.step()
        assert torch.equal(model.second.weight, before)
        model.second.requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, shard(batches(1)[0], group)).backward()
        with pytest.raises(ConfigurationError, match=r"2 parameter\(s\) were unfrozen.*replan"):
            optimizer.step()
        optimizer.replan()
        optimizer.step()  # with the gradients of the step that was refused
        assert not torch.equal(model.second.weight, before)
        return len(optimizer._plan.specs), flat(model)

    results = run_ranks(2, body)
    model = Net()
    plain = OPTIMIZERS["sgd"](list(model.parameters()))
    for frozen in (True, False):
        plain.zero_grad()
        loss_of(model, batches(1)[0]).backward()
        if frozen:
            model.second.zero_grad()
        plain.step()
    assert results[0][0] == 8
    assert (results[0][1] - flat(model)).abs().max() <= 1e-12
    assert torch.equal(results[0][1], results[1][1])


def test_a_failed_replan_says_so_until_one_succeeds() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap(model, group, overlap="iterations")
        model.second.weight.requires_grad_(group.rank == 0)
        with pytest.raises(PlanMismatchError, match=r"parameters.second.weight: rank 0 has .*, rank 1 has nothing"):
            optimizer.replan()
        with pytest.raises(ConfigurationError, match=r"last plan failed"):
            optimizer.step()
        model.second.weight.requires_grad_(True)
        optimizer.replan()
        loss_of(model, shard(batches(1)[0], group)).backward()
        optimizer.step()
        optimizer.flush()
        return flat(model)

    results = run_ranks(2, body)
    assert all_equal(results)
    assert not torch.equal(results[0], flat(Net()))


def test_what_cannot_be_synchronised_is_named() -> None:
    def body(group: Group) -> None:
        complex_model = torch.nn.Linear(2, 2, dtype=torch.complex64)
        with pytest.raises(UnsupportedError, match=r"'weight' has dtype torch.complex64"):
            wrap(complex_model, group)
        with pytest.raises(UnsupportedError, match=r"'weight' is on meta and has no values: move the model"):
            wrap(torch.nn.Linear(2, 2, device="meta"), group)
        with pytest.raises(ConfigurationError, match=r"reduced by tr.ReduceOp.AVG or tr.ReduceOp.SUM"):
            wrap(Net(), group, op=ReduceOp.MAX)
        with pytest.raises(ConfigurationError, match=r"overlap is 'backward', 'step' or 'iterations', not 'yes'"):
            wrap(Net(), group, overlap="yes")
        with pytest.raises(ConfigurationError, match=r"bucket_bytes must be at least 1"):
            wrap(Net(), group, bucket_bytes=0)
        with pytest.raises(ConfigurationError, match=r"on_missing is"):
            wrap(Net(), group, on_missing="ignore")
        model = Net()
        optimizer = wrap(model, group)
        with pytest.raises(ConfigurationError, match=r"is a DistributedOptimizer already"):
            DistributedOptimizer(optimizer, model, group=group)
        with pytest.raises(ConfigurationError, match=r"'head.weight' is already synchronised by another"):
            wrap(model, group, name="second")
        optimizer.close()
        wrap(model, group, name="second")

    run_ranks(2, body)


def test_a_sparse_gradient_that_appears_only_in_backward_is_made_dense() -> None:
    def body(group: Group) -> None:
        weight = torch.nn.Parameter(torch.ones(5, 3))
        model = torch.nn.Module()
        model.weight = weight
        optimizer = wrap(model, group)
        torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
        optimizer.synchronize()
        assert weight.grad.tolist() == [[0.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3]

    run_ranks(2, body)


def test_a_model_converted_after_planning_is_refused_and_can_be_planned_again() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap(model, group, bucket_bytes=1 << 20, overlap="step")
        model.float()
        batch = shard(batches(1, dtype=torch.float32)[0], group)
        loss_of(model, batch).backward()
        with pytest.raises(ConfigurationError, match=r"planned as torch.float64.* but its gradient is torch.float32"):
            optimizer.step()
        optimizer.replan()
        optimizer.step()
        return flat(model)

    results = run_ranks(2, body)
    assert results[0].dtype == torch.float32
    assert all_equal(results)


@pytest.mark.parametrize("overlap", MODES)
def test_a_lost_peer_surfaces_as_itself(overlap: str) -> None:
    gone = threading.Event()

    def body(group: Group) -> str:
        model = Net()
        optimizer = wrap(model, group, overlap=overlap)
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        optimizer.flush()
        if group.rank == 1:
            group.close()
            gone.set()
            return "left"
        assert gone.wait(20)

        def train() -> None:  # it may show in a hook, in step() or afterwards
            optimizer.zero_grad()
            loss_of(model, batches(1)[0]).backward()
            optimizer.step()
            optimizer.flush()

        with pytest.raises(PeerLost) as caught:
            train()
        return f"lost {caught.value.rank}"

    assert run_ranks(2, body) == ["lost 1", "left"]


def test_a_deadline_in_step_leaves_the_step_to_be_finished_later() -> None:
    late = threading.Event()

    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap(model, group, overlap="step")
        loss_of(model, shard(batches(1)[0], group)).backward()
        if group.rank == 0:
            with pytest.raises(DeadlineExceededError), impatient(group):
                optimizer.step()
            assert torch.equal(flat(model), flat(Net()))
            late.set()
        else:
            assert late.wait(20)
        repeat_until_done(optimizer.step)
        return flat(model)

    results = run_ranks(2, body, engine=EngineConfig(timeout_s=30.0, stall_warning_s=0))
    assert (results[0] - train_alone(OPTIMIZERS["sgd"], 1)).abs().max() <= 1e-12
    assert all_equal(results)


def test_step_hooks_run_once_per_step_with_reduced_gradients() -> None:
    def body(group: Group) -> list[torch.Tensor]:
        model = Net()
        optimizer = wrap(model, group, overlap="iterations")
        seen: list[torch.Tensor] = []
        handle = optimizer.register_step_pre_hook(lambda *_: seen.append(model.head.weight.grad.clone()))
        for batch in batches(2):
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
        handle.remove()
        optimizer.zero_grad()
        loss_of(model, shard(batches(1)[0], group)).backward()
        optimizer.step()
        optimizer.flush()
        return seen

    results = run_ranks(2, body)
    assert len(results[0]) == 2
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))


@pytest.mark.parametrize("overlap", MODES)
def test_hooks_do_not_keep_the_optimizer_nor_the_model_alive(overlap: str) -> None:
    def body(group: Group) -> tuple[bool, bool, int]:
        model = Net()
        optimizer = wrap(model, group, overlap=overlap)
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        optimizer.flush()
        optimizer_alive = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        hooks = sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
        hooks += sum(len(module._forward_pre_hooks) for module in model.modules())
        loss_of(model, batches(1)[0]).backward()  # as local as ever
        model_alive = weakref.ref(model)
        del model
        gc.collect()
        return optimizer_alive() is None, model_alive() is None, hooks

    assert run_ranks(1, body) == [(True, True, 0)]


def test_copies_of_the_model_are_independent_of_the_optimizer() -> None:
    def body(group: Group) -> bool:
        model = Net()
        optimizer = wrap(model, group, overlap="iterations")
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        optimizer.flush()
        average = copy.deepcopy(model)
        stream = io.BytesIO()
        torch.save(model, stream)
        loaded = torch.load(io.BytesIO(stream.getvalue()), weights_only=False)
        reference = flat(model)
        optimizer.zero_grad()
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        rounds = optimizer._dense.round
        for other in (average, loaded):
            loss_of(other, batches(1)[0]).backward()
            assert torch.equal(flat(other), reference)
        assert len(optimizer._deferred.pending) == len(optimizer._dense.buckets)
        with pytest.raises(TypeError, match=r"save its state_dict"):
            pickle.dumps(optimizer)
        return optimizer._dense.round == rounds

    assert run_ranks(1, body) == [True]


def test_a_closed_optimizer_says_so() -> None:
    def body(group: Group) -> int:
        model = Net()
        optimizer = wrap(model, group)
        assert "rank 0 of 1" in repr(optimizer)
        optimizer.close()
        optimizer.close()
        with pytest.raises(ConfigurationError, match=r"was closed"):
            optimizer.step()
        return sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())

    assert run_ranks(1, body) == [0]


@pytest.mark.parametrize("refusing", [[0], [1], [0, 1, 2]])
def test_a_group_that_torch_refuses_leaves_the_optimizer_as_it_was(refusing: list[int]) -> None:
    """On the ranks that torch has not refused, the plans differ; afterwards all ranks train on."""

    def body(group: Group) -> torch.Tensor:
        model = torch.nn.ModuleDict({"body": torch.nn.Linear(3, 3), "head": torch.nn.Linear(3, 1)})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        inner = torch.optim.SGD(model["body"].parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, group=group)
        if group.rank in refusing:
            with pytest.raises(ValueError, match="more than one parameter group"):
                optimizer.add_param_group({"params": list(model["body"].parameters())})
        else:
            with pytest.raises(PlanMismatchError):
                optimizer.add_param_group({"params": list(model["head"].parameters())})
        assert len(optimizer.param_groups) == 1
        for _ in range(2):
            optimizer.zero_grad()
            model["body"](torch.full((2, 3), group.rank + 1.0)).sum().backward()
            optimizer.step()
        return model["body"].weight.detach().clone()

    results = run_ranks(3, body)
    assert all(torch.equal(each, results[0]) for each in results)
    assert not torch.equal(results[0], torch.full((3, 3), 0.5))
