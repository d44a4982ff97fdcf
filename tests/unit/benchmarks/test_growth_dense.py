"""``bench growth --dense`` counts what the schedules send; a simulated network card sends one message at a time."""

import gc

import pytest

from totalreduce.foundation.types import OpKind
from totalreduce.schedules.select import candidates
from totalreduce.schedules.spec import LinkModel
from totalreduce.testing.simulation import SimulatedCluster
from totalreduce_benchmarks.growth_dense import simulate_dense

#: Messages of the average rank and of the busiest one, for a tensor of one lane.
MESSAGES = {
    "ring": lambda ranks: (2 * (ranks - 1), 2 * (ranks - 1)),
    "star": lambda ranks: (2 * (ranks - 1) / ranks, ranks - 1),
    "halving_doubling": lambda ranks: (2 * (ranks.bit_length() - 1),) * 2,
}


def simulate(name, ranks, size=4096):
    return simulate_dense(name, ranks, size, candidates(OpKind.ALLREDUCE, size, range(ranks), LinkModel()))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_those_of_the_schedule(name, ranks):
    figure = simulate(name, ranks)
    assert (figure.messages, figure.messages_max) == MESSAGES[name](ranks)
    assert 0 < figure.cpu_s <= figure.cpu_s_max < 1


def test_the_centre_of_a_star_sends_one_message_after_the_other():
    figure = simulate("star", 9, 40_000)
    message_s = (40_000 + 64) / LinkModel().bytes_per_s
    assert figure.simulated_s > 9 * message_s  # the others' messages to the centre, at once; then eight from the centre
    assert figure.simulated_s < 10.5 * message_s


@pytest.mark.slow
def test_exactly_one_schedule_is_chosen():
    figures = [simulate(name, 4) for name in ("ring", "star", "tree", "halving_doubling")]
    assert sum(figure.chosen for figure in figures) == 1
    assert min(figures, key=lambda figure: figure.estimated_s).chosen


def test_no_rank_pays_for_a_collection_of_garbage(monkeypatch):
    enabled, original = [], SimulatedCluster.run
    monkeypatch.setattr(SimulatedCluster, "run", lambda cluster: (enabled.append(gc.isenabled()), original(cluster)))
    simulate("ring", 3)
    assert enabled == [False, False]
    assert gc.isenabled()
