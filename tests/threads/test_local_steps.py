"""``DistributedOptimizer(sync=strategy)``: the parameters of real ranks beside loops over models in one process."""

from __future__ import annotations

import contextlib
import functools
import io
import threading

import numpy as np
import pytest
import torch
from optimizer_cases import Net, all_equal, batches, flat, impatient, loss_of, repeat_until_done, shard

from totalreduce.codecs.int8 import Int8
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, PeerLost, PlanMismatchError
from totalreduce.groups.group import Group
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.strategies.async_gossip import AsyncGossip
from totalreduce.strategies.averaging import LocalSGD, PostLocalSGD
from totalreduce.strategies.easgd import EASGD
from totalreduce.strategies.gossip import Gossip
from totalreduce.strategies.outer import DiLoCo, Nesterov, SlowMo
from totalreduce.strategies.strategy import HostElements, Strategy
from totalreduce.strategies.strom import Strom
from totalreduce.testing import run_ranks
from totalreduce.testing.lockstep import run_exchanges

SIZES = [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)]
DOUBLE = torch.float64


def inner_of(model: torch.nn.Module, kind: str = "sgd") -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(group: Group, sync: Strategy | None, steps: int, dtype=DOUBLE, kind: str = "sgd") -> torch.nn.Module:
    model, optimizer = trained(group, sync, steps, dtype, kind)
    optimizer.close()
    return model


def trained(
    group: Group, sync: Strategy | None, steps: int, dtype=DOUBLE, kind: str = "sgd"
) -> tuple[torch.nn.Module, DistributedOptimizer]:
    """Return a model after so many steps, and its optimizer, which is open."""
    model = Net(dtype)
    optimizer = DistributedOptimizer(inner_of(model, kind), model, group=group, sync=sync)
    for batch in batches(steps, dtype=dtype):
        optimizer.zero_grad()
        loss_of(model, shard(batch, group)).backward()
        optimizer.step()
    return model, optimizer


