"""``sync=tr.ParameterServer(...)`` with ``overlap="iterations"``: values come ahead of the forward pass."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import pytest
import torch
from optimizer_cases import OPTIMIZERS, Net, all_equal, batches, flat, impatient, loss_of, repeat_until_done

import totalreduce as tr
from totalreduce.foundation.errors import ConfigurationError, PeerLost, SlowWorkersError
from totalreduce.groups.group import Group
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.server.dense import ServerSteps
from totalreduce.testing import run_ranks

ps = tr.ps
NUM_STEPS = 4


class Chain(torch.nn.Module):
    """Layers of one weight each, whose gradients are ones."""

    def __init__(self, length: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(length))
        for layer in self.layers:
            torch.nn.init.zeros_(layer.weight)
        self.double()

    def forward(self, factor: float, num_layers: int = 4) -> torch.Tensor:
        one = torch.full((1, 1), factor, dtype=torch.float64)
        return torch.stack([layer(one) for layer in self.layers[:num_layers]]).sum()


def wrap(
    model: torch.nn.Module, group: Group, sync: object, kind: str = "sgd", **settings: object
) -> DistributedOptimizer:
    inner = OPTIMIZERS[kind](list(model.parameters()))
    options = {"overlap": "iterations", "bucket_bytes": 1, **settings}
    return DistributedOptimizer(inner, model, group=group, sync=sync, **options)


def ones(group: Group, sync: object | None = None) -> tuple[Chain, DistributedOptimizer]:
    model = Chain()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = tr.ParameterServer(servers=[0]) if sync is None else sync
    return model, DistributedOptimizer(
        inner, model, group=group, sync=sync, overlap="iterations", bucket_bytes=1, name="ones"
    )


def interrupt(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


def weights(model: Chain) -> list[float]:
    return [layer.weight.item() for layer in model.layers]


def train(group: Group, sync: object, kind: str, overlap: str) -> tuple[torch.Tensor, list[bool], int]:
    """Return the parameters, whether each step but the first ended early, and how many buckets left in backward."""
    model, early = Net(torch.float32), []
    optimizer = wrap(model, group, sync, kind, overlap=overlap)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for inputs, targets in batches(NUM_STEPS, dtype=torch.float32):
        optimizer.zero_grad()
        mine = slice(group.rank, None, group.world_size)
        loss_of(model, (inputs[mine], targets[mine])).backward()
        optimizer.step()
        early.append(bool(optimizer._deferred.pending))
        schedule.step()
    optimizer.strategy_steps.finish()
    left = optimizer.strategy_steps.early_buckets if isinstance(optimizer.strategy_steps, ServerSteps) else -1
    optimizer.close()
    return flat(model), early, left


@pytest.mark.parametrize("world_size", [1, 2, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 5))])
@pytest.mark.parametrize(("kind", "optimizer"), [("adamw", "server"), ("momentum", "worker"), ("adamw", "worker")])
def test_no_bit_depends_on_when_values_are_waited_for(world_size: int, kind: str, optimizer: str) -> None:
    sync = tr.ParameterServer(consistency=ps.Bounded(0), optimizer=optimizer, servers=[world_size - 1], shards=3)
    plain = run_ranks(world_size, lambda group: train(group, sync, kind, "backward"))
    ahead = run_ranks(world_size, lambda group: train(group, sync, kind, "iterations"))
    assert all_equal([parameters for parameters, *_ in [*plain, *ahead]])
    for _, early, left in ahead:
        assert early == [True] * NUM_STEPS
        assert left > NUM_STEPS  # gradients leave during backward nevertheless
    assert not any(any(early) for _, early, _ in plain)


def test_where_servers_make_no_difference_it_is_the_synchronous_optimizer() -> None:
    sync = tr.ParameterServer()
    found = run_ranks(2, lambda group: train(group, sync, "adamw", "iterations"))
    expected = run_ranks(2, lambda group: train(group, sync, "adamw", "backward"))
    assert all_equal([parameters for parameters, *_ in [*found, *expected]])
    assert found[0][1:] == ([True] * NUM_STEPS, -1)


@pytest.mark.parametrize("optimizer", ["server", "worker"])
def test_each_layer_waits_for_its_own_values(optimizer: str) -> None:
    def body(group: Group) -> None:
        model, outer = ones(group, tr.ParameterServer(servers=[0], optimizer=optimizer))
        steps = outer.strategy_steps
        model(-1.0).backward()
        outer.step()
        assert weights(model) == [0.0] * 4
        # The order of forward. Buckets are numbered from the last layer on.
        assert [steps.arriving.buckets_members[index] for index in steps.arriving.by_urgency] == [
            (0,),
            (1,),
            (2,),
            (3,),
        ]
        model.layers[0](torch.ones(1, 1, dtype=torch.float64))
        model.layers[1](torch.ones(1, 1, dtype=torch.float64))
        assert weights(model) == [1.0, 1.0, 0.0, 0.0]
        group.barrier()  # everything has been taken over behind it
        assert weights(model) == [1.0] * 4
        outer.strategy_steps.finish()
        outer.close()

    run_ranks(2, body)


def test_what_needs_the_whole_step_waits_for_it(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        model, outer = ones(group, tr.ParameterServer(servers=[0]))
        calls = [
            outer.flush,
            outer.synchronize,
            outer.state_dict,
            model.state_dict,
            lambda: outer.strategy_steps.save(tmp_path),
            lambda: model.eval()(1.0),
            lambda: outer.step(lambda: model.train()(-1.0).backward()),
            outer.strategy_steps.finish,
        ]
        num_steps = 0
        for call in calls:
            outer.zero_grad()
            model.train()(-1.0).backward()
            outer.step()
            num_steps += 1
            assert weights(model) == [num_steps - 1.0] * 4
            outer.zero_grad()
            call()
            num_steps += call is calls[-2]
            assert weights(model) == [float(num_steps)] * 4
        assert outer.strategy_steps.steps_taken == num_steps
        outer.close()

    run_ranks(2, body)


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_workers_optimizer_leaves_the_gradient_of_all_ranks(is_kept: bool) -> None:
    """As with overlap="backward"; but not where the program has set gradients to zero after the step."""

    def body(group: Group) -> list[float | None]:
        model, outer = ones(group, tr.ParameterServer(servers=[0], optimizer="worker"))
        model(-float(1 + 2 * group.rank)).backward()
        outer.step()
        if not is_kept:
            outer.zero_grad(set_to_none=False)
        outer.flush()
        outer.strategy_steps.finish()
        outer.close()
        assert weights(model) == [2.0] * 4
        return [layer.weight.grad.item() for layer in model.layers]

    assert run_ranks(2, body) == [[-2.0 if is_kept else 0.0] * 4] * 2


def test_a_parameter_that_no_rank_has_used_stays_as_it_is() -> None:
    def body(group: Group) -> list[float]:
        model, outer = ones(group, tr.ParameterServer(servers=[0], optimizer="worker"))
        model(-1.0).backward()
        model.layers[2].weight.grad = None
        if group.rank == 0:
            model.layers[3].weight.grad = None
        outer.step()
        outer.flush()
        outer.strategy_steps.finish()
        outer.close()
        assert model.layers[2].weight.grad is None
        return weights(model)

    assert run_ranks(2, body) == [[1.0, 1.0, 0.0, 0.5]] * 2


@pytest.mark.parametrize("optimizer", ["server", "worker"])
def test_the_mean_of_others_is_not_the_gradient_of_the_next_step(optimizer: str) -> None:
    """Only one rank uses the last layer, in the first step, and ``zero_grad`` comes before the layer's update."""

    def body(group: Group) -> list[float]:
        model, outer = ones(group, tr.ParameterServer(servers=[0], optimizer=optimizer))
        for step in range(3):
            outer.zero_grad()
            model(-1.0, 4 if (group.rank, step) == (1, 0) else 3).backward()
            outer.step()
        outer.flush()
        outer.strategy_steps.finish()
        outer.close()
        return weights(model)

    assert run_ranks(2, body) == [[3.0, 3.0, 3.0, 0.5]] * 2


