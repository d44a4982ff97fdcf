"""Strategies with servers, on real ranks: what is applied, what is observed, and how they end."""

from __future__ import annotations

import contextlib
import functools
import io
import threading
import time

import numpy as np
import pytest
import torch
from optimizer_cases import Net, all_equal, batches, flat, impatient, loss_of, repeat_until_done, shard

from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, PeerLost
from totalreduce.groups.group import Group
from totalreduce.pytorch.intervals import Interval
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.server.served import Async, Eager, Quorum, SoftSync, StaleSynchronous
from totalreduce.server.served_steps import ServedStrategy
from totalreduce.server.shares import shares_of
from totalreduce.testing import run_ranks

SIZES = [2, 3, pytest.param(4, marks=pytest.mark.slow)]
STRATEGIES = [
    Async(),
    Async(max_staleness=6, scale="none"),
    StaleSynchronous(slack=2),
    SoftSync(n=2),
    Quorum(n=1, grace_s=0.01),
    Eager(mode="solo"),
]


class Counting(torch.nn.Module):
    """Five parameters whose gradients are ones: with SGD each update moves all elements alike."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros(size, dtype=torch.float64) for size in (3, 40, 7, 1, 12)])

    def forward(self, factor: float) -> torch.Tensor:
        return sum((part.sum() for part in self.parts), torch.zeros(())) * factor


def served(group: Group, model: torch.nn.Module, sync: ServedStrategy, lr: float = 1.0) -> DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    return DistributedOptimizer(inner, model, group=group, sync=sync)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    "sync", [Async(scale="none"), Async(max_staleness=6, scale="none"), StaleSynchronous(slack=2)], ids=str
)
def test_every_gradient_is_applied_once(world_size: int, sync: ServedStrategy) -> None:
    """Ranks take different numbers of steps, and one of them is slow."""

    def body(group: Group) -> tuple[torch.Tensor, dict[int, int]]:
        model = Counting()
        optimizer = served(group, model, sync)
        for _ in range(6 + group.rank):
            optimizer.zero_grad()
            model(-float(10**group.rank)).backward()
            time.sleep(0.005 if group.rank == 0 else 0.0)
            optimizer.step()
        optimizer.strategy_steps.finish()
        optimizer.close()
        return flat(model), dict(optimizer.strategy_steps.staleness)

    total = sum((6 + rank) * 10**rank for rank in range(world_size))
    for parameters, staleness in run_ranks(world_size, body):
        torch.testing.assert_close(parameters, torch.full_like(parameters, total), rtol=0, atol=1e-9)
        assert sum(staleness.values()) in (0, sum(6 + rank for rank in range(world_size)))
        if isinstance(sync, Async) and sync.max_staleness is not None:
            assert max(staleness, default=0) <= 6


#: Ranks take steps one after the other: the rank, and its gradient. Rank 2 takes none.
COURSE = [(0, -1.0), (0, -2.0), (1, -12.0), (0, -4.0)]


@pytest.mark.parametrize(
    ("sync", "expected", "staleness"),
    [
        # The gradient of rank 1 is of version 0, behind two updates, and so counts half.
        (Async(), 1 + 2 + 12 / 2 + 4, {0: 2, 1: 1, 2: 1}),
        (Async(scale="none"), 1 + 2 + 12 + 4, {0: 2, 1: 1, 2: 1}),
        (Async(max_staleness=4, scale="none"), 1 + 2 + 12 + 4, {0: 2, 1: 1, 2: 1}),
        (StaleSynchronous(slack=3), 1 + 2 + 12 + 4, {0: 2, 1: 1, 2: 1}),
        # Means of two gradients: (1 + 2) / 2 and (12 + 4) / 2. Rank 0 goes on with version 0 after the first.
        (SoftSync(n=2), 1.5 + 8, {0: 3, 1: 1}),
        # The gradient of rank 1 comes late, and waits for the next update: (12 + 4) / 2.
        (Quorum(n=1), 1 + 2 + 8, {0: 3, 2: 1}),
        (Eager(mode="solo"), 1 + 2 + 8, {0: 3, 2: 1}),
    ],
    ids=str,
)
def test_gradients_in_a_given_order_have_the_values_of_the_rule(
    sync: ServedStrategy, expected: float, staleness: dict[int, int]
) -> None:
    has_ended = [threading.Event() for _ in COURSE]

    def body(group: Group) -> tuple[set[float], dict[int, int], int]:
        model = Counting()
        optimizer = served(group, model, sync)
        for place, (rank, gradient) in enumerate(COURSE):
            if rank == group.rank:
                assert place == 0 or has_ended[place - 1].wait(20)
                optimizer.zero_grad()
                model(gradient).backward()
                optimizer.step()
                has_ended[place].set()
        assert has_ended[-1].wait(20)  # rank 2 is behind, and has not finished
        optimizer.strategy_steps.finish()
        steps = optimizer.strategy_steps
        optimizer.close()
        return set(flat(model).tolist()), dict(steps.staleness), steps.lead

    for parameters, found, lead in run_ranks(3, body):
        assert parameters == {expected}
        assert found == staleness
        assert lead == 3


@pytest.mark.filterwarnings("error")
def test_a_schedule_sees_that_steps_are_taken() -> None:
    def body(group: Group) -> list[float]:
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        optimizer = DistributedOptimizer(inner, model, group=group, sync=Async())
        rates = []
        for _ in range(3):
            optimizer.zero_grad()
            model(1.0).backward()
            optimizer.step()
            schedule.step()
            rates += schedule.get_last_lr()
        optimizer.strategy_steps.finish()
        optimizer.close()
        return rates

    assert run_ranks(2, body) == [[0.5, 0.25, 0.125]] * 2


@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_training_comes_to_an_end_with_equal_parameters_and_a_small_loss(sync: ServedStrategy) -> None:
    """Where steps leave out ranks that are late, the ranks meet every ten steps, so that none is late for more."""
    meeting = threading.Barrier(3)

    def body(group: Group) -> tuple[torch.Tensor, float, float]:
        torch.manual_seed(3)
        model = Net(torch.float32)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), model, group=group, sync=sync
        )
        [batch] = batches(1, dtype=torch.float32)
        before = float(loss_of(model, batch).detach())
        for step in range(60):
            if isinstance(sync, (Eager, Quorum)) and step % 10 == 0:
                meeting.wait(20)
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
        optimizer.strategy_steps.finish()
        optimizer.close()
        return flat(model), before, float(loss_of(model, batch).detach())

    results = run_ranks(3, body)
    assert all_equal([parameters for parameters, *_ in results])
    for _, before, after in results:
        assert after < 0.5 * before


def test_a_slow_rank_does_not_hold_the_others_up() -> None:
    """The others end all of their steps before the first one of the slow rank."""
    ended = [threading.Event() for _ in range(3)]

    def body(group: Group) -> None:
        model = Counting()
        optimizer = served(group, model, Async())
        for _ in range(3 if group.rank == 0 else 10):
            optimizer.zero_grad()
            model(1.0).backward()
            if group.rank == 0:
                assert all(event.wait(20) for event in ended[1:])
            optimizer.step()
        ended[group.rank].set()
        optimizer.strategy_steps.finish()
        optimizer.close()

    run_ranks(3, body)


def test_a_collective_between_steps_ends_with_errors_that_say_what_waits() -> None:
    """Rank 2 takes its first step when the others, which are a quorum, have come to the collective."""
    both, both_come = threading.Barrier(2), threading.Event()

    def body(group: Group) -> str:
        model = Counting()
        optimizer = served(group, model, Quorum(n=2))
        for number in range(4):
            optimizer.zero_grad()
            model(1.0).backward()
            if group.rank == 2:
                assert both_come.wait(20)
            try:
                with impatient(group, 2.0) if group.rank == 2 else contextlib.nullcontext():
                    optimizer.step()
                if number == 3:
                    work = group.allreduce(torch.ones(1))
                    both.wait(20)
                    both_come.set()
                    work.wait(timeout_s=2.0)
            except DeadlineExceededError as error:
                return str(error)
        return "no error"

    first, second, late = run_ranks(3, body, engine=EngineConfig(timeout_s=30.0))
    for message in (first, second):
        assert "never submitted by rank(s) 2" in message
    assert "quorum holds this rank back until other ranks go on" in late
    assert "A rank that waits in a collective between two steps does neither" in late


def test_learning_rates_are_those_of_the_worker() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Counting()
        optimizer = served(group, model, Async(scale="none"))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for _ in range(3):
            optimizer.zero_grad()
            model(-1.0).backward()
            optimizer.step()
            schedule.step()
        optimizer.strategy_steps.finish()
        optimizer.close()
        return flat(model)

    for parameters in run_ranks(2, body):
        torch.testing.assert_close(parameters, torch.full_like(parameters, 2 * 1.75))


@pytest.mark.parametrize(
    "sync", [Async(max_staleness=0), StaleSynchronous(slack=0), SoftSync(n=3), Quorum(n=3)], ids=str
)
def test_without_slack_the_bits_are_those_of_synchronous_steps(sync: ServedStrategy) -> None:
    def body(group: Group) -> list[torch.Tensor]:
        trained = []
        for which in (None, sync):
            model = Net(torch.float32)
            optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, group=group, sync=which)
            for batch in batches(5, dtype=torch.float32):
                optimizer.zero_grad()
                loss_of(model, shard(batch, group)).backward()
                optimizer.step()
            optimizer.close()
            trained.append(flat(model))
        return trained

    for synchronous, other in run_ranks(3, body):
        torch.testing.assert_close(other, synchronous, rtol=0, atol=0)


def test_a_rank_that_is_held_back_for_too_long_says_why() -> None:
    has_said = threading.Event()

    def body(group: Group) -> str:
        model = Counting()
        optimizer = served(group, model, StaleSynchronous(slack=1))
        if group.rank == 1:
            assert has_said.wait(20)
            optimizer.close()
            return ""
        for _ in range(2):
            optimizer.zero_grad()
            model(1.0).backward()
            try:
                with impatient(group):
                    optimizer.step()
            except DeadlineExceededError as error:
                has_said.set()
                return str(error)
        has_said.set()
        return "nobody waits"

    said, _ = run_ranks(2, body)
    assert "stale_synchronous" in said
    assert "Do all ranks train" in said


def test_more_ranks_than_parameters() -> None:
    def body(group: Group) -> float:
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = served(group, model, Async(scale="none"))
        for _ in range(3):
            optimizer.zero_grad()
            (-model.weight.sum()).backward()
            optimizer.step()
        optimizer.strategy_steps.finish()
        optimizer.close()
        return float(model.weight.detach()[0, 1])

    assert run_ranks(3, body) == [9.0] * 3


def tensors_of(shares: list[list[Interval]]) -> list[list[int]]:
    return [[part.parameter for part in share] for share in shares]


@pytest.mark.parametrize("cuts", [False, True])
def test_shares_are_of_about_the_same_size(cuts: bool) -> None:
    """Small tensors are not cut."""
    assert tensors_of(shares_of([10, 1, 9, 5, 5], 2, cuts=cuts)) == [[0, 4], [1, 2, 3]]
    assert shares_of([4], 3, cuts=cuts) == [[Interval(0, 0, 4)], [], []]
    assert shares_of([0, 3], 1, cuts=cuts) == [[Interval(0, 0, 0), Interval(1, 0, 3)]]
    sizes = list(range(1, 30))
    shares = shares_of(sizes, 4, cuts=cuts)
    assert sorted(part for share in shares for part in share) == [Interval(n, 0, size) for n, size in enumerate(sizes)]
    totals = [sum(part.size for part in share) for share in shares]
    assert max(totals) - min(totals) <= 4


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_large_tensors_are_cut_into_shares_of_the_same_size(count: int) -> None:
    sizes = [1000, 4_000_000, 20_000, 7, 800_000]
    shares = shares_of(sizes, count, cuts=True)
    covered = [np.zeros(size, int) for size in sizes]
    for part in (part for share in shares for part in share):
        covered[part.parameter][part.begin : part.end] += 1
    assert all((each == 1).all() for each in covered)
    totals = [sum(part.size for part in share) for share in shares]
    assert max(totals) < 1.05 * sum(sizes) / count
    assert max(sum(part.size for part in share) for share in shares_of(sizes, count, cuts=False)) >= 4_000_000


@pytest.mark.parametrize(("num_tensors", "count"), [(9, 8), (5, 4), (13, 12), (3, 2)])
def test_shares_of_layers_of_equal_size(num_tensors: int, count: int) -> None:
    shares = shares_of([1_000_000] * num_tensors, count, cuts=True)
    totals = [sum(part.size for part in share) for share in shares]
    assert max(totals) <= 1.25 * sum(totals) / count


def test_shares_of_empty_tensors() -> None:
    for cuts in (False, True):
        assert shares_of([0, 0], 2, cuts=cuts) == [[Interval(0, 0, 0), Interval(1, 0, 0)], []]


class Odd(torch.optim.SGD):
    """A program's own optimizer, which may do anything with a parameter."""


