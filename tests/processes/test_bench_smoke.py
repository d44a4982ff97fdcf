"""Every benchmark once, tiny, with real workers: figures come out, and a wrong result stops them."""

import json
import statistics

import pytest
import torch
from commands import invoke

from totalreduce.bench.collectives import CollectivesParameters, CollectivesSamples, Contestant
from totalreduce.bench.launching import BenchmarkFailedError, Setting, run_benchmark
from totalreduce.bench.ps import DENSE, SPARSE
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import OpKind
from totalreduce.launch.emulate import EmulatedNetwork
from totalreduce.schedules import algorithms_of

TWO_RANKS = Setting(ranks=2)
TRACE = {
    "model": "tiny",
    "source": "made up",
    "columns": ["ready_s", "needed_s", "elements"],
    "layers": [[0.010, 0.012, 3001], [0.004, 0.016, 300_007], [0.0, 0.020, 50_000]],
}


def run(*arguments, exit_code=0):
    found = invoke("bench", *arguments)
    assert found.exit_code == exit_code, found.output
    return found


def test_allreduce_reports_every_size_and_peer(tmp_path, warm_python):
    out = tmp_path / "out.json"
    found = run(
        *("allreduce", "-n", 2, "--sizes", "4KiB,300KiB", "--rounds", 3, "--json", out),
        *("--against", "gloo", "--against", "fifo"),
    )
    assert "2 ranks on one host" in found.stdout
    document = json.loads(out.read_text())
    figures = {(figure["size"], figure["peer"]): figure for figure in document["figures"]}
    assert set(figures) == {
        (size, peer) for size in (4096, 307_200) for peer in ("totalreduce", "shared", "gloo", "fifo")
    }
    for (size, peer), figure in figures.items():
        seconds = figure["seconds"]["median"]
        assert 0 < seconds < 30
        assert figure["algorithm_bytes_per_s"] == pytest.approx(size / seconds)
        assert figure["bus_bytes_per_s"] == pytest.approx(size / seconds)  # 2 (n - 1) / n = 1 for two ranks
        assert figure["share_of_rate"] is None
        # Two ranks send each byte once; headers add little.
        assert (figure["bytes_sent"] is None) == (peer == "gloo")
        assert peer == "gloo" or size <= figure["bytes_sent"] <= 1.05 * size
        assert (figure["gain"] is None) == (figure["gain_shared"] is None) == (peer in ("totalreduce", "shared"))
    assert "shared by" in found.stdout
    assert len(document["raw"]) == 2
    row = document["raw"][1]["rows"][0]
    assert [contestant["peer"] for contestant in row["contestants"]] == ["totalreduce", "shared", "gloo", "fifo"]
    assert [len(samples) for samples in row["seconds"]] == [3] * 4
    assert document["environment"]["torch"] == torch.__version__


@pytest.mark.slow
def test_every_collective_is_timed_and_checked_by_every_schedule_and_peer(tmp_path, warm_python):
    pytest.importorskip("mpi4py", reason="the MPI side needs mpi4py")
    out = tmp_path / "out.json"
    found = run(
        *("collectives", "-n", 2, "--sizes", "30KiB", "--rounds", 1, "--schedule", "all", "--json", out),
        *("--against", "gloo,fifo,mpich"),
    )
    document = json.loads(out.read_text())
    by_kind = {}
    for figure in document["figures"]:
        by_kind.setdefault(figure["kind"], []).append(figure)
        assert figure["size"] == 30 * 1024
        assert 0 < figure["seconds"]["median"] < 30
        assert figure["share_of_rate"] is None
        assert (figure["chosen"] == "") == (figure["peer"] in ("gloo", "mpich"))
    assert set(by_kind) == {kind.name.lower() for kind in OpKind if kind is not OpKind.BARRIER}
    for kind, figures in by_kind.items():
        assert [figure["peer"] for figure in figures][-3:] == ["gloo", "fifo", "mpich"]
        explicit = {figure["schedule"] for figure in figures} - {"auto"}
        expected = {algorithm.name.lower() for algorithm in algorithms_of(OpKind[kind.upper()])}
        assert explicit == (set() if kind in ("gather", "scatter", "alltoall", "send_recv") else expected)
    assert document["environment"]["mpi"]["mpich"].startswith("MPICH")
    assert "2 ranks on one host" in found.stdout


