"""``join()`` with parameter averaging: ranks that have no more data take part in the averages of the others."""

from __future__ import annotations

import threading

import pytest
import torch
from optimizer_cases import all_equal, flat, impatient, repeat_until_done

import totalreduce as tr
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError
from totalreduce.groups.group import Group
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.testing import run_ranks

PERIOD = 3


class Point(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.point = torch.nn.Parameter(torch.zeros(5, dtype=dtype))


def wrap(group: Group, sync: tr.LocalSGD, dtype: torch.dtype = torch.float64) -> tuple[Point, DistributedOptimizer]:
    model = Point(dtype)
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    return model, DistributedOptimizer(inner, model, group=group, sync=sync)


def number_of_steps(rank: int, epoch: int = 0) -> int:
    return [4, 11, 0, 6][(rank + epoch) % 4]


def step(model: Point, optimizer: DistributedOptimizer, rank: int) -> None:
    model.point.grad = torch.full_like(model.point, -(10.0**rank)) - 0.1 * model.point.detach()
    optimizer.step()


def reference(world_size: int, sync: tr.LocalSGD, epochs: int) -> list[float]:
    """What the ranks compute, in one process: an element of the parameters after each epoch."""
    values, moments, found, samples = [0.0] * world_size, [0.0] * world_size, [], sync.weights == "samples"
    for epoch in range(epochs):
        left = [number_of_steps(rank, epoch) for rank in range(world_size)]
        # The last average is that of the rank which joins last: with what is left, or of nothing.
        for _ in range(max(left) // PERIOD + 1):
            weights = [0.0] * world_size
            for rank in range(world_size):
                for _ in range(min(PERIOD, left[rank])):
                    moments[rank] = 0.5 * moments[rank] - 10.0**rank - 0.1 * values[rank]
                    values[rank] -= moments[rank]
                    weights[rank] += rank + 1 if samples else 1
                    left[rank] -= 1
            if sum(weights):
                mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
                values = [mean] * world_size
                if sync.optimizer_state == "average":
                    mean = sum(w * m for w, m in zip(weights, moments, strict=True)) / sum(weights)
                    moments = [mean] * world_size
        found.append(values[0])
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "sync", [tr.LocalSGD(period=PERIOD), tr.LocalSGD(period=PERIOD, weights="samples")], ids=["equal", "samples"]
)
def test_ranks_count_by_what_they_have_done(world_size: int, sync: tr.LocalSGD) -> None:
    """Two epochs; in each of them the ranks have another number of batches."""

    def body(group: Group) -> tuple[list[torch.Tensor], list[int]]:
        model, optimizer = wrap(group, sync)
        ends, lasts = [], []
        for epoch in range(2):
            for _ in range(number_of_steps(group.rank, epoch)):
                optimizer.strategy_steps.count_samples(group.rank + 1)
                step(model, optimizer, group.rank)
            lasts.append(optimizer.join())
            ends.append(flat(model))
        optimizer.close()
        return ends, lasts

    results = run_ranks(world_size, body)
    expected = reference(world_size, sync, 2)
    for ends, lasts in results:
        for epoch, end in enumerate(ends):
            torch.testing.assert_close(end, torch.full_like(end, expected[epoch]), rtol=1e-12, atol=1e-9)
            assert all_equal([end, results[0][0][epoch]])
        assert lasts[0] == max(range(world_size), key=number_of_steps)


def test_the_state_of_the_optimizer_is_averaged_likewise() -> None:
    sync = tr.LocalSGD(period=PERIOD, optimizer_state="average")

    def body(group: Group) -> torch.Tensor:
        model, optimizer = wrap(group, sync)
        for _ in range(2 + group.rank):
            step(model, optimizer, group.rank)
        optimizer.join()
        optimizer.close()
        return torch.cat([flat(model), optimizer.state[model.point]["momentum_buffer"]])

    assert all_equal(run_ranks(3, body))


def test_what_codes_do_not_express_comes_with_later_averages() -> None:
    """The last rank goes on for long without a change of its parameters, until nothing of the others is left."""

    def body(group: Group, codec: tr.Int8 | None) -> torch.Tensor:
        model, optimizer = wrap(group, tr.LocalSGD(period=2, codec=codec), torch.float32)
        for number in range(40 if group.rank == 1 else 2):
            model.point.grad = torch.arange(5.0) * (group.rank - 3) if number < 2 else torch.zeros(5)
            for state in optimizer.state.values():
                state.clear()  # no momentum
            optimizer.step()
        optimizer.join()
        optimizer.close()
        return flat(model)

    plain = run_ranks(3, lambda group: body(group, None))
    coded = run_ranks(3, lambda group: body(group, tr.Int8()))
    assert all_equal(plain)
    assert all_equal(coded)
    torch.testing.assert_close(coded[0], plain[0], rtol=0, atol=1e-3)


def test_join_can_be_repeated_after_a_time_out() -> None:
    late = threading.Event()

    def body(group: Group) -> torch.Tensor:
        model, optimizer = wrap(group, tr.LocalSGD(period=PERIOD))
        if group.rank == 0:
            with pytest.raises(DeadlineExceededError), impatient(group):
                optimizer.join()
            late.set()
            model.point.grad = torch.ones_like(model.point)
            with pytest.raises(ConfigurationError, match="repeat join"):
                optimizer.step()
        else:
            assert late.wait(20)
            for _ in range(4):
                step(model, optimizer, group.rank)
        repeat_until_done(optimizer.join)
        optimizer.close()
        return flat(model)

    results = run_ranks(2, body)
    assert all_equal(results)
    assert results[0][0] > 10


@pytest.mark.parametrize(
    "sync", [tr.LocalSGD(period=1), tr.PostLocalSGD(start=1), tr.DiLoCo(period=4), tr.Gossip()], ids=str
)
def test_other_strategies_refuse_join(sync: object) -> None:
    def body(group: Group) -> None:
        _, optimizer = wrap(group, sync)
        with pytest.raises(ConfigurationError, match="give all ranks the same number of steps"):
            optimizer.join()
        optimizer.close()

    run_ranks(2, body)
