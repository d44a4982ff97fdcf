"""``totalreduce bench ps-faults``: a parameter server whose processes are killed."""

from __future__ import annotations

import json
import random
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, final

import typer

from totalreduce.bench.command import benchmark
from totalreduce.bench.launching import BenchmarkFailedError, Setting, require_success
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.records import to_document
from totalreduce.bench.report import Report, Table
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import describe_error
from totalreduce_benchmarks.faults_injector import Injector, Schedule
from totalreduce_benchmarks.faults_job import RunningJob, run_job, write_config
from totalreduce_benchmarks.faults_kinds import FaultKind, FaultPlan
from totalreduce_benchmarks.faults_records import read_lines
from totalreduce_benchmarks.ps_faults_records import PsFaultsConfig

__all__ = ["PsFaultsFigure", "PsFaultsParameters", "bench_ps_faults", "measure_ps_faults"]

#: So many last lines of each rank are shown if the job does not go on.
_LINES_MAX = 3
#: A pull that waits for the recovery begins at most so long after the fault.
_NOTICED_S = 2.0
#: A pull or a push that takes longer has waited.
_SLOW_S = 0.05


@dataclass(frozen=True, slots=True)
class PsFaultsParameters:
    """The table, and what is killed; the fields are options."""

    kills: Annotated[
        str, typer.Option(help="How often a server is killed, a worker, and one of each at the same time.")
    ] = "server=10,worker=10,both=2"
    servers: Annotated[int, typer.Option(min=1, help="The number of ranks that are servers: the last ones.")] = 2
    workers: Annotated[int, typer.Option(min=0, help="The number of workers, the first ranks. 0: all others.")] = 0
    replicas: Annotated[int, typer.Option(min=1, help="The number of servers that hold each key.")] = 2
    keys: Annotated[int, typer.Option(min=1, help="The number of keys.")] = 20_000
    rule: Annotated[str, typer.Option(help="sequential, bounded or eventual.")] = "eventual"
    step_ms: Annotated[float, typer.Option(help="Computation of a step.")] = 20.0
    on_loss: Annotated[str, typer.Option(help="replace or shrink.")] = "shrink"
    interval: Annotated[float, typer.Option(help="Mean seconds from a full recovery to the next fault.")] = 0.3
    spares: Annotated[int, typer.Option(min=0, help="Spare processes of the launcher.")] = 1
    seed: Annotated[int, typer.Option(help="Seed of the faults' times and ranks.")] = 0

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        checks.one_of("--on-loss", self.on_loss, ("replace", "shrink"))
        checks.one_of("--rule", self.rule, ("sequential", "bounded", "eventual"))
        self.plan([], [])

    def plan(self, workers: Sequence[int], servers: Sequence[int]) -> FaultPlan:
        """Return what is killed, among these ranks."""
        only_workers = [rank for rank in workers if rank not in servers] or workers
        kinds = {
            "server": _Kill("a server", servers),
            "worker": _Kill("a worker", only_workers),
            "both": _Kill("one of each", servers, only_workers),
        }
        plan = FaultPlan(self.kills, kinds, "--kills")
        if plan.counts is None:
            raise ConfigurationError(f"--kills is counts such as server=100,worker=100,both=20, not {self.kills!r}")
        return plan


@final
class _Kill(FaultKind):
    """SIGKILL of one rank of each list at the same time."""

    def __init__(self, description: str, *choices: Sequence[int]) -> None:
        self.help, self._choices = description, choices

    def cause(self, job: RunningJob, chance: random.Random) -> float | None:
        first, *others = [chance.choice(ranks) for ranks in self._choices]
        at = job.send(first, signal.SIGKILL)
        if at is not None:
            for rank in others:
                job.send(rank, signal.SIGKILL)
        return at


@dataclass(frozen=True, slots=True)
class PsFaultsFigure:
    """The faults of one kind.

    Attributes:
        kind: ``server``, ``worker``, ``both``, or ``all``.
        injected: The number of faults.
        wrong_values: The number of values that workers have pulled and that a lost or doubled push explains; of all
            kinds together.
        resumed_p50_s: Median time from the fault until all workers that were not killed have ended the first pull that
            it has disturbed.
        resumed_max_s: The longest time.
        settled_p50_s: Median time until they have ended the longest pull, which may be one that waits until the new
            process has joined.
        settled_max_s: The longest time.
    """

    kind: str
    injected: int
    wrong_values: int
    resumed_p50_s: float
    resumed_max_s: float
    settled_p50_s: float
    settled_max_s: float


