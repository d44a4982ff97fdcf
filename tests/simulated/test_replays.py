"""Loops of ``tr.replayed`` under random faults: every result and every state is that of the undisturbed run."""

import dataclasses
import itertools

import pytest
from replays import KINDS, ReplayedSimulation, ReplayPlan, summary

from totalreduce.foundation.types import OpKind
from totalreduce.recovery.membership import Policy


def policy_of(size: int) -> Policy:
    return Policy("replace", size, deadline_s=1e9)


def plan_of(seed: int) -> ReplayPlan:
    size = (2, 3, 4, 5, 8)[seed % 5]
    # With 8 ranks and 2 copies of results, a rank keeps every fourth one.
    copies = {"result_copies": 2, "local_replicas": 1} if seed % 2 else {}
    return ReplayPlan(policy_of(size), target=2 + seed % 2, faults=seed % 6, **copies)


def run(plan: ReplayPlan, seed: int):
    job = ReplayedSimulation(plan, seed)
    job.run()
    return summary(job)


def test_every_seed_has_the_results_of_an_undisturbed_run() -> None:
    restarted = [run(plan_of(seed), seed).restarted for seed in range(100)]
    assert sum(restarted) > 80


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(100, 5100, 500))
def test_many_seeds_have_the_results_of_an_undisturbed_run(begin: int) -> None:
    for seed in range(begin, begin + 500):
        run(plan_of(seed), seed)


def test_a_seed_has_one_course() -> None:
    for seed in range(5):
        digests = {ReplayedSimulation(plan_of(seed), seed).run() for _ in range(2)}
        assert len(digests) == 1


def crash_everywhere(size: int, kinds: tuple[OpKind, ...]) -> int:
    """Kill each seat at each turn, until the job has ended before; return the number of jobs with a loss."""
    num_losses = turn = 0
    while True:
        plans = [ReplayPlan(policy_of(size), target=2, kinds=kinds, crash_at=((turn, seat),)) for seat in range(size)]
        restarted = sum(run(plan, size).restarted for plan in plans)
        if not restarted:
            break
        num_losses, turn = num_losses + restarted, turn + 1
    return num_losses


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
def test_a_crash_at_every_turn_is_survived(kind: OpKind) -> None:
    assert crash_everywhere(2, (kind, kind)) > 50


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
def test_a_crash_at_every_turn_of_more_ranks_is_survived(size: int, kind: OpKind) -> None:
    assert crash_everywhere(size, (kind, kind)) > 50 * size


def test_two_crashes_at_once_are_survived_at_every_fifth_turn() -> None:
    """Two of four ranks, neighbours in the ring of copies or not."""
    for turn, pair in itertools.product(range(20, 300, 35), itertools.combinations(range(4), 2)):
        plan = ReplayPlan(policy_of(4), target=2, crash_at=tuple((turn, seat) for seat in pair))
        assert run(plan, turn).restarted == 2 or turn > 200


@pytest.mark.slow
def test_every_pair_of_crashes_of_three_ranks_is_survived() -> None:
    crashes = list(itertools.product(range(0, 220, 4), range(3)))
    for pair in itertools.combinations(crashes, 2):
        run(ReplayPlan(policy_of(3), target=2, kinds=KINDS[:2], crash_at=pair), 3)


@pytest.mark.parametrize("position", range(3))
def test_a_process_that_makes_another_call_ends_the_job_everywhere(position: int) -> None:
    num_failed = 0
    for seed in range(20):
        plan = dataclasses.replace(plan_of(seed), deviates=(1, position), faults=4)
        job = ReplayedSimulation(plan, seed)
        job.run()
        num_failed += summary(job).failed > 0
    assert num_failed >= 4