class OneOf:
    """The rank and the world size, for ``shard``."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


class TorchReplica(HostElements):
    """A replica that knows nothing but its model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.dtype = np.dtype(np.float64)
        self.learning_rate = 0.0

    def read(self, tensors):
        return torch.cat([self.parameters[tensor].detach().flatten() for tensor in tensors]).numpy()

    def write(self, tensors, values):
        parts = torch.from_numpy(values).split([self.sizes[tensor] for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            self.parameters[tensor].data.copy_(part.view_as(self.parameters[tensor]))

    def read_range(self, begin, end):
        return self.read(range(len(self.sizes)))[begin:end]

    def write_range(self, begin, values):
        everything = self.read(range(len(self.sizes)))
        everything[begin : begin + values.size] = values
        self.write(range(len(self.sizes)), everything)


def in_one_process(sync: Strategy, world_size: int, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Train one model per rank, one after the other, with the exchanges in lockstep.

    Returns, by rank, the parameters after the last step, and after the end of training.
    """
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
            apply(sessions, *waiting.pop(0))
    before = [flat(model) for model in models]
    for each in waiting:
        apply(sessions, *each)
    for pending in zip(*[session.ending() for session in sessions], strict=True):
        apply(sessions, pending, run_exchanges([each.exchange for each in pending])[0])
    return list(zip(before, [flat(model) for model in models], strict=True))


def apply(sessions: list, pending: tuple, results: list) -> None:
    for session, each, result in zip(sessions, pending, results, strict=True):
        session.apply(each.channel, result)


STRATEGIES = [
    LocalSGD(period=3),
    DiLoCo(period=4, fragments=2),
    DiLoCo(period=4, fragments=2, overlap=2, mix=0.3),
    SlowMo(period=2),
    EASGD(period=2),
    Gossip(),
    Gossip(graph="random", overlap=1),
    Strom(threshold=1e-3, overlap=1),
]


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_ranks_compute_what_one_process_computes(sync: Strategy, world_size: int) -> None:
    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        model, optimizer = trained(group, sync, 9)
        before = flat(model)
        optimizer.strategy_steps.finish()
        assert optimizer.strategy_steps.spread() == 0
        optimizer.close()
        return before, flat(model)

    expected = in_one_process(sync, world_size, 9)
    for mine, other in zip(run_ranks(world_size, body), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_finish_that_ran_out_of_time_is_repeated() -> None:
    """Rank 1 is late for the exchange that is under way, and then for the last average."""

    late = {step: threading.Event() for step in (2, 4)}

    def body(group: Group) -> tuple[float, int]:
        model = torch.nn.Linear(1, 1, bias=False, dtype=DOUBLE)
        torch.nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = DiLoCo(period=2, overlap=1, mix=0.0, outer=Nesterov(1.0, 0.0))
        optimizer = DistributedOptimizer(inner, model, group=group, sync=sync)
        errors = 0

        def is_refused_meanwhile() -> None:
            for call in (optimizer.step, optimizer.strategy_steps.state):
                with pytest.raises(ConfigurationError, match=r"finish\(\) was interrupted"):
                    call()
            late[step].set()

        for step in range(5):
            if step in late and group.rank == 0:
                with impatient(group):
                    errors += repeat_until_done(optimizer.strategy_steps.finish, is_refused_meanwhile)
            elif step in late:
                assert late[step].wait(20)
                optimizer.strategy_steps.finish()
            optimizer.zero_grad()
            (-model.weight * (group.rank + 1)).sum().backward()
            optimizer.step()
        optimizer.strategy_steps.finish()
        return model.weight.item(), errors

    (first, errors), (second, _) = run_ranks(2, body)
    assert (first, second) == (7.5, 7.5)  # five steps of 1.5
    assert errors >= 2


def test_finish_is_refused_while_steps_can_be_undone() -> None:
    def body(group: Group) -> None:
        model, optimizer = trained(group, DiLoCo(period=4, overlap=2), 3)
        optimizer.strategy_steps.is_guarded = True
        before = flat(model)
        with pytest.raises(ConfigurationError, match=r"behind the block of tr\.recoverable"):
            optimizer.strategy_steps.finish()
        torch.testing.assert_close(flat(model), before, rtol=0, atol=0)
        optimizer.close()

    run_ranks(2, body)


def test_a_state_that_was_saved_before_exchanges_could_be_restarted_is_loaded() -> None:
    """States of strategies without overlap had the same parts then, but for ``under_way``."""

    def body(group: Group) -> None:
        _, optimizer = trained(group, SlowMo(period=3), 4)
        saved, shared = optimizer.strategy_steps.state(), optimizer.strategy_steps.shared()
        assert list(saved["session"]["own"]) == ["rests"]
        del saved["under_way"], shared["under_way"]
        optimizer.strategy_steps.load_state(saved)
        optimizer.strategy_steps.load_shared(shared)
        assert optimizer.strategy_steps.state()["steps"] == 4
        optimizer.close()

    run_ranks(2, body)


def test_finish_after_more_steps_than_other_ranks_is_an_error() -> None:
    """A period ends after two steps, so that rank 0 has nothing to exchange after them."""

    def body(group: Group) -> None:
        _, optimizer = trained(group, LocalSGD(period=2), 2 + group.rank)
        with impatient(group):
            optimizer.strategy_steps.finish()

    with pytest.raises(DeadlineExceededError, match="same number of steps"):
        run_ranks(2, body)


@pytest.mark.parametrize(
    ("sync", "num_buckets"),
    [
        (None, 1),
        (PostLocalSGD(start=1, then=LocalSGD(period=2)), 1),
        (LocalSGD(period=2), 0),
        (DiLoCo(period=2), 0),
        (Gossip(), 0),
        (EASGD(period=2), 0),
        (AsyncGossip(), 0),
    ],
    ids=str,
)
def test_where_no_gradient_travels_gradients_have_no_buckets(sync, num_buckets: int, monkeypatch) -> None:
    made = []
    empty = Group.empty
    monkeypatch.setattr(Group, "empty", lambda *args, dtype: made.append(dtype) or empty(*args, dtype=dtype))

    def body(group: Group) -> None:
        _, optimizer = trained(group, sync, 3)
        with contextlib.suppress(AttributeError):
            optimizer.strategy_steps.finish()
        optimizer.close()

    run_ranks(2, body)
    assert len(made) == 2 * num_buckets


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
            optimizer.strategy_steps.count_samples(10 * group.rank + step)
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
        before = optimizer.strategy_steps.spread()
        model.weight.data[1, 2] = float(group.rank) - 1.0
        model.bias.data[0] = -0.5 * group.rank
        return before, optimizer.strategy_steps.spread()

    assert run_ranks(3, body) == [(0.0, 2.0)] * 3


SAVED = [
    DiLoCo(period=4, fragments=2, codec=Int8()),
    DiLoCo(period=4, fragments=2, overlap=3, codec=Int8(stochastic=True)),
    EASGD(period=2),
    LocalSGD(period=3),
    LocalSGD(period=4, codec=Int8()),
    LocalSGD(period=4, weights="samples", optimizer_state="average"),
    PostLocalSGD(start=3, then=LocalSGD(period=2)),
    SlowMo(period=4),
    Gossip(graph="random", overlap=2),
]


@pytest.mark.parametrize("sync", SAVED, ids=str)
def test_training_goes_on_from_saved_states_bit_by_bit(sync: Strategy) -> None:
    """Saved by torch within a period, or while exchanges are under way, and loaded into new objects."""

    def some_steps(group: Group, model: torch.nn.Module, optimizer: DistributedOptimizer, begin: int, end: int) -> None:
        for batch in batches(end, dtype=torch.float32)[begin:]:
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            if hasattr(optimizer.strategy_steps, "count_samples"):
                optimizer.strategy_steps.count_samples(group.rank + begin)
            optimizer.step()

    def made(group: Group) -> tuple[torch.nn.Module, DistributedOptimizer]:
        model = Net(torch.float32)
        return model, DistributedOptimizer(inner_of(model), model, group=group, sync=sync)

    def body(group: Group) -> bool:
        model, optimizer = made(group)
        some_steps(group, model, optimizer, 0, 6)
        states = model.state_dict(), optimizer.state_dict(), optimizer.strategy_steps.state()
        file = io.BytesIO()
        torch.save(states[:2], file)
        some_steps(group, model, optimizer, 6, 11)
        torch.save(states[2], strategy_file := io.BytesIO())  # the state is a copy, which training has not changed
        optimizer.close()
        other, fresh = made(group)
        for each in (file, strategy_file):
            each.seek(0)
        parameters, inner = torch.load(file)
        other.load_state_dict(parameters)
        fresh.load_state_dict(inner)
        fresh.strategy_steps.load_state(torch.load(strategy_file))
        some_steps(group, other, fresh, 6, 11)
        return torch.equal(flat(other), flat(model))

    assert run_ranks(3, body) == [True] * 3


class Guard:
    """Notes what a guarded step calls, and can refuse a step that ends with an exchange."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuses = False

    def counts(self) -> bool:
        return True

    def step_alone(self) -> None:
        self.calls.append("alone")

    def before_wait(self) -> None:
        self.calls.append("wait")

    def before_step(self) -> None:
        self.calls.append("step")

    def before_commit(self) -> None:
        self.calls.append("commit")
        if self.refuses:
            raise PeerLost(1, "a test")


@pytest.mark.parametrize(
    "sync",
    [LocalSGD(period=3, codec=Int8()), DiLoCo(period=3), EASGD(period=3), Gossip(period=3), Strom(threshold=1e-3)],
    ids=str,
)
def test_a_guarded_step_that_is_undone_and_repeated_changes_no_bit(sync: Strategy) -> None:
    def some_steps(group: Group, refused: bool) -> tuple[torch.Tensor, list[str]]:
        model, guard = Net(torch.float32), Guard()
        optimizer = DistributedOptimizer(inner_of(model), model, group=group, sync=sync)
        optimizer.guard = guard
        for batch in batches(7, dtype=torch.float32):
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            if refused and optimizer.strategy_steps.state()["steps"] == 5:
                before, guard.refuses = flat(model), True
                with pytest.raises(PeerLost):
                    optimizer.step()
                assert not torch.equal(flat(model), before)
                optimizer.strategy_steps.undo()
                torch.testing.assert_close(flat(model), before, rtol=0, atol=0)
                guard.refuses = False
            optimizer.step()
        optimizer.close()
        return flat(model), guard.calls

    def body(group: Group) -> None:
        expected, calls = some_steps(group, refused=False)
        vote = ["wait", "step", "commit"]
        period = 1 if isinstance(sync, Strom) else 3
        assert calls == [call for step in range(1, 8) for call in (["alone"] if step % period else vote)]
        repeated, calls_of_repeated = some_steps(group, refused=True)
        torch.testing.assert_close(repeated, expected, rtol=0, atol=0)
        assert len(calls_of_repeated) == len(calls) + 3

    run_ranks(2, body)


def test_steps_go_on_in_a_group_with_fewer_ranks_and_with_new_ones() -> None:
    """Averages are those of the ranks that remain; a new rank begins with what all have in common."""
    outer = Nesterov(1.0, 0.5)

    def body(group: Group) -> None:
        model = Net(DOUBLE)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, model, group=group, sync=DiLoCo(period=2, outer=outer))
        steps = optimizer.strategy_steps

        def move(amount: float) -> float:
            before = flat(model).clone()
            for _ in range(2):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, -amount / 2)
                steps.step()
            moved = flat(model) - before
            assert moved.min() == pytest.approx(moved.max().item())
            return moved[0].item()

        # The mean of 0, 1 and 2, and half of the velocity, 1.
        assert move(float(group.rank)) == pytest.approx(1.5)
        steps.close()
        if group.rank < 2:  # the mean of 0 and 1; the velocity is 0.5 * 1 + 0.5
            pair = group.subgroup([0, 1], name="pair")
            steps.enter(pair, "pair")
            assert move(float(group.rank)) == pytest.approx(1.0)
            steps.close()
        words = group.broadcast_object({"parameters": flat(model), "shared": steps.shared()})
        if group.rank == 2:
            torch.nn.utils.vector_to_parameters(words["parameters"], model.parameters())
            steps.load_shared(words["shared"])
        steps.enter(group, "all again")
        # All move by 1; the velocity is 0.5 * 1 + 1, and then 0.5 * 1.5 + 1.
        assert [move(1.0), move(1.0)] == pytest.approx([1.75, 1.875])
        assert steps.spread() == 0.0
        optimizer.close()

    run_ranks(3, body)


def test_states_of_others_are_refused_and_change_nothing() -> None:
    def body(group: Group) -> None:
        model = Net(DOUBLE)
        optimizer = DistributedOptimizer(inner_of(model), model, group=group, sync=DiLoCo(period=4))
        present = optimizer.strategy_steps.state()
        for other in (DiLoCo(period=4, fragments=2), LocalSGD(period=4), Gossip()):
            another = Net(DOUBLE)
            saved = DistributedOptimizer(inner_of(another), another, group=group, sync=other).local_steps.state()
            with pytest.raises(ConfigurationError, match=r"the state is not that of 'diloco'|a list of 2 at state\."):
                optimizer.strategy_steps.load_state(saved)
        for broken in ({}, {**present, "steps": "4"}, {**present, "session": {}}):
            with pytest.raises(ConfigurationError, match=r"sync=|same settings"):
                optimizer.strategy_steps.load_state(broken)
        assert optimizer.strategy_steps.state()["steps"] == 0

    run_ranks(2, body)


@pytest.mark.parametrize("sync", [LocalSGD(period=2), DiLoCo(period=2, overlap=1, mix=0.0, outer=Nesterov(1.0, 0.0))])
def test_a_step_that_ran_out_of_time_is_repeated_and_counts_once(sync: Strategy) -> None:
    """Each step adds 1 on rank 0 and 2 on rank 1; rank 1 is late."""

    late = threading.Event()

    def body(group: Group) -> tuple[float, int]:
        model = torch.nn.Linear(1, 1, bias=False, dtype=DOUBLE)
        torch.nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, model, group=group, sync=sync)
        errors = 0

        def is_refused_meanwhile() -> None:
            with pytest.raises(ConfigurationError, match="interrupted"):
                optimizer.strategy_steps.state()
            with pytest.raises(ConfigurationError, match="interrupted"):
                model.weight.sum().backward()
            late.set()

        for step in range(4):
            optimizer.zero_grad()
            (-model.weight * (group.rank + 1)).sum().backward()
            if group.rank == 0:
                with impatient(group):
                    errors += repeat_until_done(optimizer.step, is_refused_meanwhile)
            else:
                assert step != 1 or late.wait(20)
                optimizer.step()
        return model.weight.item(), errors

    (first, errors), (second, _) = run_ranks(2, body)
    if sync == LocalSGD(period=2):
        assert (first, second) == (6.0, 6.0)
    else:  # the mean of two steps, 3, in the place of three steps; then one step more
        assert (first, second) == (3.0 + 1.0, 3.0 + 2.0)
    assert errors >= 1


