"""Fixtures of the tests with real processes."""

import sys

import pytest
import slurm_site
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


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A Slurm of the test's own."""
    reason = slurm_site.missing()
    if reason:
        pytest.skip(reason)
    try:
        with slurm_site.SlurmSite(tmp_path_factory.mktemp("slurm")) as site:
            yield site
    except slurm_site.SlurmError as error:
        pytest.skip(str(error))
