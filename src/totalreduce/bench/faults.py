"""``totalreduce bench faults``: a real training job whose processes are killed and frozen, also while they recover."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from totalreduce.bench.command import benchmark, split_names
from totalreduce.bench.faults_records import SAMPLES, FaultsConfig, Final, end_job_after, last_block
from totalreduce.bench.faults_torchrun import TorchrunFaults
from totalreduce.bench.launching import BenchmarkFailedError, Setting, require_success
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.network_faults import host_of
from totalreduce.bench.plots import Line, draw_lines
from totalreduce.bench.report import Report, Table
from totalreduce.bench.sampling import percentile
from totalreduce.foundation import checks, environment
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.local import EmulateOptions, RecoveryOptions, RunResult, run_workers

_KINDS = ("kill", "stop", "again", "first", "reset", "partition")
#: The faults that need connections between hosts.
_NETWORK_KINDS = ("reset", "partition")
#: How long a partition lasts: longer than the silence after which a rank counts as lost.
_PARTITION_S = 4.0
#: If no block takes effect for so long, the job hangs.
_HUNG_S = 60.0
_WORKER = "totalreduce.bench.faults_worker"
#: How often the injector looks for steps.
_LOOK_S = 0.05
#: An undisturbed run to the same version must not take longer.
_REFERENCE_S = 3600.0


@dataclass(frozen=True, slots=True)
class FaultsParameters:
    """The job and its faults; the fields are options."""

    faults: Annotated[int, typer.Option(min=1, help="Number of faults.")] = 20
    kinds: Annotated[
        str,
        typer.Option(
            help="Which faults, by turns. kill: SIGKILL of a random rank at a random time. stop: SIGSTOP. again: two "
            "kills, the second one while the job recovers from the first. first: SIGKILL of rank 0. With "
            "--emulate-hosts, one rank per host: reset: the connections of two hosts are reset. partition: for 4 s "
            "nothing comes from one host to another one, but the other direction works."
        ),
    ] = "kill"
    on_loss: Annotated[str, typer.Option(help="replace or shrink.")] = "replace"
    interval: Annotated[
        str, typer.Option(help="Seconds from a full recovery to the next fault, on average. Several: a run for each.")
    ] = "0.5"
    torchrun: Annotated[
        bool, typer.Option("--torchrun", help="Also run the job under torchrun, which restarts all processes.")
    ] = False
    snapshot_every: Annotated[int, typer.Option(min=1, help="Blocks between snapshots on disk, for --torchrun.")] = 20
    step_ms: Annotated[float, typer.Option(help="Computation of a step.")] = 80.0
    optimizer: Annotated[str, typer.Option(help="adamw or momentum.")] = "adamw"
    sync: Annotated[str, typer.Option(help="none or oktopk.")] = "none"
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32"
    elements: Annotated[int, typer.Option(help="Elements of a further parameter.")] = 100_000
    replicas: Annotated[int, typer.Option(min=0, help="Ranks that have a copy of each rank's residuals.")] = 1
    spares: Annotated[int, typer.Option(min=0, help="Spare processes of the launcher.")] = 0
    seed: Annotated[int, typer.Option(help="Seed of the faults' times and ranks.")] = 0

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        split_names("--kinds", self.kinds, _KINDS)
        if self.torchrun and self.kinds != "kill":
            raise ConfigurationError("--torchrun goes with --kinds kill")
        if any(interval <= 0 for interval in self.intervals()):
            raise ConfigurationError(f"--interval {self.interval}: an interval must be positive")
        checks.one_of("--on-loss", self.on_loss, ("replace", "shrink"))
        checks.one_of("--optimizer", self.optimizer, ("adamw", "momentum"))
        checks.one_of("--sync", self.sync, ("none", "oktopk"))
        checks.one_of("--dtype", self.dtype, ("float32", "bfloat16"))

    def intervals(self) -> list[float]:
        """Return the intervals in seconds."""
        try:
            return [float(word) for word in self.interval.split(",")]
        except ValueError:
            raise ConfigurationError(
                f"--interval is numbers with commas, such as 0.5,2,8, not {self.interval}"
            ) from None


@dataclass(frozen=True, slots=True)
class FaultsFigure:
    """The job under faults.

    Attributes:
        system: ``replace``, ``shrink`` or ``torchrun``.
        every_s: The seconds of the run divided by its faults.
        injected: Number of faults.
        survived: Faults after which the job went on with a right state.
        hung: Whether the job stopped making progress.
        wrong: Versions at which ranks had different states, and 1 more if the end differs from an undisturbed run.
        lost_versions: Versions of which no process has a record.
        lost_samples: Samples that no step of their epoch has used.
        doubled_samples: Samples that steps of one epoch have used twice.
        detection_p50_s: Time from a fault until the first survivor noticed it.
        detection_max_s: The longest.
        recovery_p50_s: Time from then until the survivors' next group had one state.
        recovery_max_s: The longest.
        progress_p50_s: Time from a fault until a block took effect that none before the fault had reached.
        step_s: Median time of a block without faults.
        goodput: Blocks times this time, divided by the time of the whole run after its start.
        versions: Number of blocks that took effect.
        seconds: Time from the first to the last block.
    """

    system: str
    every_s: float
    injected: int
    survived: int
    hung: bool
    wrong: int
    lost_versions: int
    lost_samples: int
    doubled_samples: int
    detection_p50_s: float
    detection_max_s: float
    recovery_p50_s: float
    recovery_max_s: float
    progress_p50_s: float
    step_s: float
    goodput: float
    versions: int
    seconds: float


@benchmark(
    "faults",
    "totalreduce bench faults -n 8 --faults 50",
    "totalreduce bench faults -n 8 --on-loss shrink --kinds kill,stop,again",
    "totalreduce bench faults -n 4 --sync oktopk --optimizer momentum",
    "totalreduce bench faults --emulate-hosts 4 --kinds reset,partition",
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
    figures, raw = [], []
    for interval_s in parameters.intervals():
        for measure in (_measure, _measure_torchrun) if parameters.torchrun else (_measure,):
            with tempfile.TemporaryDirectory(prefix="totalreduce-faults-") as name:
                figure, samples = measure(setting, parameters, interval_s, Path(name))
            figures.append(figure)
            raw.append(samples)
    columns = [
        ("system", lambda f: f.system),
        ("a fault every", lambda f: f"{f.every_s:.1f} s"),
        ("injected", lambda f: str(f.injected)),
        ("survived", lambda f: str(f.survived)),
        ("hung", lambda f: "yes" if f.hung else "0"),
        ("wrong", lambda f: str(f.wrong)),
        ("versions lost", lambda f: str(f.lost_versions)),
        ("samples lost, doubled", lambda f: f"{f.lost_samples}, {f.doubled_samples}"),
        ("noticed p50, max", lambda f: _pair(f.detection_p50_s, f.detection_max_s, 1e3, ".0f", "ms")),
        ("recovered p50, max", lambda f: _pair(f.recovery_p50_s, f.recovery_max_s, 1.0, ".2f", "s")),
        ("next new block p50", lambda f: f"{f.progress_p50_s:.2f} s"),
        ("step", lambda f: f"{f.step_s * 1e3:.0f} ms"),
        ("goodput", lambda f: f"{f.goodput:.0%}"),
    ]
    title = f"{parameters.kinds}, {parameters.optimizer}, sync={parameters.sync}"
    runs = ", ".join(f"{figure.versions} blocks in {figure.seconds:.0f} s" for figure in figures)
    caption = f"{runs}. {setting.describe()}."
    table = Table(title, columns, figures, caption)
    document = {**setting.as_document(), **asdict(parameters)}
    draw = functools.partial(_draw, figures=figures, title=f"{setting.describe()}: {title}")
    return Report([table], document, describe_machine(), figures, raw, draw)


def _pair(median_value: float, maximum: float, factor: float, form: str, unit: str) -> str:
    return f"{median_value * factor:{form}}, {maximum * factor:{form}} {unit}" if maximum else "-"


def _draw(path: Path, *, figures: list[FaultsFigure], title: str) -> None:
    lines = []
    for system in dict.fromkeys(figure.system for figure in figures):
        own = sorted((each for each in figures if each.system == system), key=lambda each: each.every_s)
        lines.append(Line(system, [each.every_s for each in own], [100 * each.goodput for each in own]))
    draw_lines(path, title, ("seconds between faults", "goodput, % of the steps without faults"), lines)


def _check_network(setting: Setting, parameters: FaultsParameters) -> None:
    kinds = [kind for kind in split_names("--kinds", parameters.kinds, _KINDS) if kind in _NETWORK_KINDS]
    if kinds and setting.hosts != setting.ranks:
        raise ConfigurationError(f"--kinds {kinds[0]} needs one rank per emulated host: --emulate-hosts 4")


def _measure(
    setting: Setting, parameters: FaultsParameters, interval_s: float, folder: Path
) -> tuple[FaultsFigure, dict[str, Any]]:
    injector = _Injector(parameters, interval_s, setting.ranks, folder)
    outcome = _run(setting, parameters, folder, injector)
    if not injector.hung:
        require_success(outcome, "the job under faults")
    finals = _finals(folder)
    wrong = len({final.digest for final in finals}) > 1
    if finals and parameters.on_loss == "replace":
        undisturbed = _undisturbed(setting, parameters, finals[0].version)
        wrong = wrong or [(each.digest, each.buffers) for each in finals] != undisturbed
    return summarise(parameters, parameters.on_loss, _records(folder), finals, injector, ends_wrong=wrong)


def _measure_torchrun(
    setting: Setting, parameters: FaultsParameters, interval_s: float, folder: Path
) -> tuple[FaultsFigure, dict[str, Any]]:
    """Run the same job under torchrun: after a loss all processes start again, from the last snapshot on disk."""
    faults = TorchrunFaults(
        folder,
        num_faults=parameters.faults,
        num_ranks=setting.ranks,
        interval_s=interval_s,
        seed=parameters.seed,
    )
    config = _config(parameters, folder, parameters.step_ms, parameters.snapshot_every)
    faults.run(["-m", _WORKER, str(config)], {"OMP_NUM_THREADS": "1", **_environment()}, hung_s=2 * _HUNG_S)
    finals = _finals(folder)
    undisturbed = _undisturbed(setting, parameters, finals[0].version) if finals else []
    wrong = [(each.digest, each.buffers) for each in finals] != undisturbed
    return summarise(parameters, "torchrun", _records(folder), finals, faults, ends_wrong=wrong)


def _config(parameters: FaultsParameters, folder: Path, step_ms: float, snapshot_every: int) -> Path:
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
    )
    path = folder / "config.json"
    path.write_text(json.dumps(asdict(config)), encoding="utf-8")
    return path


def _environment() -> dict[str, str]:
    """Return the variables of all runs: two that measure links may choose schedules that add in different orders."""
    return {"TOTALREDUCE_LINKS": "off", **environment.current()}


def _finals(folder: Path) -> list[Final]:
    """Return what the ranks have written at the end, by rank."""
    paths = sorted(folder.glob("final-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [Final(**json.loads(path.read_text())) for path in paths]


def _run(setting: Setting, parameters: FaultsParameters, folder: Path, injector: _Injector | None) -> RunResult:
    path = _config(parameters, folder, 0.0 if injector is None else parameters.step_ms, 0)
    emulate, recovery = None, None
    if setting.hosts:
        emulate = EmulateOptions(
            num_hosts=setting.hosts, rate=setting.rate, ranks_per_host=setting.ranks // setting.hosts
        )
    if injector is not None:
        recovery = RecoveryOptions(
            on_loss="shrink" if parameters.on_loss == "shrink" else "replace",
            restarts=4 * parameters.faults + 10,
            spares=parameters.spares,
            on_event=injector.on_event,
        )
        injector.start()
    return run_workers(
        [sys.executable, "-m", _WORKER, str(path)],
        num_workers=setting.ranks,
        emulate=emulate,
        environment=_environment(),
        output="capture",
        recovery=recovery,
        timeout_s=_REFERENCE_S if injector is None else None,
    )


def _undisturbed(setting: Setting, parameters: FaultsParameters, version: int) -> list[tuple[str, str]]:
    """Return the digests of the state and of the buffers, by rank, of a run to the version without faults."""
    with tempfile.TemporaryDirectory(prefix="totalreduce-faults-") as name:
        folder = Path(name)
        (folder / "stop").write_text(str(version), encoding="utf-8")
        require_success(_run(setting, parameters, folder, None), "the undisturbed job")
        return [(final.digest, final.buffers) for final in _finals(folder)]


class _Injector:
    """Causes the faults, in a thread beside the launcher.

    Attributes:
        times: The time of day of each fault.
        hung: Whether the job made no progress for ``_HUNG_S``.
    """

    def __init__(self, parameters: FaultsParameters, interval_s: float, num_ranks: int, folder: Path) -> None:
        self._interval_s = interval_s
        self._parameters, self._num_ranks, self._folder = parameters, num_ranks, folder
        self._random = random.Random(parameters.seed)
        self._kinds = split_names("--kinds", parameters.kinds, _KINDS)
        self._pids: dict[int, int] = {}
        self._members: list[tuple[int, int]] = []
        self._incarnations: dict[int, int] = {}
        self._changed = threading.Condition()
        self._ended = False
        self._decided_at = 0.0
        self.times: list[float] = []
        self.hung = False

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._cause_all, name="faults", daemon=True).start()

    def on_event(self, event: dict[str, Any]) -> None:
        """Follow the launcher's events."""
        with self._changed:
            if event["event"] == "started":
                self._pids[event["rank"]] = event["pid"]
                self._incarnations[event["rank"]] = event["incarnation"]
            elif event["event"] == "ended":
                self._pids.pop(event["rank"], None)
                self._ended = self._ended or event["exit_code"] == 0
            elif event["event"] == "epoch":
                self._members = [(each["seat"], each["incarnation"]) for each in event["members"]]
                self._decided_at = time.time()
            self._changed.notify_all()

    def _cause_all(self) -> None:
        for number in range(self._parameters.faults):
            kind = self._kinds[number % len(self._kinds)]
            if not self._wait_until_complete():
                return
            time.sleep(self._random.uniform(0.0, 2 * self._interval_s))
            rank = self._random.randrange(self._num_ranks) if kind != "first" else 0
            if kind in _NETWORK_KINDS:
                self._disturb_network(kind, rank)
                continue
            self._cause(kind, rank)
            if kind == "again":  # before or after the survivors have formed their group
                time.sleep(self._random.uniform(0.0, 3.0))
                self._cause("kill", self._random.randrange(self._num_ranks))
        if self._wait_until_complete():
            time.sleep(1.0)
            version = max((line["about"] for line in _records(self._folder) if "about" in line), default=0)
            end_job_after(self._folder, version)

    def _cause(self, kind: str, rank: int) -> None:
        with self._changed:
            pid = self._pids.pop(rank, None)  # from now on it counts as gone
            others = [
                seat for seat, incarnation in self._members if seat != rank and self._incarnations[seat] == incarnation
            ]
            if pid is not None and not any(seat in self._pids for seat in others):
                self._pids[rank], pid = pid, None  # the last process with the state of the job
            if pid is None:
                return
            self.times.append(time.time())
            os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)

    def _disturb_network(self, kind: str, rank: int) -> None:
        """Reset the connections of a host with another one, or stop what it sends there for a while."""
        peers = [peer for peer in range(self._num_ranks) if peer != rank]
        self._random.shuffle(peers)
        with self._changed:
            pids = dict(self._pids)
        here = host_of(pids[rank])
        with self._changed:
            members, self._members = self._members, []  # until the ranks have formed another group
        for peer in peers:
            there, at = host_of(pids[peer]), time.time()
            if kind == "partition":
                self.times.append(at)
                here.block(there)
                time.sleep(_PARTITION_S)
                here.unblock(there)
                return
            if here.reset(there):
                self.times.append(at)
                return
        with self._changed:
            self._members = members

    def _wait_until_complete(self) -> bool:
        """Return when all ranks have taken a step together; ``False`` if the job has ended or hangs."""
        give_up_at = time.monotonic() + _HUNG_S
        while time.monotonic() < give_up_at:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._is_complete(), _LOOK_S)
                complete, members, since = self._is_complete(), list(self._members), self._decided_at
                if self._ended:
                    return False
            if complete and self._has_taken_step(members, since):
                return True
            time.sleep(_LOOK_S)
        self.hung = True
        os.kill(os.getpid(), signal.SIGTERM)  # the launcher ends the run
        return False

    def _has_taken_step(self, members: list[tuple[int, int]], since: float) -> bool:
        """Whether a member has written that a block took effect after a time: then all members have the state."""
        blocks = [last_block(self._folder / f"blocks-{seat}-{incarnation}.jsonl") for seat, incarnation in members]
        return any(block is not None and block["at"] > since for block in blocks)

    def _is_complete(self) -> bool:
        running = [(rank, self._incarnations[rank]) for rank in sorted(self._pids)]
        return len(running) == self._num_ranks and self._members == running


