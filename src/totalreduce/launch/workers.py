"""One local worker: its environment, its process, how it ended."""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import describe_error

__all__ = ["RunResult", "Worker", "WorkerResult", "default_num_threads", "free_port", "worker_environments"]

Target = int | IO[bytes] | None
"""What ``subprocess.Popen`` takes for a standard stream."""


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """How one worker ended.

    Attributes:
        rank: Its rank.
        pid: Its process id.
        exit_code: As a shell shows it: 128 plus the signal's number if a signal ended it.
        signal: Name of the signal that ended it, for example ``SIGKILL``; ``None`` if it exited.
        seconds: From its start to its end.
        last_errors: The last lines of its standard error, as far as that went through the launcher.
    """

    rank: int
    pid: int
    exit_code: int
    signal: str | None
    seconds: float
    last_errors: tuple[str, ...] = ()

    def describe(self) -> str:
        """``exit code 3`` or ``killed by SIGKILL``."""
        return f"killed by {self.signal}" if self.signal else f"exit code {self.exit_code}"


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended.

    Attributes:
        exit_code: What the launcher should exit with: 0, the first failure's code, 124 after a timeout, 141
            if nobody reads the output any more, 128 plus the signal's number if it was told to stop.
        workers: One result per rank.
        first_failure: The worker that failed first by itself, if any.
        interrupted_by: Name of the signal that told the launcher to stop, if any.
        timed_out: Whether ``timeout_s`` ran out.
        seconds: From the first start to the last end.
        output: Standard output per rank, if captured.
        errors: Standard error per rank, if captured.
    """

    exit_code: int
    workers: tuple[WorkerResult, ...]
    first_failure: WorkerResult | None
    interrupted_by: str | None = None
    timed_out: bool = False
    seconds: float = 0.0
    output: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """JSON-ready summary, without captured output."""
        summary = asdict(self)
        del summary["output"], summary["errors"]
        return {"world_size": len(self.workers), **summary}


class Worker:
    """A started worker, leader of a session and process group of its own.

    An ended one is left unreaped until :meth:`finish`, so that its process group cannot be somebody else's.

    Attributes:
        rank: Its rank.
        process: Its process.
        exit_descriptor: Readable once it has ended; ``None`` where the kernel is too old (before 5.3) for it.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: Target,
        stderr: Target,
    ) -> None:
        """Start it.

        Raises:
            ConfigurationError: The command cannot be started.
        """
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigurationError(f"cannot start {command[0]!r}: {describe_error(error)}") from error
        self.rank = rank
        self.exit_descriptor = _pidfd(self.process.pid)
        self._started_at = time.monotonic()
        self._ended_at: float | None = None
        self._exit_code, self._signal = 0, ""

    @property
    def ended(self) -> bool:
        """Whether :meth:`poll` saw its end."""
        return self._ended_at is not None

    @property
    def ended_by_signal(self) -> bool:
        """Whether a signal ended it."""
        return bool(self._signal)

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than with exit code 0."""
        return self.ended and self._exit_code != 0

    def poll(self, now: float) -> bool:
        """Look whether it has ended; true exactly once."""
        if self.ended:
            return False
        status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return False
        self._ended_at = now
        if status.si_code == os.CLD_EXITED:
            self._exit_code = status.si_status
        else:
            self._exit_code = 128 + status.si_status
            self._signal = signal.Signals(status.si_status).name
        return True

    def send(self, number: signal.Signals) -> None:
        """Signal it and what it started, as a terminal would."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    def finish(self, now: float) -> None:
        """Kill what is left of its process group, and reap it."""
        if self.exit_descriptor is not None:
            os.close(self.exit_descriptor)
        self.send(signal.SIGKILL)
        if not self.ended:
            try:
                self.process.wait(5.0)
            except subprocess.TimeoutExpired:  # stuck in the kernel: nothing more can be done from here
                self._exit_code, self._signal, self._ended_at = 128 + signal.SIGKILL, "SIGKILL", now
                return
            self._ended_at = now
            code = self.process.returncode
            self._exit_code = code if code >= 0 else 128 - code
            self._signal = signal.Signals(-code).name if code < 0 else ""
        else:
            self.process.wait()

    def result(self, last_errors: tuple[str, ...]) -> WorkerResult:
        """How it ended."""
        ended_at = self._started_at if self._ended_at is None else self._ended_at
        seconds = round(ended_at - self._started_at, 3)
        return WorkerResult(self.rank, self.process.pid, self._exit_code, self._signal or None, seconds, last_errors)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def worker_environments(
    base: Mapping[str, str], num_workers: int, *, workers_per_host: int, master_address: str, job_id: str
) -> list[dict[str, str]]:
    """The variables of every worker: torchrun's, the job's id and key, one thread pool's fair share.

    Args:
        base: The environment to extend; what another launcher put there about ranks is replaced or removed.
        num_workers: World size.
        workers_per_host: How many of them share a (real or emulated) host.
        master_address: Where rank 0 will listen.
        job_id: Unique to this run.
    """
    foreign = ("TORCHELASTIC_", "TOTALREDUCE_LOCAL_", "TOTALREDUCE_MASTER_")
    exact = ("TOTALREDUCE_RANK", "TOTALREDUCE_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_NAME")
    common = {name: text for name, text in base.items() if not name.startswith(foreign) and name not in exact}
    if "TOTALREDUCE_JOB_KEY" not in common and "TOTALREDUCE_JOB_KEY_FILE" not in common:
        common["TOTALREDUCE_JOB_KEY"] = secrets.token_hex(32)
    common.setdefault("OMP_NUM_THREADS", str(default_num_threads(num_workers)))
    # A spinning barrier of one worker takes the core another one needs: measured 40x slower with two workers too many.
    common.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Gradients are new memory in every step: in pages of 4 KiB a tenth of a step with 15 M parameters was page faults.
    common.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # A worker's output goes through a pipe, where Python would keep it back by the block.
    common.setdefault("PYTHONUNBUFFERED", "1")
    common |= {
        "TOTALREDUCE_JOB_ID": job_id,
        "WORLD_SIZE": str(num_workers),
        "ROLE_WORLD_SIZE": str(num_workers),
    }
    common |= {"MASTER_ADDR": master_address, "MASTER_PORT": str(free_port())}
    common["LOCAL_WORLD_SIZE"] = str(workers_per_host)
    return [
        {
            **common,
            "RANK": str(rank),
            "ROLE_RANK": str(rank),
            "LOCAL_RANK": str(rank % workers_per_host),
            "GROUP_RANK": str(rank // workers_per_host),
        }
        for rank in range(num_workers)
    ]


def default_num_threads(num_workers: int) -> int:
    """This process's cores shared evenly between the workers, at least one each."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def free_port() -> int:
    """A TCP port that nobody listens on, below those that the kernel gives to outgoing connections.

    Between here and rank 0's ``listen`` somebody else may take it; picked at random, that is improbable.

    Raises:
        ConfigurationError: None of a hundred is free.
    """
    for _ in range(100):
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise ConfigurationError("no free TCP port between 20000 and 32000 on this host")
