"""``examples/sparse_training.py`` through both doors, and ``bench train`` and ``bench strategies`` around it."""

import json
from pathlib import Path

import pytest
from commands import invoke

from totalreduce.foundation.errors import ConfigurationError

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = """
import runpy
sys.argv = {argv!r}
sys.path.insert(0, {folder!r})
runpy.run_path({argv!r}[0], run_name="__main__")
"""


@pytest.fixture
def with_digits(fleet):
    """Workers have scikit-learn's data already, which a cnn is trained on."""
    pytest.importorskip("sklearn")
    fleet.preload("sklearn.datasets")
    return fleet


def train(fleet, out, *options, ranks=2):
    """What rank 0 wrote."""
    argv = [str(EXAMPLES / "sparse_training.py"), "--json", str(out), "--steps", "20", "--evaluations", "4", *options]
    workers = fleet.start(ranks, SOURCE.format(argv=argv, folder=str(EXAMPLES)))
    for worker in workers:
        assert worker.wait(90) == 0, worker.errors()
    return json.loads(out.read_text())


def losses(document):
    return [[look["loss"] for look in run["evaluations"]] for run in document["runs"]]


@pytest.mark.parametrize("model", ["cnn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lstm", "gpt"))])
def test_all_elements_of_all_ranks_are_what_dense_training_has(with_digits, tmp_path, model):
    fleet = with_digits
    small = ("--model", model, "--width", "64", "--momentum", "optimizer")
    dense = train(fleet, tmp_path / "dense.json", *small, "--method", "dense", "--door", "ddp")
    every = train(fleet, tmp_path / "every.json", *small, "--method", "topka", "--density", "1")
    few = train(fleet, tmp_path / "few.json", *small, "--method", "topka", "--density-warmup", "0")
    assert [look["step"] for look in dense["runs"][0]["evaluations"]] == [5, 10, 15, 20]
    assert len(dense["runs"][0]["step_s"]) == 20
    (wanted,), (all_sent,), (few_sent,) = losses(dense), losses(every), losses(few)
    assert all_sent == pytest.approx(wanted, rel=2e-3)  # values travel as bfloat16, and the rest a step later
    assert wanted[-1] < wanted[0]
    assert few_sent != pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_doors_and_seeds(with_digits, tmp_path):
    fleet = with_digits
    small = ("--model", "cnn", "--width", "64", "--seeds", "2")
    ours = train(fleet, tmp_path / "ours.json", *small, "--method", "dense")
    ddp = train(fleet, tmp_path / "ddp.json", *small, "--method", "dense", "--door", "ddp")
    for mine, theirs in zip(losses(ours), losses(ddp), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    assert losses(ours)[0] != losses(ours)[1]
    hook = train(fleet, tmp_path / "hook.json", *small, "--method", "oktopk", "--door", "ddp")
    assert all(seed[-1] < seed[0] for seed in losses(hook))


@pytest.mark.slow
def test_methods_with_settings_in_turns_with_steps_without_communication(fleet, tmp_path):
    small = ("--model", "logistic", "--width", "1000", "--seeds", "2")
    methods = "local_sgd:period=4,diloco:period=6:overlap=2:codec=int8:outer_lr=0.5,stale_synchronous:slack=0:rate=0.5"
    timed = train(fleet, tmp_path / "timed.json", *small, "--method", methods, "--turns", "3", "--interface", "lo")
    assert [run["method"] for run in timed["runs"]] == methods.split(",")
    assert all(len(run["step_s"]) == len(run["alone_s"]) == 3 for run in timed["runs"])
    assert all(min(*run["step_s"], *run["alone_s"]) > 0 for run in timed["runs"])
    assert (timed["num_parameters"], timed["optimizer"], timed["world_size"]) == (1001, "sgd", 2)
    # With a period of 1 the losses are those of dense training; with half the learning rate they are not.
    server = "parameter_server:consistency=sequential"
    same = f"local_sgd:period=1,dense,stale_synchronous:slack=0:rate=0.5,{server}"
    runs = train(fleet, tmp_path / "same.json", *small, "--method", same)["runs"]
    assert [(run["method"], run["seed"]) for run in runs] == [
        (name, seed) for name in same.split(",") for seed in (0, 1)
    ]
    found = [[look["loss"] for look in run["evaluations"]] for run in runs]
    assert found[:2] == found[2:4] == found[6:]
    assert found[4:6] != found[2:4]
    later = train(fleet, tmp_path / "later.json", *small, "--method", "dense", "--seeds", "1", "--first-seed", "1")
    assert [run["seed"] for run in later["runs"]] == [1]
    assert losses(later) == found[3:4]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_strategies_are_compared_on_links_and_with_a_slow_rank(tmp_path):
    pytest.importorskip("matplotlib")
    out, picture, text = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "out.md"
    arguments = ("strategies", "--models", "logistic", "--keys", "200000", "--quick", "--emulate-hosts", "2")
    methods = "local_sgd,async,async_gossip,parameter_server:consistency=bounded:tau=4:optimizer=worker"
    which = ("--optimizers", "sgd", "--methods", methods, "--against", "dense", "--rates", "100mbit+5ms")
    files = ("--json", str(out), "--plot", str(picture), "--markdown", str(text))
    found = invoke("bench", *arguments, *which, "--slow-step-ms", "30", *files)
    assert found.exit_code == 0, found.output
    dense, averaging, *others = json.loads(out.read_text())["figures"]["logistic, sgd"]
    sent = [figure["links"]["100mbit+5ms"]["sent_bytes"] for figure in (dense, averaging)]
    assert 800_004 < sent[0] < 1.2 * 800_004
    assert sent[1] < 1.2 * sent[0] / 16
    assert dense["slowed"]["pace"] < 0.6
    assert [figure["slowed"]["pace"] > 0.6 for figure in others[:2]] == [True, True]
    assert others[2]["loss"] < 0.7  # with a bound, the others wait for a rank that is always slow
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "| DDP / gloo, dense |" in text.read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_benchmark_trains_on_links(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ("train", "--models", "cnn", "--quick", "--emulate-hosts", "2", "--rates", "1gbit")
    found = invoke("bench", *arguments, "--json", str(out), "--plot", str(picture))
    assert found.exit_code == 0, found.output
    assert "cnn, 4.8 M parameters, 40 steps from 2 seeds, density 0.01, 2 ranks on 2 emulated hosts" in found.stdout
    figures = {figure["contestant"]: figure for figure in json.loads(out.read_text())["figures"]["cnn"]}
    assert list(figures) == ["dense", "fp16", "powersgd", "oktopk"]
    assert figures["dense"]["distance"] == 0
    assert abs(figures["fp16"]["loss"] - figures["dense"]["loss"]) < 0.05
    assert figures["dense"]["links"]["1gbit"]["step_s"] > figures["oktopk"]["links"]["1gbit"]["step_s"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--models", "vgg"), "--models takes cnn, lstm, gpt"),
        (("--emulate-hosts", "0"), "--emulate-hosts from 2"),
        (("--seeds", "1"), "at least 2 --seeds"),
        (("--rates", "fast"), "fast"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, complaint):
    found = invoke("bench", "train", *arguments)
    assert isinstance(found.exception, ConfigurationError)
    assert complaint in str(found.exception)
