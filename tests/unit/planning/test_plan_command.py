"""``totalreduce plan``: what it predicts must follow from the engines, the sessions and the hosts."""

import json
import sys
from dataclasses import replace

import pytest

from totalreduce.bench.methods import make_method
from totalreduce.cli.main import main
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.planning import script as recording
from totalreduce.planning import traffic
from totalreduce.planning.machines import IDEAL, Calibration, Machines
from totalreduce.planning.plan import make_trace
from totalreduce.planning.prediction import Planner, with_epoch
from totalreduce.planning.script import trace_script
from totalreduce.planning.traces import Layer, Trace
from totalreduce.planning.traffic import record_method, script_totals
from totalreduce.sparse.auto import decide
from totalreduce.sparse.oktopk import OkTopk
from totalreduce.sparse.powersgd import PowerSGD
from totalreduce.sparse.session import BucketShape

MODEL = make_trace(2_000_000, 0.1)
SMALL = make_trace(200_000, 0.1)
QUICK = Machines(rate="1gbit", latency_us=20, payload_share=1.0)


def planner(model=MODEL, machines=QUICK, calibration=IDEAL, **settings):
    return Planner(model, machines, calibration, **settings)


@pytest.mark.parametrize("share", [0.01, pytest.param(1, marks=pytest.mark.slow)])
def test_the_analysis_of_the_survey_comes_out(share):
    """300 M parameters, 1 GB/s, ten iterations a second: 1.2 s with two ranks and 10.8 s with ten, if all send to one.

    A ring sends 2 (N - 1) chunks of the N-th part of the gradient per rank, whatever N is. A ``share`` of the
    parameters at the same share of the rate takes the same time.
    """
    model = make_trace(round(share * 300_000_000), 0.1)
    machines = Machines(rate=f"{share * 8:g}gbit", latency_us=50, payload_share=1.0)
    plan = Planner(model, machines, IDEAL, bucket_bytes=round(share * (256 << 20)), messages=1_000_000)
    central = [plan.predict("central", ranks) for ranks in (2, 10)]
    assert [each.exchange_s for each in central] == pytest.approx([1.2, 10.8], rel=0.005)
    ring = [plan.predict("dense:ring", ranks) for ranks in (2, 10)]
    assert [each.exchange_s for each in ring] == pytest.approx([1.2, 2 * 9 / 10 * 1.2], rel=0.03)
    sent = share * 1.2e9
    assert [each.sent_bytes for each in ring] == pytest.approx([sent, 2 * 9 / 10 * sent], rel=0.002)
    assert all(each.limit == "rate of a link" and not each.is_extrapolated for each in (*central, *ring))


def test_a_step_hides_what_fits_beside_backward():
    """On a fast network only the last bucket's exchange is exposed; on a slow one, all but the backward pass."""
    fast = planner(machines=Machines(rate="100gbit", latency_us=1, payload_share=1.0)).predict("dense:ring", 4)
    slow = planner(machines=Machines(rate="100mbit", latency_us=1, payload_share=1.0)).predict("dense:ring", 4)
    assert fast.step_s == pytest.approx(0.1, rel=0.02)
    assert fast.limit == "compute"
    on_the_wire_s = 2 * 3 / 4 * 8e6 / 12.5e6
    assert slow.exchange_s == pytest.approx(on_the_wire_s, rel=0.06)
    assert slow.step_s == pytest.approx(0.1 + slow.exposed_s)
    backward_s = 2 / 3 * 0.1
    assert 0 < slow.hidden_share < backward_s / slow.exchange_s


def test_the_selectors_choice_is_named_and_depends_on_the_network():
    def schedules(latency_us, ranks):
        return planner(machines=Machines(rate="1gbit", latency_us=latency_us)).predict("dense", ranks).schedules

    assert schedules(20, 4) == ("ring",)
    assert schedules(20_000, 16) != ("ring",)


@pytest.mark.parametrize("schedule", ["ring", "halving_doubling"])
def test_an_extrapolation_is_near_the_whole_simulation_and_says_what_it_is(schedule):
    name, costs = f"dense:{schedule}", Calibration()
    whole = planner(calibration=costs).predict(name, 16)
    part = planner(calibration=costs, messages=300).predict(name, 16)
    assert whole.simulated_ranks == 16
    assert part.simulated_ranks < 16
    assert part.is_extrapolated
    assert part.step_s == pytest.approx(whole.step_s, rel=0.1)
    assert part.sent_bytes == pytest.approx(whole.sent_bytes, rel=0.05)


