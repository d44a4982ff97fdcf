"""The job of ``totalreduce bench faults`` by torchft: each rank is a replica group, and a lighthouse names the members.

After a loss, the others go on without the rank. A worker that has ended is started again at once, and gets the state of
another one. torchft is no dependency of this package: the option ``--torchft`` names the Python that has it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import totalreduce
from totalreduce.bench.launching import BenchmarkFailedError
from totalreduce_benchmarks.faults_peers import PeerFaults

__all__ = ["TorchftFaults"]

_WORKER = "totalreduce_benchmarks.faults_torchft_worker"
#: Where the other Python finds this package and totalreduce: source trees, or the folder of installed packages.
_PACKAGES = dict.fromkeys((Path(__file__).parents[1], Path(totalreduce.__file__).parents[1]))
_LOOK_S = 0.02
_START_S = 60.0


class TorchftFaults(PeerFaults):
    """Kills workers, one after the other, and starts them again."""

    def run(self, python: str, config: Path, environment: Mapping[str, str], *, hung_s: float) -> None:
        """Run the workers until all faults have been caused, and the job has gone on to its end.

        Args:
            python: An interpreter with torch and torchft.
            config: The file with ``FaultsConfig``.
            environment: The variables of the workers.
            hung_s: After so long without a step the job hangs.

        Raises:
            BenchmarkFailedError: torchft cannot be used, or a worker has failed.
        """
        paths = [*map(str, _PACKAGES), *filter(None, [environment.get("PYTHONPATH")])]
        # The plain names: this package is no back end there.
        variables = {**environment, "PYTHONPATH": os.pathsep.join(paths), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        errors = self._folder / "torchft.log"
        with errors.open("ab") as log:
            workers = _Workers([python, "-m", _WORKER, str(config)], variables, log, self._num_ranks)
            try:
                workers.start(self._folder / "lighthouse", errors)
                self.cause_all(lambda: not workers.failed, hung_s)
                workers.wait(hung_s)
            except TimeoutError:
                self.hung = True
            finally:
                workers.close()
        if workers.failed:
            raise BenchmarkFailedError(f"a worker of torchft has failed: {errors.read_text()[-2000:]}")


class _Workers:
    """The lighthouse, and a worker for each rank, which a thread starts again when a signal has ended it.

    Attributes:
        failed: Whether a worker has ended with an error.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], log: IO[bytes], num_ranks: int) -> None:
        self._command, self._environment, self._log, self._num_ranks = command, environment, log, num_ranks
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  #: By rank; the lighthouse has the number -1.
        self._incarnations = dict.fromkeys(range(num_ranks), 0)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="torchft-workers", daemon=True)
        self.failed = False

    def start(self, address: Path, errors: Path) -> None:
        """Start all; return when the lighthouse has written its address to a file."""
        self._start(-1)
        give_up_at = time.monotonic() + _START_S
        while not address.exists():
            if self._processes[-1].poll() is not None or time.monotonic() >= give_up_at:
                raise BenchmarkFailedError(f"the lighthouse of torchft does not start: {errors.read_text()[-2000:]}")
            time.sleep(_LOOK_S)
        for rank in range(self._num_ranks):
            self._start(rank)
        self._thread.start()

    def _start(self, rank: int) -> None:
        arguments = [str(rank), str(self._incarnations.get(rank, 0))]
        self._processes[rank] = subprocess.Popen(
            [*self._command, *arguments],
            env=dict(self._environment),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            for rank in range(self._num_ranks):
                code = self._processes[rank].poll()
                if code == -signal.SIGKILL:
                    self._incarnations[rank] += 1
                    self._start(rank)
                elif code:
                    self.failed = True

    def wait(self, timeout_s: float) -> None:
        """Return when all workers have ended by themselves.

        Raises:
            TimeoutError: They have not, in time.
        """
        give_up_at = time.monotonic() + timeout_s
        while not self.failed and any(self._processes[rank].poll() is None for rank in range(self._num_ranks)):
            if time.monotonic() >= give_up_at:
                raise TimeoutError
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """End all that still runs."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(10.0)
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(10.0)
