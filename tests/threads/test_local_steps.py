"""``DistributedOptimizer(sync=strategy)``: the parameters of real ranks beside loops over models in one process."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from optimizer_cases import Net, all_equal, batches, flat, loss_of, shard

from totalreduce.codecs.int8 import Int8
from totalreduce.foundation.errors import ConfigurationError, PlanMismatchError
from totalreduce.groups.group import Group
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.strategies.averaging import LocalSGD, PostLocalSGD
from totalreduce.strategies.easgd import EASGD
from totalreduce.strategies.gossip import Gossip
from totalreduce.strategies.outer import DiLoCo, Nesterov, SlowMo
from totalreduce.strategies.strategy import Strategy
from totalreduce.testing import run_ranks
from totalreduce.testing.lockstep import run_exchanges

SIZES = [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)]
DOUBLE = torch.float64


def inner_of(model: torch.nn.Module, kind: str = "sgd") -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(group: Group, sync: Strategy | None, steps: int, dtype=DOUBLE, kind: str = "sgd") -> torch.nn.Module:
    model = Net(dtype)
    optimizer = DistributedOptimizer(inner_of(model, kind), model, group=group, sync=sync)
    for batch in batches(steps, dtype=dtype):
        optimizer.zero_grad()
        loss_of(model, shard(batch, group)).backward()
        optimizer.step()
    optimizer.close()
    return model


class OneOf:
    """The rank and the world size, for ``shard``."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


