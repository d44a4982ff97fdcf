"""From raw samples of all ranks to the figures in the tables, with numbers small enough to check by hand."""

from dataclasses import replace

import pytest

from totalreduce.bench import collectives, ps, urgent
from totalreduce.bench.collectives import CollectiveRow, CollectivesSamples, Contestant
from totalreduce.bench.launching import BenchmarkFailedError, Setting
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.records import from_document
from totalreduce_benchmarks import coordination, replay, sparse, step, summary
from totalreduce_benchmarks.coordination import CoordinationSamples

MIB = 1 << 20


def decoded(kind, documents):
    return [from_document(kind, document) for document in documents]


def test_the_slowest_rank_counts_and_gains_are_taken_round_by_round():
    def rank(ours, gloo, sent):
        peers = [Contestant("totalreduce", "auto"), Contestant("gloo", "auto")]
        row = CollectiveRow("allreduce", 1000, 250, peers, [ours, gloo], [sent, []], [[2e-6] * 3, []], {})
        return CollectivesSamples([8e8, 1e9], [row])

    results = [
        rank([1e-5, 3e-5, 2e-5], [4e-5, 6e-5, 4e-5], [1100] * 3),
        rank([2e-5] * 3, [2e-5] * 3, [1300] * 3),
    ]
    ours, gloo = collectives.summarise(results, (0, 1), 1e9)
    assert (ours.peer, ours.seconds.median, ours.seconds.high) == ("totalreduce", 2e-5, 3e-5)
    assert ours.algorithm_bytes_per_s == pytest.approx(5e7)
    assert ours.bus_bytes_per_s == pytest.approx(5e7)  # two ranks: factor 1
    assert ours.share_of_rate == pytest.approx(8e-6 / 2e-5)
    assert ours.share_of_tcp == pytest.approx(8e3 / 9e8 / 2e-5)
    assert ours.bytes_sent == 1200
    assert (ours.cpu_s, gloo.cpu_s) == (pytest.approx(2e-6), None)
    assert ours.gain is None
    assert gloo.gain.median == pytest.approx(2.0)  # rounds: 4/2, 6/3, 4/2


