"""``bench train`` and ``bench strategies``: from what the script wrote to figures, and what is refused."""

import inspect
from dataclasses import fields, replace
from pathlib import Path

import pytest

from totalreduce.bench.launching import Setting
from totalreduce.bench.records import from_document
from totalreduce.bench.report import Table
from totalreduce.foundation.errors import ConfigurationError
from totalreduce_benchmarks import training
from totalreduce_benchmarks.strategies import bench_strategies
from totalreduce_benchmarks.training import CaseSamples, TrainPlan, contestants_of, parse_link


def summarise(documents):
    return training.summarise(from_document(CaseSamples, documents))


def learnt(*seeds, **facts):
    """A contestant whose held-out losses after 10, 20, ... steps were these, by seed."""
    return {
        "runs": [{"evaluations": [look(10 * (i + 1), loss) for i, loss in enumerate(seed)]} for seed in seeds],
        **facts,
    }


def look(step, loss):
    return {"step": step, "loss": loss, "accuracy": 1 - loss / 4}


def timed(*step_s):
    return {"runs": [{"step_s": list(step_s)}]}


def turns(step_s, alone_s, sent_bytes=0.0):
    return {"runs": [{"step_s": step_s, "alone_s": alone_s, "sent_bytes": sent_bytes}]}


DENSE = learnt((3.0, 2.0, 1.0), (3.0, 2.0, 1.2))  # ends with 1.1 and a standard deviation of 0.1414
GOAL = 1.1 + 0.02**0.5
#: When dense training reached the goal, mean over seeds.
DENSE_STEPS = (20 + 10 * (2 - GOAL) / 1.0 + 20 + 10 * (2 - GOAL) / 0.8) / 2
AT_ONCE = learnt((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))


def test_losses_are_compared_in_standard_deviations_of_dense_training():
    dense, other = summarise({"learnt": {"dense": DENSE, "oktopk": learnt((3, 2, 1.3), (3, 2, 1.5))}})
    assert (dense.contestant, dense.loss, dense.distance) == ("dense", pytest.approx(1.1), 0.0)
    assert dense.loss_sd == pytest.approx(0.02**0.5)
    assert other.distance == pytest.approx(0.3 / 0.02**0.5)
    assert (other.accuracy, other.accuracy_sd) == (pytest.approx(0.65), pytest.approx(0.05 / 2**0.5))


def test_the_loss_counts_from_when_it_is_reached():
    never, once = (3.0, 2.5, 2.0), (3.0, 1.0, 1.5)  # is above the goal again: does not matter
    dense, other = summarise({"learnt": {"dense": DENSE, "oktopk": learnt(never, once)}})
    assert (other.reached, other.steps) == (1, pytest.approx(10 + 10 * (3 - GOAL) / 2))
    assert (dense.reached, dense.steps) == (2, pytest.approx(DENSE_STEPS))
    _, lost = summarise({"learnt": {"dense": DENSE, "oktopk": learnt(never, never)}})
    assert (lost.reached, lost.steps) == (0, None)


def test_steps_of_a_whole_training_become_seconds():
    # Dense: 4 s, plain steps of 2 s, then 1 s for every step, of which not all were run. Sparse: slow at first.
    rates = {"1gbit": {"dense": timed(4, *[2] * 11, 1, 1, 1), "oktopk": timed(*[0.5] * 10, *[0.1] * 20)}}
    dense, other = summarise({"learnt": {"dense": DENSE, "oktopk": AT_ONCE}, "timed": rates})
    assert dense.links["1gbit"].step_s == 1.0
    assert dense.links["1gbit"].seconds == pytest.approx(dense.steps + 14)
    assert (other.links["1gbit"].step_s, other.links["1gbit"].seconds) == (0.1, pytest.approx(5.0))
    assert other.links["1gbit"].gain == pytest.approx((dense.steps + 14) / 5.0)
    assert dense.links["1gbit"].gain == 1.0


def test_a_training_with_a_period_has_the_mean_of_its_periods():
    """The first twelve steps do not count; then an exchange takes 4 s in every fourth one."""
    run = training.Run(step_s=[9.0] * 12 + [1, 1, 1, 5, 1, 1, 1, 9, 1, 1, 1, 5], block=4)
    assert (run.typical_s, run.over_alone) == (2.0, None)


