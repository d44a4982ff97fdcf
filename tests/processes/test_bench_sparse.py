"""``totalreduce bench sparse``, ``kernels`` and ``growth`` once, tiny, with real workers: what they count is right."""

import json

import pytest
from commands import invoke

from totalreduce.bench.launching import BenchmarkFailedError
from totalreduce.foundation.errors import ConfigurationError

METHODS = ["oktopk", "topka", "gtopk", "topkdsa", "gaussiank", "shared", "powersgd", "coded", "dense"]
PEERS = ["gloo", "fp16", "powersgd-hook"]


def run(*arguments, exit_code=0):
    found = invoke("bench", *arguments)
    assert found.exit_code == exit_code, found.output
    return found


def test_every_method_sends_what_it_says_and_selects_what_it_should(tmp_path, warm_python):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    found = run(
        *("sparse", "-n", 2, "--elements", "100k", "--bucket-elements", "40k", "--steps", 2, "--rounds", 2),
        *("--against", "gloo,fp16,powersgd-hook", "--json", out, "--plot", picture),
    )
    assert "100 k float32 (normal), density 0.01, 2 ranks on one host" in found.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    document = json.loads(out.read_text())
    figures = {figure["contestant"]: figure for figure in document["figures"]}
    assert list(figures) == METHODS + PEERS
    for name in METHODS:
        check_figure(figures[name], [rank["contestants"][name] for rank in document["raw"]])
    for name in PEERS:
        assert figures[name]["parts_s"] == {}
        assert set(figures[name]["gains"]) == set(PEERS) - {name}
    for name in ("oktopk", "topka", "gtopk", "topkdsa", "shared"):
        assert (figures[name]["selected_over_k"], figures[name]["selected_near"]) == (1.0, 1.0)
    assert 0.75 <= figures["gaussiank"]["selected_over_k"] <= 1.25
    assert (figures["shared"]["applied_over_k"], figures["gtopk"]["applied_over_k"]) == (1.0, 1.0)
    assert figures["oktopk"]["applied_over_k"] == pytest.approx(1.0, abs=0.05)
    assert 1.5 < figures["topka"]["applied_over_k"] <= 2.0
    # Three buckets: half of each to the other rank and half of the sums back, and one byte of greeting.
    assert figures["dense"]["payload_sent_bytes"] == 4 * 100_000 + 3
    # 1000 elements of 3 bytes; a greeting and a header for each bucket.
    assert 2900 < figures["topka"]["payload_sent_bytes"] < 3200
    assert figures["topka"]["payload_sent_bytes"] < figures["oktopk"]["payload_sent_bytes"] < 6000
    assert figures["dense"]["error"] < 1e-6
    assert figures["gloo"]["error"] < 1e-6
    assert 1e-6 < figures["fp16"]["error"] < 1e-3
    for name in ("topka", "oktopk", "powersgd", "powersgd-hook"):
        assert 0.1 < figures[name]["error"] < 1.0
    assert figures["powersgd"]["xi"] is None
    assert figures["topka"]["xi"] > 0


def check_figure(figure, ranks):
    assert figure["seconds"]["num_samples"] == 2
    assert set(figure["gains"]) == set(PEERS)
    for rank in ranks:
        steps = [step for steps in rank["seconds"] for step in steps]
        assert len(steps) == len(rank["bytes"]) == len(rank["parts"]) == 4
        for seconds, parts, (sent, received, payload_sent, payload_received) in zip(
            steps, rank["parts"], rank["bytes"], strict=True
        ):
            assert all(part >= 0 for part in parts)
            assert sum(parts) <= seconds < sum(parts) + 10.0
            # A header of some dozens of bytes for each message; the fast lane has no messages.
            assert payload_sent <= sent < payload_sent + 5000
            assert payload_received <= received < payload_received + 5000
    # What one sends the other one receives; a barrier's first message may come into the step before.
    assert figure["sent_bytes"] == pytest.approx(figure["received_bytes"], abs=200)
    assert figure["payload_sent_bytes"] == pytest.approx(figure["payload_received_bytes"])
    if figure["bytes_per_selected"] is not None:
        # Three buckets of k 333.
        assert figure["bytes_per_selected"] * 999 * figure["selected_over_k"] == pytest.approx(figure["sent_bytes"])