@pytest.mark.slow
def test_urgent_operations_meet_the_bulk_in_flight(tmp_path, warm_python, monkeypatch):
    monkeypatch.setenv("TOTALREDUCE_FAST_LANE", "0")  # small operations never wait there
    out = tmp_path / "out.json"
    run(
        "urgent",
        "-n",
        2,
        "--bulk",
        "48MiB",
        "--interval-ms",
        2,
        "--rounds",
        2,
        "--against",
        "fifo",
        "--json",
        out,
    )
    ours, fifo = json.loads(out.read_text())["figures"]
    assert (ours["peer"], fifo["peer"]) == ("totalreduce", "fifo")
    assert ours["num_urgent"] >= 2
    assert 0 < ours["p50_s"] <= ours["p99_s"] <= ours["max_s"]
    # In order of submission the first urgent one waits for all of the bulk that is left.
    raw = [rank["peers"]["fifo"] for rank in json.loads(out.read_text())["raw"]]
    for index in range(2):
        first = max(rank["urgent"][index][0][0] for rank in raw)
        assert 0.002 + first > 0.5 * max(rank["loaded_s"][index] for rank in raw)


@pytest.mark.slow
def test_replay_prints_waiting_and_steps(tmp_path, warm_python):
    out, path = tmp_path / "out.json", tmp_path / "tiny.json"
    path.write_text(json.dumps(TRACE))
    found = run(
        *("replay", path, "-n", 2, "--balance", "none", "--steps", 3, "--rounds", 1, "--json", out),
        *("--against", "gloo", "--against", "fifo"),
    )
    assert "tiny" in found.stdout
    figures = {figure["peer"]: figure for figure in json.loads(out.read_text())["figures"]}
    assert set(figures) == {"totalreduce", "gloo", "fifo"}
    for figure in figures.values():
        assert figure["compute_s"] == 0.020
        assert figure["step_s"]["num_samples"] == 3
        # A step takes its compute and whatever was waited for.
        assert figure["step_s"]["low"] >= 0.0199
        assert figure["num_bytes"] == 4 * 353_008
    assert figures["gloo"]["messages"] == 2  # the first one is closed at 1 MiB
    assert figures["totalreduce"]["messages"] == 1


@pytest.mark.slow
def test_replay_balances_communication_and_compute(tmp_path, warm_python):
    out, path = tmp_path / "out.json", tmp_path / "tiny.json"
    path.write_text(json.dumps(TRACE))
    run(
        "replay",
        "--traces-dir",
        tmp_path,
        "-n",
        2,
        "--ratio",
        0.5,
        "--steps",
        2,
        "--rounds",
        1,
        "--json",
        out,
    )
    (figure,) = json.loads(out.read_text())["figures"]
    raw = json.loads(out.read_text())["raw"]
    # The scale comes from the first of the two measurements of goodput, the figure from both.
    first = sum(rank["traces"][0]["goodput_bits_per_s"][0] for rank in raw) / 2
    assert figure["num_bytes"] * 8 / first / figure["compute_s"] == pytest.approx(0.5)


@pytest.mark.slow
def test_step_sends_a_part_beside_the_whole(tmp_path, warm_python):
    out = tmp_path / "out.json"
    sparse = ("--sync", "oktopk", "--dense", "--no-communication", "--bucket", "0.5")
    found = run("step", "--model", "cnn", "-n", 2, "--steps", 2, "--rounds", 1, *sparse, "--json", out)
    assert "lay beside backward" in found.stdout
    document = json.loads(out.read_text())
    figures = {figure["contestant"]: figure for figure in document["figures"]}
    assert list(figures) == ["totalreduce", "dense", "alone"]
    # 4.3 M parameters at 1 %, 3 bytes and once again, and what is small and sent whole: not 17 MB.
    assert 100_000 < figures["totalreduce"]["bytes_sent"] < 600_000
    assert all(0 <= rank["hidden_share"] <= 1 for rank in document["raw"])


@pytest.mark.slow
def test_step_trains_with_servers_too(tmp_path, warm_python):
    out = tmp_path / "out.json"
    run("step", "--model", "cnn", "-n", 2, "--steps", 2, "--rounds", 1, "--servers", 1, "--bucket", 1, "--json", out)
    figures = {figure["contestant"]: figure for figure in json.loads(out.read_text())["figures"]}
    assert list(figures) == ["totalreduce", "servers", "servers_ahead"]
    assert all(figure["seconds"]["num_samples"] == 2 for figure in figures.values())


