"""The job of ``totalreduce bench faults`` under torchrun, which restarts all processes when one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from totalreduce.bench.launching import BenchmarkFailedError
from totalreduce_benchmarks.faults_peers import PeerFaults

__all__ = ["TorchrunFaults"]


class TorchrunFaults(PeerFaults):
    """Kills workers of torchrun, one after the other."""

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
                self.cause_all(lambda: process.poll() is None, hung_s)
                code = process.wait(hung_s)
            except (TimeoutError, subprocess.TimeoutExpired):
                self.hung, code = True, 0
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(30.0)
        if code:
            raise BenchmarkFailedError(f"torchrun ended with exit code {code}: {errors.read_text()[-2000:]}")