def test_turns_are_compared_with_steps_without_communication():
    others = turns([2.0, 3.0, 2.0], [1.0, 2.5, 0.5], sent_bytes=100.0)
    links = {"10mbit": {"dense": turns([4.0, 4.0], [1.0, 1.0], 800.0), "diloco:period=4": others}}
    dense, other = summarise({"learnt": {"dense": DENSE, "diloco:period=4": AT_ONCE}, "timed": links})
    link = other.links["10mbit"]
    assert (link.step_s, link.over_alone) == (2.0, 2.0)
    assert (link.seconds, link.gain) == (pytest.approx(20.0), pytest.approx(DENSE_STEPS * 4 / 20))
    assert dense.links["10mbit"].over_alone == 4.0


@pytest.mark.parametrize("name", ["post-local", "post_local_sgd:period=2"])
def test_the_first_steps_of_post_local_are_dense_ones(name):
    own = {**AT_ONCE, "steps": 40, "local_after": 0.2}  # the goal is reached in step 10, after 8 dense steps
    links = {"10mbit": {"dense": turns([4.0, 4.0], [1, 1], 800.0), name: turns([1, 2], [1, 1], 100.0)}}
    _, other = summarise({"learnt": {"dense": {**DENSE, "steps": 40}, name: own}, "timed": links})
    assert other.links["10mbit"].seconds == pytest.approx(8 * 4 + 2 * 1.5)
    assert other.links["10mbit"].sent_bytes == pytest.approx((8 * 800 + 32 * 100) / 40)


def test_a_slow_rank_has_its_own_losses_and_its_own_time():
    """With it, dense training takes 3 s for a step and async 2 s; without it both take 1 s."""
    slowed = {
        "dense": turns([3.0] * 4, [1.0] * 4),
        "async": {"runs": [{"step_s": [2.0] * 30, "evaluations": [look(10, 3.0), look(20, 1.0), look(30, 0.9)]}]},
    }
    even = {name: turns([1.0] * 4, [1.0] * 4) for name in slowed}
    samples = {"learnt": {"dense": DENSE, "async": AT_ONCE}, "even": even, "slowed": slowed, "slow": 3.0}
    dense, other = (figure.slowed for figure in summarise(samples))
    assert (dense.pace, other.pace) == (pytest.approx(1 / 3), 0.5)
    assert (dense.seconds, dense.share) == (pytest.approx(3.0 * DENSE_STEPS), 1.0)
    assert other.seconds == pytest.approx(2.0 * (10 + 10 * (3 - GOAL) / 2), abs=2.0)
    assert (other.loss, other.reached) == (0.9, 1)
    assert other.share == pytest.approx(other.seconds / dense.seconds)


def test_who_takes_part():
    assert contestants_of("oktopk,topka", "fp16,dense,powersgd") == ["dense", "fp16", "powersgd", "oktopk", "topka"]
    assert contestants_of("shared, diloco:period=4", "fp16") == ["dense", "fp16", "shared", "diloco:period=4"]
    assert contestants_of("diloco:period=4,diloco:period=8", "dense")[1:] == ["diloco:period=4", "diloco:period=8"]


@pytest.mark.parametrize(
    ("methods", "against"),
    [("nonesuch", "dense"), ("", "dense"), ("oktopk", "horovod"), ("nonesuch:period=4", "dense")],
)
def test_unknown_contestants_are_refused(methods, against):
    with pytest.raises(ConfigurationError, match="takes"):
        contestants_of(methods, against)