class Wide(torch.nn.Module):
    """A large parameter whose elements lie in another order than those of a contiguous one, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.large = torch.nn.Parameter(torch.randn(300, 200, generator=generator).t())
        self.small = torch.nn.Parameter(torch.randn(5, generator=generator))
        self.unused = torch.nn.Parameter(torch.randn(70_000, generator=generator))


KINDS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    "Odd": lambda parameters: Odd(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_of_parts_does_what_one_of_whole_parameters_does(kind: str) -> None:
    """All ranks have the same gradients, and each update is the mean of all; the state goes through a new optimizer."""
    steps = 6

    def gradients(model: Wide, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        model.large.grad = torch.randn(300, 200, generator=generator).t()  # as autograd does, like the parameter
        model.small.grad = torch.randn(5, generator=generator)

    alone = Wide()
    expected = KINDS[kind](alone.parameters())
    for step in range(steps):
        gradients(alone, step)
        expected.step()

    def body(group: Group) -> tuple[list[torch.Tensor], dict, int]:
        model, state = Wide(), None
        for begin in (0, steps // 2):  # the second half by an optimizer that begins with the state of the first one
            inner = KINDS[kind](model.parameters())
            optimizer = DistributedOptimizer(inner, model, group=group, sync=Quorum(n=2, grace_s=20.0))
            if state is not None:
                optimizer.strategy_steps.load_state(state)
            for step in range(begin, begin + steps // 2):
                gradients(model, step)
                optimizer.step()
            optimizer.strategy_steps.finish()
            state = optimizer.strategy_steps.state()
            parts = sum(len(share) for share in optimizer.strategy_steps._shares.parts)
            optimizer.close()
        return [parameter.detach().clone() for parameter in model.parameters()], state["optimizer"], parts

    for parameters, state, parts in run_ranks(3, body):
        assert parts == 3 if kind == "Odd" else parts > 5
        for found, parameter in zip(parameters, alone.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.detach(), rtol=1e-5, atol=1e-6)
        assert sorted(state) == [0, 1]  # the other one had no gradient
        for number, parameter in enumerate((alone.large, alone.small)):
            for key, value in expected.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    assert state[number][key].shape == value.shape
                    torch.testing.assert_close(state[number][key], value, rtol=1e-5, atol=1e-6, check_stride=True)


def test_an_impossible_bound_is_refused_on_every_rank() -> None:
    def body(group: Group) -> None:
        model = Counting()
        with pytest.raises(ConfigurationError, match="at least 2, or 0"):
            served(group, model, Async(max_staleness=1))

    run_ranks(3, body)


def test_a_step_and_an_end_that_ran_out_of_time_are_repeated_and_count_once() -> None:
    """Each step adds 1 on rank 0 and 2 on rank 1; rank 1 is late."""

    late_for_step, late_for_end = threading.Event(), threading.Event()

    def body(group: Group) -> tuple[float, int]:
        model = Counting()
        optimizer = served(group, model, StaleSynchronous(slack=1))
        errors = 0

        def is_refused_meanwhile() -> None:
            with pytest.raises(ConfigurationError, match="interrupted"):
                model(1.0).backward()
            late_for_step.set()

        for step in range(4):
            optimizer.zero_grad()
            model(-float(group.rank + 1)).backward()
            if group.rank == 0:
                with impatient(group):
                    errors += repeat_until_done(optimizer.step, is_refused_meanwhile)
            else:
                assert step != 1 or late_for_step.wait(20)
                optimizer.step()
        if group.rank == 0:
            with impatient(group):
                errors += repeat_until_done(optimizer.strategy_steps.finish, late_for_end.set)
        else:
            assert late_for_end.wait(20)
            optimizer.strategy_steps.finish()
        optimizer.strategy_steps.finish()  # once more does nothing
        with pytest.raises(ConfigurationError, match="finish"):
            optimizer.step()
        optimizer.close()
        assert set(flat(model).tolist()) == {float(flat(model)[0])}
        return float(flat(model)[0]), errors

    (first, errors), (second, _) = run_ranks(2, body)
    assert (first, second) == (12.0, 12.0)
    assert errors >= 2


def test_one_program_runs_with_any_setting_and_number_of_ranks() -> None:
    """Where no choice is left, what the program asks of the steps is there, too."""

    def body(sync: ServedStrategy, group: Group) -> tuple[torch.Tensor, int]:
        model = Counting()
        optimizer = served(group, model, sync)
        for _ in range(3):
            optimizer.zero_grad()
            model(-1.0).backward()
            optimizer.step()
        optimizer.strategy_steps.finish()
        assert sum(optimizer.strategy_steps.staleness.values()) == 3
        assert optimizer.strategy_steps.lead == 0
        optimizer.close()
        return flat(model)

    for world_size, sync in ((1, Async()), (1, Eager(mode="solo")), (2, Eager()), (2, StaleSynchronous(slack=0))):
        for parameters in run_ranks(world_size, functools.partial(body, sync)):
            torch.testing.assert_close(parameters, torch.full_like(parameters, 3.0), rtol=0, atol=0)


class Mixed(torch.nn.Module):
    """Parameters of three types, whose servers are different ranks, and one that is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.full((4, 5), 1 / 3, dtype=torch.float64).t())
        self.plain = torch.nn.Parameter(torch.full((19,), 1 / 3))
        self.short = torch.nn.Parameter(torch.full((18,), 0.5, dtype=torch.bfloat16))

    def forward(self) -> torch.Tensor:
        return (self.wide * torch.arange(4.0, dtype=torch.float64)).sum() + self.plain.sum() + self.short.float().sum()


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_of_several_types_arrive_with_all_their_digits(world_size: int) -> None:
    def body(group: Group) -> list[torch.Tensor]:
        model = Mixed()
        optimizer = served(group, model, Async(scale="none"), lr=0.25)
        for _ in range(2):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        optimizer.strategy_steps.finish()
        optimizer.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    wide = 1 / 3 - 0.5 * world_size * torch.arange(4.0, dtype=torch.float64).expand(5, 4)
    for found in run_ranks(world_size, body):
        torch.testing.assert_close(found[0], wide, rtol=1e-15, atol=1e-15)
        torch.testing.assert_close(found[1], torch.full((19,), 1 / 3 - 0.5 * world_size), rtol=1e-6, atol=0)
        torch.testing.assert_close(found[2], torch.full((18,), 0.5 - 0.5 * world_size, dtype=torch.bfloat16))


