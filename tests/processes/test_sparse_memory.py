"""What sparse methods take of a machine's memory beside the gradients: one residual, and lists of a few hundredths."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("programs") / "peak_memory.py"
WIDTH, FEW, MANY = 2048, 12, 72


def per_parameter(door):
    """Bytes for each parameter, beyond what any model takes, as a multiple of those of its gradient."""
    peaks = []
    for layers in (FEW, MANY):
        command = [sys.executable, "-m", "totalreduce", "run", "-n", "2", "--", PROGRAM, door, str(layers), str(WIDTH)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(int(re.search(r"\[0\] peak (\d+)", done.stdout).group(1)))
    return (peaks[1] - peaks[0]) / (4 * (MANY - FEW) * WIDTH * (WIDTH + 1))


@pytest.mark.slow
# DDP begins with one bucket for everything, so that in the first pass all lists are there at once.
@pytest.mark.parametrize(("door", "without", "limit"), [("optimizer", "alone", 1.1), ("hook", "ddp", 1.15)])
def test_there_is_one_residual(door, without, limit):
    extra = per_parameter(door) - per_parameter(without)
    print(f"{door}: {extra:.3f} times the gradients")
    assert 0.9 < extra <= limit