@pytest.mark.slow
def test_step_trains_the_same_model_as_ddp(tmp_path, warm_python):
    out = tmp_path / "out.json"
    run(
        *("step", "--model", "cnn", "--batch", 1, "-n", 2, "--steps", 2, "--rounds", 1, "--json", out),
        *("--against", "gloo", "--no-communication", "--overlap", "iterations"),
    )
    document = json.loads(out.read_text())
    assert [figure["contestant"] for figure in document["figures"]] == ["totalreduce", "gloo", "alone"]
    assert all(figure["seconds"]["num_samples"] == 2 for figure in document["figures"])
    result = document["raw"][0]
    assert result["difference_float64"] <= 1e-12
    assert result["difference"] <= 1e-5
    # Two ranks send each gradient byte once.
    assert document["figures"][0]["bytes_sent"] == pytest.approx(4 * result["num_parameters"], rel=0.05)


def test_trace_records_what_replay_reads(tmp_path):
    out = tmp_path / "gpt.json"
    threads = torch.get_num_threads()
    try:
        found = run("trace", "--model", "gpt", "--steps", 1, "--out", out)
    finally:
        torch.set_num_threads(threads)
    assert "40 layers" in found.stdout
    layers = json.loads(out.read_text())["layers"]
    assert len(layers) == 40
    assert [layer[1] for layer in layers] == sorted(layer[1] for layer in layers)
    assert layers[-1][0] < layers[2][0]  # the last layer's gradient is there long before the first ones'


def test_a_failing_worker_means_no_figures(capfd, warm_python):
    parameters = CollectivesParameters([4096], {"allreduce": [Contestant("totalreduce", "auto")]}, "complex64")
    with pytest.raises(BenchmarkFailedError, match=r"rank [01] failed: WrongResultError: .*complex64"):
        run_benchmark("totalreduce.bench.collectives_worker", parameters, TWO_RANKS, CollectivesSamples)
    assert "complex64" in capfd.readouterr().err


