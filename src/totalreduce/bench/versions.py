"""``totalreduce bench versions``: two versions of this package side by side, in turns."""

from __future__ import annotations

import json as json_format
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from totalreduce.bench.arithmetic import parse_sizes
from totalreduce.bench.launching import BenchmarkFailedError
from totalreduce.bench.options import JsonOption
from totalreduce.bench.report import duration, print_progress, times
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate
from totalreduce.bench.scripts import describe_environment
from totalreduce.bench.sparse import parse_count
from totalreduce.cli.report import format_bytes, print_table, write_document
from totalreduce.foundation.environment import current
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.local import run_workers

__all__ = ["Job", "Version", "VersionsFigure", "bench_versions", "find_version", "summarise"]

_WORKER = Path(__file__).with_name("versions_worker.py")
_LIMIT_S = 600.0
_KINDS = ("allreduce", "step", "sparse")
_TRANSPORTS = ("shm", "tcp", "auto")


@dataclass(frozen=True, slots=True)
class Version:
    """An installed version of the package.

    Attributes:
        label: ``old`` or ``new``.
        python: The interpreter that runs it.
        source: The folder that holds the package; ``None``: the interpreter's own installation.
    """

    label: str
    python: str
    source: str | None

    def environment(self) -> dict[str, str]:
        """Return the environment in which ``python`` imports this version."""
        base = {name: value for name, value in current().items() if name != "PYTHONPATH"}
        return base if self.source is None else {**base, "PYTHONPATH": self.source}


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks of one launch measure.

    Attributes:
        what: ``allreduce``, ``step`` or ``sparse``.
        ranks: Number of ranks.
        transport: As for ``totalreduce.init``.
    """

    what: str
    ranks: int
    transport: str


@dataclass(frozen=True, slots=True)
class VersionsFigure:
    """One case, measured with both versions.

    Attributes:
        what: For example ``allreduce of 4 KiB``.
        ranks: Number of ranks.
        transport: As for ``totalreduce.init``.
        old_s: Time of one operation or step on the slowest rank: median of a launch, estimated over launches.
        new_s: The same for the new version.
        speed: ``old_s / new_s``, launch by launch: above 1, the new version is faster.
        old_cpu_s: Processor time of all ranks per message that they sent.
        new_cpu_s: The same for the new version.
        cpu: ``new_cpu_s / old_cpu_s``, launch by launch: below 1, the new version needs less.
        old_messages: Messages that a rank sent for one operation or step, mean over ranks.
        new_messages: The same for the new version.
    """

    what: str
    ranks: int
    transport: str
    old_s: Estimate
    new_s: Estimate
    speed: Estimate
    old_cpu_s: Estimate
    new_cpu_s: Estimate
    cpu: Estimate
    old_messages: float
    new_messages: float


def bench_versions(
    *,
    old: Annotated[Path, typer.Option(help="The package's folder src, or the python of a virtual environment.")],
    new: Annotated[Path, typer.Option(help="Likewise.")],
    what: Annotated[
        str, typer.Option(help="allreduce, step (of an MLP), sparse (Ok-Topk), separated by commas.")
    ] = "allreduce,step,sparse",
    ranks: Annotated[str, typer.Option("--ranks", "-n", help="Numbers of ranks, separated by commas.")] = "2,4",
    transports: Annotated[str, typer.Option(help="Of allreduce: shm, tcp, auto. Else it is auto.")] = "shm,tcp",
    sizes: Annotated[str, typer.Option(help="Bytes per rank of allreduce.")] = "4KiB,1MiB,64MiB",
    elements: Annotated[str, typer.Option(help="Elements of the sparse gradient.")] = "25.6M",
    seconds: Annotated[float, typer.Option(help="Timed seconds of a case in one launch, about.")] = 1.0,
    rounds: Annotated[int, typer.Option(help="Launches of each version.")] = 7,
    json: JsonOption = None,
) -> None:
    """Compare two versions of this package: allreduce, training steps, and Ok-Topk.

    In every round each version is launched anew, in turns, and the ratios are taken launch by launch. Beside the times
    stands the processor time per message. The measuring program uses the public interface only.
    """
    versions = [find_version("old", old), find_version("new", new)]
    counts = [_parse_ranks(word) for word in ranks.split(",")]
    jobs = [
        Job(kind, count, transport)
        for kind in _chosen("--what", what, _KINDS)
        for count in counts
        for transport in (_chosen("--transports", transports, _TRANSPORTS) if kind == "allreduce" else ["auto"])
    ]
    if rounds < 1 or seconds <= 0:
        raise ConfigurationError(f"--rounds must be at least 1 and --seconds positive, not {rounds} and {seconds:g}")
    settings = {"sizes": parse_sizes(sizes), "elements": parse_count(elements), "seconds": seconds}
    figures: list[VersionsFigure] = []
    raw = []
    for job in jobs:
        launches = _measure(versions, job, settings, rounds)
        figures += summarise(job, launches)
        raw.append({**asdict(job), "launches": launches})
    _print(versions, rounds, figures)
    write_document(
        json,
        {
            "benchmark": "versions",
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "setting": {**settings, "rounds": rounds, "old": str(old), "new": str(new)},
            "environment": describe_environment(),
            "figures": [asdict(figure) for figure in figures],
            "raw": raw,
        },
    )


def find_version(label: str, path: Path) -> Version:
    """Return the version that a folder or an interpreter has.

    Raises:
        ConfigurationError: The folder holds no package, or the file is no program.
    """
    for folder in (path, path / "src"):
        if (folder / "totalreduce" / "__init__.py").is_file():
            return Version(label, sys.executable, str(folder.absolute()))
    if path.is_file() and os.access(path, os.X_OK):
        return Version(label, str(path.absolute()), None)
    raise ConfigurationError(
        f"--{label} {path} is neither a folder with the package totalreduce nor the python of a virtual environment"
    )


def summarise(job: Job, launches: dict[str, list[list[dict[str, Any]]]]) -> list[VersionsFigure]:
    """From every launch's samples, by version and rank, to figures. Pure."""
    figures = []
    for index, case in enumerate(launches["old"][0][0]["cases"]):
        seconds, cpu, messages = (
            {
                label: [of([rank["cases"][index] for rank in ranks]) for ranks in several]
                for label, several in launches.items()
            }
            for of in (_seconds, _cpu_per_message, _messages_per_operation)
        )
        what = {"step": "step of an MLP", "sparse": "step with Ok-Topk"}.get(job.what, "")
        figures.append(
            VersionsFigure(
                what=what or f"allreduce of {format_bytes(case['size'])}",
                ranks=job.ranks,
                transport=job.transport,
                old_s=estimate(seconds["old"]),
                new_s=estimate(seconds["new"]),
                speed=ratio_estimate(seconds["old"], seconds["new"]),
                old_cpu_s=estimate(cpu["old"]),
                new_cpu_s=estimate(cpu["new"]),
                cpu=ratio_estimate(cpu["new"], cpu["old"]),
                old_messages=median(messages["old"]),
                new_messages=median(messages["new"]),
            )
        )
    return figures


