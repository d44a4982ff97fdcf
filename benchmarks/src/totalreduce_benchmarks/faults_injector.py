"""Causes the faults of ``totalreduce bench faults``, in a thread beside the launcher."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from totalreduce.bench.report import print_progress
from totalreduce_benchmarks.faults_job import RunningJob
from totalreduce_benchmarks.faults_kinds import Fault, FaultPlan
from totalreduce_benchmarks.faults_records import end_job_after

__all__ = ["HUNG_S", "Injected", "Injector", "Schedule"]

#: If no block takes effect for so long, the job hangs.
HUNG_S = 60.0
#: The time between two lines about the progress.
_PROGRESS_S = 10.0
#: How often a fault is tried that is not possible, because a process is just being started.
_TRIES = 20


class Injected(Protocol):
    """The faults of a run.

    Attributes:
        faults: The faults, in order.
        hung: Whether the job stopped making progress.
        keeper_starts: The times of day at which the launcher has started the process that serves its store.
    """

    faults: list[Fault]
    hung: bool
    keeper_starts: list[float]


@dataclass(frozen=True, slots=True)
class Schedule:
    """When faults come.

    Attributes:
        interval_s: Without a duration the mean time from a full recovery to the next fault, which is random; with a
            duration the time between two faults.
        num_faults: The number of faults of kinds without counts.
        duration_s: How long faults come, whether the job has recovered from the last one or not; ``None``: until all
            have come, each after a full recovery.
        pace_s: How long the job runs before the first fault.
        seed: Of the times and the ranks.
    """

    interval_s: float
    num_faults: int
    duration_s: float | None = None
    pace_s: float = 0.0
    seed: int = 0


@final
class Injector:
    """Causes faults (``Injected``).

    Attributes:
        job: The job.
        faults: The faults so far.
        hung: Whether the job made no progress for ``HUNG_S``.
        error: The error because of which no more faults came; ``None`` if there was none.
        keeper_starts: Those of the job.
    """

    def __init__(self, job: RunningJob, plan: FaultPlan, schedule: Schedule, folder: Path) -> None:
        """``folder``: where the workers write."""
        self.job, self._plan, self._schedule, self._folder = job, plan, schedule, folder
        self._chance = random.Random(schedule.seed)
        self.faults: list[Fault] = []
        self.hung = False
        self.error: BaseException | None = None
        self.keeper_starts = job.keeper_starts
        self._told_at = time.monotonic()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="faults", daemon=True).start()

    def _run(self) -> None:
        job = self.job
        try:
            if job.wait_until_complete(HUNG_S) and job.wait_until(time.time() + self._schedule.pace_s, HUNG_S):
                self._cause_all()
            if job.wait_until_complete(HUNG_S):
                time.sleep(1.0)
                end_job_after(self._folder, job.version())
        except BaseException as error:
            # Without a thread that has the job come to its end, the run would never end.
            if isinstance(error, TimeoutError):
                self.hung = True
            else:
                self.error = error
            os.kill(os.getpid(), signal.SIGTERM)  # the launcher ends the run

    def _cause_all(self) -> None:
        """Cause all faults, each at its time."""
        schedule, begin = self._schedule, time.time()
        lasts = schedule.duration_s is not None
        for number, kind in enumerate(self._plan.sequence(None if lasts else schedule.num_faults, self._chance)):
            if schedule.duration_s is None:
                if not self._cause_after_recovery(kind):
                    return
            else:
                since = number * schedule.interval_s
                if since > schedule.duration_s or not self.job.wait_until(begin + since, HUNG_S):
                    return
                self._cause(kind)
            self._tell()

    def _cause_after_recovery(self, kind: str) -> bool:
        """Cause a fault at a random time after the job has recovered; return whether the job still runs."""
        for _ in range(_TRIES):
            if not self.job.wait_until_complete(HUNG_S):
                return False
            time.sleep(self._chance.uniform(0.0, 2 * self._schedule.interval_s))
            if self._cause(kind):
                break
        return True

    def _cause(self, kind: str) -> bool:
        """Cause a fault; return whether it was possible."""
        at = self._plan.cause(kind, self.job, self._chance)
        if at is not None:
            self.faults.append(Fault(kind, at))
        return at is not None

    def _tell(self) -> None:
        now = time.monotonic()
        if now >= self._told_at + _PROGRESS_S:
            self._told_at = now
            done = Counter(fault.kind for fault in self.faults)
            counts = self._plan.counts or {}
            kinds = [f"{kind} {done[kind]}" + (f" of {counts[kind]}" if counts else "") for kind in self._plan.kinds]
            if self._schedule.duration_s is not None:
                kinds = [f"{kind} {done[kind]}" for kind in self._plan.kinds]
            print_progress(f"faults: {len(self.faults)} ({', '.join(kinds)}), {self.job.version()} blocks")
