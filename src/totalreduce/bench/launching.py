"""The launcher's side of a benchmark: start workers, wait, collect one result per rank; does not load torch."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from totalreduce.bench.machine import Machine
from totalreduce.bench.mpi_launching import MPI_PEERS, mpi_jobs
from totalreduce.bench.records import from_document, to_document
from totalreduce.cli.examples import examples_folder
from totalreduce.foundation.environment import current
from totalreduce.foundation.errors import ConfigurationError, TotalReduceError
from totalreduce.launch.emulate import EmulateOptions, rate_bits_per_s
from totalreduce.launch.local import RecoveryOptions, run_workers
from totalreduce.launch.output import Output
from totalreduce.launch.workers import RunResult

_LIMIT_S = 3600.0
R = TypeVar("R")
#: A contestant of ``bench allreduce``: Total Reduce with tensors that the ranks of a host read where they lie.
SHARED = "shared"


class BenchmarkFailedError(TotalReduceError):
    """A worker of a benchmark failed or found a wrong result: there is no figure to report."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        #: The exit code of the command: 1, or 128 plus the number of the signal that stopped it.
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The place and the peers of a benchmark."""

    ranks: int  #: Number of worker processes.
    hosts: int = 0  #: Number of emulated hosts; 0: all workers on this machine's loopback.
    rate: str = "1gbit"  #: Rate of each emulated host's link, as ``1gbit``.
    delay_ms: float = 0.0  #: How long a packet travels from one emulated host to another, in addition.
    against: tuple[str, ...] = ()  #: Other peers in the same run: ``gloo``, ``fifo``, ``openmpi``, ``mpich``.
    rounds: int = 1  #: How often each peer is measured.
    transport: str = "auto"  #: That of Total Reduce, as for ``totalreduce.init``.
    #: Where the ``mpirun`` of an MPI is, by peer; those not named are looked for on PATH.
    mpirun: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse settings that cannot work."""
        if self.ranks < 1:
            raise ConfigurationError(f"--ranks must be at least 1, not {self.ranks}")
        if self.hosts and self.ranks % self.hosts:
            raise ConfigurationError(
                f"{self.ranks} ranks cannot be spread evenly over {self.hosts} emulated hosts; "
                "make --ranks a multiple of --emulate-hosts"
            )
        if self.rounds < 1:
            raise ConfigurationError(f"--rounds must be at least 1, not {self.rounds}")
        unknown = set(self.against) - {"gloo", "fifo", *MPI_PEERS}
        if unknown:
            known = f"gloo, fifo, {', '.join(MPI_PEERS)}"
            raise ConfigurationError(f"--against knows {known}, not {', '.join(sorted(unknown))}")
        if self.hosts and self.mpi_peers:
            raise ConfigurationError(
                f"--against {', '.join(self.mpi_peers)} works on one host only: MPI's launcher cannot reach "
                "emulated hosts; leave --emulate-hosts out"
            )
        if set(self.mpirun) - set(MPI_PEERS):
            raise ConfigurationError(f"--mpirun takes {' or '.join(MPI_PEERS)}, not {', '.join(self.mpirun)}")

    @property
    def rate_bits_per_s(self) -> float | None:
        """Nominal rate of a link; ``None`` where nothing is shaped."""
        return rate_bits_per_s(self.rate) if self.hosts else None

    @property
    def peers(self) -> list[str]:
        """The peers, in the order in which they are measured."""
        return ["totalreduce", *dict.fromkeys(self.against)]

    @property
    def mpi_peers(self) -> list[str]:
        """Peers that an ``mpirun`` of their own starts."""
        return [peer for peer in self.peers if peer in MPI_PEERS]

    @property
    def host_of_rank(self) -> tuple[int, ...]:
        """Host of every rank: blocks of equal size, as the launcher places them."""
        return tuple(rank * (self.hosts or 1) // self.ranks for rank in range(self.ranks))

    @property
    def emulate(self) -> EmulateOptions | None:
        """The emulated hosts for the launcher; ``None`` where there are none."""
        if not self.hosts:
            return None
        per_host = self.ranks // self.hosts
        return EmulateOptions(num_hosts=self.hosts, rate=self.rate, ranks_per_host=per_host, delay_ms=self.delay_ms)

    def refuse_mpi(self, command: str) -> None:
        """Say that a benchmark has no MPI side."""
        if self.mpi_peers:
            raise ConfigurationError(f"bench {command} has nothing to compare with {', '.join(self.mpi_peers)}")

    def describe(self) -> str:
        """For table titles."""
        if self.hosts:
            delay = f"+{self.delay_ms:g}ms" if self.delay_ms else ""
            return f"{self.ranks} ranks on {self.hosts} emulated hosts x {self.rate}{delay}"
        return f"{self.ranks} ranks on one host"

    def as_document(self) -> dict[str, Any]:
        """Return the part of a document that describes the setting."""
        return {
            "ranks": self.ranks,
            "hosts": self.hosts,
            "rate_bits_per_s": self.rate_bits_per_s,
            "peers": self.peers,
            "rounds": self.rounds,
        }


@dataclass(frozen=True, slots=True)
class Results(Generic[R]):
    """The samples of all ranks of a benchmark."""

    ranks: list[R]  #: The record that each rank's ``measure`` returned.
    machine: Machine  #: As rank 0 sees it.

    def raw(self) -> list[dict[str, Any]]:
        """Return the records as documents, each with the machine."""
        return [{**to_document(rank), "environment": asdict(self.machine)} for rank in self.ranks]


def run_benchmark(
    worker: str, parameters: Any, setting: Setting, kind: type[R], *, recovery: RecoveryOptions | None = None
) -> Results[R]:
    """Run one benchmark on all ranks.

    Args:
        worker: The full name of the module whose ``measure(context, parameters)`` every rank calls, or
            ``measure(parameters)``, which makes its group itself.
        parameters: The record that ``measure`` takes.
        setting: The place and the peers.
        kind: The record that ``measure`` returns.
        recovery: How the launcher replaces lost ranks; ``None``: it does not.
    """
    with tempfile.TemporaryDirectory(prefix="totalreduce-bench-") as name:
        folder = Path(name)
        config = {"worker": worker, "folder": folder, "setting": setting, "parameters": parameters}
        path = folder / "config.json"
        path.write_text(json.dumps(to_document(config)), encoding="utf-8")
        with mpi_jobs(setting.mpi_peers, setting.mpirun, setting.ranks, folder):
            outcome = run_job(
                [sys.executable, "-m", "totalreduce.bench.worker", str(path)],
                setting,
                # c10d's store warns about hosts without a name, which emulated ones are.
                environment={"TORCH_CPP_LOG_LEVEL": "ERROR", **current()},
                recovery=recovery,
            )
        paths = {rank: folder / f"rank{rank}.json" for rank in range(setting.ranks)}
        found = {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}
    errors = [(document["time"], rank, document["error"]) for rank, document in found.items() if "error" in document]
    if errors:
        # The earliest error is the cause; the errors of the other ranks mostly follow from it.
        _, rank, error = min(errors)
        raise BenchmarkFailedError(f"rank {rank} failed: {error}")
    missing = ", ".join(str(rank) for rank in paths if rank not in found)
    if missing or outcome.exit_code:
        what = f"rank(s) {missing} ended without a result" if missing else "a worker ended after its result was written"
        raise BenchmarkFailedError(f"{what} (exit code {outcome.exit_code})")
    ranks = [from_document(kind, found[rank]["result"]) for rank in paths]
    return Results(ranks, from_document(Machine, found[0]["environment"]))


def run_job(
    argv: Sequence[str],
    setting: Setting,
    *,
    environment: Mapping[str, str] | None = None,
    output: Output = "all",
    recovery: RecoveryOptions | None = None,
    timeout_s: float = _LIMIT_S,
) -> RunResult:
    """Run a command on all ranks of a setting, to its end."""
    outcome = run_workers(
        argv,
        num_workers=setting.ranks,
        where=setting.emulate,
        environment=environment,
        output=output,
        recovery=recovery,
        timeout_s=timeout_s,
    )
    if outcome.interrupted_by is not None:
        raise BenchmarkFailedError(f"stopped by {outcome.interrupted_by}", outcome.exit_code)
    if outcome.timed_out:
        raise BenchmarkFailedError(f"not finished after {timeout_s:.0f} s; ask for less")
    return outcome


def find_script(script: str) -> Path:
    """Return a file, or an example by its name."""
    if Path(script).is_file():
        return Path(script).resolve()
    example = examples_folder() / f"{script}.py"
    if example.is_file():
        return example.resolve()
    raise ConfigurationError(f"there is neither a file {script} nor an example of this name (totalreduce examples)")


def run_script(
    setting: Setting,
    command: Sequence[str],
    kind: type[R],
    *,
    over_gloo: bool,
    timeout_s: float,
    python: str = sys.executable,
) -> R:
    """Run a script on all ranks, started as a user would start it, and return the document that it wrote.

    Args:
        setting: The ranks and hosts.
        command: The script and its options, without ``--json``.
        kind: The record that the script writes.
        over_gloo: Whether torch's gloo carries its messages: it sometimes aborts in its destructors after all work is
            done, which is no failure then.
        timeout_s: How long it may take.
        python: The interpreter.
    """
    with tempfile.TemporaryDirectory(prefix="totalreduce-bench-") as folder:
        out = Path(folder) / "out.json"
        argv = [python, *command, "--json", str(out)]
        # More ranks than cores leave one without a core for seconds; that is no death.
        patient = {"TOTALREDUCE_PEER_TIMEOUT_S": "30", **current()}
        outcome = run_job(argv, setting, environment=patient, output="capture", timeout_s=timeout_s)
        afterwards = out.exists() and all(
            worker.exit_code == 0 or worker.signal == "SIGABRT" for worker in outcome.workers
        )
        if not (over_gloo and afterwards):
            require_success(outcome, " ".join(command))
        if not out.exists():
            raise BenchmarkFailedError(f"{command[0]} did not write its --json file")
        return from_document(kind, json.loads(out.read_text(encoding="utf-8")))


def require_success(outcome: RunResult, what: str) -> None:
    """Raise the failure of a job whose output was captured."""
    failure = outcome.first_failure
    if failure is not None:
        lines = "\n".join(failure.last_errors)
        raise BenchmarkFailedError(f"{what}: rank {failure.rank} failed: {failure.describe()}\n{lines}")