def _seconds(ranks: list[dict[str, Any]]) -> float:
    """The median block of a launch; of each block the slowest rank counts."""
    blocks: list[float] = [max(block) for block in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    return median(blocks)


def _cpu_per_message(ranks: list[dict[str, Any]]) -> float:
    return float(sum(rank["cpu_s"] for rank in ranks) / max(1, sum(rank["messages"] for rank in ranks)))


def _messages_per_operation(ranks: list[dict[str, Any]]) -> float:
    return float(sum(rank["messages"] for rank in ranks) / sum(rank["operations"] for rank in ranks))


def _measure(
    versions: Sequence[Version], job: Job, settings: dict[str, Any], rounds: int
) -> dict[str, list[list[dict[str, Any]]]]:
    """Launch each version once per round; the order within a round alternates, so that a drift cancels out."""
    launches: dict[str, list[list[dict[str, Any]]]] = {version.label: [] for version in versions}
    for index in range(rounds):
        for version in versions if index % 2 == 0 else reversed(versions):
            launches[version.label].append(_launch(version, job, settings))
        print_progress(f"versions: {job.what}, {job.ranks} ranks, {job.transport}: round {index + 1} of {rounds}")
    return launches


def _launch(version: Version, job: Job, settings: dict[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="totalreduce-bench-") as name:
        config = Path(name) / "config.json"
        config.write_text(json_format.dumps({**settings, **asdict(job)}), encoding="utf-8")
        outcome = run_workers(
            # -P: the folder of the worker's file holds modules of this version.
            [version.python, "-P", str(_WORKER), str(config)],
            num_workers=job.ranks,
            environment=version.environment(),
            output="capture",
            timeout_s=_LIMIT_S,
        )
        if outcome.interrupted_by is not None:
            raise BenchmarkFailedError(f"stopped by {outcome.interrupted_by}", outcome.exit_code)
        if outcome.timed_out:
            raise BenchmarkFailedError(f"the {version.label} version has not finished after {_LIMIT_S:.0f} s")
        if outcome.first_failure is not None:
            failure = outcome.first_failure
            lines = "\n".join(failure.last_errors)
            raise BenchmarkFailedError(
                f"the {version.label} version: rank {failure.rank} failed: {failure.describe()}\n{lines}"
            )
        documents = [json_format.loads(config.with_name(f"rank{rank}.json").read_text()) for rank in range(job.ranks)]
    package = documents[0]["package"]
    if version.source is not None and not package.startswith(version.source):
        raise BenchmarkFailedError(f"the {version.label} version is {package}, not that of {version.source}")
    return documents


def _parse_ranks(word: str) -> int:
    if not word.strip().isdecimal() or int(word) < 1:
        raise ConfigurationError(f"--ranks takes numbers from 1, separated by commas, not {word!r}")
    return int(word)


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or set(names) - set(known):
        raise ConfigurationError(f"{option} takes {', '.join(known)}, not {text!r}")
    return names


def _print(versions: Sequence[Version], rounds: int, figures: Sequence[VersionsFigure]) -> None:
    old, new = (version.source or version.python for version in versions)
    print_table(
        f"old {old}, new {new}",
        (
            "what",
            "ranks",
            "over",
            "old (95 %)",
            "new (95 %)",
            "new faster by",
            "messages",
            "CPU per message: old",
            "new",
            "new / old",
        ),
        [
            (
                figure.what,
                str(figure.ranks),
                figure.transport,
                duration(figure.old_s),
                duration(figure.new_s),
                times(figure.speed),
                f"{figure.old_messages:.4g}, {figure.new_messages:.4g}",
                duration(figure.old_cpu_s),
                duration(figure.new_cpu_s),
                times(figure.cpu),
            )
            for figure in figures
        ],
        f"Slowest rank, median of a launch, median of {rounds} launches, all results checked. CPU: of all ranks. "
        "Messages: of an operation, old and new, by the average rank.",
    )
