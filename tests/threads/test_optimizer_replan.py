"""``replan()``, ``add_param_group()`` and ``step()`` after time-outs, refusals, and reductions already done."""

from __future__ import annotations

import threading

import pytest
import torch
from optimizer_cases import (
    OPTIMIZERS,
    Net,
    all_equal,
    batches,
    flat,
    flat_grad,
    impatient,
    loss_of,
    repeat_until_done,
    shard,
    train_alone,
    wrap,
)

from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, PlanMismatchError
from totalreduce.groups.group import Group
from totalreduce.pytorch.error_feedback import ErrorFeedback
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.sparse.oktopk import OkTopk
from totalreduce.testing import run_ranks

PATIENT = EngineConfig(timeout_s=30.0, stall_warning_s=0)


def step_once(model: torch.nn.Module, optimizer: DistributedOptimizer, group: Group) -> torch.Tensor:
    """Return the parameters after one step with this rank's part of the first batch."""
    loss_of(model, shard(batches(1)[0], group)).backward()
    optimizer.step()
    return flat(model)


def add_a_refused_group(
    group: Group, frozen_rank: int, errors: tuple[type[Exception], ...]
) -> tuple[Exception, torch.Tensor]:
    """Return this rank's error, one of ``errors``, and the parameters after a step without the group.

    Torch refuses the group of rank 0, which has it already; the other ranks add another one. ``frozen_rank`` has no
    trainable parameter without the group.
    """
    model = Net()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.first.parameters(), lr=0.1), model, group=group)
    model.first.requires_grad_(group.rank != frozen_rank)
    added = model.first if group.rank == 0 else model.head
    with pytest.raises(errors) as caught:
        optimizer.add_param_group({"params": list(added.parameters())})
    assert len(optimizer.param_groups) == 1
    model.first.requires_grad_(True)
    optimizer.replan()
    return caught.value, step_once(model, optimizer, group)


def assert_stepped_once(results: list[torch.Tensor]) -> None:
    assert (results[0] - train_alone(OPTIMIZERS["sgd"], 1)).abs().max() <= 1e-12
    assert all_equal(results)


@pytest.mark.parametrize("begun", [False, True])
def test_while_a_new_plan_is_unfinished_nothing_uses_the_round_that_it_ends(begun: bool) -> None:
    """Its buckets have left without gradients: installed, they would be zeros."""
    late = threading.Event()

    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap(model, group, overlap="step")
        if begun or group.rank:
            loss_of(model, shard(batches(1)[0], group)).backward()
        if group.rank == 0:
            with pytest.raises(DeadlineExceededError), impatient(group):
                optimizer.replan()
            before = flat_grad(model)
            calls = [optimizer.step, optimizer.synchronize, optimizer.join, lambda: optimizer.param_groups]
            for call in [*calls, optimizer.flush_residuals]:
                with pytest.raises(ConfigurationError, match=r"repeat replan\(\) or add_param_group\(\)"):
                    call()
            assert torch.equal(flat_grad(model), before)
            with pytest.raises(ConfigurationError, match=r"repeat replan\(\) or add_param_group\(\)"):
                loss_of(model, batches(1)[0]).backward()
            late.set()
        else:
            assert late.wait(20)
        repeat_until_done(optimizer.replan)
        optimizer.zero_grad()
        return step_once(model, optimizer, group)

    assert_stepped_once(run_ranks(2, body, engine=PATIENT))


def test_after_a_comparison_of_plans_that_ran_out_of_time_only_close_is_allowed() -> None:
    late = threading.Event()

    def body(group: Group) -> None:
        model = Net()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.first.parameters(), lr=0.1), model, group=group)
        optimizer._end_plan()  # in time, so that only the comparison of the new plans runs out of it
        if group.rank == 0:
            try:
                with pytest.raises(DeadlineExceededError), impatient(group):
                    optimizer.replan()
                calls = [optimizer.replan, optimizer.step, optimizer.synchronize, optimizer.join]
                calls += [lambda: optimizer.add_param_group({"params": [model.head.weight]})]
                for call in calls:
                    with pytest.raises(ConfigurationError, match=r"did not compare their plans in time: close"):
                        call()
                assert len(optimizer.param_groups) == 1
            finally:
                late.set()
        else:
            assert late.wait(20)
        optimizer.close()
        with pytest.raises(ConfigurationError, match="was closed"):
            optimizer.step()

    run_ranks(2, body, engine=PATIENT)


def test_a_rank_without_any_plan_does_not_leave_the_ranks_waiting_that_add_a_group() -> None:
    """Torch refuses the group of rank 0, whose other parameters are frozen: it has no plan without the group either."""

    def body(group: Group) -> tuple[str, torch.Tensor]:
        error, parameters = add_a_refused_group(group, 0, (ConfigurationError, PlanMismatchError))
        return f"{type(error).__name__}: {error}", parameters

    (mine, weights), (other, others) = run_ranks(2, body, engine=PATIENT)
    assert mine.startswith("ConfigurationError: no parameter of the optimizer is trainable")
    assert other.startswith("PlanMismatchError")
    assert torch.equal(weights, others)