def test_parameters_without_gradients_stay_as_they_are() -> None:
    """A gradient of zeros would shrink them by the weight decay. Where one rank has a gradient, it counts."""

    def body(group: Group) -> list[float]:
        model = Counting()
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        optimizer = DistributedOptimizer(inner, model, group=group, sync=SoftSync(n=1))
        for _ in range(2):
            optimizer.zero_grad()
            (model.parts[0].sum() + (model.parts[1].sum() if group.rank else 0.0)).backward()
            optimizer.step()
        optimizer.strategy_steps.finish()
        optimizer.close()
        return [float(part.detach()[0]) for part in model.parts]

    for found in run_ranks(2, body):
        assert found[2:] == [1.0] * 3
        assert found[0] == pytest.approx(_adamw(4), abs=1e-12)
        assert found[1] == pytest.approx(_adamw(2), abs=1e-12)


def _adamw(steps: int) -> float:
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5)
    for _ in range(steps):
        parameter.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
    return parameter.item()


def test_servers_go_on_from_the_state_of_the_optimizer() -> None:
    def body(group: Group) -> float:
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        model(-1.0).backward()
        inner.step()  # a velocity of -1, at 1
        optimizer = DistributedOptimizer(inner, model, group=group, sync=Async())
        if group.rank == 0:
            optimizer.step()  # once more: a velocity of -1.5
        optimizer.strategy_steps.finish()
        optimizer.close()
        return float(flat(model)[0])

    assert run_ranks(2, body) == [2.5, 2.5]


