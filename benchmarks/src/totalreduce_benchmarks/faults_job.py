"""The job of ``totalreduce bench faults`` as the launcher's events and the workers' logs show it while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from totalreduce.bench.launching import Setting
from totalreduce.foundation import environment
from totalreduce.launch.local import RecoveryOptions, run_workers
from totalreduce.launch.workers import RunResult
from totalreduce_benchmarks.faults_records import FaultsConfig, last_block
from totalreduce_benchmarks.ps_faults_records import PsFaultsConfig

__all__ = ["RunningJob", "run_job", "variables", "write_config"]

#: How often the events and the logs are looked at.
_LOOK_S = 0.05


@final
class RunningJob:
    """The processes of a job, and its progress. The launcher's thread calls ``on_event``, the injector's all others.

    Attributes:
        num_ranks: The number of ranks with which the job began.
        has_ended: Whether a worker has come to the end of the job.
        keeper_starts: The times of day at which the launcher has started the process that serves its store.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.num_ranks, self._folder = num_ranks, folder
        self.has_ended = False
        self.keeper_starts: list[float] = []
        self._pids: dict[int, int] = {}
        self._members: list[tuple[int, int]] = []
        self._incarnations: dict[int, int] = {}
        self._keeper_pid: int | None = None
        self._disturbed_at = 0.0  #: The time of day of the last decision on members, or of the last fault.
        self._changed = threading.Condition()

    def recovery(self, on_loss: str, num_faults: int, spares: int) -> RecoveryOptions:
        """Return how the launcher replaces what so many faults end; it reports its events to this object."""
        return RecoveryOptions(
            on_loss="shrink" if on_loss == "shrink" else "replace",
            restarts=4 * num_faults + 10,
            spares=spares,
            on_event=self.on_event,
        )

    def on_event(self, event: dict[str, Any]) -> None:
        """Follow the launcher's events."""
        with self._changed:
            kind = event["event"]
            if kind == "started":
                self._pids[event["rank"]] = event["pid"]
                self._incarnations[event["rank"]] = event["incarnation"]
            elif kind == "ended":
                self._pids.pop(event["rank"], None)
                self.has_ended = self.has_ended or event["exit_code"] == 0
            elif kind == "epoch":
                self._members = [(each["seat"], each["incarnation"]) for each in event["members"]]
                self._disturbed_at = time.time()
            elif kind == "keeper":
                self._keeper_pid = event["pid"]
                self.keeper_starts.append(time.time())
            self._changed.notify_all()

    def send(self, rank: int, number: signal.Signals) -> float | None:
        """Send a signal that ends or stops a rank.

        Returns:
            The time of day; ``None``: the rank is gone, or it is the last process that has the state of the job.
        """
        with self._changed:
            others = [
                seat
                for seat, incarnation in self._members
                if seat != rank and self._incarnations.get(seat) == incarnation and seat in self._pids
            ]
            pid = self._pids.pop(rank, None) if others else None  # from now on it counts as gone
            return None if pid is None else self._kill(pid, number)

    def kill_keeper(self) -> float | None:
        """Kill the process that serves the launcher's store; return the time of day, ``None``: there is none now."""
        with self._changed:
            pid, self._keeper_pid = self._keeper_pid, None
            return None if pid is None else self._kill(pid, signal.SIGKILL)

    def _kill(self, pid: int, number: signal.Signals) -> float:
        self._disturbed_at = at = time.time()
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(pid, number)
        return at

    def pids(self) -> dict[int, int]:
        """Return the processes that run and were sent no signal, by rank."""
        with self._changed:
            return dict(self._pids)

    def forget_members(self) -> list[tuple[int, int]]:
        """Count no group as complete until the next one is formed; return the members of the last one."""
        with self._changed:
            members, self._members = self._members, []
            return members

    def remember_members(self, members: list[tuple[int, int]]) -> None:
        """Undo ``forget_members``."""
        with self._changed:
            self._members = self._members or members

    def wait_until_complete(self, timeout_s: float) -> bool:
        """Return when all ranks have taken a step together since the last fault; ``False``: the job has ended.

        Raises:
            TimeoutError: It takes longer than ``timeout_s``.
        """
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            with self._changed:
                self._changed.wait_for(lambda: self.has_ended or self._is_complete(), _LOOK_S)
                complete, members, since = self._is_complete(), list(self._members), self._disturbed_at
                if self.has_ended:
                    return False
            if complete and self._has_block_after(members, since):
                return True
            time.sleep(_LOOK_S)
        raise TimeoutError

    def wait_until(self, at: float, hung_s: float) -> bool:
        """Return at a time of day; ``False``: the job has ended.

        Raises:
            TimeoutError: No block took effect for ``hung_s``.
        """
        while (left := at - time.time()) > 0:
            with self._changed:
                if self._changed.wait_for(lambda: self.has_ended, min(left, 1.0)):
                    return False
            if self.idle_s() > hung_s:
                raise TimeoutError
        return True

    def idle_s(self) -> float:
        """Return the time since the last block took effect; 0 before the first one."""
        times = [block["at"] for block in map(last_block, self._folder.glob("blocks-*.jsonl")) if block is not None]
        return time.time() - max(times) if times else 0.0

    def version(self) -> int:
        """Return the version of the last block that took effect."""
        blocks = map(last_block, self._folder.glob("blocks-*.jsonl"))
        return max((block["done"] for block in blocks if block is not None), default=0)

    def _has_block_after(self, members: list[tuple[int, int]], since: float) -> bool:
        """Whether a member has written that a block took effect after a time: then all members have the state.

        In ``ps-faults``: that a step began after it.
        """
        blocks = [last_block(self._folder / f"blocks-{seat}-{incarnation}.jsonl") for seat, incarnation in members]
        return any(block is not None and block["at"] > since for block in blocks)

    def _is_complete(self) -> bool:
        running = [(rank, self._incarnations[rank]) for rank in sorted(self._pids)]
        return len(running) == self.num_ranks and self._members == running


def write_config(config: FaultsConfig | PsFaultsConfig) -> Path:
    """Write what the workers do into their folder; return the file."""
    path = Path(config.folder) / "config.json"
    path.write_text(json.dumps(asdict(config)), encoding="utf-8")
    return path


def variables() -> dict[str, str]:
    """Return the variables of all runs: two that measure links may choose schedules that add in different orders."""
    return {"TOTALREDUCE_LINKS": "off", **environment.current()}


def run_job(
    worker: str, config: Path, setting: Setting, recovery: RecoveryOptions | None, *, timeout_s: float | None = None
) -> RunResult:
    """Run a module on all ranks; without ``recovery`` no rank is replaced."""
    return run_workers(
        [sys.executable, "-m", worker, str(config)],
        num_workers=setting.ranks,
        where=setting.emulate,
        environment=variables(),
        output="capture",
        recovery=recovery,
        timeout_s=timeout_s,
    )
