"""``totalreduce bench coordination``: what agreeing on an order costs, and what it costs Horovod."""

from __future__ import annotations

import json as json_format
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from totalreduce.bench.launching import BenchmarkFailedError, Setting, run_benchmark
from totalreduce.bench.options import JsonOption, RanksOption, RoundsOption, make_setting
from totalreduce.bench.report import duration, print_progress, times, write_json
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate
from totalreduce.cli.report import print_table
from totalreduce.foundation.environment import current
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["CoordinationFigure", "bench_coordination", "measure_coordination", "summarise"]

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
        cycles: Cycles of agreement per step of many, and messages that a rank sent in them.
        messages: See ``cycles``.
    """

    contestant: str
    many: Estimate
    one: Estimate
    overhead: Estimate
    agreement: Estimate | None
    ratio: Estimate | None
    cycles: float | None
    messages: float | None


def bench_coordination(
    *,
    tensors: Annotated[int, typer.Option(help="Tensors in a step, of one element each.")] = 161,
    steps: Annotated[int, typer.Option(help="Timed steps of a launch, after 20 untimed ones.")] = 100,
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Submit in an order of its own on every rank (not for Horovod).")
    ] = False,
    horovod: Annotated[
        Path | None, typer.Option(help="A Python with Horovod, with horovodrun beside it: measure that, too, in turns.")
    ] = None,
    ranks: RanksOption = None,
    rounds: RoundsOption = 3,
    json: JsonOption = None,
) -> None:
    """Time the agreement on many tensors whose names are known to all ranks (cached).

    A step submits all tensors and waits for all; beside it one tensor of the same total size. What the many cost
    more than the one is coordination and packing. Contestants take turns, one launch after the other.
    """
    setting = make_setting(ranks, 0, "1gbit", (), rounds)
    if tensors < 1 or steps < 1:
        raise ConfigurationError("--tensors and --steps must be at least 1")
    samples = measure_coordination(setting, tensors, steps, shuffle=shuffle, horovod=horovod)
    figures = summarise(samples)
    _print(setting, tensors, figures)
    raw = [{"contestant": name, "launches": launches} for name, launches in samples.items()]
    raw[0]["environment"] = samples["torch"][0]["environment"]
    write_json(json, "coordination", setting, [asdict(figure) for figure in figures], raw)


def measure_coordination(
    setting: Setting, tensors: int, steps: int, *, shuffle: bool, horovod: Path | None
) -> dict[str, list[dict[str, Any]]]:
    """Launch every contestant once a round; returns their launches' samples, ranks in rows.

    Raises:
        BenchmarkFailedError: A rank failed or found a wrong sum.
    """
    samples: dict[str, list[dict[str, Any]]] = {"torch": [], "auto": []}
    samples |= {name: [] for name in (_POLLS if horovod is not None else ())}
    parameters = {"tensors": tensors, "steps": steps, "shuffle": shuffle}
    for number in range(setting.rounds):
        for name, launches in samples.items():
            if horovod is not None and name in _POLLS:
                launches.append(_launch_horovod(horovod, setting.ranks, tensors, steps, _POLLS[name]))
            else:
                one_round = Setting(
                    ranks=setting.ranks, hosts=0, rate=setting.rate, against=(), rounds=1, transport=name
                )
                launches.append(_joined(run_benchmark("coordination", parameters, one_round)))
        print_progress(f"coordination: round {number + 1} of {setting.rounds}")
    return samples


def _joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One launch: samples by rank, and when the ranks had agreed, which the clock of one host tells."""
    submitted, agreed = (
        [max(ranks) for ranks in zip(*(result[key] for result in results), strict=True)]
        for key in ("submitted", "agreed")
    )
    agreement = [after - before for before, after in zip(submitted, agreed, strict=True)]
    return {
        **{key: [result[key] for result in results] for key in ("many", "one")},
        **{key: fmean(result[key] for result in results) for key in ("cycles", "slow_cycles", "messages")},
        "agreement": agreement,
        "environment": results[0]["environment"],
    }


def _launch_horovod(python: Path, ranks: int, tensors: int, steps: int, poll_s: float) -> dict[str, Any]:
    launcher = python.parent / "horovodrun"
    if not launcher.exists():
        raise ConfigurationError(f"--horovod {python}: there is no horovodrun beside it")
    command = [
        str(launcher),
        "--gloo",
        "-np",
        str(ranks),
        str(python),
        str(_PEER),
        str(tensors),
        str(steps),
        str(poll_s),
    ]
    path = os.pathsep.join((str(python.parent), current().get("PATH", "")))
    try:
        ended = subprocess.run(
            command,
            env={**current(), "PATH": path},
            capture_output=True,
            text=True,
            timeout=_LAUNCH_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkFailedError(f"horovodrun has not ended within {_LAUNCH_LIMIT_S:.0f} s") from error
    lines = [line.partition("RESULT ")[2] for line in ended.stdout.splitlines() if "RESULT " in line]
    if ended.returncode or not lines:
        raise BenchmarkFailedError(f"horovodrun ended with exit code {ended.returncode}: {ended.stderr[-600:]}")
    document: dict[str, Any] = json_format.loads(lines[0])
    return document


def summarise(samples: dict[str, list[dict[str, Any]]]) -> list[CoordinationFigure]:
    """From samples to figures. Pure."""
    many, one = ({name: _averaged(launches, key) for name, launches in samples.items()} for key in ("many", "one"))
    overhead = {name: [a - b for a, b in zip(many[name], one[name], strict=True)] for name in samples}
    figures = []
    for name, launches in samples.items():
        ours = "cycles" in launches[0]
        figures.append(
            CoordinationFigure(
                name,
                estimate(many[name]),
                estimate(one[name]),
                estimate(overhead[name]),
                estimate([value for launch in launches for value in launch["agreement"]]) if ours else None,
                None if name == "torch" else ratio_estimate(many["torch"], many[name]),
                fmean(launch["cycles"] for launch in launches) if ours else None,
                fmean(launch["messages"] for launch in launches) if ours else None,
            )
        )
    return figures


def _averaged(launches: list[dict[str, Any]], key: str) -> list[float]:
    return [fmean(ranks) for launch in launches for ranks in zip(*launch[key], strict=True)]


def _print(setting: Setting, tensors: int, figures: list[CoordinationFigure]) -> None:
    rows = [
        (
            _LABELS[figure.contestant],
            duration(figure.many),
            duration(figure.one),
            duration(figure.overhead),
            "" if figure.agreement is None else duration(figure.agreement),
            times(figure.ratio),
            "" if figure.cycles is None else f"{figure.cycles:.1f}, {figure.messages:.1f}",
        )
        for figure in figures
    ]
    print_table(
        f"a step of {tensors} tensors of one element, {setting.describe()}",
        ("by", "all", "one tensor", "all - one", "agreement", "all: first row / this", "cycles, messages"),
        rows,
        "Agreement: from the last submission on any rank until every rank knows. All sums are right on all ranks.",
    )
