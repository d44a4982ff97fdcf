"""A worker: its environment, its process on this host, and the result of its end."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from totalreduce.foundation.environment import LIVE, REMOTE_WORKER, SPARE
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import describe_error
from totalreduce.launch.hosts import Place
from totalreduce.launch.programs import send_to_program
from totalreduce.launch.tracebacks import Trace

__all__ = [
    "OUT_OF_MEMORY",
    "RECOVERY_VARIABLES",
    "RunResult",
    "Start",
    "Worker",
    "WorkerResult",
    "common_environment",
    "default_num_threads",
    "describe_ranks",
    "free_port",
    "is_stopped",
    "oom_kills",
    "seat_environment",
    "signal_name",
]

#: The variables by which a worker knows that it can be replaced, and by whom.
RECOVERY_VARIABLES = (
    "TOTALREDUCE_ON_LOSS",
    "TOTALREDUCE_KEEPER",
    "TOTALREDUCE_MIN_RANKS",
    "TOTALREDUCE_BEGIN_RANKS",
    "TOTALREDUCE_INCARNATION",
)
#: The signals by which the launcher ends workers.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
#: What is said of a worker that the kernel has killed.
OUT_OF_MEMORY = "probably by the kernel, because memory was short"
#: The signals that concern all processes of a worker: they end, stop or continue them, and no process handles them.
_OF_GROUP = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)
_VMSTAT = Path("/proc/vmstat")
#: A standard stream as ``subprocess.Popen`` takes it.
Target = int | IO[bytes] | None


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """The end of one worker."""

    rank: int  #: Rank of the worker.
    pid: int  #: Id of its process.
    exit_code: int  #: The exit code as a shell shows it: 128 plus the signal's number if a signal ended the worker.
    #: Name of the signal that ended it, for example ``SIGKILL`` or ``signal 36``; ``None`` if it exited.
    signal: str | None
    seconds: float  #: Time from its start to its end.
    #: The last lines of its standard error, or those around its exception, if that went through the launcher.
    last_errors: tuple[str, ...] = ()
    host: str = "localhost"  #: The name of its host in the list of hosts.
    error: str = ""  #: The line of the exception that has ended it; "" if its standard error shows none.
    was_stopped: bool = False  #: Whether the launcher has sent it a signal to end it.
    #: Whether the kernel has probably killed it because memory was short: it was not stopped and was killed by SIGKILL,
    #: and the kernel has killed a process of its host for that reason meanwhile.
    is_out_of_memory: bool = False
    traceback: tuple[str, ...] = ()  #: The lines of the traceback of its exception, if its standard error shows one.

    @property
    def trace(self) -> Trace:
        """The exception that has ended it, and its place; without an error if a signal has ended it."""
        if self.signal is not None:
            return Trace((), "")
        return Trace.of(self.traceback, self.error)

    def describe(self) -> str:
        """Return ``exit code 3`` or ``killed by SIGKILL``, with what is known of the reason."""
        reason = f", {OUT_OF_MEMORY}" if self.is_out_of_memory else ""
        return f"killed by {self.signal}{reason}" if self.signal else f"exit code {self.exit_code}"


@dataclass(frozen=True, slots=True)
class RunResult:
    """The end of a run."""

    #: Exit code for the launcher: 0, the first failure's code, 124 after a timeout, 128 plus the signal's number after
    #: a signal.
    exit_code: int
    workers: tuple[WorkerResult, ...]  #: One result per rank.
    first_failure: WorkerResult | None  #: The worker that failed first by itself, if any.
    interrupted_by: str | None = None  #: Name of the signal that the launcher got, if any.
    timed_out: bool = False  #: Whether ``timeout_s`` ran out.
    seconds: float = 0.0  #: Time from the first start to the last end.
    lost: tuple[str, ...] = ()  #: Sentences about output that was lost, because its file or its reader has failed.
    output: list[str] = field(default_factory=list)  #: Standard output per rank, if captured.
    errors: list[str] = field(default_factory=list)  #: Standard error per rank, if captured.

    def as_dict(self) -> dict[str, object]:
        """Return a summary as JSON objects, without captured output."""
        summary = asdict(self)
        del summary["output"], summary["errors"]
        return {"world_size": len(self.workers), **summary}


class Start(NamedTuple):
    """What a worker is started with.

    Attributes:
        rank: Its rank; -1 if it is a spare, which gets one later.
        command: Its command line.
        environment: Its variables.
        has_input: Whether it has a standard input, for ``Worker.give``.
    """

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    has_input: bool = False


class Worker:
    """A started worker, leader of a session and process group of its own.

    A worker that has ended is not reaped before :meth:`finish`, so that the id of its process group stays its own.
    """

    def __init__(self, start: Start, stdout: Target, stderr: Target, *, host: str = "localhost") -> None:
        """Start the worker, whose environment is complete. Raises ``ConfigurationError``."""
        try:
            self.process = subprocess.Popen(
                start.command,
                stdin=subprocess.PIPE if start.has_input else subprocess.DEVNULL,
                bufsize=0,
                stdout=stdout,
                stderr=stderr,
                env=dict(start.environment),
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigurationError(f"cannot start {start.command[0]!r}: {describe_error(error)}") from error
        self.rank, self.host = start.rank, host  #: Its rank, and the name of its host in the list of hosts.
        #: Readable when it has ended; ``None`` if the kernel is too old (before 5.3) for it.
        self.exit_descriptor = _pidfd(self.process.pid)
        self._started_at = time.monotonic()
        self._oom_kills, self._is_out_of_memory = oom_kills(), False
        self._ended_at: float | None = None
        self._exit_code, self._signal = 0, ""
        self._was_stopped = False

    @property
    def ended(self) -> bool:
        """Whether :meth:`poll` has noticed its end."""
        return self._ended_at is not None

    @property
    def has_lost_host(self) -> bool:
        """Whether it has ended because its host cannot be reached or cannot start it, and not by its program."""
        return False

    @property
    def ended_by_signal(self) -> bool:
        """Whether a signal has ended it."""
        return bool(self._signal)

    @property
    def failed(self) -> bool:
        """Whether it has ended, but not with exit code 0."""
        return self.ended and self._exit_code != 0

    def poll(self, now: float) -> bool:
        """Return whether it has ended since the last call."""
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
            self._signal = signal_name(status.si_status)
            is_killed = self._signal == "SIGKILL" and not self._was_stopped
            self._is_out_of_memory = is_killed and oom_kills() > self._oom_kills
        return True

    def end_if_stopped(self) -> bool:
        """Kill it if a signal such as SIGSTOP has stopped it: it then does nothing and says nothing.

        Returns:
            Whether it was stopped. ``False`` for a worker on another host, where this is found out.
        """
        stopped = not self.ended and is_stopped(self.process.pid)
        if stopped:
            self.send(signal.SIGKILL)
        return stopped

    def shown(self, data: bytes, *, is_error: bool) -> bytes:  # noqa: ARG002  (see ``RemoteWorker``)
        """Return the part of the bytes from one of its pipes that the worker itself has written."""
        return data

    def give(self, line: bytes) -> None:
        """Write a line to its standard input, if it has one, and close that. A worker that has ended gets nothing."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(line)
            self.process.stdin.close()

    def send(self, number: signal.Signals) -> None:
        """Send a signal: SIGKILL, SIGSTOP and SIGCONT to its process group, others to its program alone.

        The processes that the program has started, such as the workers of a ``DataLoader``, are left alone: the program
        may need them until it has done what the signal asks for, and most of them would die by it.
        """
        self._was_stopped |= number in _ENDING and not self.ended
        with contextlib.suppress(ProcessLookupError):
            if number in _OF_GROUP:
                os.killpg(self.process.pid, number)
            else:
                send_to_program(self.process.pid, number)

    def finish(self, now: float) -> None:
        """Kill the rest of its process group, and reap it. A second call does nothing."""
        if self.process.returncode is not None:
            return  # its ids may be those of other processes now
        if self.exit_descriptor is not None:
            os.close(self.exit_descriptor)
            self.exit_descriptor = None
        self.send(signal.SIGKILL)
        if self.process.stdin is not None:
            self.process.stdin.close()
        if not self.ended:
            try:
                code = self.process.wait(5.0)
            except subprocess.TimeoutExpired:  # it is stuck in the kernel
                self._exit_code, self._signal, self._ended_at = 128 + signal.SIGKILL, "SIGKILL", now
                return
            self._ended_at = now
            self._exit_code = code if code >= 0 else 128 - code
            self._signal = signal_name(-code) if code < 0 else ""
        else:
            self.process.wait()

    def result(self, last_errors: tuple[str, ...], error: str = "", traceback: tuple[str, ...] = ()) -> WorkerResult:
        """Return the result of its end; the arguments are those of ``WorkerResult``."""
        ended_at = self._started_at if self._ended_at is None else self._ended_at
        seconds = round(ended_at - self._started_at, 3)
        number = self._signal or None
        return WorkerResult(
            *(self.rank, self.process.pid, self._exit_code, number, seconds, last_errors, self.host, error),
            was_stopped=self._was_stopped,
            is_out_of_memory=self._is_out_of_memory,
            traceback=traceback,
        )


