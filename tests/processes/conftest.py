"""Fixtures of the tests with real processes."""

import pytest
from fleet import Fleet


@pytest.fixture(scope="session")
def zygote():
    made = Fleet()
    yield made
    made.close()


@pytest.fixture
def fleet(zygote):
    """Starts jobs whose workers are gone when the test ends."""
    yield zygote
    zygote.end_jobs()