@pytest.mark.parametrize("optimizer", ["server", "worker"])
def test_gradients_of_the_last_step_are_not_kept(optimizer: str) -> None:
    def body(group: Group) -> list[bool]:
        model, outer = ones(group, tr.ParameterServer(servers=[0], optimizer=optimizer))
        model(-1.0).backward()
        gradients = [weakref.ref(layer.weight.grad) for layer in model.layers]
        outer.step()
        outer.zero_grad()
        outer.flush()
        outer.strategy_steps.finish()
        outer.close()
        return [each() is None for each in gradients]

    assert run_ranks(1, body) == [[True] * 4]


@pytest.mark.parametrize("optimizer", ["server", "worker"])
def test_a_step_that_is_left_out_follows_one_that_has_ended_early(optimizer: str) -> None:
    def body(group: Group) -> list[float]:
        model, outer = ones(group, tr.ParameterServer(servers=[0], optimizer=optimizer))
        for _ in range(3):
            outer.zero_grad()
            model(-1.0).backward()
            outer.step()
            outer.strategy_steps.stepped()
        outer.flush()
        outer.strategy_steps.finish()
        outer.close()
        return weights(model)

    assert run_ranks(2, body) == [[3.0] * 4] * 2


@pytest.mark.parametrize("optimizer", ["server", "worker"])
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_that_was_interrupted_when_it_had_asked_for_values_pushes_nothing_twice(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, with_closure: bool
) -> None:
    def body(group: Group) -> list[float]:
        model, outer = ones(group, tr.ParameterServer(servers=[0], optimizer=optimizer))
        for _ in range(2):
            outer.zero_grad()
            model(-1.0).backward()
            with monkeypatch.context() as patch:
                patch.setattr(outer._deferred, "begin", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    outer.step()
            outer.step(*[list] * with_closure)
        outer.flush()
        outer.strategy_steps.finish()
        outer.close()
        return weights(model)

    assert run_ranks(1, body) == [[2.0] * 4]


def test_an_interruption_of_the_torch_optimizer_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: Group) -> None:
        model, outer = ones(group, tr.ParameterServer(servers=[0], optimizer="worker"))
        model(-1.0).backward()
        outer.step()
        with monkeypatch.context() as patch:
            patch.setattr(outer._inner, "step", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(-1.0)
        with pytest.raises(ConfigurationError, match="interrupted while it sent requests to servers or took the step"):
            model(-1.0)
        with pytest.raises(ConfigurationError, match="interrupted"):
            outer.step()
        outer.close()

    run_ranks(1, body)


def test_an_interruption_of_a_copy_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: Group) -> list[float]:
        model, outer = ones(group)
        model(-1.0).backward()
        outer.step()
        with monkeypatch.context() as patch:
            patch.setattr(outer.strategy_steps.arriving._rows, "write", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(-1.0)
        model(-1.0)
        outer.close()
        return weights(model)

    assert run_ranks(1, body) == [[1.0] * 4]


def test_a_step_that_was_to_wait_is_repeated_as_such() -> None:
    """No module has run before the first call, and one has before the second one."""

    late = threading.Event()

    def body(group: Group) -> None:
        model, outer = ones(group)
        for layer in model.layers:
            layer.weight.grad = torch.full_like(layer.weight, -1.0)
        if group.rank == 0:
            with pytest.raises(SlowWorkersError), impatient(group, client=outer.strategy_steps._client):
                outer.step()
            with torch.no_grad():
                model(1.0)
            late.set()
        else:
            assert late.wait(20)
        repeat_until_done(outer.step)
        assert not outer._deferred.pending
        assert weights(model) == [1.0] * 4
        outer.zero_grad()
        model(-1.0).backward()
        outer.step()
        repeat_until_done(outer.strategy_steps.finish)
        outer.close()
        assert weights(model) == [2.0] * 4

    run_ranks(2, body)


def test_a_forward_pass_that_ran_out_of_time_is_repeated() -> None:
    late = threading.Event()

    def body(group: Group) -> list[float]:
        model, outer = ones(group)
        for step in range(3):
            outer.zero_grad()
            if group.rank == 0 and step == 2:
                with pytest.raises(SlowWorkersError), impatient(group, client=outer.strategy_steps._client):
                    model(-1.0)
                late.set()
            repeat_until_done(lambda: model(-1.0))
            loss = model(-1.0)
            if group.rank == 1 and step == 1:
                assert late.wait(20)
            loss.backward()
            repeat_until_done(outer.step)
        repeat_until_done(outer.strategy_steps.finish)
        outer.close()
        return weights(model)

    assert run_ranks(2, body) == [[3.0] * 4] * 2


def test_a_step_with_a_closure_that_ran_out_of_time_may_end_without_it() -> None:
    late = threading.Event()

    def body(group: Group) -> list[float]:
        model, outer = ones(group)
        model(-1.0).backward()
        outer.step()
        outer.zero_grad()
        if group.rank == 0:
            with pytest.raises(SlowWorkersError), impatient(group, client=outer.strategy_steps._client):
                outer.step(lambda: model(-1.0).backward())
            late.set()
            repeat_until_done(outer.step)
        else:
            assert late.wait(20)
            model(-1.0).backward()
            outer.step()
        outer.flush()
        assert weights(model) == [2.0] * 4
        outer.zero_grad()
        model(-1.0).backward()
        outer.step()
        repeat_until_done(outer.strategy_steps.finish)
        outer.close()
        return weights(model)

    assert run_ranks(2, body) == [[3.0] * 4] * 2


def test_a_weight_that_was_read_before_its_values_came_is_refused() -> None:
    """As with the synchronous optimizer: the gradient is one of old weights."""

    def body(group: Group) -> None:
        model, outer = ones(group)
        model(-1.0).backward()
        outer.step()
        loss = model(-1.0) + (model.layers[3].weight * 1).sum()
        loss.backward()  # the layer itself has run, with its new weight
        outer.step()
        model.layers[0](torch.ones(1, 1, dtype=torch.float64))
        with pytest.raises(ConfigurationError, match=r"layers\.3\.weight' was used before its deferred update"):
            (model.layers[3].weight * 1).sum().backward()
        outer.close()

    run_ranks(1, body)


def test_the_loss_of_a_rank_comes_out_of_the_forward_pass() -> None:
    has_stepped = threading.Event()  # or the loss comes out of the step

    def body(group: Group) -> None:
        model, outer = ones(group)
        model(-1.0).backward()
        outer.step()
        outer.zero_grad()
        model(-1.0).backward()
        if group.rank == 1:
            assert has_stepped.wait(10.0)
            group.close(reason="leaves")
            return
        outer.step()
        has_stepped.set()
        with pytest.raises(PeerLost):
            model(-1.0)
        with pytest.raises(PeerLost):
            outer.close()

    run_ranks(2, body)


def test_other_strategies_refuse_it() -> None:
    def body(group: Group) -> None:
        for sync in (tr.LocalSGD(period=2), tr.Async(max_staleness=None)):
            with pytest.raises(ConfigurationError, match="needs overlap='backward'"):
                ones(group, sync)

    run_ranks(1, body)
