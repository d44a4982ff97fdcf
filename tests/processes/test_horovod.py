"""``totalreduce.horovod``: every case of ``programs/horovod_cases.py``, at several world sizes.

The processes of a world size are started once and asked for one case after the other; a case that fails ends them.
"""

import re
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "horovod_cases.py"
CASES = re.findall(r"^@case\ndef (\w+)\(", PROGRAM.read_text(), re.MULTILINE)
SOURCE = f"""
import runpy
sys.argv = [{str(PROGRAM)!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LIMIT_S = 60.0


class Job:
    """The processes of one world size."""

    def __init__(self, zygote):
        self._zygote, self._workers = zygote, []

    def workers(self, size):
        if len(self._workers) != size:
            self.close()
            # More processes than cores: one that gets no turn for seconds is not dead.
            self._workers = self._zygote.start(size, SOURCE, TOTALREDUCE_PEER_TIMEOUT_S="30")
        return self._workers

    def close(self):
        self._zygote.end_jobs()
        self._workers = []


@pytest.fixture(scope="module")
def job(zygote):
    made = Job(zygote)
    yield made
    made.close()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4, 5, 8))])
def test_case(job, size, name):
    workers = job.workers(size)
    for worker in workers:
        worker.tell(name)
    try:
        failures = [worker.read("case", LIMIT_S)["failure"] for worker in workers]
    except BaseException:
        job.close()
        raise
    if any(failures):
        job.close()
        pytest.fail("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text))


def test_all_cases_are_known():
    assert len(CASES) == len(set(CASES)) == PROGRAM.read_text().count("\n@case\n")
    assert sys.version_info >= (3, 11)
