"""Asynchronous gossip in virtual time: the mean is kept, nobody waits, and ranks come together."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from totalreduce.foundation.errors import ProtocolError
from totalreduce.strategies.async_gossip import AsyncGossip, GossipNode

SIZE = 5


class Simulation:
    """Ranks with steps of random lengths, and messages with random delays.

    Attributes:
        steps: By rank: the steps that it has ended.
    """

    def __init__(self, seed: int, world_size: int, dtype: type = np.float64, slow: int | None = None) -> None:
        self._random, self._world_size, self._slow = Random(seed), world_size, slow
        start = np.random.default_rng(seed).standard_normal((world_size, SIZE)).astype(dtype)
        self.values = list(start)
        settings = AsyncGossip(seed=seed, period=1 + seed % 3)
        self.nodes = [GossipNode(settings, rank, world_size, start[rank]) for rank in range(world_size)]
        self.steps = [0] * world_size
        #: Answers that are under way, by their number.
        self._answers: dict[int, np.ndarray] = {}
        self.expected = start.astype(np.float64).sum(axis=0)
        self.scale, self.tolerance = 1e-4, 1e-6  # of local updates; of the sum
        self._numbers, self._events = itertools.count(), []
        for rank in range(world_size):
            self._later(self._duration(rank), lambda now, rank=rank: self._step(rank, now))

    def _duration(self, rank: int) -> float:
        return self._random.uniform(0.8, 1.2) * (30.0 if rank == self._slow else 1.0)

    def _later(self, at: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def run(self, until: float) -> None:
        while self._events[0][0] < until:
            now, _, event = heapq.heappop(self._events)
            event(now)
            self.check()

    def check(self) -> None:
        """The sum over all ranks, with what is not in their parameters yet, has changed by local updates alone."""
        total = sum(v.astype(np.float64) + n._pending for v, n in zip(self.values, self.nodes, strict=True))
        total = total + sum(self._answers.values(), np.zeros(SIZE))
        assert np.abs(total - self.expected).max() < self.tolerance

    def _step(self, rank: int, now: float) -> None:
        update = (self.scale * np.sin(np.arange(SIZE) + rank + now)).astype(self.values[rank].dtype)
        self.values[rank] = self.values[rank] + update
        self.expected = self.expected + update.astype(np.float64)
        self.steps[rank] += 1
        partner = self.nodes[rank].stepped(self.values[rank])
        if partner is not None:
            sent = self.values[rank].copy()
            delay = self._random.expovariate(1.0)
            self._later(now + delay, lambda now: self._ask(rank, partner, sent, now))
        self._later(now + self._duration(rank), lambda now: self._step(rank, now))

    def _ask(self, rank: int, partner: int, sent: np.ndarray, now: float) -> None:
        number, change = next(self._numbers), self.nodes[partner].asked(sent)
        self._answers[number] = change
        delay = self._random.expovariate(1.0)
        self._later(now + delay, lambda _now: self.nodes[rank].answered(self._answers.pop(number)))

    def spread(self) -> float:
        return float(np.ptp(np.stack(self.values), axis=0).max())


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 120), marks=pytest.mark.slow)], ids=len)
def test_the_mean_is_kept_and_nobody_waits(seeds: range) -> None:
    """In every second run, one rank is 30 times slower than the others."""
    for seed in seeds:
        _check_run(seed)


def _check_run(seed: int) -> None:
    world_size = 2 + seed % 7
    slow = seed % world_size if seed % 2 else None
    simulation = Simulation(seed, world_size, slow=slow)
    before = simulation.spread()
    simulation.run(100.0)
    for rank, steps in enumerate(simulation.steps):
        if rank == slow:
            assert 2 <= steps <= 4
        else:
            assert 100 / 1.2 - 1 <= steps <= 100 / 0.8  # its own pace
    if slow is None:
        assert simulation.spread() < 0.05 * before


def test_the_mean_is_kept_in_float32() -> None:
    simulation = Simulation(4, 5, np.float32)
    simulation.tolerance = 1e-5
    simulation.run(100.0)
    assert simulation.spread() < 0.01


def test_the_same_seed_chooses_the_same_partners() -> None:
    runs = []
    for _ in range(2):
        simulation = Simulation(7, 6)
        simulation.run(50.0)
        runs.append(np.stack(simulation.values))
    np.testing.assert_array_equal(*runs)


def test_an_active_rank_is_not_asked() -> None:
    active, passive = (GossipNode(AsyncGossip(), rank, 2, np.zeros(3)) for rank in (0, 1))
    with pytest.raises(ProtocolError, match="active"):
        active.asked(np.ones(3))
    with pytest.raises(ProtocolError, match="sends 4 parameters"):
        passive.asked(np.ones(4))
    assert passive.stepped(np.zeros(3)) is None
    assert (active.stepped(np.zeros(3)), active.stepped(np.zeros(3))) == (1, None)  # one exchange at a time


def test_a_passive_rank_counts_what_it_has_agreed_to_since_its_step() -> None:
    """Two active ranks ask within one step of the passive one: the second average is that with the first one's."""
    passive, values = GossipNode(AsyncGossip(), 1, 3, np.zeros(2)), np.zeros(2)
    passive.stepped(values)
    assert passive.asked(np.full(2, 8.0)).tolist() == [-4.0, -4.0]
    assert passive.asked(np.full(2, 8.0)).tolist() == [-2.0, -2.0]
    passive.stepped(values)
    assert values.tolist() == [6.0, 6.0]
    assert passive.asked(np.full(2, 8.0)).tolist() == [-1.0, -1.0]


def test_a_passive_rank_has_no_part_in_averages_before_its_first_step() -> None:
    """The program may load other parameters than those with which the node was made."""
    passive, values = GossipNode(AsyncGossip(), 1, 2, np.zeros(2)), np.full(2, 10.0)
    assert passive.asked(np.full(2, 8.0)).tolist() == [0.0, 0.0]
    passive.stepped(values)
    assert values.tolist() == [10.0, 10.0]
    assert passive.asked(np.full(2, 8.0)).tolist() == [1.0, 1.0]
    passive.stepped(values)
    assert values.tolist() == [9.0, 9.0]