def oom_kills() -> int:
    """Return how many processes of this host the kernel has killed so far because memory was short; 0 if unknown."""
    try:
        fields = _VMSTAT.read_text().split()
    except OSError:
        return 0
    return int(fields[fields.index("oom_kill") + 1]) if "oom_kill" in fields else 0


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped a process of this host."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9, and ``signal 36`` for a real-time signal, most of which have no name in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def common_environment(
    base: Mapping[str, str], num_workers: int, *, master_address: str, job_id: str, num_servers: int = 0
) -> dict[str, str]:
    """Return the variables that all workers share: torchrun's, the job's id and key.

    Args:
        base: The environment to extend; variables of another launcher about ranks are replaced or removed.
        num_workers: The number of ranks that run the program.
        master_address: The address of rank 0's host.
        job_id: The id of the job.
        num_servers: The number of further ranks, which only serve a parameter server. The variables of torchrun are
            about the workers alone, so that a program can use ``torch.distributed`` among them.
    """
    foreign = ("TORCHELASTIC_", "TOTALREDUCE_LOCAL_", "TOTALREDUCE_MASTER_")
    exact = {"TOTALREDUCE_RANK", "TOTALREDUCE_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_NAME", SPARE, REMOTE_WORKER}
    exact |= {"TOTALREDUCE_SERVERS", LIVE}
    exact |= set(RECOVERY_VARIABLES)
    common = {name: text for name, text in base.items() if not name.startswith(foreign) and name not in exact}
    if "TOTALREDUCE_JOB_KEY" not in common and "TOTALREDUCE_JOB_KEY_FILE" not in common:
        common["TOTALREDUCE_JOB_KEY"] = secrets.token_hex(32)
    # A spinning barrier of one worker takes the core of another one: measured 40x slower with two workers too many.
    common.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Gradients are new memory in every step: in pages of 4 KiB a tenth of a step with 15 M parameters was page faults.
    common.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # A worker's output goes through a pipe, for which Python would collect it in blocks.
    common.setdefault("PYTHONUNBUFFERED", "1")
    common |= {"TOTALREDUCE_JOB_ID": job_id, "WORLD_SIZE": str(num_workers), "ROLE_WORLD_SIZE": str(num_workers)}
    common |= {"MASTER_ADDR": master_address, "MASTER_PORT": str(free_port())}
    if num_servers:
        common |= {"TOTALREDUCE_SERVERS": str(num_servers), "TOTALREDUCE_WORLD_SIZE": str(num_workers + num_servers)}
    return common


def seat_environment(seat: int, place: Place, *, has_servers: bool = False) -> dict[str, str]:
    """Return the variables that say who a worker is."""
    ranks = {
        "RANK": str(seat),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
    }
    whole = {f"TOTALREDUCE_{name}": value for name, value in ranks.items()} if has_servers else {}
    return {**ranks, "ROLE_RANK": str(seat), "GROUP_RANK": str(place.host_number), **whole}


def describe_ranks(num_workers: int, num_servers: int) -> str:
    """Return ``4 workers`` or ``4 workers and 2 servers``."""
    return f"{num_workers} workers" + (f" and {num_servers} servers" if num_servers else "")


def default_num_threads(num_workers: int) -> int:
    """Return the number of this process's cores per worker, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def free_port() -> int:
    """Return a random TCP port that is not in use, below the ports of outgoing connections.

    Another process may take it before rank 0 listens, but that is improbable.
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
