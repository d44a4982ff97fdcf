"""Asynchronous gossip on real ranks: the mean, paces, and the end."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from optimizer_cases import Net, all_equal, batches, flat, impatient, loss_of, repeat_until_done, shard

import totalreduce as tr
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, PeerLost, TotalReduceError
from totalreduce.groups.group import Group
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.testing import run_ranks


def gossip(group: Group, model: torch.nn.Module, lr: float = 0.1) -> DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    return DistributedOptimizer(inner, model, group=group, sync=tr.AsyncGossip())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_mean_of_all_ranks_is_kept_while_they_take_different_numbers_of_steps(world_size: int) -> None:
    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor, int]:
        torch.manual_seed(group.rank)
        model = Net()
        before, optimizer = flat(model), gossip(group, model, 1.0)
        pushed = torch.zeros_like(before)
        for _ in range(2):
            for _ in range(10 + 5 * group.rank):
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                pushed += torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
                optimizer.step()
                time.sleep(0.001)
            optimizer.strategy_steps.finish()
        optimizer.close()
        return flat(model) - before, pushed, optimizer.strategy_steps.exchanges

    results = run_ranks(world_size, body)
    assert all_equal([moved for moved, *_ in results])
    total = sum(pushed for _, pushed, _ in results)
    torch.testing.assert_close(results[0][0], -total / world_size, rtol=0, atol=1e-6)
    assert all(exchanges > 0 for *_, exchanges in results) or world_size == 1


def test_a_slow_rank_does_not_hold_the_others_up() -> None:
    """The others end all of their steps before the first one of the slow rank."""
    ended = [threading.Event() for _ in range(3)]

    def body(group: Group) -> int:
        model = Net()
        optimizer = gossip(group, model)
        for _ in range(3 if group.rank == 1 else 10):
            if group.rank == 1:
                assert all(event.wait(20) for event in (ended[0], ended[2]))
            optimizer.step()
        ended[group.rank].set()
        optimizer.strategy_steps.finish()
        optimizer.close()
        return optimizer.strategy_steps.exchanges

    first, _, last = run_ranks(3, body)
    assert min(first, last) > 0  # the slow rank, which alone is asked, has answered in its steps


def test_training_comes_to_a_small_loss() -> None:
    def body(group: Group) -> tuple[float, float]:
        model = Net()
        optimizer = gossip(group, model)
        [batch] = batches(1)
        before = float(loss_of(model, batch).detach())
        for _ in range(60):
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
        optimizer.strategy_steps.finish()
        optimizer.close()
        return before, float(loss_of(model, batch).detach())

    for before, after in run_ranks(4, body):
        assert after < 0.5 * before


def test_the_end_can_be_waited_for_again() -> None:
    late = threading.Event()

    def body(group: Group) -> None:
        optimizer = gossip(group, Net())
        optimizer.step()
        if group.rank == 1:
            assert late.wait(20)
        else:
            with pytest.raises(DeadlineExceededError), impatient(group):
                optimizer.strategy_steps.finish()
            late.set()
        repeat_until_done(optimizer.strategy_steps.finish)
        optimizer.close()

    run_ranks(2, body)


def test_a_lost_rank_is_an_error_of_the_others() -> None:
    def body(group: Group) -> str:
        optimizer = gossip(group, Net())
        group.barrier()
        if group.rank == 1:
            group.close()
            return ""

        def train() -> None:
            for _ in range(2000):
                optimizer.step()
                time.sleep(0.001)

        with pytest.raises(PeerLost) as raised:
            train()
        return str(raised.value)

    assert "rank 1" in run_ranks(2, body)[0]


def test_an_error_of_the_thread_is_one_of_the_end() -> None:
    def body(group: Group) -> None:
        optimizer = gossip(group, Net())
        steps = optimizer.strategy_steps
        if group.rank == 0:
            steps._group.send(torch.zeros(8, dtype=torch.uint8), dst=1, tag=0).wait()  # no parameters
        else:
            steps._thread.join(5.0)
            for _ in range(2):
                with pytest.raises(TotalReduceError, match=r"rank 0 submitted send_recv of uint8\[8\]"):
                    steps.finish()
        group.barrier()

    run_ranks(2, body)


def test_join_and_recovery_are_refused() -> None:
    def body(group: Group) -> None:
        optimizer = gossip(group, Net())
        with pytest.raises(ConfigurationError, match="join"):
            optimizer.join()
        optimizer.close()

    run_ranks(2, body)
    assert "tr.Gossip" in tr.AsyncGossip().recovery_obstacle()
