"""``bench train``: from what the script wrote to figures, and what is refused."""

import pytest

from totalreduce.bench import train
from totalreduce.bench.records import from_document
from totalreduce.bench.train import ModelSamples, TrainPlan, contestants_of
from totalreduce.foundation.errors import ConfigurationError


def summarise(documents):
    return train.summarise(from_document(ModelSamples, documents))


def learnt(*seeds):
    """A contestant whose held-out losses after 10, 20, ... steps were these, by seed."""
    return {"runs": [{"evaluations": [look(10 * (i + 1), loss) for i, loss in enumerate(seed)]} for seed in seeds]}


def look(step, loss):
    return {"step": step, "loss": loss, "accuracy": 1 - loss / 4}


def timed(*step_s):
    return {"runs": [{"step_s": list(step_s)}]}


DENSE = learnt((3.0, 2.0, 1.0), (3.0, 2.0, 1.2))  # ends with 1.1 and a standard deviation of 0.1414


def test_losses_are_compared_in_standard_deviations_of_dense_training():
    dense, other = summarise({"learnt": {"dense": DENSE, "oktopk": learnt((3, 2, 1.3), (3, 2, 1.5))}, "timed": {}})
    assert (dense.contestant, dense.loss, dense.distance) == ("dense", pytest.approx(1.1), 0.0)
    assert dense.loss_sd == pytest.approx(0.02**0.5)
    assert other.distance == pytest.approx(0.3 / 0.02**0.5)
    assert (other.accuracy, other.accuracy_sd) == (pytest.approx(0.65), pytest.approx(0.05 / 2**0.5))


def test_the_loss_counts_from_when_it_is_reached():
    goal = 1.1 + 0.02**0.5
    never, once = (3.0, 2.5, 2.0), (3.0, 1.0, 1.5)  # is above the goal again: does not matter
    dense, other = summarise({"learnt": {"dense": DENSE, "oktopk": learnt(never, once)}, "timed": {}})
    assert (other.reached, other.steps) == (1, pytest.approx(10 + 10 * (3 - goal) / 2))
    first, second = 20 + 10 * (2 - goal) / 1.0, 20 + 10 * (2 - goal) / 0.8
    assert (dense.reached, dense.steps) == (2, pytest.approx((first + second) / 2))
    _, lost = summarise({"learnt": {"dense": DENSE, "oktopk": learnt(never, never)}, "timed": {}})
    assert (lost.reached, lost.steps) == (0, None)


def test_steps_become_seconds():
    # Dense: 4 s, plain steps of 2 s, then 1 s for every step, of which not all were run. Sparse: slow at first.
    rates = {"1gbit": {"dense": timed(4, *[2] * 11, 1, 1, 1), "oktopk": timed(*[0.5] * 10, *[0.1] * 20)}}
    at_once = learnt((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    dense, other = summarise({"learnt": {"dense": DENSE, "oktopk": at_once}, "timed": rates})
    assert dense.links["1gbit"].step_s == 1.0
    assert dense.links["1gbit"].seconds == pytest.approx(dense.steps + 14)
    assert (other.links["1gbit"].step_s, other.links["1gbit"].seconds) == (0.1, pytest.approx(5.0))
    assert other.links["1gbit"].gain == pytest.approx((dense.steps + 14) / 5.0)
    assert dense.links["1gbit"].gain == 1.0


def test_bytes_are_compared_with_those_of_a_ring():
    at_once = learnt((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    facts = {"world_size": 4, "num_parameters": 1000}
    sparse = {"runs": [{"step_s": [0.1] * 20, "sent_bytes": 2400}], **facts}
    rates = {"1gbit": {"dense": {**timed(*[1.0] * 20), **facts}, "strom": sparse}}
    dense, other = summarise({"learnt": {"dense": DENSE, "strom": at_once}, "timed": rates})
    assert (dense.saving, other.saving) == (None, 6000 * 20 / 2400)  # 3/4 of 4,000 bytes, twice in each step


def test_a_slow_rank_has_its_own_losses_and_its_own_time():
    """With it, dense training takes 3 s for a step and the other method 2 s, of which 1 s without a slow rank."""
    goal = 1.1 + 0.02**0.5
    dense_steps = (20 + 10 * (2 - goal) / 1.0 + 20 + 10 * (2 - goal) / 0.8) / 2
    learnt_dense = {"runs": [{**run, "step_s": [1.0] * 30} for run in DENSE["runs"]]}
    slowed = {
        "dense": timed(*[3.0] * 24),
        "async": {"runs": [{"step_s": [2.0] * 30, "evaluations": [look(10, 3.0), look(20, 1.0), look(30, 0.9)]}]},
    }
    learnt_by = {"dense": learnt_dense, "async": learnt_dense}
    dense, other = summarise({"learnt": learnt_by, "timed": {}, "slowed": slowed, "slow": 3.0})
    assert (dense.pace, other.pace) == (pytest.approx(1 / 3), 0.5)
    assert dense.slowed.seconds == pytest.approx(3.0 * dense_steps, abs=3.0)
    assert other.slowed.seconds == pytest.approx(2.0 * (10 + 10 * (3 - goal) / 2), abs=2.0)
    assert other.slowed.gain == pytest.approx(dense.slowed.seconds / other.slowed.seconds)
    with pytest.raises(ConfigurationError, match=r"--slow is from 1 to 100, not 0\.5"):
        TrainPlan(slow=0.5)


def test_who_takes_part():
    assert contestants_of("oktopk,topka", "fp16,dense,powersgd") == ["dense", "fp16", "powersgd", "oktopk", "topka"]
    assert contestants_of("shared", "fp16") == ["dense", "fp16", "shared"]


@pytest.mark.parametrize(("methods", "against"), [("nonesuch", "dense"), ("", "dense"), ("oktopk", "horovod")])
def test_unknown_contestants_are_refused(methods, against):
    with pytest.raises(ConfigurationError, match="takes"):
        contestants_of(methods, against)


@pytest.mark.parametrize(("steps", "seeds"), [(13, 2), (100, 1)])
def test_plans_that_say_nothing_are_refused(steps, seeds):
    with pytest.raises(ConfigurationError, match="at least 2 --seeds and 14 --steps"):
        TrainPlan(steps=steps, seeds=seeds)