def test_an_extrapolated_sparse_method_keeps_the_growth_of_its_bytes():
    """TopkA's bytes grow with the number of ranks; the sessions of fewer ranks show it."""
    whole = planner(SMALL).predict("topka", 16)
    part = planner(SMALL, messages=100).predict("topka", 16)
    assert part.is_extrapolated
    assert part.sent_bytes == pytest.approx(whole.sent_bytes, rel=0.25)
    assert whole.sent_bytes > 4 * planner(SMALL).predict("topka", 4).sent_bytes


def test_a_sparse_method_sends_what_its_sessions_send():
    predicted = planner().predict("oktopk", 4)
    script = record_method(make_method("oktopk", 0.01), 4, BucketShape(((2_000_000,),)))
    _, payload = script_totals(script)
    assert predicted.sent_bytes == pytest.approx(payload, rel=0.1)
    assert predicted.sent_bytes < 0.05 * planner().predict("dense", 4).sent_bytes


#: A model of 64 times 48 weights, 48 biases, and 3 times 4 times 5 weights, whose matrix is 3 times 20.
SHAPED = Trace(
    "shaped",
    "made",
    (Layer(0.01, 0.02, 3120, ((64, 48), (48,))), Layer(0.0, 0.03, 60, ((3, 4, 5),))),
    0.03,
)


def test_powersgd_sends_the_factors_of_matrices_and_the_rest_as_it_is():
    """Left factors and what is not compressed are one allreduce, right factors another; greetings are a few bytes."""
    for ranks in (2, 5):
        predicted = planner(SHAPED).predict("powersgd:rank=2", ranks)
        elements = 2 * 64 + 48 + 2 * 3 + 2 * 48 + 2 * 20
        allreduced = 2 * 4 * elements * (ranks - 1) / ranks
        assert allreduced < predicted.sent_bytes < allreduced + 64 * predicted.ranks * 16
    higher = planner(SHAPED).predict("powersgd:rank=3", 2)
    fewer = planner(SHAPED).predict("powersgd:rank=1", 2)
    # No rank but that of the matrix of three rows: its factors would be no smaller than itself.
    assert higher.sent_bytes - fewer.sent_bytes == pytest.approx(4 * (2 * (64 + 48) + 60 - (3 + 20)), rel=0.05)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_two_ranks_show_what_all_send_where_bytes_follow_from_shapes(ranks):
    class Uneven(OkTopk):
        whole = True

    shape = BucketShape(((64, 48), (48,), (30, 20)))
    for method in (PowerSGD(rank=3), Uneven(density=0.1)):
        script = traffic.record_method(method, ranks, shape)
        assert script == traffic._method_script(method, ranks, shape)


def test_auto_chooses_by_the_predicted_time_of_a_bucket_and_says_what():
    """Compression is worth its processor time on a slow network only."""
    costs = Calibration(select_elements_per_s=2e7)
    fast = planner(SMALL, Machines(rate="10gbit", latency_us=20), costs)
    slow = planner(SMALL, Machines(rate="10mbit", latency_us=20), costs)
    dense, sparse = fast.predict("auto", 4), slow.predict("auto:density=0.02", 4)
    assert (dense.contestant, dense.chosen) == ("auto", "dense")
    assert dense == replace(fast.predict("dense", 4), contestant="auto", chosen="dense")
    assert sparse.chosen in ("oktopk:density=0.02", "topka:density=0.02")
    same = slow.predict(sparse.chosen, 4)
    assert sparse == replace(same, contestant="auto:density=0.02", chosen=sparse.chosen)
    other = {"oktopk:density=0.02", "topka:density=0.02"} - {sparse.chosen}
    assert same.step_s < slow.predict(*other, 4).step_s


def test_autos_rule_is_that_of_training():
    """The fastest candidate is taken if it needs at most nine tenths of the dense time."""
    methods = [make_method("oktopk", 0.01), make_method("topka", 0.01)]
    chosen = [decide(10, methods, 1.0, times).method for times in ([0.95, 0.91], [0.9, 0.95], [0.5, 0.4])]
    assert chosen == [None, methods[0], methods[1]]


