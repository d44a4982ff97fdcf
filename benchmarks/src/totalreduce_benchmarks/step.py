"""``totalreduce bench step``: a real model's training step, DistributedOptimizer beside DDP over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

import typer

from totalreduce.bench.command import benchmark
from totalreduce.bench.launching import Results, Setting, run_benchmark
from totalreduce.bench.methods import make_sync
from totalreduce.bench.report import Report, Table, duration, size, times
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate
from totalreduce.foundation.errors import ConfigurationError

_HOOKS = ("fp16", "powersgd")
_LABELS = {
    "totalreduce": "DistributedOptimizer",
    "gloo": "DDP / gloo",
    "fifo": "DistributedOptimizer, fifo",
    "alone": "no communication",
    "timeline": "DistributedOptimizer, timeline on",
    "dense": "DistributedOptimizer, dense",
    "fp16": "DDP / gloo, fp16 hook",
    "powersgd": "DDP / gloo, PowerSGD hook, rank 4",
    "servers": "servers, step() waits",
    "servers_ahead": "servers, forward waits",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParameters:
    """The training; the fields are options."""

    model: Annotated[str, typer.Option(help="mlp (14.6 M parameters), gpt or cnn.")] = "mlp"
    overlap: Annotated[
        str,
        typer.Option(help="backward: gradients final when step() begins; iterations: into the next forward pass."),
    ] = "backward"
    steps: Annotated[int, typer.Option(help="Timed steps in a row, after two untimed ones.")] = 10
    batch: Annotated[
        int | None, typer.Option(min=1, help="Examples per rank and step. [dim]default: the model's own[/dim]")
    ] = None
    bucket: Annotated[
        float | None,
        typer.Option(
            help="Size of a bucket in MiB; with --sync of what is compressed. [dim]default: the library's own[/dim]"
        ),
    ] = None
    no_communication: Annotated[bool, typer.Option("--no-communication", help="Also train every rank for itself.")] = (
        False
    )
    timeline: Annotated[bool, typer.Option("--timeline", help="Also train with the timeline on.")] = False
    sync: Annotated[
        str | None,
        typer.Option(help="Sparse method of DistributedOptimizer: oktopk, topka ... (see bench sparse), or auto."),
    ] = None
    density: Annotated[float, typer.Option(help="Share of the elements that the sparse method sends.")] = 0.01
    hooks: Annotated[str, typer.Option(help="Also train by DDP with these hooks: fp16, powersgd, or both.")] = ""
    dense: Annotated[
        bool, typer.Option("--dense", help="With --sync: also train by DistributedOptimizer without it.")
    ] = False
    servers: Annotated[
        int,
        typer.Option(
            min=0,
            help="Also train with tr.ParameterServer on so many of the ranks: step() waits for values, or forward.",
        ),
    ] = 0

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.model not in ("mlp", "gpt", "cnn"):
            raise ConfigurationError(f"--model is mlp, gpt or cnn, not {self.model!r}")
        if self.overlap not in ("backward", "iterations"):
            raise ConfigurationError(f"--overlap is backward or iterations, not {self.overlap!r}")
        if self.steps < 1 or (self.bucket is not None and self.bucket_bytes == 0):
            raise ConfigurationError("--steps must be at least 1 and --bucket positive")
        if set(self.chosen_hooks) - set(_HOOKS):
            raise ConfigurationError(f"--hooks are fp16 and powersgd, not {self.hooks!r}")
        if self.sync is not None:
            make_sync(self.sync, self.density)

    @property
    def bucket_bytes(self) -> int | None:
        """Size of a bucket in bytes."""
        return None if self.bucket is None else max(0, int(self.bucket * (1 << 20)))

    @property
    def with_servers(self) -> list[str]:
        """Names of the contestants that train with a parameter server."""
        return ["servers", "servers_ahead"] if self.servers else []

    @property
    def chosen_hooks(self) -> list[str]:
        """Names of the hooks."""
        return [hook for hook in self.hooks.split(",") if hook]


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of one rank.

    Attributes:
        seconds: Of every timed step, by contestant.
        bytes_sent: By Total Reduce, per step.
        num_parameters: Of the model.
        difference: From DDP's parameters, relative to the change by training, in the timed float32; ``None`` where DDP
            took no part or need not agree.
        difference_float64: Likewise of the untimed steps in float64.
        hidden_share: Of the sparse exchanges, how much lay beside backward; ``None`` without them.
    """

    seconds: dict[str, list[float]]
    bytes_sent: float
    num_parameters: int = 0
    difference: float | None = None
    difference_float64: float | None = None
    hidden_share: float | None = None