@pytest.mark.parametrize(
    "sync",
    [LocalSGD(period=2), DiLoCo(period=2, overlap=1, codec=Int8()), EASGD(period=1), Gossip(graph="ring")],
    ids=str,
)
def test_the_loss_of_a_rank_ends_the_steps_of_all(sync: Strategy) -> None:
    def body(group: Group) -> str:
        model = Net(DOUBLE)
        optimizer = DistributedOptimizer(inner_of(model), model, group=group, sync=sync)
        for number, batch in enumerate(batches(8, dtype=DOUBLE)):
            if group.rank == 1 and number == 3:
                group.close()
                return "left"
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            try:
                optimizer.step()
            except PeerLost:
                before = flat(model)
                with pytest.raises(PeerLost):  # no step of this rank alone follows
                    optimizer.step()
                assert torch.equal(flat(model), before)
                # A program that does not handle the loss ends here. A rank whose partner in this turn is this one and
                # not the one that has left would otherwise wait for it until the deadline.
                with contextlib.suppress(PeerLost):
                    group.close()
                return f"lost after {number}"
        return "nothing"

    ends = run_ranks(3, body, engine=EngineConfig(timeout_s=5.0))
    assert {each for rank, each in enumerate(ends) if rank != 1} <= {f"lost after {n}" for n in (2, 3, 4)}