@pytest.mark.parametrize(
    ("sync", "later"),
    [
        (Async(), Async()),
        (SoftSync(n=2), SoftSync(n=1)),
        (Quorum(n=2), Quorum(n=1)),  # with two ranks it is the synchronous optimizer, at first
        (Async(), Async(max_staleness=0)),
    ],
    ids=str,
)
def test_training_goes_on_from_the_state_after_the_end(sync: ServedStrategy, later: ServedStrategy) -> None:
    """On the same optimizer, and on a new one with other ranks: velocities of all servers are in the state."""

    def made(group: Group, which: ServedStrategy):
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        return model, inner, DistributedOptimizer(inner, model, group=group, sync=which)

    def one_step(model: torch.nn.Module, optimizer: DistributedOptimizer, rank: int) -> None:
        optimizer.zero_grad()
        model(-1.0).backward()
        if rank == 0 or optimizer.strategy_steps.is_synchronous:
            optimizer.step()
        optimizer.strategy_steps.finish()

    def body(group: Group):
        model, _, optimizer = made(group, sync)
        one_step(model, optimizer, group.rank)  # a velocity of -1, at 1
        state, parameters = optimizer.strategy_steps.state(), flat(model).clone()
        optimizer.strategy_steps.load_state(state)
        one_step(model, optimizer, group.rank)  # a velocity of -1.5, at 2.5
        optimizer.close()
        file = io.BytesIO()
        torch.save(state, file)
        return parameters, file.getvalue(), flat(model)

    def with_others(saved: tuple[torch.Tensor, bytes, torch.Tensor], group: Group) -> torch.Tensor:
        parameters, state, _ = saved
        model, _, optimizer = made(group, later)
        torch.nn.utils.vector_to_parameters(parameters.clone(), model.parameters())
        optimizer.strategy_steps.load_state(torch.load(io.BytesIO(state)))
        one_step(model, optimizer, group.rank)
        optimizer.close()
        return flat(model)

    first = run_ranks(2, body)
    for parameters, _, end in first:
        torch.testing.assert_close(parameters, torch.full_like(parameters, 1.0), rtol=0, atol=0)
        torch.testing.assert_close(end, torch.full_like(end, 2.5), rtol=0, atol=0)
    for end in run_ranks(3, functools.partial(with_others, first[0])):
        torch.testing.assert_close(end, torch.full_like(end, 2.5), rtol=0, atol=0)


