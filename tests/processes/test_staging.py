"""Operations on tensors of an accelerator give the bits of the same operations on host tensors.

The accelerator is the fake one, whose copies are late and poison their destinations: ``programs/staging_cases.py``.
"""

from pathlib import Path

import pytest
from fake_accelerator.asked import DeviceJob, names_of_cases

pytestmark = pytest.mark.timeout(300)
PROGRAM = Path(__file__).parent / "programs" / "staging_cases.py"


@pytest.fixture(scope="module", params=[1, 2, pytest.param(3, marks=pytest.mark.slow)])
def job(zygote, request):
    return DeviceJob(zygote, PROGRAM, request.param)


@pytest.mark.parametrize("name", names_of_cases(PROGRAM))
def test_case(job, name):
    job.run(name)
