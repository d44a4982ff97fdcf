"""``totalreduce bench ddp``: unmodified torch.distributed scripts, on this back end and on gloo.

A script of ``examples/`` is started as a user would start it, once per back end and round. Nothing of it is
known here but its options ``--backend``, ``--model``, ``--steps``, ``--dtype`` and ``--json``, so any script that has
them will do.

Float32 alone cannot prove that two ways to train agree: sums have another order, and a rounding error grows while it is
trained with (seen: 3e-3 of the loss after 15 steps of the residual network on 4 ranks, where either back end was as far
from the same training in float64). So both first train a few steps in float64, where agreement is tight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from totalreduce.bench.command import benchmark
from totalreduce.bench.launching import BenchmarkFailedError, Setting, find_script, run_script
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.report import Report, Table, duration, print_progress, times
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate
from totalreduce.foundation.errors import ConfigurationError

#: DistributedDataParallel makes its buckets anew after the first step.
_WARMUP_STEPS = 3
_EXACT_STEPS = 6
_EXACT_TOLERANCE = 1e-10
_TIMED_TOLERANCE = 0.1
_LAUNCH_LIMIT_S = 900.0
#: The name of the contestant that exchanges no gradients (``bench.alone``).
ALONE = "no exchange"


@dataclass(frozen=True, slots=True)
class DdpLaunch:
    """The document that a script has written."""

    losses: list[float]  #: Of every step.
    step_s: list[float]  #: Seconds of every step, averaged over ranks.
    backend: str = ""  #: Its name in torch.distributed.
    model: str = ""  #: Name of the model.
    world_size: int = 0


@dataclass(frozen=True, slots=True)
class DdpFigure:
    """One back end."""

    backend: str  #: Its name in torch.distributed, or ``ALONE``.
    seconds: Estimate  #: Time of a step: averaged over ranks, median over a launch's steps, estimated over launches.
    #: Total Reduce's step time divided by this back end's, round by round; ``None`` for Total Reduce's own.
    ratio: Estimate | None
    #: The largest relative difference of any step's loss from Total Reduce's first launch; 0 for ``ALONE``, whose
    #: replicas differ.
    difference: float


@benchmark(
    "ddp",
    "totalreduce bench ddp -n 2 --alone",
    "totalreduce bench ddp --script torch_fsdp --model gpt --emulate-hosts 4 -- --batch 4",
    shared=("ranks", "emulate_hosts", "emulate_rate", "ranks_per_host", "rounds"),
    rounds=6,
)
def bench_ddp(
    setting: Setting,
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
    alone: Annotated[
        bool, typer.Option("--alone", help="Time DDP without any exchange of gradients, too: the limit of a step.")
    ] = False,
) -> Report:
    """Time an unmodified DDP or FSDP2 script on this back end and on gloo.

    The back ends take turns, one launch after the other. Every step's loss must agree, tightly in float64
    and coarsely in the timed float32, or there is no figure.
    """
    setting = replace(setting, against=("gloo",))
    if steps < 1:
        raise ConfigurationError(f"--steps must be at least 1, not {steps}")
    options = ["--model", model, *(arguments or [])]
    path = find_script(script)
    exact = compare_exactly(setting, path, options)
    contestants = [*setting.peers, *([ALONE] if alone else [])]
    launches = measure_ddp(setting, contestants, path, [*options, "--steps", str(_WARMUP_STEPS + steps)])
    figures = summarise(launches)
    raw = [{"options": options, "difference_float64": exact, "launches": launches}]
    table = _table(setting, f"{path.stem} {model}", figures, exact)
    return Report([table], setting.as_document(), describe_machine(), figures, raw)


def compare_exactly(setting: Setting, script: Path, options: Sequence[str]) -> float:
    """Train a few steps in float64 on each back end; returns the largest relative difference of any loss."""
    command = [str(script), *options, "--steps", str(_EXACT_STEPS), "--dtype", "float64"]
    losses = {backend: [_launch(setting, command, backend).losses] for backend in setting.peers}
    differences = differences_of(losses, _EXACT_TOLERANCE)
    print_progress("ddp: float64 losses checked")
    return max(differences.values())


def measure_ddp(
    setting: Setting, contestants: Sequence[str], script: Path, options: Sequence[str]
) -> dict[str, list[DdpLaunch]]:
    """Launch the script once per contestant and round; the first contestant changes from round to round.

    Returns:
        The documents of the script, by contestant and in the order of rounds.
    """
    launches: dict[str, list[DdpLaunch]] = {backend: [] for backend in contestants}
    for index in range(setting.rounds):
        for backend in contestants if index % 2 == 0 else reversed(contestants):
            launches[backend].append(_launch(setting, [str(script), *options], backend))
            step_ms = 1000 * _step_s(launches[backend][-1])
            print_progress(f"ddp: round {index + 1} of {setting.rounds}: {backend} {step_ms:.1f} ms")
    return launches


def summarise(launches: dict[str, list[DdpLaunch]]) -> list[DdpFigure]:
    """From every launch's losses and times to figures. Pure."""
    seconds = {backend: [_step_s(launch) for launch in several] for backend, several in launches.items()}
    losses = {backend: [each.losses for each in several] for backend, several in launches.items() if backend != ALONE}
    differences = {ALONE: 0.0, **differences_of(losses, _TIMED_TOLERANCE)}
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
        tolerance: The largest difference that rounding explains.
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


def _step_s(launch: DdpLaunch) -> float:
    return median(launch.step_s[_WARMUP_STEPS:])


def _launch(setting: Setting, command: Sequence[str], backend: str) -> DdpLaunch:
    if backend == ALONE:  # the back end collects the times of the ranks only, so gloo does
        command, backend = ["-m", "totalreduce.bench.alone", *command], "gloo"
    argv = [*command, "--backend", backend]
    return run_script(setting, argv, DdpLaunch, over_gloo=backend == "gloo", timeout_s=_LAUNCH_LIMIT_S)


def _table(setting: Setting, what: str, figures: list[DdpFigure], exact: float) -> Table[DdpFigure]:
    difference = max(figure.difference for figure in figures)
    return Table(
        f"step of {what}, {setting.describe()}",
        [
            ("back end", lambda figure: figure.backend),
            ("step (95 %)", lambda figure: duration(figure.seconds)),
            ("totalreduce / this", lambda figure: times(figure.ratio)),
        ],
        figures,
        f"The same script with another --backend. The back ends' losses agree to {exact:.1e} of their value in "
        f"float64, {difference:.1e} in float32.",
    )
