"""The faults of jobs of ``totalreduce bench faults`` that another launcher runs."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from totalreduce_benchmarks.faults_kinds import Fault
from totalreduce_benchmarks.faults_records import end_job_after, last_block

__all__ = ["PeerFaults"]

_LOOK_S = 0.05


class PeerFaults:
    """Kills workers, one after the other (``faults_injector.Injected``).

    Attributes:
        faults: The faults so far.
        hung: Whether the job made no progress for ``hung_s``.
        keeper_starts: Empty: there is no store of this library's launcher.
    """

    def __init__(self, folder: Path, *, num_faults: int, num_ranks: int, interval_s: float, seed: int) -> None:
        """``folder``: where the workers write their logs, and ``pid-RANK``."""
        self._folder, self._num_faults, self._num_ranks = folder, num_faults, num_ranks
        self._interval_s, self._chance = interval_s, random.Random(seed)
        self.faults: list[Fault] = []
        self.hung = False
        self.keeper_starts: list[float] = []

    def cause_all(self, runs: Callable[[], bool], hung_s: float) -> None:
        """Kill workers, each after all have taken a step since the last fault; then have the job come to its end.

        Args:
            runs: Returns whether the job still runs.
            hung_s: After so long without a step of some rank, the job hangs.

        Raises:
            TimeoutError: The job hangs.
        """
        for _ in range(self._num_faults):
            if not self._wait_for_steps(runs, hung_s):
                return
            time.sleep(self._chance.uniform(0.0, 2 * self._interval_s))
            pid = int((self._folder / f"pid-{self._chance.randrange(self._num_ranks)}").read_text())
            self.faults.append(Fault("kill", time.time()))
            os.kill(pid, signal.SIGKILL)
        version = self._wait_for_steps(runs, hung_s)
        if version:
            end_job_after(self._folder, version)

    def _wait_for_steps(self, runs: Callable[[], bool], hung_s: float) -> int:
        """Return the version of a block, when all ranks have taken one since the last fault; 0: the job has ended."""
        since = self.faults[-1].at if self.faults else 0.0
        give_up_at = time.monotonic() + hung_s
        while runs():
            blocks = [self._last_block(rank) for rank in range(self._num_ranks)]
            versions = [int(block["done"]) for block in blocks if block is not None and block["at"] > since + _LOOK_S]
            if len(versions) == self._num_ranks:
                return max(versions)
            if time.monotonic() >= give_up_at:
                self.hung = True
                raise TimeoutError
            time.sleep(_LOOK_S)
        return 0

    def _last_block(self, rank: int) -> dict[str, float] | None:
        blocks = [last_block(path) for path in self._folder.glob(f"blocks-{rank}-*.jsonl")]
        return max((block for block in blocks if block is not None), key=lambda block: block["at"], default=None)
