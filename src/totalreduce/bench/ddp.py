"""``totalreduce bench ddp``: unmodified torch.distributed scripts, on this back end and on gloo.

What runs is a script of ``examples/``, started as a user would start it, once per back end and round. Nothing of it is
known here but its options ``--backend``, ``--model``, ``--steps``, ``--dtype`` and ``--json``, so any script that has
them will do.

Float32 alone cannot prove that two ways to train agree: sums have another order, and a rounding error grows while it is
trained with (seen: 3e-3 of the loss after 15 steps of the residual network on 4 ranks, where either back end was as far
from the same training in float64). So both first train a few steps in float64, where agreement is tight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from totalreduce.bench.launching import BenchmarkFailedError, Setting
from totalreduce.bench.options import (
    HostsOption,
    JsonOption,
    RanksOption,
    RanksPerHostOption,
    RateOption,
    RoundsOption,
    make_setting,
)
from totalreduce.bench.report import duration, print_progress, times, write_json
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate
from totalreduce.bench.scripts import describe_environment, find_script, launch_script
from totalreduce.cli.report import print_table
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["DdpFigure", "bench_ddp", "compare_exactly", "differences_of", "measure_ddp", "summarise"]

#: DistributedDataParallel makes its buckets anew after the first step.
_WARMUP_STEPS = 3
_EXACT_STEPS = 6
_EXACT_TOLERANCE = 1e-10
_TIMED_TOLERANCE = 0.1
_LAUNCH_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class DdpFigure:
    """One back end.

    Attributes:
        backend: Its name in torch.distributed.
        seconds: Time of a step: averaged over ranks, median over a launch's steps, estimated over launches.
        ratio: Total Reduce's step time divided by this back end's, round by round; ``None`` for Total Reduce's own.
        difference: The largest relative difference of any step's loss from Total Reduce's first launch.
    """

    backend: str
    seconds: Estimate
    ratio: Estimate | None
    difference: float


def bench_ddp(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="More options for the script, after --.", show_default=False)
    ] = None,
    *,
    script: Annotated[
        str,
        typer.Option(
            help="torch_ddp, torch_fsdp, lightning_fit, accelerate_fit, transformers_fit, or a file with their options."
        ),
    ] = "torch_ddp",
    model: Annotated[str, typer.Option(help="cnn or gpt.")] = "cnn",
    steps: Annotated[int, typer.Option(help="Timed steps of a launch, after three untimed ones.")] = 20,
    ranks: RanksOption = None,
    emulate_hosts: HostsOption = 0,
    ranks_per_host: RanksPerHostOption = None,
    emulate_rate: RateOption = "1gbit",
    rounds: RoundsOption = 6,
    json: JsonOption = None,
) -> None:
    """Time an unmodified DDP or FSDP2 script on this back end and on gloo.

    The two take turns, one launch after the other. Every step's loss must agree, tightly in float64
    and coarsely in the timed float32, or there is no figure.
    """
    setting = make_setting(ranks, emulate_hosts, emulate_rate, ("gloo",), rounds, ranks_per_host=ranks_per_host)
    if steps < 1:
        raise ConfigurationError(f"--steps must be at least 1, not {steps}")
    options = ["--model", model, *(arguments or [])]
    path = find_script(script)
    exact = compare_exactly(setting, path, options)
    launches = measure_ddp(setting, path, [*options, "--steps", str(_WARMUP_STEPS + steps)])
    figures = summarise(launches)
    _print(setting, f"{path.stem} {model}", figures, exact)
    raw = [
        {"environment": describe_environment(), "options": options, "difference_float64": exact, "launches": launches}
    ]
    write_json(json, "ddp", setting, [asdict(figure) for figure in figures], raw)


def compare_exactly(setting: Setting, script: Path, options: Sequence[str]) -> float:
    """Train a few steps in float64 on each back end; returns the largest relative difference of any loss.

    Args:
        setting: Where, and against which back ends.
        script: Takes ``--backend``, ``--steps``, ``--dtype`` and ``--json``.
        options: Further ones.

    Raises:
        BenchmarkFailedError: The losses differ, or a launch failed.
    """
    command = [str(script), *options, "--steps", str(_EXACT_STEPS), "--dtype", "float64"]
    losses = {backend: [_launch(setting, command, backend)["losses"]] for backend in setting.peers}
    differences = differences_of(losses, _EXACT_TOLERANCE)
    print_progress("ddp: float64 losses checked")
    return max(differences.values())


def measure_ddp(setting: Setting, script: Path, options: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Launch the script once per back end and round; who is first changes from round to round.

    Args:
        setting: Where, and against which back ends.
        script: Takes ``--backend`` and ``--json``.
        options: Further ones.

    Returns:
        What the script wrote, by back end and in the order of rounds: ``losses`` and ``step_s`` of every step.

    Raises:
        BenchmarkFailedError: A launch failed; names the rank that failed first.
        ConfigurationError: The setting cannot be run here, for example because of missing rights.
    """
    launches: dict[str, list[dict[str, Any]]] = {backend: [] for backend in setting.peers}
    for index in range(setting.rounds):
        for backend in setting.peers if index % 2 == 0 else reversed(setting.peers):
            launches[backend].append(_launch(setting, [str(script), *options], backend))
            step_ms = 1000 * median(launches[backend][-1]["step_s"][_WARMUP_STEPS:])
            print_progress(f"ddp: round {index + 1} of {setting.rounds}: {backend} {step_ms:.1f} ms")
    return launches


