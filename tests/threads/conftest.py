"""Tests whose ranks are threads of one process run on one core.

Python's lock lets one of these threads run at a time. On two cores the threads hand the lock over between cores, which
doubles the processor time of a test. The tests of shared memory keep all cores, for the order of loads and stores is
a matter of two cores; so does ``make soak``.
"""

import os

import pytest

ALL_CORES = ("test_fast_lane.py", "test_shm.py")
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


@pytest.fixture(autouse=True, scope="module")
def one_core(request):
    cores = os.sched_getaffinity(0)
    soak = request.config.option.markexpr == "slow"
    if not soak and request.path.name not in ALL_CORES:
        os.sched_setaffinity(0, {sorted(cores)[WORKER % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)