@dataclass(frozen=True, slots=True)
class StepFigure:
    """One contestant.

    Attributes:
        contestant: ``totalreduce``, ``gloo`` (that is DDP), ``fifo``, ``timeline``, ``dense`` (without ``--sync``),
            ``fp16`` and ``powersgd`` (DDP with these hooks), ``servers`` and ``servers_ahead`` (with a parameter
            server; forward waits for values in the second one) or ``alone`` (no communication).
        seconds: Time of a step, averaged over ranks, median over steps.
        ratio: Total Reduce's step time divided by this contestant's: below 1, Total Reduce is faster.
        bytes_sent: By the average rank in one step; ``None`` where unknown.
    """

    contestant: str
    seconds: Estimate
    ratio: Estimate | None
    bytes_sent: float | None


@benchmark(
    "step",
    "totalreduce bench step --against gloo --no-communication",
    "totalreduce bench step --model gpt --overlap iterations --emulate-hosts 4 --against gloo",
    "totalreduce bench step --emulate-hosts 4 --against gloo --sync oktopk --hooks fp16,powersgd",
    shared=("transport", "ranks", "emulate_hosts", "emulate_rate", "against", "rounds"),
    rounds=4,
)
def bench_step(setting: Setting, parameters: StepParameters) -> Report:
    """Time a real model's training step. --against gloo is torch's DistributedDataParallel over gloo.

    With --transport torch gloo carries out DistributedOptimizer's reductions, too.

    All train the same model on the same batches in turns; replicas must be the same bits on all ranks and
    agree with DDP's in the end, or there is no figure. With --sync they need not agree with DDP's.
    """
    figures, results = measure_step(setting, parameters)
    table = _table(setting, parameters.model, figures, results.ranks)
    return Report([table], setting.as_document(), results.machine, figures, results.raw())


def measure_step(setting: Setting, parameters: StepParameters) -> tuple[list[StepFigure], Results[StepSamples]]:
    """Run the workers; returns the figures and the ranks' samples."""
    setting.refuse_mpi("step")
    results = run_benchmark("totalreduce_benchmarks.step_worker", parameters, setting, StepSamples)
    return summarise(results.ranks), results


def summarise(ranks: Sequence[StepSamples]) -> list[StepFigure]:
    """From every rank's samples to figures. Pure."""
    seconds = {
        name: [fmean(samples) for samples in zip(*(rank.seconds[name] for rank in ranks), strict=True)]
        for name in ranks[0].seconds
    }
    return [
        StepFigure(
            name,
            estimate(samples),
            None if name == "totalreduce" else ratio_estimate(seconds["totalreduce"], samples),
            fmean(rank.bytes_sent for rank in ranks) if name == "totalreduce" else None,
        )
        for name, samples in seconds.items()
    ]


def _table(setting: Setting, model: str, figures: list[StepFigure], ranks: Sequence[StepSamples]) -> Table[StepFigure]:
    timed, exact = ranks[0].difference, ranks[0].difference_float64
    agreement = (
        ""
        if timed is None or exact is None
        else f" DDP's agree to {exact:.1e} of what training changed in float64, {timed:.1e} in float32."
    )
    shares = [rank.hidden_share for rank in ranks if rank.hidden_share is not None]
    overlap = f" Of the sparse exchange {fmean(shares):.0%} lay beside backward." if shares else ""
    return Table(
        f"training step of {model}, {ranks[0].num_parameters / 1e6:.1f} M parameters, {setting.describe()}",
        [
            ("by", lambda figure: _LABELS[figure.contestant]),
            ("step (95 %)", lambda figure: duration(figure.seconds)),
            ("DistributedOptimizer / this", lambda figure: times(figure.ratio)),
            ("sent per step and rank", lambda figure: size(figure.bytes_sent)),
        ],
        figures,
        f"Replicas are the same bits on all ranks.{agreement}{overlap}",
    )
