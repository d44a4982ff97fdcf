"""The fake accelerator of ``tests/helpers`` keeps its promises: ``programs/fake_accelerator_cases.py``."""

from pathlib import Path

import pytest
from fake_accelerator.asked import DeviceJob, names_of_cases

pytestmark = pytest.mark.timeout(300)
PROGRAM = Path(__file__).parent / "programs" / "fake_accelerator_cases.py"
FRESH = "contexts_are_made_by_use_and_by_leaving_a_stream"


@pytest.fixture(scope="module")
def job(zygote):
    return DeviceJob(zygote, PROGRAM, 1)


@pytest.mark.parametrize("name", [name for name in names_of_cases(PROGRAM) if name != FRESH])
def test_case(job, name):
    job.run(name)


def test_contexts(zygote):
    DeviceJob(zygote, PROGRAM, 1).run(FRESH)