@pytest.mark.parametrize("call", ["step", "replan"])
@pytest.mark.parametrize("divisor", ["world", "active"])
def test_averages_of_some_ranks_are_not_averaged_again_where_that_would_change_them(divisor: str, call: str) -> None:
    def body(group: Group) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), group=group, join_divisor=divisor)
        if group.rank == 0:
            optimizer.join()
            return -1.0
        (weight * 3.0).sum().backward()
        optimizer.synchronize()
        if divisor == "world":
            with pytest.raises(ConfigurationError, match="reduced already"):
                optimizer.step(lambda: 1.0) if call == "step" else optimizer.replan()
            optimizer.step()
        else:
            optimizer.step(lambda: 1.0)
        optimizer.join()
        return -weight.item()

    assert run_ranks(3, body) == [-1.0] + [2.0 if divisor == "world" else 3.0] * 2


@pytest.mark.parametrize("call", ["step", "replan"])
def test_compressed_gradients_are_not_compressed_again(call: str) -> None:
    def body(group: Group) -> torch.Tensor:
        model = torch.nn.Linear(16, 16, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model,
            group=group,
            sync=OkTopk(density=0.1),
            feedback=ErrorFeedback(elements_min=0),
        )
        model(torch.arange(16.0)[None] + group.rank).sum().backward()
        optimizer.synchronize()
        reduced = model.weight.grad.clone()
        with pytest.raises(ConfigurationError, match="reduced already"):
            optimizer.step(lambda: 1.0) if call == "step" else optimizer.replan()
        optimizer.step()
        return reduced + model.weight.detach()

    assert [result.abs().max().item() for result in run_ranks(2, body)] == [0.0, 0.0]


@pytest.mark.parametrize("sync", [None, OkTopk(density=0.2)])
def test_an_optimizer_does_not_meet_what_a_closed_one_of_its_name_has_sent(sync: OkTopk | None) -> None:
    """Rank 0 was in the middle of a round when both ranks gave the first optimizer up."""

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        model = Net(torch.float32)
        first = wrap(model, group, sync=sync, overlap="step", feedback=ErrorFeedback(elements_min=0))
        if group.rank == 0:
            loss_of(model, shard(batches(2, dtype=torch.float32)[1], group)).backward()
        first.close()
        model.zero_grad()
        optimizer = wrap(model, group)
        batch = batches(1, dtype=torch.float32)[0]
        loss_of(model, shard(batch, group)).backward()
        optimizer.synchronize()
        reduced = flat_grad(model)
        model.zero_grad()
        loss_of(model, batch).backward()
        return reduced, flat_grad(model)

    for reduced, whole in run_ranks(2, body):
        assert torch.allclose(reduced, whole, rtol=1e-5, atol=1e-7)


def test_an_optimizer_whose_comparison_ran_out_of_time_counts_on_every_rank() -> None:
    """The late rank finds the other's part of the comparison, and succeeds. Both give it up, and make another one."""
    late = threading.Event()

    def body(group: Group) -> torch.Tensor:
        model = Net()
        if group.rank == 0:
            with pytest.raises(DeadlineExceededError), impatient(group):
                wrap(model, group, initial=None)
            late.set()
        else:
            assert late.wait(20)
            wrap(model, group, initial=None).close()
        optimizer = wrap(model, group)
        return step_once(model, optimizer, group)

    assert_stepped_once(run_ranks(2, body, engine=PATIENT))


@pytest.mark.parametrize("with_closure", [True, False])
def test_the_torch_optimizer_of_a_closed_one_can_be_used_after_a_time_out(with_closure: bool) -> None:
    late = threading.Event()

    def body(group: Group) -> None:
        model = Net()
        optimizer = wrap(model, group, overlap="step")
        loss = loss_of(model, batches(1)[0])

        def closure() -> torch.Tensor:
            loss.backward()
            return loss

        if not with_closure:
            closure()
        if group.rank == 0:
            with pytest.raises(DeadlineExceededError), impatient(group):
                optimizer.step(closure if with_closure else None)
            late.set()
        else:
            assert late.wait(20)
        optimizer.close()
        assert len(optimizer.param_groups) == 1
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())

    run_ranks(2, body, engine=PATIENT)


def test_an_optimizer_whose_settings_one_rank_refuses_counts_on_every_rank() -> None:
    """The other rank waits for the comparison of plans, and runs out of time. Then both ranks make another one."""
    late = threading.Event()

    def body(group: Group) -> torch.Tensor:
        model = Net()
        if group.rank == 0:
            with pytest.raises(ConfigurationError, match="compression is"):
                wrap(model, group, compression="fp8")
            assert late.wait(20)
        else:
            with pytest.raises(DeadlineExceededError), impatient(group):
                wrap(model, group)
            late.set()
        optimizer = wrap(model, group)
        return step_once(model, optimizer, group)

    assert_stepped_once(run_ranks(2, body, engine=PATIENT))


def test_a_rank_without_a_plan_has_its_own_error_and_all_others_hear_of_it() -> None:
    """Torch refuses the group of rank 0. Rank 1 accepts it, and rank 2 has no trainable parameter without it."""

    def body(group: Group) -> tuple[str, torch.Tensor]:
        error, parameters = add_a_refused_group(group, 2, (ConfigurationError, PlanMismatchError, ValueError))
        return type(error).__name__, parameters

    results = run_ranks(3, body, engine=PATIENT)
    assert [error for error, _ in results] == ["PlanMismatchError", "PlanMismatchError", "ConfigurationError"]
    assert all_equal([parameters for _, parameters in results])
