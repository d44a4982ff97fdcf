"""``totalreduce bench faults``: a real training job whose processes are killed and frozen, also while they recover."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from totalreduce.bench.command import benchmark
from totalreduce.bench.launching import BenchmarkFailedError, Setting, require_success
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.plots import Line, draw_lines
from totalreduce.bench.records import to_document
from totalreduce.bench.report import Report, Table
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import describe_error
from totalreduce_benchmarks.faults_injector import HUNG_S, Injected, Injector, Schedule
from totalreduce_benchmarks.faults_job import RunningJob, run_job, variables, write_config
from totalreduce_benchmarks.faults_kinds import KINDS, FaultPlan
from totalreduce_benchmarks.faults_peers import PeerFaults
from totalreduce_benchmarks.faults_records import FaultsConfig, Final, read_lines
from totalreduce_benchmarks.faults_summary import FaultsFigure, KindFigure, summarise
from totalreduce_benchmarks.faults_torchft import TorchftFaults
from totalreduce_benchmarks.faults_torchrun import TorchrunFaults

_WORKER = "totalreduce_benchmarks.faults_worker"
#: An undisturbed run to the same version must not take longer.
_REFERENCE_S = 3600.0
#: With a duration: how long the job runs before the first fault, at most, and as a part of the duration.
_PACE_S, _PACE_SHARE = 20.0, 0.25
P = TypeVar("P", bound=PeerFaults)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class FaultsJob:
    """The job; the fields are options."""

    step_ms: Annotated[float, typer.Option(help="Computation of a step.")] = 80.0
    optimizer: Annotated[str, typer.Option(help="adamw or momentum.")] = "adamw"
    sync: Annotated[str, typer.Option(help="none or oktopk.")] = "none"
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32"
    elements: Annotated[int, typer.Option(help="Elements of a further parameter.")] = 100_000
    replicas: Annotated[int, typer.Option(min=0, help="Ranks that have a copy of each rank's residuals.")] = 1
    spares: Annotated[int, typer.Option(min=0, help="Spare processes of the launcher.")] = 0


@dataclass(frozen=True, slots=True)
class FaultsParameters(FaultsJob):
    """The job and its faults; the fields are options."""

    faults: Annotated[int, typer.Option(min=1, help="Number of faults, if --kinds has no counts.")] = 20
    kinds: Annotated[
        str,
        typer.Option(
            help="Which faults: kill,stop by turns, or kill=500,stop=100 in random order. "
            + " ".join(
                f"{name}{' (--emulate-hosts, one rank per host)' if kind.needs_hosts else ''}: {kind.help}."
                for name, kind in KINDS.items()
            )
        ),
    ] = "kill"
    duration: Annotated[
        str,
        typer.Option(
            help="Cause a fault every --interval seconds for so long, as 90s, 30m or 1h, whether the job has recovered "
            "or not. Goodput is then measured against the pace before the first fault."
        ),
    ] = ""
    on_loss: Annotated[str, typer.Option(help="replace or shrink.")] = "replace"
    interval: Annotated[
        str, typer.Option(help="Seconds from a full recovery to the next fault, on average. Several: a run for each.")
    ] = "0.5"
    torchrun: Annotated[
        bool, typer.Option("--torchrun", help="Also run the job under torchrun, which restarts all processes.")
    ] = False
    torchft: Annotated[
        str,
        typer.Option(
            metavar="PYTHON", help="Also run the job by torchft, with this Python, which needs torch and torchft."
        ),
    ] = ""
    snapshot_every: Annotated[int, typer.Option(min=1, help="Blocks between snapshots on disk, for --torchrun.")] = 20
    seed: Annotated[int, typer.Option(help="Seed of the faults' times and ranks.")] = 0

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        plan = FaultPlan(self.kinds)
        peer = "--torchrun" if self.torchrun else "--torchft" if self.torchft else ""
        if peer and (plan.kinds != ["kill"] or self.duration):
            raise ConfigurationError(f"{peer} goes with --kinds kill, and without --duration")
        if self.torchft and (self.sync != "none" or not Path(self.torchft).exists()):
            raise ConfigurationError(
                "--torchft names the python of an environment with torchft, and goes without --sync"
            )
        self.duration_s()
        if any(interval <= 0 for interval in self.intervals()):
            raise ConfigurationError(f"--interval {self.interval}: an interval must be positive")
        checks.one_of("--on-loss", self.on_loss, ("replace", "shrink"))
        checks.one_of("--optimizer", self.optimizer, ("adamw", "momentum"))
        checks.one_of("--sync", self.sync, ("none", "oktopk"))
        checks.one_of("--dtype", self.dtype, ("float32", "bfloat16"))

    def duration_s(self) -> float | None:
        """Return the duration in seconds; ``None`` without one."""
        if not self.duration:
            return None
        number, unit = self.duration[:-1], self.duration[-1]
        try:
            seconds = float(number) * _UNITS[unit]
        except (KeyError, ValueError):
            raise ConfigurationError(f"--duration is a time such as 90s, 30m or 1h, not {self.duration!r}") from None
        if not seconds > 0:
            raise ConfigurationError(f"--duration {self.duration}: a duration must be positive")
        return seconds

    def schedule(self, interval_s: float) -> Schedule:
        """Return when faults come, with one of the intervals."""
        duration_s = self.duration_s()
        pace_s = 0.0 if duration_s is None else min(_PACE_S, _PACE_SHARE * duration_s)
        return Schedule(interval_s, self.faults, duration_s, pace_s, self.seed)

    def num_faults(self, interval_s: float) -> int:
        """Return how many faults come at most, with one of the intervals."""
        duration_s = self.duration_s()
        return FaultPlan(self.kinds).total(self.faults) if duration_s is None else int(duration_s / interval_s) + 1

    def intervals(self) -> list[float]:
        """Return the intervals in seconds."""
        try:
            return [float(word) for word in self.interval.split(",")]
        except ValueError:
            raise ConfigurationError(
                f"--interval is numbers with commas, such as 0.5,2,8, not {self.interval}"
            ) from None


@benchmark(
    "faults",
    "totalreduce bench faults -n 8 --faults 50",
    "totalreduce bench faults -n 8 --on-loss shrink --kinds kill,stop,again",
    "totalreduce bench faults -n 4 --sync oktopk --optimizer momentum",
    "totalreduce bench faults --emulate-hosts 4 --kinds kill=500,stop=100,reset=100,partition=50,again=100,first=50",
    "totalreduce bench faults -n 8 --kinds kill,keeper --duration 1h --interval 5 --step-ms 100",
    "totalreduce bench faults -n 4 --interval 1,4,16 --spares 1 --torchrun --plot goodput.png",
    shared=("ranks", "emulate_hosts", "emulate_rate"),
    plot=True,
)
def bench_faults(setting: Setting, parameters: FaultsParameters) -> Report:
    """Kill and freeze the processes of a training job, and compare what is left with an undisturbed run.

    With --on-loss replace, parameters and optimizer state must be those of an undisturbed run, bit by bit; with shrink,
    equal on all ranks at every version.
    """
    _check_network(setting, parameters)
    contestants = [_measure]
    contestants += [_measure_torchrun] if parameters.torchrun else []
    contestants += [_measure_torchft] if parameters.torchft else []
    figures, raw = [], []
    for interval_s in parameters.intervals():
        for measure in contestants:
            with tempfile.TemporaryDirectory(prefix="totalreduce-faults-") as name:
                figure, samples = measure(setting, parameters, interval_s, Path(name))
            figures.append(figure)
            raw.append(samples)
    title = f"{parameters.kinds}, {parameters.optimizer}, sync={parameters.sync}"
    runs = ", ".join(f"{figure.versions} blocks in {figure.seconds:.0f} s" for figure in figures)
    columns: list[tuple[str, Callable[[FaultsFigure], str]]] = [
        ("system", lambda f: f.system),
        ("a fault every", lambda f: f"{f.every_s:.1f} s"),
        *((head, _of_total(text)) for head, text in _KIND_COLUMNS),
        ("versions lost", lambda f: str(f.lost_versions)),
        ("samples lost, doubled", lambda f: f"{f.lost_samples}, {f.doubled_samples}"),
        ("next new block p50", lambda f: f"{f.progress_p50_s:.2f} s"),
        ("step", lambda f: f"{f.step_s * 1e3:.0f} ms"),
        ("goodput", lambda f: f"{f.goodput:.0%}"),
    ]
    tables: list[Table[Any]] = [Table(title, columns, figures, f"{runs}. {setting.describe()}.")]
    for figure in figures:
        if len(figure.kinds) > 1:
            shown = f"by kind: {figure.system}, a fault every {figure.every_s:.1f} s"
            tables.append(Table(shown, [("kind", lambda f: f.kind), *_KIND_COLUMNS], [*figure.kinds, figure.total]))
    document = {**setting.as_document(), **asdict(parameters)}
    draw = functools.partial(_draw, figures=figures, title=f"{setting.describe()}: {title}")
    return Report(tables, document, describe_machine(), figures, raw, draw)


def _of_total(text: Callable[[KindFigure], str]) -> Callable[[FaultsFigure], str]:
    return lambda figure: text(figure.total)


def _pair(median_value: float, maximum: float, factor: float, form: str, unit: str) -> str:
    return f"{median_value * factor:{form}}, {maximum * factor:{form}} {unit}" if maximum else "-"


def _draw(path: Path, *, figures: list[FaultsFigure], title: str) -> None:
    lines = []
    for system in dict.fromkeys(figure.system for figure in figures):
        own = sorted((each for each in figures if each.system == system), key=lambda each: each.every_s)
        lines.append(Line(system, [each.every_s for each in own], [100 * each.goodput for each in own]))
    draw_lines(path, title, ("seconds between faults", "goodput, % of the steps without faults"), lines)


_KIND_COLUMNS: list[tuple[str, Callable[[KindFigure], str]]] = [
    ("injected", lambda f: str(f.injected)),
    ("survived", lambda f: str(f.survived)),
    ("hung", lambda f: str(f.hung)),
    ("wrong", lambda f: str(f.wrong)),
    ("noticed p50, max", lambda f: _pair(f.detection_p50_s, f.detection_max_s, 1e3, ".0f", "ms")),
    ("recovered p50, max", lambda f: _pair(f.recovery_p50_s, f.recovery_max_s, 1.0, ".2f", "s")),
]


def _check_network(setting: Setting, parameters: FaultsParameters) -> None:
    kinds = [kind for kind in FaultPlan(parameters.kinds).kinds if KINDS[kind].needs_hosts]
    if kinds and setting.hosts != setting.ranks:
        raise ConfigurationError(f"--kinds {kinds[0]} needs one rank per emulated host: --emulate-hosts 4")


def _measure(
    setting: Setting, parameters: FaultsParameters, interval_s: float, folder: Path
) -> tuple[FaultsFigure, dict[str, Any]]:
    job = RunningJob(folder, setting.ranks)
    injector = Injector(job, FaultPlan(parameters.kinds), parameters.schedule(interval_s), folder)
    recovery = job.recovery(parameters.on_loss, parameters.num_faults(interval_s), parameters.spares)
    injector.start()
    outcome = run_job(_WORKER, _config(setting, parameters, folder, parameters.step_ms, 0), setting, recovery)
    if injector.error is not None:
        raise BenchmarkFailedError(
            f"no more faults could be caused: {describe_error(injector.error)}"
        ) from injector.error
    if not injector.hung:
        require_success(outcome, "the job under faults")
    finals = _finals(folder)
    wrong = len({final.digest for final in finals}) > 1
    if finals and parameters.on_loss == "replace":
        undisturbed = _undisturbed(setting, parameters, finals[0].version)
        wrong = wrong or [(each.digest, each.buffers) for each in finals] != undisturbed
    return _summary(parameters, parameters.on_loss, folder, finals, injector, ends_wrong=wrong)


def _measure_torchrun(
    setting: Setting, parameters: FaultsParameters, interval_s: float, folder: Path
) -> tuple[FaultsFigure, dict[str, Any]]:
    """Run the same job under torchrun: after a loss all processes start again, from the last snapshot on disk."""
    faults = _peer(TorchrunFaults, setting, parameters, interval_s, folder)
    config = _config(setting, parameters, folder, parameters.step_ms, parameters.snapshot_every)
    faults.run(["-m", _WORKER, str(config)], {"OMP_NUM_THREADS": "1", **variables()}, hung_s=2 * HUNG_S)
    finals = _finals(folder)
    undisturbed = _undisturbed(setting, parameters, finals[0].version) if finals else []
    wrong = [(each.digest, each.buffers) for each in finals] != undisturbed
    return _summary(parameters, "torchrun", folder, finals, faults, ends_wrong=wrong)


def _measure_torchft(
    setting: Setting, parameters: FaultsParameters, interval_s: float, folder: Path
) -> tuple[FaultsFigure, dict[str, Any]]:
    """Run the same model and step by torchft: ranks have the same state at each version, but other samples."""
    faults = _peer(TorchftFaults, setting, parameters, interval_s, folder)
    config = _config(setting, parameters, folder, parameters.step_ms, 0)
    faults.run(parameters.torchft, config, {"OMP_NUM_THREADS": "1", **variables()}, hung_s=2 * HUNG_S)
    finals = _finals(folder)
    wrong = len({final.digest for final in finals}) > 1
    return _summary(parameters, "torchft", folder, finals, faults, ends_wrong=wrong)


def _peer(kind: type[P], setting: Setting, parameters: FaultsParameters, interval_s: float, folder: Path) -> P:
    num_faults = parameters.num_faults(interval_s)
    return kind(folder, num_faults=num_faults, num_ranks=setting.ranks, interval_s=interval_s, seed=parameters.seed)


def _summary(
    parameters: FaultsParameters,
    system: str,
    folder: Path,
    finals: list[Final],
    faults: Injected,
    *,
    ends_wrong: bool,
) -> tuple[FaultsFigure, dict[str, Any]]:
    lines = _records(folder)
    paced = parameters.duration_s() is not None
    figure = summarise(system, lines, finals, faults, ends_wrong=ends_wrong, paced=paced)
    changes = [line["change"] for line in lines if "change" in line]
    return figure, {"faults": to_document(faults.faults), "changes": changes, "parameters": asdict(parameters)}


def _config(setting: Setting, parameters: FaultsParameters, folder: Path, step_ms: float, snapshot_every: int) -> Path:
    """Write what the workers do; return the file."""
    config = FaultsConfig(
        str(folder),
        step_ms,
        parameters.optimizer,
        parameters.sync,
        parameters.dtype,
        parameters.elements,
        parameters.replicas,
        snapshot_every,
        setting.ranks,
    )
    return write_config(config)


def _finals(folder: Path) -> list[Final]:
    """Return what the ranks have written at the end, by rank."""
    paths = sorted(folder.glob("final-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [Final(**json.loads(path.read_text())) for path in paths]


def _undisturbed(setting: Setting, parameters: FaultsParameters, version: int) -> list[tuple[str, str]]:
    """Return the digests of the state and of the buffers, by rank, of a run to the version without faults."""
    with tempfile.TemporaryDirectory(prefix="totalreduce-faults-") as name:
        folder = Path(name)
        (folder / "stop").write_text(str(version), encoding="utf-8")
        config = _config(setting, parameters, folder, 0.0, 0)
        outcome = run_job(_WORKER, config, setting, None, timeout_s=_REFERENCE_S)
        require_success(outcome, "the undisturbed job")
        return [(final.digest, final.buffers) for final in _finals(folder)]


def _records(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all processes."""
    return [line for path in sorted(folder.glob("blocks-*.jsonl")) for line in read_lines(path)]
