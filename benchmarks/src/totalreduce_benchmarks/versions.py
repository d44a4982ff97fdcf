"""``totalreduce bench versions``: two versions of this package side by side, in turns."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from totalreduce.bench.arithmetic import parse_count, parse_sizes
from totalreduce.bench.command import benchmark, split_names, split_ranks
from totalreduce.bench.launching import BenchmarkFailedError, Setting, require_success, run_job
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.records import from_document, to_document
from totalreduce.bench.report import Report, Table, duration, print_progress, times
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate, slowest
from totalreduce.cli.report import format_bytes
from totalreduce.foundation.environment import current
from totalreduce.foundation.errors import ConfigurationError

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
    """The case of one launch.

    Attributes:
        what: ``allreduce``, ``step`` or ``sparse``.
        ranks: Number of ranks.
        transport: As for ``totalreduce.init``.
    """

    what: str
    ranks: int
    transport: str


@dataclass(frozen=True, slots=True)
class Case:
    """One case on one rank of a launch.

    Attributes:
        seconds: Of one operation or step, by block.
        cpu_s: Processor time of all timed blocks.
        messages: Sent in them.
        operations: Carried out in them.
        size: Bytes per rank, of allreduce.
    """

    seconds: list[float]
    cpu_s: float
    messages: int
    operations: int
    size: int = 0


@dataclass(frozen=True, slots=True)
class RankSamples:
    """The samples of one rank of a launch, and the version of the package."""

    package: str
    version: str
    cases: list[Case]


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
        old_cpu_s: Processor time of all ranks for one operation or step.
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


@benchmark(
    "versions",
    "totalreduce bench versions --old ../before --new .",
    "totalreduce bench versions --old before/bin/python --new after/bin/python --what allreduce --sizes 4KiB -n 2",
)
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
) -> Report:
    """Compare two versions of this package: allreduce, training steps, and Ok-Topk.

    In every round each version is launched anew, in turns, and the ratios are taken launch by launch. Beside the times
    stands the processor time per operation. The measuring program uses the public interface only.
    """
    versions = [find_version("old", old), find_version("new", new)]
    counts = split_ranks("--ranks", ranks, least=1)
    jobs = [
        Job(kind, count, transport)
        for kind in split_names("--what", what, _KINDS)
        for count in counts
        for transport in (split_names("--transports", transports, _TRANSPORTS) if kind == "allreduce" else ["auto"])
    ]
    if rounds < 1 or seconds <= 0:
        raise ConfigurationError(f"--rounds must be at least 1 and --seconds positive, not {rounds} and {seconds:g}")
    settings = {"sizes": parse_sizes(sizes), "elements": parse_count(elements), "seconds": seconds}
    figures: list[VersionsFigure] = []
    raw = []
    for job in jobs:
        launches = _measure(versions, job, settings, rounds)
        figures += summarise(job, launches)
        raw.append({**to_document(job), "launches": launches})
    setting = {**settings, "rounds": rounds, "old": old, "new": new}
    return Report([_table(versions, rounds, figures)], setting, describe_machine(), figures, raw)


def find_version(label: str, path: Path) -> Version:
    """Return the version that a folder or an interpreter has."""
    for folder in (path, path / "src"):
        if (folder / "totalreduce" / "__init__.py").is_file():
            return Version(label, sys.executable, str(folder.absolute()))
    if path.is_file() and os.access(path, os.X_OK):
        return Version(label, str(path.absolute()), None)
    raise ConfigurationError(
        f"--{label} {path} is neither a folder with the package totalreduce nor the python of a virtual environment"
    )


def summarise(job: Job, launches: dict[str, list[list[RankSamples]]]) -> list[VersionsFigure]:
    """From every launch's samples, by version and rank, to figures. Pure."""
    figures = []
    for index, case in enumerate(launches["old"][0][0].cases):
        old, new = ([[rank.cases[index] for rank in ranks] for ranks in launches[label]] for label in ("old", "new"))
        old_s, new_s = [_seconds(ranks) for ranks in old], [_seconds(ranks) for ranks in new]
        old_cpu_s = [_cpu_per_operation(ranks) for ranks in old]
        new_cpu_s = [_cpu_per_operation(ranks) for ranks in new]
        what = {"step": "step of an MLP", "sparse": "step with Ok-Topk"}.get(job.what)
        figures.append(
            VersionsFigure(
                what=what or f"allreduce of {format_bytes(case.size)}",
                ranks=job.ranks,
                transport=job.transport,
                old_s=estimate(old_s),
                new_s=estimate(new_s),
                speed=ratio_estimate(old_s, new_s),
                old_cpu_s=estimate(old_cpu_s),
                new_cpu_s=estimate(new_cpu_s),
                cpu=ratio_estimate(new_cpu_s, old_cpu_s),
                old_messages=_messages_per_operation(old),
                new_messages=_messages_per_operation(new),
            )
        )
    return figures