def test_growth_counts_the_same_in_processes_and_in_lockstep(tmp_path, warm_python):
    out = tmp_path / "out.json"
    found = run(
        *("growth", "--processes", 2, "--lockstep", "2,5", "--elements", "200k", "--selected", "2k", "--json", out)
    )
    assert "by number of ranks" in found.stdout
    document = json.loads(out.read_text())
    figures = {(figure["method"], figure["by"], figure["ranks"]): figure for figure in document["figures"]}
    assert len(figures) == 9
    for method in ("oktopk", "topka", "gtopk"):
        real, simulated = figures[method, "processes", 2], figures[method, "lockstep", 2]
        assert (real["k"], simulated["k"]) == (2000, 2000)
        assert real["received_bytes"] == pytest.approx(simulated["received_bytes"], rel=0.03)
        assert real["received_bytes"] < real["wire_bytes"] < real["received_bytes"] + 2000
        assert real["bytes_per_selected"] == real["received_bytes_max"] / 2000
    topka = [figures["topka", "lockstep", ranks]["received_bytes"] for ranks in (2, 5)]
    assert topka[1] == pytest.approx(4 * topka[0], rel=0.01)


def test_kernels_are_compared_with_a_copy_and_with_topk(tmp_path):
    out = tmp_path / "out.json"
    found = run("kernels", "--elements", "300k", "--density", 0.02, "--rounds", 2, "--json", out)
    assert "6 k selected, one core" in found.stdout
    document = json.loads(out.read_text())
    figures = {figure["kernel"]: figure for figure in document["figures"]}
    assert {"select + residual", "plain copy", "torch.topk", "pack", "unpack", "add 4 lists up"} <= set(figures)
    fused, raw = figures["select + residual"], document["raw"]
    assert (fused["items"], figures["pack"]["items"], figures["add 4 lists up"]["items"]) == (300_000, 6000, 24_000)
    assert fused["ns_per_item"]["low"] == pytest.approx(1e9 * min(raw["select + residual"]) / 300_000)
    ratios = [own / copy for own, copy in zip(raw["select + residual"], raw["plain copy"], strict=True)]
    assert fused["over_copy"]["median"] == pytest.approx(sum(ratios) / 2)
    assert set(document["environment"]) >= {"torch", "numba", "processor"}


def test_a_failed_check_ends_the_command_with_exit_code_1(monkeypatch):
    def fail(*_):
        raise BenchmarkFailedError("rank 1 failed: oktopk has lost 1.0e-01 of what went in")

    monkeypatch.setattr("totalreduce_benchmarks.sparse.run_benchmark", fail)
    assert "no figures: rank 1 failed: oktopk has lost" in run("sparse", "-n", 2, exit_code=1).output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("sparse", "--methods", "oktopk,topq"), "sparse method 'topq' is not known"),
        (("sparse", "--methods", ","), "--methods names none"),
        (("sparse", "--density", "1.5"), "density must be from 0 to 1"),
        (("sparse", "-n", "1"), "at least 2 ranks"),
        (("sparse", "--against", "mpich"), "--against knows gloo, fp16, powersgd-hook here, not mpich"),
        (("sparse", "--elements", "4MiB"), "not a number of elements"),
        (("sparse", "--distribution", "uniform"), "--distribution is normal"),
        (("sparse", "--steps", "0"), "--steps"),
        (("sparse", "--warm-up", "2"), "--warm-up"),
        (("sparse", "--rounds", "0"), "--rounds"),
        (("sparse", "--plot", "out.txt"), "--plot writes"),
        (("kernels", "--density", "0"), "some must be"),
        (("kernels", "--density", "-1"), "density must be from 0 to 1"),
        (("kernels", "--rounds", "0"), "--rounds"),
        (("growth", "--processes", "1,2"), "--processes takes numbers of ranks from 2"),
        (("growth", "--processes", "", "--lockstep", ""), "nothing to count"),
        (("growth", "--methods", "shared"), "--methods takes oktopk, topka, gtopk"),
        (("growth", "--density", "0"), "--density"),
        (("growth", "--selected", "200M"), "fewer --selected"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(arguments, complaint):
    found = invoke("bench", *arguments)
    assert isinstance(found.exception, ConfigurationError), found.output
    assert complaint in str(found.exception)


@pytest.mark.parametrize("command", ["sparse", "kernels", "growth"])
def test_help_ends_with_an_example(command):
    assert f"totalreduce bench {command}" in run(command, "--help").stdout
