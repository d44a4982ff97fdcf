"""From samples to the figures of ``bench sparse``, ``kernels`` and ``growth``, small enough to check by hand."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import invoke

from totalreduce.bench import arithmetic, methods
from totalreduce.bench.gradients import GradientSource
from totalreduce.bench.launching import BenchmarkFailedError
from totalreduce.bench.plots import Line, draw_lines
from totalreduce.bench.records import from_document
from totalreduce.cli import pictures
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.pytorch.buckets import ParameterSpec
from totalreduce.pytorch.error_feedback import CompressedPlan, ErrorFeedback
from totalreduce_benchmarks import growth, kernels, plots, sparse
from totalreduce_benchmarks.sparse_worker import matrix_sides


@pytest.mark.parametrize(
    ("text", "expected"),
    [("14.7M", 14_700_000), ("100k", 100_000), ("2 m", 2_000_000), ("0.001G", 1_000_000), ("512", 512), ("0.6", 1)],
)
def test_a_count_with_its_unit_is_elements(text, expected):
    assert arithmetic.parse_count(text) == expected


@pytest.mark.parametrize("text", ["", "M", "-4k", "4MiB", "0", "0.4", "1e6", "2.2G"])
def test_what_is_no_count_is_refused_with_an_example(text):
    with pytest.raises(ConfigurationError, match=r"14\.7M|2\^31"):
        arithmetic.parse_count(text)


def test_counts_are_shown_with_three_digits():
    shown = [arithmetic.format_count(count) for count in (14_700_000, 2e9, 250_000, 999, 1.5)]
    assert shown == ["14.7 M", "2 G", "250 k", "999", "1.5"]


def test_buckets_are_cut_as_large_parameters_are():
    assert sparse.SparseParameters(elements="10", bucket_elements="4").edges == [0, 3, 6, 10]
    assert sparse.SparseParameters(elements="4", bucket_elements="4").edges == [0, 4]
    edges = sparse.SparseParameters(elements="14.7M", bucket_elements="4M").edges
    assert (len(edges), max(np.diff(edges)) - min(np.diff(edges))) == (5, 0)


@pytest.mark.parametrize("count", [1, 4_000_000, 10_000_000, 12_600_000, 14_700_000, 60_000_000])
def test_without_an_option_buckets_are_those_of_the_optimizer(count, monkeypatch):
    given = []

    def measure(setting, parameters):
        given.append(parameters)
        raise BenchmarkFailedError("nothing is measured here")

    monkeypatch.setattr(sparse, "measure_sparse", measure)
    assert invoke("bench", "sparse", "--elements", count).exit_code == 1
    (parameters,) = given
    assert parameters.count == count
    edges = parameters.edges
    weight = torch.nn.Parameter(torch.empty(count, device="meta"))
    spec = ParameterSpec.of("weight", (), weight)
    plan = CompressedPlan.of([weight], [spec], ErrorFeedback(), whole=False)
    sizes = [sum(part.end - part.begin for part in bucket) for bucket in plan.buckets]
    assert len(edges) - 1 == len(sizes)
    assert max(np.diff(edges)) == max(sizes)


@pytest.mark.parametrize(("count", "sides"), [(16, (4, 4)), (15, (5, 3)), (17, (4, 4)), (1, (1, 1)), (2, (2, 1))])
def test_a_bucket_is_seen_as_a_nearly_square_matrix(count, sides):
    assert matrix_sides(count) == sides
    assert 0 <= count - sides[0] * sides[1] < sides[1]


def summarise(documents):
    return sparse.summarise([from_document(sparse.SparseSamples, document) for document in documents])


def rank(*, seconds, sent, received, selected, parts=(0.001, 0.002, 0.003, 0.004)):
    """One rank of a method with two buckets of k 100 and 10, over two rounds of two steps."""
    counts = [[[100, selected, 104], [10, 10, 12]]] * 4
    moved = [[sent, one, sent - 10, one - 10] for one in received]
    return {"seconds": seconds, "parts": [list(parts)] * 4, "bytes": moved, "counts": counts, "rescans": 0.5}


def test_the_slowest_rank_of_each_step_counts_and_ratios_are_taken_round_by_round():
    ours = [
        rank(seconds=[[0.1, 0.2], [0.4, 0.4]], sent=1000, received=[100, 300, 100, 100], selected=100),
        rank(seconds=[[0.3, 0.1], [0.4, 0.2]], sent=2000, received=[300, 300, 300, 300], selected=90),
    ]
    gloo = [{"seconds": [[0.5, 0.5], [0.4, 0.4]], "error": 0.0, "xi": None}] * 2
    results = [
        {"contestants": {"oktopk": own | {"error": 0.5, "xi": 0.25}, "gloo": theirs}}
        for own, theirs in zip(ours, gloo, strict=True)
    ]
    figure, peer = summarise(results)
    assert (figure.contestant, peer.contestant) == ("oktopk", "gloo")
    assert (figure.seconds.low, figure.seconds.high) == pytest.approx((0.25, 0.4))  # (0.3 + 0.2) / 2, (0.4 + 0.4) / 2
    assert (figure.gains["gloo"].low, figure.gains["gloo"].high) == pytest.approx((1.0, 2.0))
    assert figure.parts_s == pytest.approx({"selection": 0.001, "coding": 0.002, "waiting": 0.003, "writing": 0.004})
    assert (figure.sent_bytes, figure.payload_sent_bytes) == (1500, 1490)
    assert (figure.received_bytes, figure.payload_received_bytes) == (225, 215)
    assert figure.imbalance_received == pytest.approx((1.5 + 1 + 1.5 + 1.5) / 4)
    assert figure.imbalance_sent == pytest.approx(2000 / 1500)
    assert figure.bytes_per_selected == pytest.approx(1500 / 105)  # 110 and 100 in both buckets together
    assert figure.selected_over_k == pytest.approx((1 + 1 + 0.9 + 1) / 4)
    assert figure.selected_near == pytest.approx(3 / 4)
    assert figure.applied_over_k == pytest.approx((1.04 + 1.2) / 2)
    assert figure.applied_near == pytest.approx(1 / 2)
    assert (figure.rescans, figure.error, figure.xi) == (0.5, 0.5, 0.25)
    assert (peer.gains, peer.parts_s, peer.sent_bytes, peer.selected_near) == ({}, {}, None, None)


def test_ranks_that_were_not_to_select_do_not_count():
    """As with the shared method: one leader."""
    leader = rank(seconds=[[0.1, 0.1]] * 2, sent=300, received=[1] * 4, selected=100)
    other = leader | {"counts": [[[0, 0, 104], [0, 0, 12]]] * 4}
    results = [{"contestants": {"shared": own | {"error": 1.0, "xi": 1.0}}} for own in (other, leader)]
    (figure,) = summarise(results)
    assert (figure.selected_over_k, figure.selected_near) == (1.0, 1.0)
    assert figure.bytes_per_selected == pytest.approx(300 / 110)
    assert figure.applied_over_k == pytest.approx((1.04 + 1.2) / 2)


def test_a_method_without_a_k_has_no_shares_of_it():
    plain = rank(seconds=[[0.1, 0.1]] * 2, sent=300, received=[1] * 4, selected=0) | {"counts": [[]] * 4}
    (figure,) = summarise([{"contestants": {"dense": plain | {"error": 0.0, "xi": None}}}] * 2)
    assert (figure.selected_over_k, figure.applied_near, figure.bytes_per_selected, figure.xi) == (None,) * 4
    assert figure.sent_bytes == 300


@pytest.mark.parametrize("distribution", methods.DISTRIBUTIONS)
def test_gradients_differ_in_every_step_and_rank_and_can_be_made_again(distribution):
    count = 64 * 500 + 7

    def gradient(rank, step):
        out = np.empty(count, np.float32)
        GradientSource(count, distribution, rank).write(out, step)
        return out

    first = gradient(0, 0)
    assert np.array_equal(first, gradient(0, 0))
    for other in (gradient(0, 1), gradient(1, 0)):
        assert (first == other).mean() < (0.98 if distribution == "embedding" else 0.01)
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.3
    absent = (first[: 64 * 500].reshape(-1, 64) == 0).all(axis=1)
    assert absent.mean() == (pytest.approx(0.94, abs=0.03) if distribution == "embedding" else 0)
    assert not absent[:5].any()  # the first hundredth of the rows is always there


def test_the_busiest_rank_counts_where_growth_is_concerned():
    def one(received):
        moved = [[90, received + 5, 80, received]] * 2
        samples = sparse.ContestantSamples([], bytes=moved, counts=[[[20, 20, 20]]] * 2)
        return sparse.SparseSamples({"gtopk": samples})

    figure = growth.figure_of_processes("gtopk", [one(100), one(300)])
    assert (figure.method, figure.ranks, figure.by, figure.k) == ("gtopk", 2, growth.PROCESSES, 20)
    assert (figure.received_bytes, figure.received_bytes_max, figure.wire_bytes) == (200, 300, 205)
    assert (figure.sent_bytes, figure.sent_bytes_max, figure.bytes_per_selected) == (80, 80, 15)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_simulated_ranks_send_what_the_methods_say(world_size):
    figures = {name: growth.simulate(name, world_size, 1000, 0.01) for name in ("oktopk", "topka", "gtopk")}
    others = world_size - 1
    # Everybody's block: a header, 1000 values of two bytes, and Rice codes of 7.6 to 8.5 bits; and a greeting.
    assert 2950 * others < figures["topka"].received_bytes < 3100 * others
    assert figures["topka"].received_bytes_max < 1.02 * figures["topka"].received_bytes
    # The root takes a block from each level of the tree, and the others one block in all from above.
    levels = int(np.ceil(np.log2(world_size)))
    assert figures["gtopk"].received_bytes_max == pytest.approx(3065 * levels, rel=0.05)
    assert figures["gtopk"].sent_bytes_max == pytest.approx(3065 * others, rel=0.05)
    # Two phases of k elements, but for what stays; 512 bytes of histogram from everybody; samples in the first step.
    expected = 2 * 3050 * others / world_size + 512 * others
    assert figures["oktopk"].received_bytes == pytest.approx(expected, rel=0.08)
    assert figures["oktopk"].first_bytes > figures["oktopk"].received_bytes + 1024 * others


def test_ratios_of_kernels_are_taken_round_by_round():
    def kernel(name, items, selected, item_bytes):
        return kernels.Kernel(name, items, selected, item_bytes, lambda: None, lambda: None)

    several = [
        kernel(kernels.FUSED, 100, False, 12.0),
        kernel(kernels.COPY, 100, False, 12.0),
        kernel(kernels.TOPK, 100, False, None),
        kernel("pack", 10, True, None),
    ]
    seconds = {
        kernels.FUSED: [2e-7, 4e-7],
        kernels.COPY: [1e-7, 4e-7],
        kernels.TOPK: [4e-6, 4e-6],
        "pack": [1e-8, 3e-8],
    }
    fused, copy, topk, pack = kernels.summarise(several, seconds)
    assert (fused.ns_per_item.low, fused.ns_per_item.high) == pytest.approx((2, 4))
    assert fused.bytes_per_s == pytest.approx(1200 / 3e-7)
    assert (fused.over_copy.low, fused.over_copy.high) == pytest.approx((1, 2))
    assert (fused.topk_over.low, fused.topk_over.high) == pytest.approx((10, 20))
    assert copy.over_copy is None
    assert copy.topk_over.median == pytest.approx(25)
    assert (topk.over_copy.low, topk.bytes_per_s, topk.topk_over) == (pytest.approx(10), None, None)
    assert (pack.ns_per_item.median, pack.over_copy, pack.topk_over) == (pytest.approx(2), None, None)


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(monkeypatch):
    with pytest.raises(ConfigurationError, match=r"\.png.*not 'out\.txt'"):
        pictures.require_matplotlib(Path("out.txt"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'totalreduce\[plot\]'"):
        pictures.require_matplotlib(Path("out.png"))


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    bars = [plots.Bar("ours", 3.0, 2.0, 4.0, {"selection": 1.0, "writing": 1.0}), plots.Bar("gloo", 5.0, 5.0, 5.0)]
    plots.draw_bars(tmp_path / "bars.png", "two", "ms", bars)
    lines = [
        Line("oktopk, processes", [2, 4], [3.0, 4.5]),
        Line("oktopk, lockstep", [8], [5.0], dashed=True),
    ]
    draw_lines(tmp_path / "lines.svg", "growth", ("ranks", "bytes"), lines)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "lines.svg").read_text()
    with pytest.raises(ConfigurationError, match="cannot write --plot"):
        plots.draw_bars(tmp_path / "nowhere" / "bars.png", "two", "ms", bars)