class Mixed(torch.nn.Module):
    """Parameters of three types, one of them transposed, and an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.double_ = torch.nn.Parameter(torch.randn(5, 4, generator=generator, dtype=DOUBLE).t())
        self.single_ = torch.nn.Parameter(torch.randn(7, generator=generator))
        self.half_ = torch.nn.Parameter(torch.randn(6, generator=generator).bfloat16())
        self.table = torch.nn.Embedding(6, 2, sparse=True, _weight=torch.randn(6, 2, generator=generator))

    def forward(self, number: int) -> torch.Tensor:
        parts = ((self.double_ * number).sin().sum(), self.single_.square().sum(), self.half_.float().exp().sum())
        return sum(parts, self.table(torch.tensor([number % 6])).cos().sum())


@pytest.mark.parametrize("sparse", ["dense", "gather"])
@pytest.mark.parametrize("sync", [LocalSGD(period=2), SlowMo(period=2), Gossip(graph="random")], ids=str)
def test_all_types_of_parameters_are_averaged(sync: Strategy, sparse: str) -> None:
    """Also tables with sparse gradients, and float64 beside float32 with all its digits."""

    def body(group: Group) -> list[torch.Tensor]:
        model = Mixed()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, group=group, sync=sync, sparse=sparse)
        for step in range(2):
            optimizer.zero_grad()
            model(3 * group.rank + step).backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    expected = []
    for rank in range(2):
        model = Mixed()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            inner.zero_grad()
            model(3 * rank + step).backward()
            inner.step()
        expected.append([parameter.detach().double() for parameter in model.parameters()])
    first, second = run_ranks(2, body)
    if isinstance(sync, Gossip):  # exchanges after each step: only that all have come together
        return_equal = [torch.equal(*pair) for pair in zip(first, second, strict=True)]
        assert return_equal == [True] * 4
        return
    for mine, other, *theirs in zip(first, second, *expected, strict=True):
        assert torch.equal(mine, other)
        mean = (sum(theirs, torch.zeros(())) / 2).to(mine.dtype)
        torch.testing.assert_close(
            mine, mean, rtol=1e-14 if mine.dtype == DOUBLE else None, atol=0.0 if mine.dtype == DOUBLE else None
        )


def test_optimizers_that_need_dense_gradients_get_them_in_local_steps() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Mixed()
        inner = torch.optim.AdamW(model.parameters())
        optimizer = DistributedOptimizer(inner, model, group=group, sync=LocalSGD(period=2))
        for step in range(2):
            optimizer.zero_grad()
            model(3 * group.rank + step).backward()
            optimizer.step()
        return model.table.weight.detach().clone()

    assert all_equal(run_ranks(2, body))


def test_a_step_that_a_grad_scaler_leaves_out_is_counted() -> None:
    """The program of docs/strategies-replicas.md."""

    def body(group: Group) -> tuple[float, int, float]:
        model = Net(torch.float32)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(inner, model, group=group, sync=LocalSGD(period=2))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, batch in enumerate(batches(4, dtype=torch.float32)):
            optimizer.zero_grad()
            loss = loss_of(model, shard(batch, group)) * (float("inf") if (group.rank, number) == (1, 2) else 1.0)
            scaler.scale(loss).backward()
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < scale:
                optimizer.strategy_steps.stepped()
        return scaler.get_scale(), optimizer.strategy_steps.state()["steps"], optimizer.strategy_steps.spread()

    assert run_ranks(2, body) == [(1024.0, 4, 0.0), (512.0, 4, 0.0)]


def test_parameters_that_a_strategy_does_not_know_are_refused() -> None:
    def body(group: Group) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        model[1].requires_grad_(False)
        inner = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
        optimizer = DistributedOptimizer(inner, model, group=group, sync=LocalSGD(period=2))
        with pytest.raises(ConfigurationError, match="goes on with the trainable parameters"):
            optimizer.add_param_group({"params": list(model[2].parameters())})
        optimizer.replan()  # nothing has changed
        model(torch.ones(1, 2) * (group.rank + 1)).sum().backward()
        optimizer.step()
        model[1].requires_grad_(True)
        with pytest.raises(ConfigurationError, match=r"2 parameter.s. were unfrozen"):
            optimizer.step()
        with pytest.raises(ConfigurationError, match="goes on with the trainable parameters"):
            optimizer.replan()
        model[1].requires_grad_(False)
        optimizer.replan()
        optimizer.step()
        assert optimizer.strategy_steps.spread() == 0.0

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
            _ = plain.strategy_steps

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

    with pytest.raises((DeadlineExceededError, PeerLost)):
        run_ranks(2, body, engine=EngineConfig(timeout_s=2.0))
