"""Copies of models on accelerators beside training: ``programs/copies_beside_cases.py``, on the fake accelerator."""

import re
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "copies_beside_cases.py"
HELPERS = Path(__file__).parents[1] / "helpers"
CASES = re.findall(r"^@case\ndef (\w+)\(", PROGRAM.read_text(), re.MULTILINE)
SOURCE = f"""
import runpy
sys.argv = [{str(PROGRAM)!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def job(zygote):
    workers = zygote.start(2, SOURCE, HELPERS=str(HELPERS), TOTALREDUCE_PEER_TIMEOUT_S="30")
    missing = [worker.read("loaded", timeout_s=100.0)["missing"] for worker in workers]
    if any(missing):
        pytest.skip(missing[0])
    return workers


@pytest.mark.parametrize("name", CASES)
def test_case(job, name):
    for worker in job:
        worker.tell(name)
    failures = [worker.read("case", timeout_s=60.0)["failure"] for worker in job]
    assert failures == [None] * len(job), "\n".join(filter(None, failures))