def test_states_before_the_end_and_states_of_others_are_refused() -> None:
    def body(group: Group) -> None:
        model = Counting()
        optimizer = served(group, model, Async())
        steps = optimizer.strategy_steps
        with pytest.raises(ConfigurationError, match=r"after strategy_steps\.finish\(\)"):
            steps.state()
        other = {"strategy": "async", "kind": "SGD", "optimizer": {}}
        for state, says in (
            ({"strategy": "quorum"}, "not that of 'async' but of 'quorum'"),
            (None, "but of None"),
            ({**other, "kind": "Adam"}, "of Adam, and the optimizer is SGD"),
            ({**other, "optimizer": {5: {}}}, "entry 5, and there are 5 parameters"),
            ({**other, "optimizer": {0: {"momentum_buffer": torch.zeros(4)}}}, r"the shape \[4\]"),
        ):
            with pytest.raises(ConfigurationError, match=says):
                steps.load_state(state)
        model(-1.0).backward()
        optimizer.step()
        with pytest.raises(ConfigurationError, match="finish"):
            steps.load_state(other)
        steps.finish()
        with pytest.raises(ConfigurationError, match="load_state"):
            optimizer.step()
        optimizer.close()

    run_ranks(2, body)


class Wrapped(torch.optim.SGD):
    """An optimizer that cannot be made of its own settings."""

    def __init__(self, parameters, factor):
        super().__init__(parameters, lr=factor)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (torch.optim.LBFGS, "does not support LBFGS"),
        (torch.optim.SparseAdam, "does not support SparseAdam"),
        (lambda parameters: Wrapped(parameters, 0.1), "a second Wrapped"),
    ],
)
def test_optimizers_that_a_server_cannot_have_are_refused(make, says: str) -> None:
    def body(group: Group) -> None:
        model = Counting()
        with pytest.raises(ConfigurationError, match=says):
            DistributedOptimizer(make(list(model.parameters())), model, group=group, sync=Async())

    run_ranks(2, body)


