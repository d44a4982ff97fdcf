"""The launcher's side of a benchmark: start workers, wait, collect one result per rank. No torch here."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from totalreduce.bench.mpi_launching import MPI_PEERS, mpi_jobs
from totalreduce.foundation.environment import current
from totalreduce.foundation.errors import ConfigurationError, TotalReduceError
from totalreduce.launch.emulate import EmulateOptions, rate_bits_per_s
from totalreduce.launch.local import run_workers

__all__ = ["SHARED", "BenchmarkFailedError", "Setting", "run_benchmark"]

_LIMIT_S = 3600.0
#: Among what ``bench allreduce`` measures: Total Reduce with tensors that the ranks of a host read where they lie.
SHARED = "shared"


class BenchmarkFailedError(TotalReduceError):
    """A worker of a benchmark failed or found a wrong result: there is no figure to report.

    Attributes:
        exit_code: What the command should exit with: 1, or 128 plus the number of the signal that stopped it.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Where a benchmark runs and against whom.

    Attributes:
        ranks: Number of worker processes.
        hosts: Number of emulated hosts; 0: all workers on this machine's loopback.
        rate: Rate of each emulated host's link, as ``1gbit``.
        against: What else is measured in the same run: ``gloo``, ``fifo``, ``openmpi``, ``mpich``.
        rounds: How often each peer is measured.
        transport: What Total Reduce sends through, as for ``totalreduce.init``.
        mpirun: Where the ``mpirun`` of an MPI is, by peer; those not named are looked for on PATH.
    """

    ranks: int
    hosts: int
    rate: str
    against: tuple[str, ...]
    rounds: int
    transport: str = "auto"
    mpirun: Mapping[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse settings that cannot work.

        Raises:
            ConfigurationError: Says which setting and what would work.
        """
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
        """What is measured, in the order in which it is measured."""
        return ["totalreduce", *dict.fromkeys(self.against)]

    @property
    def mpi_peers(self) -> list[str]:
        """Peers that an ``mpirun`` of their own starts."""
        return [peer for peer in self.peers if peer in MPI_PEERS]

    @property
    def host_of_rank(self) -> tuple[int, ...]:
        """Host of every rank: blocks of equal size, as the launcher places them."""
        return tuple(rank * (self.hosts or 1) // self.ranks for rank in range(self.ranks))

    def refuse_mpi(self, command: str) -> None:
        """Say that a benchmark has no MPI side.

        Raises:
            ConfigurationError: An MPI is among the peers.
        """
        if self.mpi_peers:
            raise ConfigurationError(f"bench {command} has nothing to compare with {', '.join(self.mpi_peers)}")

    def describe(self) -> str:
        """For table titles."""
        if self.hosts:
            return f"{self.ranks} ranks on {self.hosts} emulated hosts x {self.rate}"
        return f"{self.ranks} ranks on one host"


def run_benchmark(kind: str, parameters: dict[str, Any], setting: Setting) -> list[dict[str, Any]]:
    """Run one benchmark on all ranks.

    Args:
        kind: Name of the worker's function, see ``worker.py``.
        parameters: What the function needs to know; ready for JSON.
        setting: Where and against whom.

    Returns:
        What each rank's function returned, by rank.

    Raises:
        BenchmarkFailedError: A rank failed or a result was wrong; names the rank that failed first.
        ConfigurationError: The setting cannot be run here, for example because of missing rights.
    """
    with tempfile.TemporaryDirectory(prefix="totalreduce-bench-") as name:
        folder = Path(name)
        config = {
            "kind": kind,
            "parameters": parameters,
            "peers": setting.peers,
            "rounds": setting.rounds,
            "rate_bits_per_s": setting.rate_bits_per_s,
            "folder": str(folder),
            "host_of_rank": setting.host_of_rank,
            "transport": setting.transport,
        }
        path = folder / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        emulate = None
        if setting.hosts:
            emulate = EmulateOptions(
                num_hosts=setting.hosts, rate=setting.rate, ranks_per_host=setting.ranks // setting.hosts
            )
        with mpi_jobs(setting.mpi_peers, setting.mpirun, setting.ranks, folder):
            outcome = run_workers(
                [sys.executable, "-m", "totalreduce.bench.worker", str(path)],
                num_workers=setting.ranks,
                emulate=emulate,
                # c10d's store warns about hosts without a name, which emulated ones are.
                environment={"TORCH_CPP_LOG_LEVEL": "ERROR", **current()},
                output="all",
                timeout_s=_LIMIT_S,
            )
        if outcome.interrupted_by is not None:
            raise BenchmarkFailedError(f"stopped by {outcome.interrupted_by}", outcome.exit_code)
        if outcome.timed_out:
            raise BenchmarkFailedError(f"not finished after {_LIMIT_S:.0f} s; ask for less")
        documents = [_read(folder / f"rank{rank}.json") for rank in range(setting.ranks)]
    failed = [rank for rank, document in enumerate(documents) if document is None or "error" in document]
    if failed or outcome.exit_code != 0:
        raise BenchmarkFailedError(_explain(documents, failed, outcome.exit_code))
    return [document["result"] for document in documents if document is not None]


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _explain(documents: list[dict[str, Any] | None], failed: list[int], exit_code: int) -> str:
    """The earliest error is the cause; what the others report is mostly its echo."""
    errors = [(document["time"], rank) for rank, document in enumerate(documents) if document and "error" in document]
    if errors:
        _, rank = min(errors)
        document = documents[rank]
        assert document is not None
        return f"rank {rank} failed: {document['error']}"
    if failed:
        return f"rank(s) {', '.join(map(str, failed))} ended without a result (exit code {exit_code})"
    return f"a worker ended with exit code {exit_code} after the results were written"
