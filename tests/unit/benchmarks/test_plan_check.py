"""``bench plan``: from samples to figures, and from a file of kept results to a table without a measurement."""

import json

import pytest

from totalreduce.bench.records import to_document
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.planning.machines import Calibration, Machines
from totalreduce.planning.traces import Layer, Trace
from totalreduce_benchmarks.kept import KeptResults
from totalreduce_benchmarks.plan_check import compared, measured_step


def test_a_check_compares_the_mean_of_ranks_with_the_plan():
    measured = measured_step([[1.0, 2.0, 9.0], [3.0, 4.0, 9.0]])
    assert (measured.median, measured.low, measured.high) == (3.0, 2.0, 9.0)
    figure = compared("gpt", 2, "1gbit", "dense", (3.3, 2.4), measured, 0.1)
    assert (figure.error, figure.error_as_then) == pytest.approx((0.1, -0.2))


@pytest.fixture
def measurements(tmp_path):
    """A file with all measurements of one model on two and four hosts: 0.1 s of training on one of two cores."""
    path = tmp_path / "kept.jsonl"
    kept = KeptResults(path)
    trace = Trace("mlp", "made", (Layer(0.0, 0.06, 30_000), Layer(0.03, 0.05, 20_000)), 0.1)
    kept.keep(json.dumps(["traces", ["mlp"]]), to_document({"traces": {"mlp": trace}}))
    machines = Machines(rate="1gbit", latency_us=100, cores=2, emulated=True)
    costs = Calibration(sharing_loss=0.2)
    kept.keep(json.dumps(["calibration", "1gbit"]), to_document({"machines": machines, "calibration": costs}))
    for hosts, alone_s in ((2, 0.1), (4, 0.25)):
        seconds = {"alone": [alone_s] * 6, "dense": [alone_s + 0.01] * 6, "totalreduce": [alone_s + 0.01] * 6}
        key = ["steps", ["mlp"], "oktopk", 0.01, 5, 3, hosts, "1gbit"]
        kept.keep(json.dumps(key), to_document({"ranks": [{"seconds": {"mlp": seconds}}] * hosts}))
    return path


def test_kept_measurements_become_a_table_without_measuring_again(measurements, tmp_path, capsys):
    from totalreduce.cli.main import main

    out, before = tmp_path / "plan.json", measurements.read_text()
    options = ["--models", "mlp", "--hosts", "2,4", "--rates", "1gbit", "--resume", str(measurements)]
    with pytest.raises(SystemExit) as end:
        main(["bench", "plan", *options, "--json", str(out)])
    assert end.value.code == 0
    assert measurements.read_text() == before
    figures = {(each["contestant"], each["hosts"]): each for each in json.loads(out.read_text())["figures"]}
    # Four ranks share two cores, which lose a fifth of their time then.
    assert figures["alone", 2]["predicted_s"] == pytest.approx(0.1)
    assert figures["alone", 4]["predicted_s"] == pytest.approx(0.25)
    assert figures["alone", 4]["error"] == pytest.approx(0.0)
    assert 0.1 < figures["dense", 2]["predicted_s"] < 0.13
    assert figures["dense", 2]["measured_s"]["median"] == pytest.approx(0.11)
    assert set(figures) == {(name, hosts) for name in ("alone", "dense", "oktopk") for hosts in (2, 4)}
    assert capsys.readouterr().err.count("(kept)") == 4


def test_results_are_kept_as_they_come_and_a_line_that_was_cut_off_is_not_known(tmp_path):
    path = tmp_path / "kept.jsonl"
    kept = KeptResults(path)
    kept.keep("one", {"value": 1})
    kept.keep("two", [2])
    path.write_text(path.read_text()[:-5])
    again = KeptResults(path)
    assert "one" in again
    assert "two" not in again
    again.keep("two", [3])
    last = KeptResults(path)
    assert (last["one"], last["two"]) == ({"value": 1}, [3])


def test_a_file_that_keeps_something_else_is_refused(tmp_path):
    path = tmp_path / "kept.jsonl"
    path.write_text('{"name": 1}\n{"key": "one", "result": 1}\n')
    with pytest.raises(ConfigurationError, match="line 1, is not a kept result"):
        KeptResults(path)


def test_results_that_cannot_be_kept_are_one_warning(tmp_path, caplog):
    kept = KeptResults(tmp_path / "absent" / "kept.jsonl")
    for number in range(2):
        kept.keep(f"step {number}", {"seconds": number})
    assert kept["step 1"] == {"seconds": 1}
    [said] = caplog.messages
    assert "kept.jsonl: No such file or directory (ENOENT). The benchmark goes on;" in said