class TorchReplica:
    """A replica that knows nothing but its model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.dtype = np.dtype(np.float64)

    def read(self, tensors):
        return torch.cat([self.parameters[tensor].detach().flatten() for tensor in tensors]).numpy()

    def write(self, tensors, values):
        parts = torch.from_numpy(values).split([self.sizes[tensor] for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            self.parameters[tensor].data.copy_(part.view_as(self.parameters[tensor]))


def in_one_process(sync: Strategy, world_size: int, steps: int) -> list[torch.Tensor]:
    """Train one model per rank, one after the other, with the exchanges in lockstep."""
    models = [Net(DOUBLE) for _ in range(world_size)]
    optimizers = [inner_of(model) for model in models]
    sessions = [sync.session(TorchReplica(model), rank, world_size) for rank, model in enumerate(models)]
    waiting = []
    for step, batch in enumerate(batches(steps, dtype=DOUBLE), start=1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, shard(batch, OneOf(rank, world_size))).backward()
            optimizer.step()
        begun = [session.stepped(0.0) for session in sessions]
        for pending in zip(*begun, strict=True):
            waiting.append((pending, run_exchanges([each.exchange for each in pending])[0]))
        while waiting and waiting[0][0][0].due <= step:
            for each, result in zip(*waiting.pop(0), strict=True):
                each.apply(result)
    return [flat(model) for model in models]


STRATEGIES = [
    LocalSGD(period=3),
    DiLoCo(period=4, fragments=2),
    DiLoCo(period=4, fragments=2, overlap=2, mix=0.3),
    SlowMo(period=2),
    EASGD(period=2),
    Gossip(),
    Gossip(graph="random", overlap=1),
]


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_ranks_compute_what_one_process_computes(sync: Strategy, world_size: int) -> None:
    expected = in_one_process(sync, world_size, 9)
    models = run_ranks(world_size, lambda group: flat(train(group, sync, 9)))
    for mine, other in zip(models, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_period_one_has_the_bits_of_the_synchronous_optimizer(world_size: int, kind: str) -> None:
    def body(group: Group) -> list[torch.Tensor]:
        return [flat(train(group, sync, 6, torch.float32, kind)) for sync in (None, LocalSGD(period=1))]

    for synchronous, local in run_ranks(world_size, body):
        torch.testing.assert_close(local, synchronous, rtol=0, atol=0)


def test_synchronous_steps_first_have_the_bits_of_the_synchronous_optimizer() -> None:
    def body(group: Group) -> list[torch.Tensor]:
        sync = PostLocalSGD(start=6, then=LocalSGD(period=2))
        return [flat(train(group, which, steps, torch.float32)) for which, steps in ((None, 6), (sync, 6), (sync, 7))]

    results = run_ranks(3, body)
    for synchronous, local, after in results:
        torch.testing.assert_close(local, synchronous, rtol=0, atol=0)
        assert not torch.equal(after, local)
    assert not all_equal([after for *_, after in results])  # the seventh step was local


def test_the_optimizer_s_state_is_averaged_if_wanted() -> None:
    def body(policy: str, group: Group) -> list[torch.Tensor]:
        model = Net(DOUBLE)
        inner = inner_of(model, "adamw")
        optimizer = DistributedOptimizer(inner, model, group=group, sync=LocalSGD(period=2, optimizer_state=policy))
        for batch in batches(2, dtype=DOUBLE):
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
        return [inner.state[parameter]["exp_avg"].clone() for parameter in model.parameters()]

    kept = run_ranks(3, functools.partial(body, "keep"))
    averaged = run_ranks(3, functools.partial(body, "average"))
    for number in range(len(kept[0])):
        assert not torch.equal(kept[0][number], kept[1][number])
        mean = torch.stack([each[number] for each in kept]).mean(dim=0)
        for each in averaged:
            torch.testing.assert_close(each[number], mean, rtol=0, atol=1e-12)


def test_averages_count_samples() -> None:
    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        model = torch.nn.Linear(1, 1, bias=False, dtype=DOUBLE)
        torch.nn.init.zeros_(model.weight)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model, group=group, sync=LocalSGD(period=2, weights="samples")
        )
        for step in range(2):
            optimizer.zero_grad()
            (model.weight * -float(group.rank + 1)).sum().backward()
            optimizer.local_steps.count_samples(10 * group.rank + step)
            optimizer.step()
        return model.weight.item()

    weights = [1, 21, 41]
    expected = sum(2 * (rank + 1) * weight for rank, weight in enumerate(weights)) / sum(weights)
    assert run_ranks(3, body) == pytest.approx([expected] * 3, abs=1e-6)


def test_the_spread_is_the_largest_distance_between_ranks() -> None:
    def body(group: Group) -> tuple[float, float]:
        model = torch.nn.Linear(3, 2)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = DistributedOptimizer(inner_of(model), model, group=group, sync=LocalSGD(period=5))
        before = optimizer.local_steps.spread()
        model.weight.data[1, 2] = float(group.rank) - 1.0
        model.bias.data[0] = -0.5 * group.rank
        return before, optimizer.local_steps.spread()

    assert run_ranks(3, body) == [(0.0, 2.0)] * 3


@pytest.mark.parametrize(
    "sync", [DiLoCo(period=4, fragments=2, codec=Int8()), EASGD(period=2), LocalSGD(period=3)], ids=str
)
def test_training_goes_on_from_saved_states_bit_by_bit(sync: Strategy) -> None:
    def body(group: Group) -> bool:
        whole = flat(train(group, sync, 10, torch.float32))
        model = Net(torch.float32)
        optimizer = DistributedOptimizer(inner_of(model), model, group=group, sync=sync, name="first")
        saved = None
        for number, batch in enumerate(batches(10, dtype=torch.float32)):
            if number == 6:
                saved = model.state_dict(), optimizer.state_dict(), optimizer.local_steps.state()
                optimizer.close()
                fresh = Net(torch.float32)
                optimizer = DistributedOptimizer(inner_of(fresh), fresh, group=group, sync=sync, name="second")
                fresh.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                optimizer.local_steps.load_state(saved[2])
                model = fresh
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
        return torch.equal(flat(model), whole)

    assert run_ranks(3, body) == [True] * 3


def test_a_state_is_not_saved_while_an_exchange_is_under_way() -> None:
    def body(group: Group) -> None:
        model = Net(DOUBLE)
        sync = DiLoCo(period=2, overlap=1)
        optimizer = DistributedOptimizer(inner_of(model), model, group=group, sync=sync)
        for number, batch in enumerate(batches(3, dtype=DOUBLE), start=1):
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
            if number == 2:
                with pytest.raises(ConfigurationError, match="under way until step 3"):
                    optimizer.local_steps.state()
            else:
                optimizer.local_steps.state()

    run_ranks(2, body)


def test_what_does_not_fit_together_is_refused_on_every_rank() -> None:
    def other_parameters(group: Group) -> None:
        model = Net(DOUBLE)
        with torch.no_grad():
            next(model.parameters()).add_(group.rank)
        with pytest.raises(ConfigurationError, match="begin with different parameters"):
            DistributedOptimizer(inner_of(model), model, group=group, sync=LocalSGD())

    def other_settings(group: Group) -> None:
        model = Net(DOUBLE)
        with pytest.raises(PlanMismatchError, match="period"):
            DistributedOptimizer(inner_of(model), model, group=group, sync=LocalSGD(period=2 + group.rank))

    def other_codecs(group: Group) -> None:
        model = Net(DOUBLE)
        codec = Int8(block=64 * (1 + group.rank))
        with pytest.raises(PlanMismatchError, match="block"):
            DistributedOptimizer(inner_of(model), model, group=group, sync=DiLoCo(codec=codec))

    def other_overlap(group: Group) -> None:
        model = Net(DOUBLE)
        with pytest.raises(ConfigurationError, match="overlap='backward'"):
            DistributedOptimizer(inner_of(model), model, group=group, sync=DiLoCo(), overlap="iterations")
        optimizer = DistributedOptimizer(inner_of(model), model, group=group, sync=DiLoCo(outer=Nesterov(0.5)))
        with pytest.raises(ConfigurationError, match="join"):
            optimizer.join()
        plain_model = Net(DOUBLE)
        plain = DistributedOptimizer(inner_of(plain_model), plain_model, group=group)
        with pytest.raises(ConfigurationError, match="no strategy"):
            _ = plain.local_steps

    for body in (other_parameters, other_settings, other_codecs, other_overlap):
        run_ranks(2, body)


def test_a_rank_that_takes_fewer_steps_is_named() -> None:
    def body(group: Group) -> None:
        model = Net(DOUBLE)
        optimizer = DistributedOptimizer(inner_of(model), model, group=group, sync=LocalSGD(period=2))
        for batch in batches(2 - group.rank, dtype=DOUBLE):
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()

    from totalreduce.foundation.config import EngineConfig
    from totalreduce.foundation.errors import DeadlineExceededError, PeerLost

    with pytest.raises((DeadlineExceededError, PeerLost)):
        run_ranks(2, body, engine=EngineConfig(timeout_s=2.0))