def test_a_recording_with_fewer_elements_has_long_blocks_scaled_and_short_ones_not(monkeypatch):
    method, shape = make_method("oktopk", 0.01), BucketShape(((400_000,),))
    whole = script_totals(record_method(method, 4, shape))
    monkeypatch.setattr(traffic, "_ELEMENTS_MAX", 100_000)
    assert script_totals(record_method(method, 4, shape)) == pytest.approx(whole, rel=0.1)


def test_a_strategy_exchanges_once_in_a_period():
    often, seldom = (planner().predict(f"local_sgd:period={period}", 4) for period in (2, 8))
    assert often.sent_bytes == pytest.approx(2 * 3 / 4 * 8e6 / 2, rel=0.01)
    assert seldom.sent_bytes == pytest.approx(2 * 3 / 4 * 8e6 / 8, rel=0.01)
    assert often.exposed_s == pytest.approx(4 * seldom.exposed_s, rel=0.02)
    assert seldom.hidden_share == pytest.approx(0.0, abs=1e-6)


def test_an_exchange_beside_training_is_hidden_and_a_codec_sends_less():
    plain = planner().predict("diloco:period=8", 4)
    beside = planner().predict("diloco:period=8:overlap=4", 4)
    coded = planner().predict("diloco:period=8:codec=int8", 4)
    assert beside.hidden_share == pytest.approx(1.0)
    assert beside.step_s < plain.step_s
    assert coded.sent_bytes == pytest.approx(plain.sent_bytes / 4, rel=0.1)


def test_ranks_that_share_cores_compute_slower():
    machines = Machines(rate="100gbit", latency_us=1, cores=2, emulated=True)
    predicted = planner(machines=machines).predict("dense", 8)
    assert predicted.step_s == pytest.approx(8 / 2 * MODEL.period_s, rel=0.1)


def test_costs_of_messages_count_and_are_named_as_the_limit():
    slow = Calibration(message_s=2e-3)
    cheap, dear = (planner(calibration=costs).predict("dense:ring", 16) for costs in (IDEAL, slow))
    assert dear.step_s > 1.5 * cheap.step_s
    assert dear.limit == "CPU for messages"


def test_latency_limits_small_gradients_on_long_links():
    model = Trace("small", "made", (Layer(0.0, 0.001, 1000),), 0.001)
    machines = Machines(rate="10gbit", latency_us=50_000)
    assert planner(model=model, machines=machines).predict("dense", 4).limit == "latency"


def test_memory_that_is_too_small_is_the_limit():
    machines = Machines(rate="1gbit", memory_gib=0.01)
    predicted = planner(machines=machines).predict("dense", 2)
    assert predicted.limit == "host memory"
    assert predicted.busy["host memory"] == pytest.approx(5 * 8e6 / (0.01 * 2**30))


def test_an_epoch_has_a_time_and_a_cost():
    predicted = planner(machines=Machines(rate="1gbit", ranks_per_host=2)).predict("dense", 4)
    epoch = with_epoch(predicted, samples=1000, batch=30, cost_per_host_hour=3.0)
    assert epoch.epoch_s == pytest.approx(9 * predicted.step_s)
    assert epoch.epoch_cost == pytest.approx(epoch.epoch_s / 3600 * 2 * 3.0)
    assert with_epoch(predicted, 1000, 30, 0.0).epoch_cost is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dence", "is unknown"),
        ("dense:rong", "dense has one schedule"),
        ("central:ring", "dense has one schedule"),
        ("async", r"'async' cannot be predicted: its workers push to servers.* --methods async`"),
        ("parameter_server", r"'parameter_server' cannot be predicted: its workers push to servers"),
        ("strom", r"'strom' cannot be predicted: .*values of gradients.* --methods strom`"),
        ("powersgd", r"'powersgd' cannot be predicted for 2 M parameters: .*shapes.*--script FILE.py:FUNCTION"),
        ("auto:rate=3", "unexpected keyword"),
        ("powersgd:rank=0", "rank"),
        ("local_sgd:period", "a setting is written as"),
        ("local_sgd:perod=3", "perod"),
        ("local_sgd:period=0", "period"),
        ("local_sgd:codec=int9", "int9"),
    ],
)
def test_a_contestant_that_makes_no_sense_is_refused(text, message):
    with pytest.raises(ConfigurationError, match=message):
        planner().predict(text, 4)