def test_tensors_in_shared_memory_are_a_contestant_of_their_own():
    peers = [Contestant(peer, "auto") for peer in ("totalreduce", "shared", "gloo")]
    seconds = [[2e-3, 2e-3], [1e-3, 2e-3], [4e-3, 8e-3]]
    row = CollectiveRow("allreduce", MIB, MIB // 4, peers, seconds, [[9], [7], []], [[]] * 3, {})
    figures = collectives.summarise([CollectivesSamples([1e9], [row])] * 2, (0, 1), None)
    ours, shared, gloo = figures
    assert (ours.gain, ours.gain_shared, shared.gain, shared.gain_shared) == (None,) * 4
    assert (ours.bytes_sent, shared.bytes_sent) == (9, 7)
    assert (gloo.gain.median, gloo.gain_shared.median) == (3.0, 4.0)  # rounds: 2 and 4; 4 and 4
    rows = summary._allreduce_rows(Setting(ranks=2, against=("gloo",), rounds=2), figures)
    assert [(row.what, row.figure) for row in rows] == [
        ("allreduce of 1 MiB, 2 ranks on one host", "2 ms"),
        ("allreduce of 1 MiB, 2 ranks on one host, Group.empty", "1.5 ms"),
    ]
    assert [row.against.split()[0] for row in rows] == ["3.00x", "4.00x"]


def test_an_urgent_operation_counts_only_if_all_ranks_had_the_bulk_in_flight():
    def rank(*operations):
        return {
            "goodput_bits_per_s": [1e9],
            "peers": {"totalreduce": {"alone_s": [1.0], "loaded_s": [2.0], "urgent": [list(operations)]}},
        }

    results = [rank([0.010, 1.0], [0.5, 1.0], [0.020, 1.0]), rank([0.030, 1.0], [0.1, 0.0], [0.010, 1.0])]
    (figure,) = urgent.summarise(decoded(urgent.UrgentSamples, results), 125_000_000, 1e9)
    assert figure.num_urgent == 2
    assert (figure.p50_s, figure.p99_s, figure.max_s) == (0.020, 0.030, 0.030)
    assert figure.bulk_share_of_rate == pytest.approx(0.5)  # 1 Gbit takes 1 s, it took 2
    with pytest.raises(BenchmarkFailedError, match="larger --bulk"):
        urgent.summarise(decoded(urgent.UrgentSamples, [rank([0.1, 0.0])] * 2), 1000, None)


def replay_rank(ours, gloo, waited):
    def blocks(steps):
        return [{"step_s": steps, "waited_s": waited}]

    return {
        "traces": [
            {
                "model": "tiny",
                "source": "made up",
                "goodput_bits_per_s": [1e9],
                "compute_s": 1.0,
                "forward_s": 0.25,
                "num_bytes": 125_000_000,
                "messages": {"totalreduce": 3, "gloo": 1},
                "blocks": {"totalreduce": blocks(ours), "gloo": blocks(gloo)},
            }
        ]
    }


def test_a_step_is_compared_with_the_larger_of_compute_and_communication():
    results = [
        replay_rank([1.0, 1.2], [1.4, 1.6], [0.2, 0.6]),
        replay_rank([1.2, 1.0], [1.6, 1.4], [0.0, 0.2]),
    ]
    ours, gloo = replay.summarise(decoded(replay.ReplaySamples, results), 2e9)
    assert ours.communication_s == pytest.approx(1.0)  # 2 (n - 1) / n = 1, 1 Gbit at 1 Gbit/s
    assert ours.communication_nominal_s == pytest.approx(0.5)
    assert ours.step_s.median == pytest.approx(1.1)
    assert ours.over_ideal == pytest.approx(1.1)
    assert ours.ceiling == pytest.approx(1.25)
    assert ours.waited_s == pytest.approx(0.25)  # (0.2 + 0.6 + 0.0 + 0.2) over two ranks' two steps
    assert [layer for layer, _ in ours.top_layers] == [1, 0]
    assert ours.top_layers[0][1] == pytest.approx(0.2)
    assert gloo.gain.median == pytest.approx(1.5 / 1.1)


def test_a_training_step_is_averaged_over_ranks():
    results = [
        {"seconds": {"totalreduce": [0.1, 0.2], "gloo": [0.2, 0.4]}, "bytes_sent": 10.0},
        {"seconds": {"totalreduce": [0.3, 0.2], "gloo": [0.6, 0.4]}, "bytes_sent": 30.0},
    ]
    ours, ddp = step.summarise(decoded(step.StepSamples, results))
    assert (ours.seconds.median, ours.bytes_sent, ours.ratio) == (pytest.approx(0.2), 20.0, None)
    assert ddp.ratio.median == pytest.approx(0.5)


def test_agreement_is_from_the_last_submission_until_the_last_rank_knows():
    ranks = [
        CoordinationSamples([0.2, 0.4], [0.1, 0.1], [10.0, 20.0], [10.5, 20.25], 3.0, 0.0, 2.0),
        CoordinationSamples([0.4, 0.4], [0.1, 0.3], [10.25, 19.0], [10.25, 20.5], 5.0, 0.0, 4.0),
    ]
    horovod = [CoordinationSamples([0.6, 0.8], [0.2, 0.2])] * 2
    ours, theirs = coordination.summarise({"torch": [ranks], "horovod": [horovod]})
    assert (ours.many.low, ours.many.high) == pytest.approx((0.3, 0.4))
    assert (ours.one.low, ours.one.high) == pytest.approx((0.1, 0.2))
    assert (ours.overhead.low, ours.overhead.high) == pytest.approx((0.2, 0.2))
    assert (ours.agreement.low, ours.agreement.high) == (0.25, 0.5)
    assert (ours.cycles, ours.messages, ours.ratio) == (4.0, 3.0, None)
    assert (theirs.agreement, theirs.cycles, theirs.messages) == (None, None, None)
    assert (theirs.ratio.low, theirs.ratio.high) == pytest.approx((0.5, 0.5))


def test_the_report_is_a_markdown_table_with_the_machine_under_it():
    machine = replace(describe_machine(), processor="a CPU", cores=2, totalreduce="0.1.0", torch="2.13.0")
    text = summary.to_markdown([summary.Row("allreduce of 1 MiB", "2 ms", "1.2x gloo's speed")], machine)
    lines = text.splitlines()
    assert lines[:3] == [
        "| what | figure | against |",
        "|---|---|---|",
        "| allreduce of 1 MiB | 2 ms | 1.2x gloo's speed |",
    ]
    assert "a CPU, 2 cores; totalreduce 0.1.0, torch 2.13.0" in lines[-1]


def test_the_report_has_a_row_for_each_sparse_method_and_none_for_gloo():
    setting = Setting(ranks=2, hosts=2, rate="1gbit", against=("gloo",), rounds=1)

    def contestant(seconds, **more):
        return {"seconds": [[seconds], [seconds]], "error": 0.5, "xi": None, **more}

    counts = {"parts": [[0.0] * 4], "bytes": [[2_000_000] * 4], "counts": [[[10, 10, 10]]], "rescans": 0}
    ranks = [{"contestants": {"topka": contestant(0.05, **counts), "gloo": contestant(1.0)}} for _ in range(2)]
    assert summary._sparse_rows(setting, sparse.summarise(decoded(sparse.SparseSamples, ranks))) == [
        summary.Row(
            "topka of 25.6 M elements, 2 ranks on 2 emulated hosts x 1gbit",
            "50 ms, 1.91 MiB sent per rank",
            "20.0x dense gloo's speed [20.0, 20.0]",
        )
    ]


def test_settings_fill_each_other_in():
    setting = Setting(ranks=8, hosts=4, rate="250mbit", against=("gloo", "gloo"), rounds=1)
    assert setting.rate_bits_per_s == 250e6
    assert setting.peers == ["totalreduce", "gloo"]
    assert setting.describe() == "8 ranks on 4 emulated hosts x 250mbit"
    assert Setting(ranks=2).rate_bits_per_s is None


def test_keys_per_second_count_the_keys_of_all_ranks_for_each_server():
    def rank(push, ring, ranged, kernels):
        seconds = {"push, new keys": push, "ring allreduce": ring, "push_range": ranged}
        sent = {"push, new keys": 800.0, "ring allreduce": 64.0, "push_range": 32.0}
        return ps.PsSamples(seconds, sent, kernels, 1.0, {"0": 3}, 0.1)

    ranks = [
        rank([0.1, 0.3], [0.2, 0.4], [0.1, 0.1], {"find keys": [0.01, 0.01]}),
        rank([0.2, 0.1], [0.1] * 2, [0.1] * 2, {}),
    ]
    push, ring, ranged, kernel = ps.summarise(ranks, 1000, 5000)
    assert (push.seconds.median, push.keys_per_s) == (pytest.approx(0.25), pytest.approx(4000))
    assert (ring.keys_per_s, ring.ratio, ring.bytes_sent) == (pytest.approx(5000 / 0.3), None, 64)
    assert ranged.ratio.median == pytest.approx(3.0)
    assert (kernel.keys_per_s, kernel.bytes_sent) == (pytest.approx(1e5), None)
