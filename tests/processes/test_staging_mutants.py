"""Each wait of ``tensors/staging.py`` is needed: without it, a value is wrong (``programs/staging_mutants.py``)."""

from pathlib import Path

import pytest
from fake_accelerator.asked import DeviceJob

PROGRAM = Path(__file__).parent / "programs" / "staging_mutants.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_wait_that_is_removed_gives_a_wrong_value(fleet):
    job = DeviceJob(fleet, PROGRAM, 1)
    assert job.run("-1") == [[]]
    needless = [wait for number, wait in enumerate(job.facts["waits"]) if job.run(str(number)) == [[]]]
    assert needless == []
