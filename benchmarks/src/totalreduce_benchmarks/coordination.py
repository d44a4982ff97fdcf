"""``totalreduce bench coordination``: the cost of agreeing on an order, beside that of Horovod."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from totalreduce.bench.command import benchmark
from totalreduce.bench.launching import BenchmarkFailedError, Setting, run_benchmark
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.report import Report, Table, duration, print_progress, times
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate, slowest
from totalreduce.foundation.environment import current
from totalreduce.foundation.errors import ConfigurationError

_PEER = Path(__file__).with_name("horovod_peer.py")
_LAUNCH_LIMIT_S = 300.0
_LABELS = {
    "torch": "totalreduce, gloo's collectives",
    "auto": "totalreduce, the engine's collectives",
    "horovod": "Horovod",
    "horovod, polled": "Horovod, polled every 0.5 ms",
}
#: How Horovod's handles are waited for, in seconds between looks.
_POLLS = {"horovod": 0.0, "horovod, polled": 5e-4}


@dataclass(frozen=True, slots=True)
class CoordinationParameters:
    """The tensors that the workers submit; the fields are options."""

    tensors: Annotated[int, typer.Option(help="Tensors in a step, of one element each.", min=1)] = 161
    steps: Annotated[int, typer.Option(help="Timed steps of a launch, after 20 untimed ones.", min=1)] = 100
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Submit in an order of its own on every rank (not for Horovod).")
    ] = False


@dataclass(frozen=True, slots=True)
class CoordinationSamples:
    """The samples of one rank in a launch; of Horovod only seconds are known.

    Attributes:
        many: Seconds of every step of many tensors.
        one: Seconds of every step of one tensor.
        submitted: When the last tensor of each step of many was submitted.
        agreed: When the ranks had agreed on the last tensor of each step of many.
        cycles: Cycles of agreement per step of many.
        slow_cycles: Those in which ranks had something to say that was not cached.
        messages: Messages that this rank sent in them.
    """

    many: list[float]
    one: list[float]
    submitted: list[float] = field(default_factory=list)
    agreed: list[float] = field(default_factory=list)
    cycles: float | None = None
    slow_cycles: float | None = None
    messages: float | None = None


Launch = list[CoordinationSamples]
"""The samples of all ranks of a launch."""


@dataclass(frozen=True, slots=True)
class CoordinationFigure:
    """One contestant.

    Attributes:
        contestant: ``torch`` or ``auto`` (this library over that transport), ``horovod`` (waiting as it does by itself,
            which spins) or ``horovod, polled``.
        many: Seconds of a step of many tensors, averaged over ranks.
        one: Seconds of a step of a single tensor of the same total size.
        overhead: Of the one over the other, step by step.
        agreement: From the last submission on any rank until the last rank knew that all were ready; ``None`` for
            Horovod, which does not say.
        ratio: Step of ``torch`` divided by this contestant's. Not of their overheads: where some of those are
            negative, because a single tensor happened to take longer, the median of their ratios says nothing.
        cycles: Cycles of agreement per step of many.
        messages: Messages that a rank sent in them.
    """

    contestant: str
    many: Estimate
    one: Estimate
    overhead: Estimate
    agreement: Estimate | None
    ratio: Estimate | None
    cycles: float | None
    messages: float | None


@benchmark(
    "coordination",
    "totalreduce bench coordination -n 4",
    "totalreduce bench coordination -n 4 --horovod /opt/horovod/bin/python --json out.json",
    shared=("ranks", "rounds"),
    rounds=3,
)
def bench_coordination(
    setting: Setting,
    parameters: CoordinationParameters,
    *,
    horovod: Annotated[
        Path | None, typer.Option(help="A Python with Horovod, with horovodrun beside it: measure that, too, in turns.")
    ] = None,
) -> Report:
    """Time the agreement on many tensors whose names are known to all ranks (cached).

    A step submits all tensors and waits for all; beside it one tensor of the same total size. What the many cost
    more than the one is coordination and packing. Contestants take turns, one launch after the other.
    """
    launches = measure_coordination(setting, parameters, horovod)
    figures = summarise(launches)
    raw = [{"contestant": name, "launches": several} for name, several in launches.items()]
    return Report(
        [_table(setting, parameters.tensors, figures)], setting.as_document(), describe_machine(), figures, raw
    )


def measure_coordination(
    setting: Setting, parameters: CoordinationParameters, horovod: Path | None
) -> dict[str, list[Launch]]:
    """Launch every contestant once a round; returns their launches."""
    launches: dict[str, list[Launch]] = {"torch": [], "auto": []}
    launches |= {name: [] for name in (_POLLS if horovod is not None else ())}
    for number in range(setting.rounds):
        for name, several in launches.items():
            if horovod is not None and name in _POLLS:
                several.append(_launch_horovod(horovod, setting.ranks, parameters, _POLLS[name]))
            else:
                one_round = replace(setting, rounds=1, transport=name)
                results = run_benchmark(
                    "totalreduce_benchmarks.coordination_worker", parameters, one_round, CoordinationSamples
                )
                several.append(results.ranks)
        print_progress(f"coordination: round {number + 1} of {setting.rounds}")
    return launches


def _launch_horovod(python: Path, ranks: int, parameters: CoordinationParameters, poll_s: float) -> Launch:
    launcher = python.parent / "horovodrun"
    if not launcher.exists():
        raise ConfigurationError(f"--horovod {python}: there is no horovodrun beside it")
    numbers = (parameters.tensors, parameters.steps, poll_s)
    command = [str(launcher), "--gloo", "-np", str(ranks), str(python), str(_PEER), *(str(n) for n in numbers)]
    path = os.pathsep.join((str(python.parent), current().get("PATH", "")))
    environment = {**current(), "PATH": path}
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_LAUNCH_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkFailedError(f"horovodrun has not ended within {_LAUNCH_LIMIT_S:.0f} s") from error
    lines = [line.partition("RESULT ")[2] for line in ended.stdout.splitlines() if "RESULT " in line]
    if ended.returncode or not lines:
        raise BenchmarkFailedError(f"horovodrun ended with exit code {ended.returncode}: {ended.stderr[-600:]}")
    document = json.loads(lines[0])
    return [CoordinationSamples(*seconds) for seconds in zip(document["many"], document["one"], strict=True)]


def summarise(launches: dict[str, list[Launch]]) -> list[CoordinationFigure]:
    """From samples to figures. Pure."""
    many = {name: _averaged(several, lambda rank: rank.many) for name, several in launches.items()}
    one = {name: _averaged(several, lambda rank: rank.one) for name, several in launches.items()}
    figures = []
    for name, several in launches.items():
        agreement = [seconds for launch in several for seconds in _agreement(launch)]
        ranks = [rank for launch in several for rank in launch]
        figures.append(
            CoordinationFigure(
                contestant=name,
                many=estimate(many[name]),
                one=estimate(one[name]),
                overhead=estimate([a - b for a, b in zip(many[name], one[name], strict=True)]),
                agreement=estimate(agreement) if agreement else None,
                ratio=None if name == "torch" else ratio_estimate(many["torch"], many[name]),
                cycles=_mean([rank.cycles for rank in ranks]),
                messages=_mean([rank.messages for rank in ranks]),
            )
        )
    return figures


def _agreement(launch: Launch) -> list[float]:
    """From the last submission on any rank until all had agreed, by step; the ranks' host has one clock."""
    submitted, agreed = slowest([rank.submitted for rank in launch]), slowest([rank.agreed for rank in launch])
    return [after - before for before, after in zip(submitted, agreed, strict=True)]


def _averaged(launches: list[Launch], seconds: Callable[[CoordinationSamples], list[float]]) -> list[float]:
    return [fmean(ranks) for launch in launches for ranks in zip(*map(seconds, launch), strict=True)]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _table(setting: Setting, tensors: int, figures: list[CoordinationFigure]) -> Table[CoordinationFigure]:
    def cycles(figure: CoordinationFigure) -> str:
        return "" if figure.cycles is None else f"{figure.cycles:.1f}, {figure.messages:.1f}"

    return Table(
        f"a step of {tensors} tensors of one element, {setting.describe()}",
        [
            ("by", lambda figure: _LABELS[figure.contestant]),
            ("all", lambda figure: duration(figure.many)),
            ("one tensor", lambda figure: duration(figure.one)),
            ("all - one", lambda figure: duration(figure.overhead)),
            ("agreement", lambda figure: duration(figure.agreement)),
            ("all: first row / this", lambda figure: times(figure.ratio)),
            ("cycles, messages", cycles),
        ],
        figures,
        "Agreement: from the last submission on any rank until every rank knows. All sums are right on all ranks.",
    )
