"""The job of ``totalreduce bench faults`` under torchrun, which restarts all processes when one is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from totalreduce.bench.faults_records import end_job_after, last_block
from totalreduce.bench.launching import BenchmarkFailedError

__all__ = ["TorchrunFaults"]

_LOOK_S = 0.05


class TorchrunFaults:
    """Kills workers of torchrun, one after the other.

    Attributes:
        times: The time of day of each fault.
        hung: Whether the job made no progress for ``hung_s``.
    """

    def __init__(self, folder: Path, *, num_faults: int, num_ranks: int, interval_s: float, seed: int) -> None:
        self._folder, self._num_faults, self._num_ranks = folder, num_faults, num_ranks
        self._interval_s, self._random = interval_s, random.Random(seed)
        self.times: list[float] = []
        self.hung = False

    def run(self, argv: Sequence[str], environment: Mapping[str, str], *, hung_s: float) -> None:
        """Run the workers with ``argv`` until all faults have been caused, and the job has gone on to its end.

        Raises:
            BenchmarkFailedError: torchrun has failed.
        """
        options = ["--nnodes=1", f"--nproc-per-node={self._num_ranks}", f"--max-restarts={self._num_faults + 1}"]
        options += ["--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        errors = self._folder / "torchrun.log"
        with errors.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, *argv],
                env=dict(environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                self._cause_all(process, hung_s)
                code = process.wait(hung_s)
            except subprocess.TimeoutExpired:
                self.hung, code = True, 0
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(30.0)
        if code:
            raise BenchmarkFailedError(f"torchrun ended with exit code {code}: {errors.read_text()[-2000:]}")

    def _cause_all(self, process: subprocess.Popen[bytes], hung_s: float) -> None:
        for _ in range(self._num_faults):
            self._wait_for_step(process, hung_s)
            time.sleep(self._random.uniform(0.0, 2 * self._interval_s))
            pid = int((self._folder / f"pid-{self._random.randrange(self._num_ranks)}").read_text())
            self.times.append(time.time())
            os.kill(pid, signal.SIGKILL)
        end_job_after(self._folder, self._wait_for_step(process, hung_s))

    def _wait_for_step(self, process: subprocess.Popen[bytes], hung_s: float) -> int:
        """Return the version of a block that has taken effect since the last fault."""
        since = self.times[-1] if self.times else 0.0
        give_up_at = time.monotonic() + hung_s
        while process.poll() is None:
            block = last_block(self._folder / "blocks-0-0.jsonl")
            if block is not None and block["at"] > since + _LOOK_S:
                return int(block["done"])
            if time.monotonic() >= give_up_at:
                raise subprocess.TimeoutExpired("torchrun", hung_s)
            time.sleep(_LOOK_S)
        return 0