def _records(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all processes; the last line of a killed process may be cut off."""
    found = []
    for path in sorted(folder.glob("blocks-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def summarise(
    parameters: FaultsParameters,
    system: str,
    lines: list[dict[str, Any]],
    finals: list[Final],
    injector: _Injector | TorchrunFaults,
    *,
    ends_wrong: bool,
) -> tuple[FaultsFigure, dict[str, Any]]:
    """From the processes' logs to figures.

    Raises:
        BenchmarkFailedError: There is no log of a block.
    """
    done = [line for line in lines if "done" in line]
    if not done:
        raise BenchmarkFailedError("no block took effect")
    digests: dict[int, set[str]] = defaultdict(set)
    for line in done:
        digests[line["done"]].add(line["digest"])
    last = max(digests)
    lost, doubled = _audit([line for line in lines if "about" in line], last)
    changes = [line["change"] for line in lines if "change" in line and "is lost" in line["change"]["reason"]]
    noticed = sorted(change["noticed_at"] for change in changes)
    detections = []
    for at, following in zip(injector.times, [*injector.times[1:], math.inf], strict=True):
        detections += [time - at for time in noticed if at <= time < following][:1]
    recoveries = [change["seconds"] for change in changes] or [0.0]
    times = sorted(line["at"] for line in done)
    step_s = median(final.step_s for final in finals) if finals else 0.0
    seconds = times[-1] - times[0]
    wrong = sum(len(each) > 1 for each in digests.values()) + ends_wrong
    figure = FaultsFigure(
        system=system,
        every_s=seconds / max(1, len(injector.times)),
        injected=len(injector.times),
        survived=0 if injector.hung or wrong else len(injector.times),
        hung=injector.hung,
        wrong=wrong,
        lost_versions=sum(version not in digests for version in range(1, last + 1)),
        lost_samples=lost,
        doubled_samples=doubled,
        detection_p50_s=percentile(detections or [0.0], 0.5),
        detection_max_s=max(detections, default=0.0),
        recovery_p50_s=percentile(recoveries, 0.5),
        recovery_max_s=max(recoveries),
        progress_p50_s=percentile(_progress(done, injector.times) or [0.0], 0.5),
        step_s=step_s,
        goodput=last * step_s / seconds if seconds else 0.0,
        versions=last,
        seconds=seconds,
    )
    return figure, {"faults": injector.times, "changes": changes, "parameters": asdict(parameters)}


def _progress(done: list[dict[str, Any]], faults: list[float]) -> list[float]:
    """Return for each fault the time until a block took effect that none before the fault had reached."""
    blocks = sorted((line["at"], line["done"]) for line in done)
    found = []
    for fault in faults:
        reached = max((version for at, version in blocks if at <= fault), default=0)
        found += [at - fault for at, version in blocks if at > fault and version > reached][:1]
    return found


def _audit(lines: list[dict[str, Any]], last: int) -> tuple[int, int]:
    """Return how many samples steps have left out, and how many they have used twice, in epochs that are over.

    Of a version, only the lines of its last membership count: a block that was repeated used the same samples before,
    without effect.
    """
    memberships: dict[int, int] = {}
    for line in lines:
        memberships[line["about"]] = max(line["job_epoch"], memberships.get(line["about"], 0))
    used: dict[int, list[int]] = defaultdict(list)
    blocks: dict[tuple[int, int], list[int]] = {}
    epoch_of: dict[int, int] = {}
    for line in lines:
        version = line["about"]
        if version < last and line["job_epoch"] == memberships[version]:
            blocks[version, line["seat"]] = line["samples"]
            epoch_of[version] = line["data_epoch"]
    for (version, _), samples in blocks.items():
        used[epoch_of[version]] += samples
    over = [epoch for epoch in used if epoch < max(used)]
    lost = sum(SAMPLES - len(set(used[epoch])) for epoch in over)
    doubled = sum(len(used[epoch]) - len(set(used[epoch])) for epoch in over)
    return lost, doubled