@benchmark(
    "ps-faults",
    "totalreduce bench ps-faults -n 4",
    "totalreduce bench ps-faults -n 5 --servers 2 --kills server=100,worker=100,both=20 --spares 2",
    "totalreduce bench ps-faults -n 4 --rule bounded --on-loss replace",
    shared=("ranks",),
)
def bench_ps_faults(setting: Setting, parameters: PsFaultsParameters) -> Report:
    """Kill servers and workers of a parameter server, and look for pushes that were lost or applied twice.

    Each worker pushes ones to random keys, in values of its own, and compares every pull with what it has pushed.
    """
    num_workers = parameters.workers or setting.ranks - parameters.servers
    if num_workers < 1 or parameters.servers > setting.ranks or parameters.replicas > parameters.servers:
        raise ConfigurationError(
            f"{setting.ranks} ranks cannot be {num_workers} workers and {parameters.servers} servers that hold each "
            f"key {parameters.replicas} times: choose -n, --servers, --workers and --replicas"
        )
    with tempfile.TemporaryDirectory(prefix="totalreduce-ps-faults-") as name:
        figures, raw = measure_ps_faults(setting, parameters, num_workers, Path(name))
    columns: list[tuple[str, Any]] = [
        ("killed", lambda f: f.kind),
        ("times", lambda f: str(f.injected)),
        ("pull resumes p50, max", lambda f: f"{f.resumed_p50_s:.2f}, {f.resumed_max_s:.2f} s"),
        ("new process is in p50, max", lambda f: f"{f.settled_p50_s:.2f}, {f.settled_max_s:.2f} s"),
    ]
    wrong = f"{figures[-1].wrong_values} pulled values that a lost or doubled push explains"
    note = f"{raw['steps']} steps of workers; {wrong}."
    title = (
        f"{num_workers} workers, {parameters.servers} servers, {parameters.replicas} replicas, {parameters.rule}, "
        f"--on-loss {parameters.on_loss}"
    )
    document = {**setting.as_document(), **asdict(parameters)}
    return Report([Table(title, columns, figures, note)], document, describe_machine(), figures, raw)


def measure_ps_faults(
    setting: Setting, parameters: PsFaultsParameters, num_workers: int, folder: Path
) -> tuple[list[PsFaultsFigure], dict[str, Any]]:
    """Run a job and kill its processes; return a figure for each kind, and what they are computed from.

    Raises:
        BenchmarkFailedError: The job did not go on after a kill, or did not come to its end.
    """
    config = PsFaultsConfig(
        str(folder),
        num_workers,
        parameters.servers,
        parameters.keys,
        parameters.replicas,
        parameters.rule,
        parameters.step_ms,
    )
    path = write_config(config)
    job = RunningJob(folder, setting.ranks)
    plan = parameters.plan(range(num_workers), range(setting.ranks - parameters.servers, setting.ranks))
    injector = Injector(job, plan, Schedule(parameters.interval, 0, seed=parameters.seed), folder)
    injector.start()
    recovery = job.recovery(parameters.on_loss, plan.total(0), parameters.spares)
    outcome = run_job("totalreduce_benchmarks.ps_faults_worker", path, setting, recovery)
    if injector.hung or injector.error is not None:
        why = "" if injector.error is None else f": {describe_error(injector.error)}"
        ends = [(rank, text.splitlines()[-_LINES_MAX:]) for rank, text in enumerate(outcome.errors)]
        lines = [f"rank {rank}: {line}" for rank, end in ends for line in end]
        raise BenchmarkFailedError(
            "\n".join([f"the job did not go on after {len(injector.faults)} kills{why}", *lines])
        )
    require_success(outcome, "the job under faults")
    finals = [json.loads(each.read_text()) for each in sorted(folder.glob("final-*.json"))]
    if len(finals) != num_workers:
        raise BenchmarkFailedError(f"{len(finals)} of {num_workers} workers have come to the end")
    wrong = sum(final["wrong"] for final in finals)
    logs = [read_lines(each) for each in sorted(folder.glob("blocks-*.jsonl"))]
    resumed = [(fault.kind, *_resumed(fault.at, logs)) for fault in injector.faults]
    figures = []
    for kind in (*plan.kinds, "all"):
        own = [(first, longest) for each, first, longest in resumed if kind in (each, "all")] or [(0.0, 0.0)]
        firsts, longest = zip(*own, strict=True)
        count = sum(kind in (each, "all") for each, *_ in resumed)
        figures.append(PsFaultsFigure(kind, count, wrong, median(firsts), max(firsts), median(longest), max(longest)))
    steps = sum(final["steps"] for final in finals)
    return figures, {"faults": to_document(injector.faults), "resumed": resumed, "steps": steps}


def _resumed(at: float, logs: list[list[dict[str, Any]]]) -> tuple[float, float]:
    """Return when, after a fault, all processes that were not killed had an answer to a pull again.

    Returns:
        The seconds after the first slow wait of each process, and after its longest one; of the slowest process.
    """
    first = longest = 0.0
    for log in logs:
        if not log or not log[0]["at"] < at < log[-1]["pulled"]:
            continue  # it was not there yet, or was killed
        waits = [(seconds, answered) for seconds, answered in _waits(at, log) if seconds > _SLOW_S]
        if waits:
            first = max(first, waits[0][1] - at)
            longest = max(longest, max(waits)[1] - at)
    return first, longest


def _waits(at: float, log: list[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    """Yield how long the pulls and pushes after a fault took, and when a pull was answered that shows their end.

    For a pull that is its own end. Behind a push, it is that of the next pull.
    """
    around = [line for line in log if line["pushed"] > at and line["at"] < at + _NOTICED_S]
    for line, behind in zip(around, [*around[1:], None], strict=True):
        if line["pulled"] > at:
            yield line["pulled"] - line["at"], line["pulled"]
        yield line["pushed"] - line["pulled"], line["pushed"] if behind is None else behind["pulled"]
