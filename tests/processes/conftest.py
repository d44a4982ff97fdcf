"""Fixtures of the tests with real processes."""

import sys

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


@pytest.fixture
def warm_python(zygote, monkeypatch):
    """Python programs are forked from the zygote: processes as real as others, without 2 s of imports each.

    Not for workers of emulated hosts: the zygote lives in the network namespace of the tests.
    """
    monkeypatch.setattr(sys, "executable", str(zygote.python))
