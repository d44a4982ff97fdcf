"""The guard: a small process that cleans up when its starter has ended in any way.

It reads job ids and names of network namespaces from a pipe. The kernel closes the pipe when the starter ends, even by
a crash or SIGKILL. Then the guard kills all processes of the jobs that still run, and removes the namespaces.

``PR_SET_PDEATHSIG`` would not do: it reaches only direct children (a data loader's workers would stay), it fires when
the *thread* that forked ends, it needs code between fork and exec, and it removes no namespaces.

This file is also run as a script, in an interpreter without packages: it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

__all__ = ["Guard", "kill_processes", "remove_namespaces"]

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
COMMAND_TIMEOUT_S = 20.0
NETNS_DIRECTORY = Path("/run/netns")


class Guard:
    """The guard process and its pipe. A context manager.

    Start it before anything that it is to clean up.
    """

    def __init__(self) -> None:
        self._jobs: list[str] = []
        self._namespaces: list[str] = []
        # It has a session of its own: Ctrl-C or hang-up of a terminal ends the starter and must not end the guard.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.pathsep.join([*os.get_exec_path(), PATH])},
            cwd="/",
            start_new_session=True,
        )

    def watch_job(self, job_id: str) -> None:
        """Kill every process with ``TOTALREDUCE_JOB_ID=job_id`` in its environment."""
        self._jobs.append(job_id)
        self._send(f"job {job_id}")

    def forget_job(self, job_id: str) -> None:
        """Leave the processes of a job alone that has ended without an error."""
        self._jobs.remove(job_id)
        self._send(f"forget {job_id}")

    def watch_namespace(self, name: str) -> None:
        """Remove this network namespace and kill the processes in it."""
        self._namespaces.append(name)
        self._send(f"netns {name}")

    def close(self, timeout_s: float = 30.0) -> None:
        """Clean up now, and wait for it at most ``timeout_s`` seconds."""
        if self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait(timeout_s)
        if status != 0:  # the guard was killed before it has cleaned up
            _clean_up(self._jobs, self._namespaces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, line: str) -> None:
        pipe = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # a killed guard: close() cleans up itself
                pipe.write(f"{line}\n".encode())
                pipe.flush()


def kill_processes(name: str, value: str) -> int:
    """Send SIGKILL to every process whose environment has ``name=value``, until none is found: one may fork meanwhile.

    Returns:
        The number of processes killed.
    """
    marker = f"{name}={value}".encode()
    killed: set[int] = set()
    for _ in range(20):
        found = [pid for pid in _process_ids() if pid != os.getpid() and marker in _environment_of(pid)]
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        time.sleep(0.02)
    return len(killed)


def _kill_namespace_processes(name: str) -> None:
    """Send SIGKILL to every process in a network namespace, until none is found."""
    for _ in range(20):
        listing = _run("ip", "netns", "pids", name)
        pids = [int(word) for word in listing.split() if word.isdigit()]
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove_namespaces(names: list[str]) -> None:
    """Kill the processes in these network namespaces and remove them, if they exist."""
    for name in names:
        if (NETNS_DIRECTORY / name).exists():
            _kill_namespace_processes(name)
            _run("ip", "netns", "del", name)


def _process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return []


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _clean_up(jobs: list[str], namespaces: list[str]) -> None:
    for job_id in jobs:
        kill_processes("TOTALREDUCE_JOB_ID", job_id)
    remove_namespaces(namespaces)


def _main(starter_pid: int) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    jobs: list[str] = []
    namespaces: list[str] = []
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.5)
        data = os.read(0, 65536) if readable else None
        # A process that the starter forked may hold the pipe open; the starter's death shows here too.
        if data == b"" or (data is None and os.getppid() != starter_pid):
            break
        *lines, pending = (pending + (data or b"")).split(b"\n")
        for line in lines:
            match = re.fullmatch(r"(job|forget|netns) (\S+)", line.decode("utf-8", "replace"))
            if match is None:
                continue
            if match[1] == "job":
                jobs.append(match[2])
            elif match[1] == "forget":
                jobs.remove(match[2])
            else:
                namespaces.append(match[2])
    _clean_up(jobs, namespaces)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