def _seconds(ranks: list[Case]) -> float:
    """The median block of a launch; of each block the slowest rank counts."""
    return median(slowest([rank.seconds for rank in ranks]))


def _cpu_per_operation(ranks: list[Case]) -> float:
    return sum(rank.cpu_s for rank in ranks) / fmean(rank.operations for rank in ranks)


def _messages_per_operation(launches: list[list[Case]]) -> float:
    return fmean(rank.messages / rank.operations for ranks in launches for rank in ranks)


def _measure(
    versions: Sequence[Version], job: Job, settings: dict[str, Any], rounds: int
) -> dict[str, list[list[RankSamples]]]:
    """Launch each version once per round; the order within a round alternates, so that a drift cancels out."""
    launches: dict[str, list[list[RankSamples]]] = {version.label: [] for version in versions}
    for index in range(rounds):
        for version in versions if index % 2 == 0 else reversed(versions):
            launches[version.label].append(_launch(version, job, settings))
        print_progress(f"versions: {job.what}, {job.ranks} ranks, {job.transport}: round {index + 1} of {rounds}")
    return launches


def _launch(version: Version, job: Job, settings: dict[str, Any]) -> list[RankSamples]:
    setting = Setting(ranks=job.ranks)
    with tempfile.TemporaryDirectory(prefix="totalreduce-bench-") as name:
        config = Path(name) / "config.json"
        config.write_text(json.dumps({**settings, **to_document(job)}), encoding="utf-8")
        # -P: the folder of the worker's file holds modules of this version.
        argv = [version.python, "-P", str(_WORKER), str(config)]
        outcome = run_job(argv, setting, environment=version.environment(), output="capture", timeout_s=_LIMIT_S)
        require_success(outcome, f"the {version.label} version")
        documents = [json.loads(config.with_name(f"rank{rank}.json").read_text()) for rank in range(job.ranks)]
    samples = [from_document(RankSamples, document) for document in documents]
    package = samples[0].package
    if version.source is not None and not package.startswith(version.source):
        raise BenchmarkFailedError(f"the {version.label} version is {package}, not that of {version.source}")
    return samples


def _table(versions: Sequence[Version], rounds: int, figures: list[VersionsFigure]) -> Table[VersionsFigure]:
    old, new = (version.source or version.python for version in versions)
    return Table(
        f"old {old}, new {new}",
        [
            ("what", lambda figure: figure.what),
            ("ranks", lambda figure: str(figure.ranks)),
            ("over", lambda figure: figure.transport),
            ("old (95 %)", lambda figure: duration(figure.old_s)),
            ("new (95 %)", lambda figure: duration(figure.new_s)),
            ("new faster by", lambda figure: times(figure.speed)),
            ("messages", lambda figure: f"{figure.old_messages:.4g}, {figure.new_messages:.4g}"),
            ("CPU: old", lambda figure: duration(figure.old_cpu_s)),
            ("new", lambda figure: duration(figure.new_cpu_s)),
            ("new / old", lambda figure: times(figure.cpu)),
        ],
        figures,
        f"Slowest rank, median of a launch, median of {rounds} launches, all results checked. CPU: of all ranks, for "
        "one operation. Messages: of an operation, old and new, by the average rank.",
    )
