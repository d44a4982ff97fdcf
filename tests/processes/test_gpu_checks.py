"""The checks of ``make gpu``, rehearsed on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "gpu" / "run.py"


@pytest.mark.slow
def test_the_checks_run_on_the_cpu():
    command = [sys.executable, RUN, "--rehearse", "staging", "ddp", "ddp-hook", "optimizer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed, 0 skipped, 0 failed" in done.stdout