def summarise(launches: dict[str, list[dict[str, Any]]]) -> list[DdpFigure]:
    """From every launch's losses and times to figures. Pure.

    Raises:
        BenchmarkFailedError: The losses differ by more than rounding explains.
    """
    seconds = {
        backend: [median(launch["step_s"][_WARMUP_STEPS:]) for launch in several]
        for backend, several in launches.items()
    }
    losses = {backend: [launch["losses"] for launch in several] for backend, several in launches.items()}
    differences = differences_of(losses, _TIMED_TOLERANCE)
    return [
        DdpFigure(
            backend,
            estimate(samples),
            None if backend == "totalreduce" else ratio_estimate(seconds["totalreduce"], samples),
            differences[backend],
        )
        for backend, samples in seconds.items()
    ]


def differences_of(losses: dict[str, list[list[float]]], tolerance: float) -> dict[str, float]:
    """How far the losses of a back end's launches are from Total Reduce's first, at most and relative. Pure.

    Args:
        losses: Every step's, by back end and launch.
        tolerance: What rounding explains.

    Raises:
        BenchmarkFailedError: They are further apart.
    """
    reference = losses["totalreduce"][0]
    differences = {backend: max(_difference(own, reference) for own in several) for backend, several in losses.items()}
    for backend, difference in differences.items():
        if difference > tolerance:
            raise BenchmarkFailedError(
                f"losses on {backend} differ from those of the first launch on totalreduce by {difference:.1e} of "
                f"their value; rounding explains {tolerance:.0e}"
            )
    return differences


def _difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative one; infinite if a loss is not a number."""
    differences = [abs(loss - wanted) / abs(wanted) for loss, wanted in zip(losses, reference, strict=True)]
    return max(math.inf if math.isnan(value) else value for value in differences)


def _launch(setting: Setting, command: Sequence[str], backend: str) -> dict[str, Any]:
    return launch_script(
        setting, [*command, "--backend", backend], over_gloo=backend == "gloo", timeout_s=_LAUNCH_LIMIT_S
    )


def _print(setting: Setting, what: str, figures: list[DdpFigure], exact: float) -> None:
    rows = [(figure.backend, duration(figure.seconds), times(figure.ratio)) for figure in figures]
    difference = max(figure.difference for figure in figures)
    print_table(
        f"step of {what}, {setting.describe()}",
        ("back end", "step (95 %)", "totalreduce / this"),
        rows,
        f"The same script with another --backend. Losses agree to {exact:.1e} of their value in float64, "
        f"{difference:.1e} in float32.",
    )
