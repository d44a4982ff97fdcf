"""``totalreduce bench replay``: a real model's training step, replayed with emulated compute.

The idea is Total Reduce's own workload test: what counts is how long a forward pass waits for gradients.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from totalreduce.bench.allreduce import mean_goodput
from totalreduce.bench.arithmetic import scheduling_ceiling, wire_limit_s
from totalreduce.bench.launching import Setting, run_benchmark
from totalreduce.bench.options import (
    AgainstOption,
    HostsOption,
    JsonOption,
    RanksOption,
    RateOption,
    RoundsOption,
    make_setting,
)
from totalreduce.bench.report import duration, times, write_json
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate
from totalreduce.bench.traces import as_document, find_traces, load_trace
from totalreduce.cli.report import format_bytes, print_table
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.pytorch.sizes import BUCKET_BYTES

__all__ = ["ReplayFigure", "bench_replay", "measure_replay", "summarise"]

_TOP_LAYERS = 3


@dataclass(frozen=True, slots=True)
class ReplayFigure:
    """One trace, one peer.

    Attributes:
        model: Name of the trace.
        peer: Who communicated.
        num_bytes: Gradient bytes of one step on one rank.
        messages: Number of messages that the layers were fused into.
        compute_s: Emulated backward and forward pass together.
        forward_s: The forward pass alone.
        communication_s: Least time on the wire at the goodput that plain TCP streams had in the same run.
        communication_nominal_s: The same at the nominal rate; ``None`` where nothing is shaped.
        step_s: Time of a step, averaged over ranks, median over steps.
        over_ideal: ``step_s / max(compute_s, communication_s)``.
        ceiling: The most that any scheduler gains over a perfect DDP here.
        waited_s: Time per step for which the forward pass was blocked, averaged over ranks.
        top_layers: The layers blocked on longest: index in forward order, seconds per step.
        gain: This peer's step time divided by Total Reduce's: above 1, Total Reduce is faster.
    """

    model: str
    peer: str
    num_bytes: int
    messages: int
    compute_s: float
    forward_s: float
    communication_s: float
    communication_nominal_s: float | None
    step_s: Estimate
    over_ideal: float
    ceiling: float
    waited_s: float
    top_layers: list[tuple[int, float]]
    gain: Estimate | None


def bench_replay(
    *,
    traces: Annotated[
        list[str] | None,
        typer.Argument(help="Files or names. Default: all of --traces-dir, else those shipped."),
    ] = None,
    traces_dir: Annotated[list[Path] | None, typer.Option(help="Where to look for traces. Repeatable.")] = None,
    balance: Annotated[
        str,
        typer.Option(
            help="What is scaled so that communication takes --ratio times as long as compute: "
            "time (the trace's times), elements (its gradients), or none."
        ),
    ] = "time",
    ratio: Annotated[float, typer.Option(help="Communication divided by compute.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Timed steps in a row, after two untimed ones.")] = 5,
    bucket: Annotated[
        float, typer.Option(help="Small layers are fused up to this many MiB, as DistributedOptimizer does by default.")
    ] = BUCKET_BYTES / (1 << 20),
    ranks: RanksOption = None,
    emulate_hosts: HostsOption = 0,
    emulate_rate: RateOption = "1gbit",
    against: AgainstOption = None,
    rounds: RoundsOption = 2,
    json: JsonOption = None,
) -> None:
    """Replay a model's training step: gradients become ready and are needed at the trace's times.

    Total Reduce sends by priority and lets the next forward pass begin at once; fifo is the same engine in
    order of submission; gloo is DDP's order: 25 MiB buckets, all awaited before the next forward pass.
    Compute is emulated.
    """
    setting = make_setting(ranks, emulate_hosts, emulate_rate, against, rounds)
    setting.refuse_mpi("replay")
    documents = [as_document(load_trace(path)) for path in find_traces(traces or (), traces_dir or ())]
    parameters = {
        "traces": documents,
        "balance": balance,
        "ratio": ratio,
        "steps": steps,
        "bucket_bytes": int(bucket * (1 << 20)),
    }
    figures, results = measure_replay(setting, parameters)
    _print(setting, figures)
    write_json(json, "replay", setting, [asdict(figure) for figure in figures], results)


def measure_replay(setting: Setting, parameters: dict[str, Any]) -> tuple[list[ReplayFigure], list[dict[str, Any]]]:
    """Run the workers; returns the figures and each rank's raw result.

    Raises:
        BenchmarkFailedError: A rank failed or a result was wrong.
        ConfigurationError: A parameter makes no sense.
    """
    if parameters["balance"] not in ("time", "elements", "none"):
        raise ConfigurationError(f"--balance is time, elements or none, not {parameters['balance']!r}")
    if parameters["ratio"] <= 0 or parameters["steps"] < 1 or parameters["bucket_bytes"] < 1:
        raise ConfigurationError("--ratio and --bucket must be positive and --steps at least 1")
    if setting.ranks < 2:
        raise ConfigurationError("bench replay needs at least 2 ranks: one rank has nobody to communicate with")
    results = run_benchmark("replay", parameters, setting)
    return summarise(results, setting.peers, setting.rate_bits_per_s), results


def summarise(results: list[dict[str, Any]], peers: list[str], rate_bits_per_s: float | None) -> list[ReplayFigure]:
    """From every rank's samples to figures. Pure."""
    figures = []
    for index in range(len(results[0]["traces"])):
        ranks = [result["traces"][index] for result in results]
        steps = {peer: _step_seconds(ranks, peer) for peer in peers}
        figures += [_figure(ranks, peer, steps, rate_bits_per_s) for peer in peers]
    return figures


