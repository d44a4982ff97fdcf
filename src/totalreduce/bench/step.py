"""``totalreduce bench step``: a real model's training step, DistributedOptimizer beside DDP over gloo."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Annotated, Any

import typer

from totalreduce.bench.launching import Setting, run_benchmark
from totalreduce.bench.methods import make_sync
from totalreduce.bench.options import (
    AgainstOption,
    HostsOption,
    JsonOption,
    RanksOption,
    RateOption,
    RoundsOption,
    TransportOption,
    make_setting,
)
from totalreduce.bench.report import duration, times, write_json
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate
from totalreduce.cli.report import format_bytes, print_table
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["StepFigure", "bench_step", "measure_step", "summarise"]

_LABELS = {
    "totalreduce": "DistributedOptimizer",
    "gloo": "DDP / gloo",
    "fifo": "DistributedOptimizer, fifo",
    "alone": "no communication",
    "timeline": "DistributedOptimizer, timeline on",
    "dense": "DistributedOptimizer, dense",
    "fp16": "DDP / gloo, fp16 hook",
    "powersgd": "DDP / gloo, PowerSGD hook, rank 4",
}


@dataclass(frozen=True, slots=True)
class StepFigure:
    """One contestant.

    Attributes:
        contestant: ``totalreduce``, ``gloo`` (that is DDP), ``fifo``, ``timeline``, ``dense`` (without ``--sync``),
            ``fp16`` and ``powersgd`` (DDP with these hooks) or ``alone`` (no communication).
        seconds: Time of a step, averaged over ranks, median over steps.
        ratio: Total Reduce's step time divided by this contestant's: below 1, Total Reduce is faster.
        bytes_sent: By the average rank in one step; ``None`` where unknown.
    """

    contestant: str
    seconds: Estimate
    ratio: Estimate | None
    bytes_sent: float | None


def bench_step(
    *,
    model: Annotated[str, typer.Option(help="mlp (14.6 M parameters), gpt or cnn.")] = "mlp",
    overlap: Annotated[
        str,
        typer.Option(help="backward: gradients final when step() begins; iterations: into the next forward pass."),
    ] = "backward",
    steps: Annotated[int, typer.Option(help="Timed steps in a row, after two untimed ones.")] = 10,
    bucket: Annotated[
        float | None,
        typer.Option(
            help="Size of a bucket in MiB; with --sync of what is compressed. [dim]default: the library's own[/dim]"
        ),
    ] = None,
    no_communication: Annotated[
        bool, typer.Option("--no-communication", help="Also train every rank for itself.")
    ] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Also train with the timeline on.")] = False,
    sync: Annotated[
        str | None,
        typer.Option(help="Sparse method of DistributedOptimizer: oktopk, topka ... (see bench sparse), or auto."),
    ] = None,
    density: Annotated[float, typer.Option(help="Share of the elements that the sparse method sends.")] = 0.01,
    hooks: Annotated[str, typer.Option(help="Also train by DDP with these hooks: fp16, powersgd, or both.")] = "",
    dense: Annotated[
        bool, typer.Option("--dense", help="With --sync: also train by DistributedOptimizer without it.")
    ] = False,
    transport: TransportOption = "auto",
    ranks: RanksOption = None,
    emulate_hosts: HostsOption = 0,
    emulate_rate: RateOption = "1gbit",
    against: AgainstOption = None,
    rounds: RoundsOption = 4,
    json: JsonOption = None,
) -> None:
    """Time a real model's training step. --against gloo is torch's DistributedDataParallel over gloo.

    With --transport torch gloo carries out DistributedOptimizer's reductions, too.

    All train the same model on the same batches in turns; replicas must be the same bits on all ranks and
    agree with DDP's in the end, or there is no figure. With --sync they need not agree with DDP's.

    Example: totalreduce bench step --emulate-hosts 4 --against gloo --sync oktopk --hooks fp16,powersgd
    """
    setting = make_setting(ranks, emulate_hosts, emulate_rate, against, rounds, transport=transport)
    setting.refuse_mpi("step")
    parameters = {
        "model": model,
        "overlap": overlap,
        "steps": steps,
        "bucket_bytes": None if bucket is None else int(bucket * (1 << 20)),
        "no_communication": no_communication,
        "timeline": timeline,
        "sync": sync,
        "density": density,
        "dense": dense,
        "hooks": [hook for hook in hooks.split(",") if hook],
    }
    figures, results = measure_step(setting, parameters)
    _print(setting, model, figures, results)
    write_json(json, "step", setting, [asdict(figure) for figure in figures], results)


def measure_step(setting: Setting, parameters: dict[str, Any]) -> tuple[list[StepFigure], list[dict[str, Any]]]:
    """Run the workers; returns the figures and each rank's raw result.

    Raises:
        BenchmarkFailedError: A rank failed or the replicas disagree.
        ConfigurationError: A parameter makes no sense.
    """
    if parameters["model"] not in ("mlp", "gpt", "cnn"):
        raise ConfigurationError(f"--model is mlp, gpt or cnn, not {parameters['model']!r}")
    if parameters["overlap"] not in ("backward", "iterations"):
        raise ConfigurationError(f"--overlap is backward or iterations, not {parameters['overlap']!r}")
    if parameters["steps"] < 1 or (parameters["bucket_bytes"] or 1) < 1:
        raise ConfigurationError("--steps must be at least 1 and --bucket positive")
    if set(parameters.get("hooks", ())) - {"fp16", "powersgd"}:
        raise ConfigurationError(f"--hooks are fp16 and powersgd, not {','.join(parameters['hooks'])!r}")
    if parameters.get("sync") is not None:
        make_sync(parameters["sync"], parameters["density"])
    results = run_benchmark("step", parameters, setting)
    return summarise(results), results


def summarise(results: list[dict[str, Any]]) -> list[StepFigure]:
    """From every rank's samples to figures. Pure."""
    seconds = {
        name: [fmean(ranks) for ranks in zip(*(result["seconds"][name] for result in results), strict=True)]
        for name in results[0]["seconds"]
    }
    return [
        StepFigure(
            name,
            estimate(samples),
            None if name == "totalreduce" else ratio_estimate(seconds["totalreduce"], samples),
            fmean(result["bytes_sent"] for result in results) if name == "totalreduce" else None,
        )
        for name, samples in seconds.items()
    ]


def _print(setting: Setting, model: str, figures: list[StepFigure], results: list[dict[str, Any]]) -> None:
    result = results[0]
    rows = [
        (
            _LABELS[figure.contestant],
            duration(figure.seconds),
            times(figure.ratio),
            "" if figure.bytes_sent is None else format_bytes(figure.bytes_sent),
        )
        for figure in figures
    ]
    timed, exact = result["difference"], result["difference_float64"]
    agreement = (
        ""
        if timed is None
        else f" DDP's agree to {exact:.1e} of what training changed in float64, {timed:.1e} in float32."
    )
    shares = [one["hidden_share"] for one in results if one["hidden_share"] is not None]
    overlap = f" Of the sparse exchange {fmean(shares):.0%} lay beside backward." if shares else ""
    print_table(
        f"training step of {model}, {result['num_parameters'] / 1e6:.1f} M parameters, {setting.describe()}",
        ("by", "step (95 %)", "DistributedOptimizer / this", "sent per step and rank"),
        rows,
        f"Replicas are the same bits on all ranks.{agreement}{overlap}",
    )
