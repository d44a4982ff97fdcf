"""``totalreduce bench replay``: a real model's training step, replayed with emulated compute.

The idea is Total Reduce's own workload test: its figure is the time for which a forward pass waits for gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from totalreduce.bench.arithmetic import wire_limit_s
from totalreduce.bench.command import benchmark
from totalreduce.bench.goodput import mean_goodput
from totalreduce.bench.launching import Results, Setting, run_benchmark
from totalreduce.bench.report import Report, Table, duration, times
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate
from totalreduce.cli.report import format_bytes
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.planning.traces import Trace, find_traces, load_trace
from totalreduce.pytorch.sizes import BUCKET_BYTES

_TOP_LAYERS = 3


@dataclass(frozen=True, slots=True)
class ReplayParameters:
    """The way in which traces are replayed; the fields are options."""

    balance: Annotated[
        str,
        typer.Option(
            help="What is scaled so that communication takes --ratio times as long as compute: "
            "time (the trace's times), elements (its gradients), or none."
        ),
    ] = "time"
    ratio: Annotated[float, typer.Option(help="Communication divided by compute.")] = 1.0
    steps: Annotated[int, typer.Option(help="Timed steps in a row, after two untimed ones.")] = 5
    bucket: Annotated[
        float, typer.Option(help="Small layers are fused up to this many MiB, as DistributedOptimizer does by default.")
    ] = BUCKET_BYTES / (1 << 20)

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.balance not in ("time", "elements", "none"):
            raise ConfigurationError(f"--balance is time, elements or none, not {self.balance!r}")
        if self.ratio <= 0 or self.steps < 1 or self.bucket_bytes < 1:
            raise ConfigurationError("--ratio and --bucket must be positive and --steps at least 1")

    @property
    def bucket_bytes(self) -> int:
        """Up to how many bytes small layers are fused."""
        return int(self.bucket * (1 << 20))


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """The traces, one after the other, and how they are replayed."""

    traces: list[Trace]
    parameters: ReplayParameters


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps in a row on one rank: their durations, and how long each layer's need was blocked in all of them."""

    step_s: list[float]
    waited_s: list[float]


@dataclass(frozen=True, slots=True)
class TraceSamples:
    """One trace on one rank.

    Attributes:
        model: Name of the trace.
        source: Where it comes from.
        goodput_bits_per_s: Of plain TCP streams, before and after.
        compute_s: Emulated backward and forward pass together.
        forward_s: The forward pass alone.
        num_bytes: Gradient bytes of one step.
        messages: Number of messages that the layers were fused into, by peer.
        blocks: By peer and round.
    """

    model: str
    source: str
    goodput_bits_per_s: list[float]
    compute_s: float
    forward_s: float
    num_bytes: int
    messages: dict[str, int]
    blocks: dict[str, list[Block]]


@dataclass(frozen=True, slots=True)
class ReplaySamples:
    """The samples of one rank."""

    traces: list[TraceSamples]


@dataclass(frozen=True, slots=True)
class ReplayFigure:
    """One trace, one peer.

    Attributes:
        model: Name of the trace.
        peer: The peer that communicated.
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


@benchmark(
    "replay",
    "totalreduce bench replay --emulate-hosts 4 --against gloo --against fifo",
    "totalreduce bench replay resnet50 --traces-dir traces --ratio 0.5 --emulate-hosts 4",
    shared=("ranks", "emulate_hosts", "emulate_rate", "against", "rounds"),
    rounds=2,
)
def bench_replay(
    setting: Setting,
    parameters: ReplayParameters,
    *,
    traces: Annotated[
        list[str] | None,
        typer.Argument(help="Files or names. Default: all of --traces-dir, else those shipped."),
    ] = None,
    traces_dir: Annotated[list[Path] | None, typer.Option(help="Where to look for traces. Repeatable.")] = None,
) -> Report:
    """Replay a model's training step: gradients become ready and are needed at the trace's times.

    Total Reduce sends by priority and lets the next forward pass begin at once; fifo is the same engine in
    order of submission; gloo is DDP's order: 25 MiB buckets, all awaited before the next forward pass.
    Compute is emulated.
    """
    found = [load_trace(path) for path in find_traces(traces or (), traces_dir or ())]
    figures, results = measure_replay(setting, ReplayJob(found, parameters))
    models = dict.fromkeys(figure.model for figure in figures)
    tables = [_table(setting, [figure for figure in figures if figure.model == model]) for model in models]
    return Report(tables, setting.as_document(), results.machine, figures, results.raw())


def measure_replay(setting: Setting, job: ReplayJob) -> tuple[list[ReplayFigure], Results[ReplaySamples]]:
    """Run the workers; returns the figures and the ranks' samples."""
    setting.refuse_mpi("replay")
    if setting.ranks < 2:
        raise ConfigurationError("bench replay needs at least 2 ranks: one rank has nobody to communicate with")
    results = run_benchmark("totalreduce_benchmarks.replay_worker", job, setting, ReplaySamples)
    return summarise(results.ranks, setting.rate_bits_per_s), results