def test_grace_ends_in_time() -> None:
    ended = threading.Event()

    def body(group: Group) -> list[float]:
        model = Counting()
        optimizer = served(group, model, Quorum(n=1, grace_s=0.01))
        seconds = []
        for _ in range(8 if group.rank == 0 else 0):
            optimizer.zero_grad()
            model(1.0).backward()
            begin = time.monotonic()
            optimizer.step()
            seconds.append(time.monotonic() - begin)
        if group.rank == 0:
            ended.set()
        assert ended.wait(20)
        optimizer.strategy_steps.finish()
        optimizer.close()
        return seconds

    seconds, _ = run_ranks(2, body)
    assert 0.01 <= min(seconds) < 0.04  # the server's thread looks at the time every 50 ms


@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_the_loss_of_a_rank_ends_the_steps_of_all(sync: ServedStrategy) -> None:
    def body(group: Group) -> str:
        model = Counting()
        optimizer = served(group, model, sync)
        for step in range(2000):
            if group.rank == 1 and step == 3:
                group.close()
                return "left"
            optimizer.zero_grad()
            model(1.0).backward()
            try:
                optimizer.step()
            except PeerLost:
                return "lost"
        return "nothing"

    begin = time.monotonic()
    assert run_ranks(3, body, engine=EngineConfig(timeout_s=10.0)) == ["lost", "left", "lost"]
    assert time.monotonic() - begin < 8.0
