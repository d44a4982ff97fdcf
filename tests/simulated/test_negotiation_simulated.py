"""Many negotiators in virtual time: what an agreement costs, and that the ranks never differ."""

import random
import time

import pytest
from negotiations import Arrangement, Training, make_workload

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.coordination.messages import Kind
from totalreduce.coordination.requests import Request, Response
from totalreduce.foundation.types import OpKind

CYCLES_PER_SEED = 10_000
SEEDS_PER_CHUNK = 5


def rounds(world_size: int) -> int:
    """ceil(log2), without the formula of the code."""
    count = 0
    while 2**count < world_size:
        count += 1
    return count


def step(world_size: int, seed: int, arrangement: Arrangement) -> tuple[float, list[Response]]:
    """All ranks submit 50 tensors at once, each in its own order, and wait; returns how long, and what came of it."""
    begin = arrangement.now
    decided: list[list[Response]] = [[] for _ in range(world_size)]
    ended: list[float] = [0.0] * world_size

    def decide(rank: int, responses: list[Response]) -> None:
        decided[rank] += responses
        ended[rank] = arrangement.now

    arrangement.decided = decide
    for rank in range(world_size):
        requests = [
            Request(f"w{index}", OpKind.ALLREDUCE, "float32", 4, (index, 3), reduction="avg") for index in range(50)
        ]
        random.Random(1000 * seed + rank).shuffle(requests)
        arrangement.act(rank, lambda negotiator, now, requests=requests: negotiator.submit(requests, now))
        arrangement.act(rank, lambda negotiator, now: negotiator.hurry(now))
    arrangement.run()
    assert all(responses == decided[0] for responses in decided)
    assert len({response.name for response in decided[0]}) == len(decided[0]) == 50
    assert all(response.error is None for response in decided[0])
    return max(ended) - begin, decided[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, pytest.param(256, marks=pytest.mark.slow)])
def test_what_an_agreement_costs(world_size: int) -> None:
    config = CoordinationConfig(cycle_s=0.0, stall_warning_s=0.0, stall_abort_s=0.0)
    arrangement = Arrangement(world_size, config, lambda: 1.0)
    slow_s, first = step(world_size, 0, arrangement)
    offsets = [stride * factor for stride in (1, 4, 16, 64) for factor in (1, 2, 3) if stride * factor < world_size]
    levels, vote_rounds = rounds(world_size), sum(stride < world_size for stride in (1, 4, 16, 64))
    assert vote_rounds + levels <= slow_s <= vote_rounds + 2 * levels, "a vote, the way up the tree, the way down"
    for seed in (1, 2):
        before = [dict(counts) for counts in arrangement.counts]
        cycles = arrangement.num_cycles
        fast_s, again = step(world_size, seed, arrangement)
        assert fast_s == vote_rounds
        assert [response.name for response in again] == [response.name for response in first]
        assert arrangement.num_cycles == cycles + 1
        for counts, then in zip(arrangement.counts, before, strict=True):
            sent = {kind: counts[kind] - then[kind] for kind in Kind}
            assert sent == dict.fromkeys(Kind, 0) | {Kind.VOTE: len(offsets)}


def run(seed: int, num_cycles: int) -> Training:
    training = Training(make_workload(seed), num_cycles)
    training.run()
    assert training.arrangement.num_cycles >= num_cycles
    return training


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(block, marks=pytest.mark.slow) for block in (2, 3))])
def test_ranks_never_differ(block: int) -> None:
    for seed in range(5 * block, 5 * (block + 1)):
        run(seed, 300)


def test_the_workloads_are_worth_it() -> None:
    """Everything that could make the ranks differ occurs."""
    trainings = [run(seed, 150) for seed in range(100, 112)]
    counters = [training.arrangement.ranks[0].counters for training in trainings]
    assert sum(training.errors > 0 for training in trainings) > 6
    assert sum(training.lent > 0 for training in trainings) > 9
    assert sum(counted.hits > 50 for counted in counters) > 6
    assert sum(counted.invalid > 3 for counted in counters) > 6
    assert sum(counted.misses > 50 for counted in counters) > 9
    assert len({training.workload.world_size for training in trainings}) == 4
    assert sum(0 < training.workload.capacity < training.workload.num_names for training in trainings) > 4


def test_the_same_seed_gives_the_same_events() -> None:
    first, second = (run(7, 200) for _ in range(2))
    assert first.arrangement.now == second.arrangement.now
    assert first.arrangement.counts == second.arrangement.counts


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(100 // SEEDS_PER_CHUNK))
def test_a_hundred_seeds_of_ten_thousand_cycles(chunk: int) -> None:
    begin = time.perf_counter()
    for seed in range(SEEDS_PER_CHUNK * chunk, SEEDS_PER_CHUNK * (chunk + 1)):
        run(1000 + seed, CYCLES_PER_SEED)
    print(f"chunk {chunk}: {SEEDS_PER_CHUNK} seeds of {CYCLES_PER_SEED} cycles: {time.perf_counter() - begin:.1f} s")
