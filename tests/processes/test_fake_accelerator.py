"""The fake accelerator (``tests/helpers/fake_accelerator``) keeps its promises: ``programs/fake_accelerator_cases.py``.

One process runs all cases: a process that has loaded the device keeps it.
"""

import re
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "fake_accelerator_cases.py"
HELPERS = Path(__file__).parents[1] / "helpers"
CASES = re.findall(r"^@case\ndef (\w+)\(", PROGRAM.read_text(), re.MULTILINE)
SOURCE = f"""
import runpy
sys.argv = [{str(PROGRAM)!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


FRESH = "contexts_are_made_by_use_and_by_leaving_a_stream"


def start(zygote):
    """A process that has loaded the device."""
    (worker,) = zygote.start(1, SOURCE, HELPERS=str(HELPERS))
    missing = worker.read("loaded", timeout_s=100.0)["missing"]  # the device may be compiled first
    if missing:
        pytest.skip(missing)
    return worker


def run(worker, name):
    worker.tell(name)
    failure = worker.read("case")["failure"]
    assert failure is None, failure


@pytest.fixture(scope="module")
def job(zygote):
    return start(zygote)


@pytest.mark.parametrize("name", [name for name in CASES if name != FRESH])
def test_case(job, name):
    run(job, name)


def test_contexts(zygote):
    run(start(zygote), FRESH)