def _figure(
    ranks: list[dict[str, Any]], peer: str, steps: dict[str, list[float]], rate_bits_per_s: float | None
) -> ReplayFigure:
    trace, world_size = ranks[0], len(ranks)
    communication_s = wire_limit_s(trace["num_bytes"], world_size, mean_goodput(ranks))
    step_s = estimate(steps[peer])
    waited = _waited_per_step(ranks, peer)
    top = sorted(enumerate(waited), key=lambda item: -item[1])[:_TOP_LAYERS]
    return ReplayFigure(
        trace["model"],
        peer,
        trace["num_bytes"],
        trace["messages"][peer],
        trace["compute_s"],
        trace["forward_s"],
        communication_s,
        rate_bits_per_s and wire_limit_s(trace["num_bytes"], world_size, rate_bits_per_s),
        step_s,
        step_s.median / max(trace["compute_s"], communication_s),
        scheduling_ceiling(trace["forward_s"], trace["compute_s"], communication_s),
        sum(waited),
        top,
        None if peer == "totalreduce" else ratio_estimate(steps[peer], steps["totalreduce"]),
    )


def _step_seconds(ranks: list[dict[str, Any]], peer: str) -> list[float]:
    """Duration of every timed step, averaged over ranks: they run in step, so only jitter differs."""
    blocks = zip(*(rank["blocks"][peer] for rank in ranks), strict=True)
    return [fmean(step) for block in blocks for step in zip(*(rank["step_s"] for rank in block), strict=True)]


def _waited_per_step(ranks: list[dict[str, Any]], peer: str) -> list[float]:
    """Seconds per step for which each layer's need blocked, averaged over ranks."""
    blocks = [block for rank in ranks for block in rank["blocks"][peer]]
    num_steps = sum(len(block["step_s"]) for block in blocks)
    return [sum(layer) / num_steps for layer in zip(*(block["waited_s"] for block in blocks), strict=True)]


def _print(setting: Setting, figures: list[ReplayFigure]) -> None:
    for model in dict.fromkeys(figure.model for figure in figures):
        _print_trace(setting, [figure for figure in figures if figure.model == model])


def _print_trace(setting: Setting, figures: list[ReplayFigure]) -> None:
    first = figures[0]
    rows = [
        (
            figure.peer,
            str(figure.messages),
            duration(figure.step_s),
            f"{figure.over_ideal:.3f}",
            f"{figure.waited_s * 1000:.1f}",
            ", ".join(f"{layer}: {seconds * 1000:.1f}" for layer, seconds in figure.top_layers),
            times(figure.gain),
        )
        for figure in figures
    ]
    nominal = first.communication_nominal_s
    print_table(
        f"{first.model} ({format_bytes(first.num_bytes)}), {setting.describe()}",
        (
            "by",
            "messages",
            "step (95 %)",
            "step / ideal",
            "waiting ms",
            "most for layer: ms",
            "gain",
        ),
        rows,
        f"Compute {first.compute_s:.4g} s (forward {first.forward_s:.4g} s, emulated), communication at "
        f"least {first.communication_s:.4g} s at the goodput of plain TCP"
        + (f", {nominal:.4g} s at the nominal rate" if nominal else "")
        + f".\nIdeal: the larger of both. No scheduler gains more than {first.ceiling:.2f}x over a perfect "
        "DDP here.\nGain: how much faster Total Reduce is than the peer of this line. Results checked.",
    )