def test_ranks_must_fill_hosts():
    with pytest.raises(ConfigurationError, match="do not fill hosts"):
        planner(machines=Machines(ranks_per_host=4)).predict("dense", 6)


def test_the_command_prints_a_table_and_writes_its_figures(tmp_path, capsys):
    machines, out = tmp_path / "machines.toml", tmp_path / "plan.json"
    machines.write_text('[machines]\nrate = "10gbit"\ncost_per_host_hour = 2\n')
    options = ["--machines", str(machines), "--rate", "1gbit", "--samples", "10k", "--json", str(out)]
    with pytest.raises(SystemExit) as end:
        main(["plan", "mlp", "--ranks", "2,4", "--by", "dense,local_sgd", *options])
    assert end.value.code == 0
    document = json.loads(out.read_text())
    assert document["setting"]["machines"]["rate"] == "1gbit"
    assert [(each["contestant"], each["ranks"]) for each in document["figures"]] == [
        *(("dense", 2), ("dense", 4)),
        *(("local_sgd", 2), ("local_sgd", 4)),
    ]
    assert all(each["epoch_cost"] > 0 for each in document["figures"])
    printed = capsys.readouterr().out
    assert "Calibration: default" in printed
    assert "rate of a link" in printed


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["mlp", "--parameters", "3M"],
        ["mlp", "--ranks", "1"],
        ["mlp", "--by", ""],
        ["mlp", "--density", "0"],
        ["--script", "none.py:make"],
        ["mlp", "--ideal", "--calibration", "x.json"],
        ["none.json"],
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", *words])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("totalreduce: ")


SCRIPT = """
import torch


def make():
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    return model, lambda: model(torch.ones(3, 8)).square().sum()


def without_model():
    return 1


def without_loss():
    return torch.nn.Linear(1, 1), lambda: 1
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


WITH_ARGUMENTS = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4)
parser.add_argument("more", nargs="*")
options = parser.parse_args()


def make():
    model = torch.nn.Linear(2, options.width)
    return model, lambda: model(torch.ones(3, 2)).square().sum()
"""


def test_a_script_has_arguments_of_its_own(tmp_path, monkeypatch, capsys):
    """A script may read its arguments at module level."""
    path = tmp_path / "mine.py"
    path.write_text(WITH_ARGUMENTS)
    words = ["plan", "--ranks", "2", "--by", "dense", "--ideal", "--script", f"{path}:make"]
    monkeypatch.setattr("sys.argv", ["totalreduce", *words])
    before, seen = list(sys.path), []

    def look(model, loss, **_):
        seen.append((sum(parameter.numel() for parameter in model.parameters()), list(sys.argv)))
        raise SystemExit  # what is recorded of a model, and what a plan makes of that, have tests of their own

    monkeypatch.setattr(recording, "record_model", look)
    for given in ([], ["--", "--width", "7"], ["--", "--width", "2", "mlp"]):
        with pytest.raises(SystemExit):
            main([*words, *given])
    assert seen == [(12, [str(path)]), (21, [str(path), "--width", "7"]), (6, [str(path), "--width", "2", "mlp"])]
    assert sys.argv == ["totalreduce", *words]
    assert sys.path == before
    with pytest.raises(SystemExit):
        main([*words, "--", "--depth", "7"])
    assert "its arguments stand after `--`" in capsys.readouterr().err
    assert len(seen) == 3


@pytest.mark.parametrize("rest", [[], ["--", "--width", "7"]])
def test_a_plan_takes_one_model(capsys, rest):
    """Words before `--` are the plan's, whether or not some follow it."""
    for words, sentence in (
        (["mlp", "--script", "x.py:make"], "a plan needs one model: leave 'mlp' or --script out"),
        (["mlp", "gpt"], "a plan takes one trace; gpt would be"),
        (["--script", "x.py:make", "mlp", "gpt"], "a plan needs one model: leave 'mlp'"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["plan", *words, *rest])
        assert end.value.code == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_is_traced(script):
    trace = trace_script(f"{script}:make")
    assert [layer.elements for layer in trace.layers] == [36, 10]
    assert trace.step_s >= trace.compute_s > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [("without_model", "must return a model"), ("none", "has no function"), ("without_loss", "must return a loss")],
)
def test_a_script_without_a_model_is_refused(script, name, message):
    with pytest.raises(ConfigurationError, match=message):
        trace_script(f"{script}:{name}")