def test_links_have_a_rate_and_perhaps_a_delay():
    assert [parse_link(text) for text in ("1gbit", "10mbit+40ms")] == [("1gbit", 0.0), ("10mbit", 40.0)]
    for wrong in ("10mbit+", "10mbit+40", "10mbit+xms", "10mbit+-1ms", "fast+40ms"):
        with pytest.raises(ConfigurationError):
            parse_link(wrong)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"steps": 13}, "at least 2 --seeds and 14 --steps"),
        ({"seeds": 1}, "at least 2 --seeds and 14 --steps"),
        ({"slow": 0.5}, r"--slow is from 1 to 100, not 0\.5"),
        ({"keys": 10_000_001}, "--keys is from 1 to 10,000,000"),
        ({"optimizers": "lion"}, "--optimizers takes own, sgd, adamw"),
        ({"first_seed": -1}, "--first-seed is 0 or more, not -1"),
        ({"rates": " , "}, "--rates names no link; 'none' measures none"),
        ({"methods": "quorum"}, "'quorum': .*'n'"),
    ],
)
def test_plans_that_say_nothing_are_refused(options, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        TrainPlan(**options)


def test_the_defaults_of_bench_strategies_make_a_plan():
    options = inspect.signature(bench_strategies).parameters
    own = {field.name: options[field.name].default for field in fields(TrainPlan)}
    plan = TrainPlan(**own)
    assert plan.cases[:2] == [("cnn", "sgd"), ("cnn", "adamw")]
    assert plan.contestants[:4] == ["dense", "powersgd", "post-local", "local_sgd"]
    short = plan.shortened()
    assert (short.cases, short.links, short.steps, short.seeds) == ([("cnn", "sgd")], ["100mbit"], 40, 2)
    assert short.contestants == plan.contestants[:7]
    both = replace(plan, torchft=Path("python")).contestants
    assert both == [*plan.contestants, "torchft-local_sgd", "torchft-diloco"]


def test_losses_can_be_compared_without_links():
    plan = TrainPlan(rates="none", optimizers="adamw")
    assert (plan.links, plan.shortened().links) == ([], [])
    with pytest.raises(ConfigurationError, match="--rates names no link; 'none' measures none"):
        TrainPlan(rates=" , ")


def test_losses_alone_need_no_link():
    """One launch for each contestant, with the seeds that were asked for; a table without links, and one picture."""
    launched = []

    def run(setting, names, options):
        launched.append((tuple(names), setting.hosts, *options[-6:]))
        runs = [
            {"method": name, "step_s": [0.5] * 20, "evaluations": [look(20, 1.0 + seed)]}
            for name in names
            for seed in (0, 1)
        ]
        return from_document(training.Training, {"runs": runs, "steps": 20})

    plan = TrainPlan(methods="local_sgd", against="dense", rates="none", seeds=2, first_seed=7, steps=20)
    assert (plan.links, plan.shortened().links) == ([], [])
    setting = Setting(ranks=2, hosts=2)
    samples = training._measure(setting, "cnn", "sgd", plan, training._Launcher("train", None, run), is_first=True)
    seeds = ("--first-seed", "7", "--evaluations", "25", "--seeds", "2")
    assert launched == [(("dense",), 0, *seeds), (("local_sgd",), 0, *seeds)]
    table = training._table(setting, "cnn, sgd", samples, training.summarise(samples))
    assert [name for name, _ in table.columns][-1] == "seeds at its loss"
    assert table.caption == "Its loss: where dense training ends, a standard deviation granted."
    assert [panel.title for panel in training._panels({"cnn, sgd": samples})] == ["cnn, sgd, over steps"]


def test_launches_that_were_kept_are_not_repeated(tmp_path):
    kept, launched = tmp_path / "kept.jsonl", []

    def run(setting, names, options):
        launched.append((tuple(names), setting.describe(), *options))
        runs = [{"method": name, "step_s": [0.5] * 20, "seed": seed} for name in names for seed in (0, 1)]
        return from_document(training.Training, {"runs": runs, "steps": 20})

    here, far = Setting(ranks=2), Setting(ranks=2, hosts=2, rate="10mbit", delay_ms=40.0)
    for _ in range(2):  # the second one reads the file
        launcher = training._Launcher("train", kept, run)
        assert list(launcher.launch(here, ["dense", "async"], ["--seeds", "2"])) == ["dense", "async"]
        found = launcher.launch(far, ["dense", "async", "torchft-diloco", "fp16"], ["--turns", "5"])
        assert [(run.method, run.seed) for run in found["fp16"].runs] == [("fp16", 0), ("fp16", 1)]
        assert found["fp16"].steps == 20
    one, emulated = "2 ranks on one host", "2 ranks on 2 emulated hosts x 10mbit+40ms"
    each = [((name,), one, "--seeds", "2") for name in ("dense", "async")]
    together = [(names, emulated, "--turns", "5") for names in (("dense", "fp16"), ("async",), ("torchft-diloco",))]
    assert launched == [*each, *together]
    training._Launcher("train", kept, run).launch(here, ["dense"], ["--seeds", "3"])
    assert launched[5:] == [(("dense",), one, "--seeds", "3")]


def test_tables_in_markdown():
    table = Table("title", [("a", str), ("twice", lambda value: str(2 * value))], [1, 2], "caption")
    assert table.to_markdown() == "**title**\n\n| a | twice |\n| --- | --- |\n| 1 | 2 |\n| 2 | 4 |\n\ncaption\n"
