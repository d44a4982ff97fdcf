"""What users call gives the bits of host tensors with those of the fake accelerator: ``programs/accelerator_doors.py``.

The processes of a door and a world size are started once and asked for one case after the other.
"""

from pathlib import Path

import pytest
from fake_accelerator.asked import DeviceJob, names_of_cases

pytestmark = pytest.mark.timeout(300)
PROGRAM = Path(__file__).parent / "programs" / "accelerator_doors.py"
#: With three ranks the last bits of their sums differ between two runs on the CPU, too.
PAIRS_ONLY = {"optimizer_of_horovod", "hooks_of_distributed_data_parallel"}
CASES = [
    pytest.param(door, name, size, marks=[pytest.mark.slow] * (size > 2))  # three ranks are part of make soak
    for door, name in names_of_cases(PROGRAM)
    for size in ((2,) if name in PAIRS_ONLY else (2, 3))
]


@pytest.fixture(scope="module")
def jobs():
    """By door and world size."""
    return {}


@pytest.mark.parametrize(("door", "name", "size"), CASES)
def test_bits_are_those_of_host_tensors(zygote, jobs, door, name, size):
    if (door, size) not in jobs:
        jobs[door, size] = DeviceJob(zygote, PROGRAM, size, DOOR=door)
    jobs[door, size].run(name)