def summarise(samples: Sequence[ReplaySamples], rate_bits_per_s: float | None) -> list[ReplayFigure]:
    """From every rank's samples to figures. Pure."""
    figures = []
    for ranks in zip(*(rank.traces for rank in samples), strict=True):
        steps = {peer: _step_seconds([rank.blocks[peer] for rank in ranks]) for peer in ranks[0].blocks}
        figures += [_figure(ranks, peer, steps, rate_bits_per_s) for peer in steps]
    return figures


def _figure(
    ranks: Sequence[TraceSamples], peer: str, steps: dict[str, list[float]], rate_bits_per_s: float | None
) -> ReplayFigure:
    trace, world_size = ranks[0], len(ranks)
    communication_s = wire_limit_s(trace.num_bytes, world_size, mean_goodput(ranks))
    step_s = estimate(steps[peer])
    waited = _waited_per_step([block for rank in ranks for block in rank.blocks[peer]])
    return ReplayFigure(
        model=trace.model,
        peer=peer,
        num_bytes=trace.num_bytes,
        messages=trace.messages[peer],
        compute_s=trace.compute_s,
        forward_s=trace.forward_s,
        communication_s=communication_s,
        communication_nominal_s=rate_bits_per_s and wire_limit_s(trace.num_bytes, world_size, rate_bits_per_s),
        step_s=step_s,
        over_ideal=step_s.median / max(trace.compute_s, communication_s),
        ceiling=scheduling_ceiling(trace.forward_s, trace.compute_s, communication_s),
        waited_s=sum(waited),
        top_layers=sorted(enumerate(waited), key=lambda item: -item[1])[:_TOP_LAYERS],
        gain=None if peer == "totalreduce" else ratio_estimate(steps[peer], steps["totalreduce"]),
    )


def _step_seconds(ranks: list[list[Block]]) -> list[float]:
    """Duration of every timed step, averaged over ranks: they run in step, so only jitter differs."""
    return [
        fmean(step)
        for blocks in zip(*ranks, strict=True)
        for step in zip(*(block.step_s for block in blocks), strict=True)
    ]


def _waited_per_step(blocks: list[Block]) -> list[float]:
    """Seconds per step for which each layer's need blocked, averaged over ranks."""
    num_steps = sum(len(block.step_s) for block in blocks)
    return [sum(layer) / num_steps for layer in zip(*(block.waited_s for block in blocks), strict=True)]


def _table(setting: Setting, figures: list[ReplayFigure]) -> Table[ReplayFigure]:
    def top(figure: ReplayFigure) -> str:
        return ", ".join(f"{layer}: {seconds * 1000:.1f}" for layer, seconds in figure.top_layers)

    first = figures[0]
    nominal = first.communication_nominal_s
    return Table(
        f"{first.model} ({format_bytes(first.num_bytes)}), {setting.describe()}",
        [
            ("by", lambda figure: figure.peer),
            ("messages", lambda figure: str(figure.messages)),
            ("step (95 %)", lambda figure: duration(figure.step_s)),
            ("step / ideal", lambda figure: f"{figure.over_ideal:.3f}"),
            ("waiting ms", lambda figure: f"{figure.waited_s * 1000:.1f}"),
            ("most for layer: ms", top),
            ("gain", lambda figure: times(figure.gain)),
        ],
        figures,
        f"Compute {first.compute_s:.4g} s (forward {first.forward_s:.4g} s, emulated), communication at "
        f"least {first.communication_s:.4g} s at the goodput of plain TCP"
        + (f", {nominal:.4g} s at the nominal rate" if nominal else "")
        + f".\nIdeal: the larger of both. No scheduler gains more than {first.ceiling:.2f}x over a perfect "
        "DDP here.\nGain: how much faster Total Reduce is than the peer of this line. Results checked.",
    )


def scheduling_ceiling(forward_s: float, compute_s: float, communication_s: float) -> float:
    """The most that any scheduler gains over a perfect DDP: ``1 + F / (F + B)`` where both take equally long.

    A perfect DDP hides communication behind everything but the forward pass: its step takes
    ``max(compute - F, communication) + F``, an ideal one ``max(compute, communication)``.
    """
    perfect_ddp = max(compute_s - forward_s, communication_s) + forward_s
    return perfect_ddp / max(compute_s, communication_s)
