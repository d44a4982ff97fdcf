"""Benchmarks of whole scripts, started as a user would start them, which report into a ``--json`` file. No torch."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import totalreduce
from totalreduce.bench.launching import BenchmarkFailedError, Setting
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.emulate import EmulateOptions
from totalreduce.launch.local import run_workers

__all__ = ["describe_environment", "find_script", "launch_script"]

_EXAMPLES = Path(__file__).parents[4] / "examples"


def find_script(script: str) -> Path:
    """A file, or an example by its name.

    Raises:
        ConfigurationError: There is neither.
    """
    for path in (Path(script), _EXAMPLES / f"{script}.py"):
        if path.is_file():
            return path.resolve()
    raise ConfigurationError(
        f"there is neither a file {script} nor {_EXAMPLES / script}.py; the examples are in the source distribution, "
        "--script takes the path of one"
    )


def launch_script(setting: Setting, command: Sequence[str], *, over_gloo: bool, timeout_s: float) -> dict[str, Any]:
    """Run a script on all ranks and return what it wrote.

    Args:
        setting: Where.
        command: The script and its options, without ``--json``.
        over_gloo: Whether torch's gloo carries its messages: it sometimes aborts in its destructors after all work is
            done, which is no failure then.
        timeout_s: How long it may take.

    Raises:
        BenchmarkFailedError: It failed, was too slow, or wrote nothing; names the rank that failed first.
        ConfigurationError: The setting cannot be run here, for example because of missing rights.
    """
    emulate = None
    if setting.hosts:
        per_host = setting.ranks // setting.hosts
        emulate = EmulateOptions(num_hosts=setting.hosts, rate=setting.rate, ranks_per_host=per_host)
    with tempfile.TemporaryDirectory(prefix="totalreduce-bench-") as folder:
        out = Path(folder) / "out.json"
        outcome = run_workers(
            [sys.executable, *command, "--json", str(out)],
            num_workers=setting.ranks,
            emulate=emulate,
            output="capture",
            timeout_s=timeout_s,
        )
        if outcome.interrupted_by is not None:
            raise BenchmarkFailedError(f"stopped by {outcome.interrupted_by}", outcome.exit_code)
        if outcome.timed_out:
            raise BenchmarkFailedError(f"not finished after {timeout_s:.0f} s; ask for fewer --steps")
        failure = outcome.first_failure
        is_afterwards = out.exists() and all(
            worker.exit_code == 0 or worker.signal == "SIGABRT" for worker in outcome.workers
        )
        if failure is not None and not (is_afterwards and over_gloo):
            lines = "\n".join(failure.last_errors)
            raise BenchmarkFailedError(
                f"{' '.join(command)}: rank {failure.rank} failed: {failure.describe()}\n{lines}"
            )
        if not out.exists():
            raise BenchmarkFailedError(f"{command[0]} did not write its --json file")
        document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return document


def describe_environment() -> dict[str, Any]:
    """Versions and machine, for the JSON document; without loading torch into the launcher."""
    return {
        "totalreduce": totalreduce.__version__,
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
    }