def test_a_failed_check_ends_the_command_with_exit_code_1(monkeypatch):
    def fail(*_):
        raise BenchmarkFailedError("rank 1 failed: element 3 is 4.0, not 5.0")

    monkeypatch.setattr("totalreduce.bench.allreduce.run_benchmark", fail)
    found = run("allreduce", "--sizes", "4KiB", exit_code=1)
    assert "no figures: rank 1 failed: element 3 is 4.0" in found.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("allreduce", "--sizes", "big"), "not a size"),
        (("allreduce", "--dtype", "int3"), "--dtype is one of"),
        (("allreduce", "--against", "nccl"), "gloo, fifo, openmpi, mpich, not nccl"),
        (("allreduce", "--against", "mpich", "--emulate-hosts", "2"), "one host only"),
        (("allreduce", "--against", "mpich", "--dtype", "bfloat16"), "MPI has no bfloat16"),
        (("allreduce", "--against", "mpich", "--mpirun", "mpich=/nonesuch"), "/nonesuch is no mpirun of it"),
        (("collectives", "--kinds", "allsum"), "not allsum"),
        (("collectives", "--schedule", "butterfly"), "not butterfly"),
        (("collectives", "--ranks-per-host", "2"), "goes with --emulate-hosts"),
        (("urgent", "--against", "mpich"), "nothing to compare with mpich"),
        (("allreduce", "-n", "3", "--emulate-hosts", "2"), "multiple of --emulate-hosts"),
        (("allreduce", "-n", "2", "--rounds", "0"), "--rounds"),
        (("urgent", "--against", "gloo"), "knows no priorities"),
        (("urgent", "--interval-ms", "0"), "--interval-ms"),
        (("replay", "nonesuch"), "no trace 'nonesuch'"),
        (("replay", "--balance", "odd"), "--balance is"),
        (("replay", "-n", "1"), "at least 2 ranks"),
        (("step", "--model", "resnet"), "--model is"),
        (("step", "--overlap", "none"), "--overlap is"),
        (("faults", "--kinds", "kill=2,stop"), "or none"),
        (("faults", "--torchft", "nowhere/python"), "--torchft names"),
        (("recovery", "--has", "everything"), "--has takes"),
        (("recovery", "--step-ms", "soon"), "not soon"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(arguments, complaint):
    found = invoke("bench", *arguments)
    assert isinstance(found.exception, ConfigurationError)
    assert complaint in str(found.exception)


def test_a_step_in_a_block_is_compared_with_one_outside(tmp_path, warm_python):
    out = tmp_path / "out.json"
    found = run(
        *("recovery", "-n", 2, "--steps", 8, "--step-ms", "1,4", "--has", "buffers", "--elements", 20_000),
        *("--json", out),
    )
    assert "2 ranks on one host" in found.stdout
    document = json.loads(out.read_text())
    figures = document["figures"]
    assert [(figure["has"], figure["step_ms"]) for figure in figures] == [("buffers", 1.0), ("buffers", 4.0)]
    # Eight batch normalisations of 50 features: mean and variance, each 208 bytes with a gap, and a count in 16 bytes.
    row = 8 * (2 * 208 + 16)
    outside = statistics.mean(
        rank["outside"]["bytes_sent"] for rank in document["raw"][0]["ranks"]
    )  # rank 0 sends its buffers
    for figure in figures:
        assert figure["step_ms"] / 1e3 < figure["outside_s"]["median"] < 10
        assert 0.1 < figure["ratio"]["median"] < 10
        assert figure["ratio"]["num_samples"] == 8
        # The vote and the exchange of buffers, each in the fast lane: two operations without a message.
        assert (figure["operations"], figure["messages"]) == (2, 0)
        vote = 5 * 8
        assert figure["bytes_sent"] == row + vote
        assert figure["bytes_share"] == pytest.approx((row + vote) / outside)
        assert figure["memory_bytes"] >= 3 * row  # as the block began, to be sent, and of all ranks
        assert figure["memory_bytes"] < 12 * row
    rows = document["raw"][0]["ranks"][1]["rows"]
    assert [len(samples) for row in rows for samples in (row["inside"], row["outside"])] == [8] * 4


def test_observed_steps_are_compared_with_others(tmp_path, warm_python):
    out = tmp_path / "out.json"
    run(
        *("observe", "-n", 2, "--blocks", 2, "--block-s", 0.05, "--per-second", 50, "--width", 16, "--batch", 8),
        *("--json", out),
    )
    document = json.loads(out.read_text())
    (figure,) = document["figures"]
    assert figure["ratio"]["num_samples"] == 2
    assert figure["per_second"] > 0
    assert figure["scaled"]["median"] == pytest.approx((figure["cpu_ratio"]["median"] - 1) / figure["per_second"])
    assert 0 < figure["document_cpu_s"] < 0.1
    assert 0 < figure["end_step_s"] < 1e-3
    assert [len(rank["observed_s"]) for rank in document["raw"]] == [2, 2]
    assert all(rank["documents_per_s"] > 0 for rank in document["raw"])


@pytest.mark.slow
def test_faults_of_two_kinds_are_counted_and_survived(tmp_path, warm_python):
    out = tmp_path / "out.json"
    run(
        *("faults", "-n", 2, "--kinds", "kill=1,keeper=1", "--interval", 0.1, "--step-ms", 5, "--elements", 1000),
        *("--json", out),
    )
    (figure,) = json.loads(out.read_text())["figures"]
    kinds = {
        kind["kind"]: (kind["injected"], kind["survived"], kind["hung"], kind["wrong"]) for kind in figure["kinds"]
    }
    assert kinds == {"kill": (1, 1, 0, 0), "keeper": (1, 1, 0, 0)}
    total = figure["total"]
    assert (total["injected"], total["survived"]) == (2, 2)
    assert 0 < total["detection_p50_s"] < 60
    assert 0 < total["recovery_max_s"] < 60
    assert (figure["lost_versions"], figure["lost_samples"], figure["doubled_samples"]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.hosts
def test_a_collectives_share_is_that_of_a_hosts_link(tmp_path):
    try:
        EmulatedNetwork(1)
    except ConfigurationError as error:
        pytest.skip(str(error))
    out = tmp_path / "out.json"
    run(
        *("collectives", "--emulate-hosts", 2, "--ranks-per-host", 2, "--emulate-rate", "200mbit", "--rounds", 2),
        *("--kinds", "allreduce,alltoall,broadcast", "--sizes", "4MiB", "--json", out),
    )
    document = json.loads(out.read_text())
    # One stream per host's link: the ranks that do not stream report the others' mean.
    assert all(1.4e8 < sample < 2.1e8 for rank in document["raw"] for sample in rank["goodput_bits_per_s"])
    for figure in document["figures"]:
        # The bucket's burst of 256 KiB may pass at once, a tenth of what a broadcast sends.
        assert 0.2 < figure["share_of_rate"] < 1.1
        assert figure["share_of_rate"] < figure["share_of_tcp"]


@pytest.mark.slow
@pytest.mark.hosts
def test_shares_of_a_shaped_link_are_below_one(tmp_path):
    try:
        EmulatedNetwork(1)  # made, not entered: it only checks what is needed
    except ConfigurationError as error:
        pytest.skip(str(error))
    out = tmp_path / "out.json"
    run(
        *("allreduce", "--emulate-hosts", 2, "--emulate-rate", "200mbit", "--sizes", "4MiB", "--rounds", 2),
        *("--against", "gloo", "--json", out),
    )
    document = json.loads(out.read_text())
    assert document["setting"]["rate_bits_per_s"] == 2e8
    goodput = [sample for rank in document["raw"] for sample in rank["goodput_bits_per_s"]]
    assert 0.5e8 < statistics.median(goodput) < 2.1e8
    for figure in document["figures"]:
        # The bucket's burst of 256 KiB may pass at once: 6 % of 4 MiB.
        assert 0.4 < figure["share_of_rate"] < 1.07
        assert figure["share_of_rate"] < figure["share_of_tcp"]


def test_ps_reports_sparse_and_dense_and_checks_what_is_pulled(tmp_path, warm_python):
    out = tmp_path / "out.json"
    found = run(
        *("ps", "-n", 2, "--keys", "20k", "--density", 0.1, "--dense", "300KiB", "--rounds", 2, "--steps", 6),
        *("--bound", 1, "--json", out),
    )
    document = json.loads(out.read_text())
    figures = {figure["what"]: figure for figure in document["figures"]}
    assert {*SPARSE, *DENSE} < set(figures)
    for what in SPARSE:
        assert figures[what]["keys_per_s"] == pytest.approx(2000 / figures[what]["seconds"]["median"])
    # Half of the keys and values go to the other rank: four bytes each, and no keys if the server knows the list.
    assert 7600 < figures["push, new keys"]["bytes_sent"] < 8500
    assert 3800 < figures["push, known keys"]["bytes_sent"] < 4300
    assert figures["ring allreduce"]["ratio"] is None
    assert figures["push_range"]["ratio"]["median"] > 0
    assert "100% travelled as a digest" in found.stdout
    assert "Staleness of pulls in 6 steps of Bounded(1)" in " ".join(found.stdout.split())
    assert {int(steps) for rank in document["raw"] for steps in rank["staleness"]} <= {0, 1}


@pytest.mark.slow
@pytest.mark.hosts
def test_plan_compares_predicted_with_measured_steps(tmp_path):
    """What a disturbed machine cannot change: every line is there, and its error is that of its two times."""
    try:
        EmulatedNetwork(1)
    except ConfigurationError as error:
        pytest.skip(str(error))
    out = tmp_path / "out.json"
    found = run(
        *("plan", "--models", "gpt", "--hosts", 2, "--rates", "200mbit", "--steps", 2, "--rounds", 1, "--json", out)
    )
    assert "error, compute as then" in found.stdout
    figures = {figure["contestant"]: figure for figure in json.loads(out.read_text())["figures"]}
    assert set(figures) == {"alone", "dense", "oktopk"}
    for figure in figures.values():
        assert figure["error"] == pytest.approx(figure["predicted_s"] / figure["measured_s"] - 1)
    assert figures["alone"]["error_as_then"] == pytest.approx(0.0)
    # 19 MB take 0.8 s at 200 Mbit/s, by both.
    assert figures["dense"]["predicted_s"] > 0.7
    assert figures["dense"]["measured_s"] > 0.7
    assert abs(figures["dense"]["error_as_then"]) < 0.4
