"""A rank dies or freezes in the middle of a collective of torch.distributed: torch's error names it, on every survivor.

Three ranks; rank 1 is the victim. Cut cables are in ``tests/hosts/test_c10d_faults_hosts.py``.
"""

import re
import signal
from pathlib import Path

import pytest
from programs.c10d_until_lost import COLLECTIVES

LIMIT_S = 3.0
"""What is promised: from the event to the error on every survivor."""

PROGRAM = Path(__file__).with_name("programs") / "c10d_until_lost.py"
BOTH_LINKS = {"allreduce", "ddp"}
LINKS = {"shm": "ShmTransport", "tcp": "TcpTransport"}


def strike(fleet, collective, link, number):
    """Start a job, wait until its collective is under way everywhere, and send rank 1 a signal; workers and time."""
    source = f"import runpy\nruntime = runpy.run_path({str(PROGRAM)!r})\nruntime['main']({collective!r})"
    workers = fleet.start(3, source, LINK=link)
    for event in ("ready", "there"):
        for worker in workers:
            facts = worker.read(event)
            assert facts.get("transport", LINKS[link]) == LINKS[link]
    return workers, workers[1].send(number)


def check(workers, since, what, limit_s=LIMIT_S):
    """Both survivors got a torch.distributed error that names rank 1, in time, and again at once; they end well."""
    for worker in (workers[0], workers[2]):
        lost = worker.read("lost")
        print(f"{what}: rank {worker.rank} knew after {lost['at'] - since:.3f} s: {lost['text']}")
        assert {"DistBackendError", "DistError"} <= set(lost["kinds"]), (what, lost)
        assert lost["rank"] == 1, (what, lost)
        assert re.search(r"\brank 1\b", lost["text"]), (what, lost)
        assert lost["at"] - since < limit_s, (what, lost)
        again = worker.read("next")
        assert "DistBackendError" in again["kinds"], (what, again)
        assert again["rank"] == 1, (what, again)
        assert again["seconds"] < LIMIT_S
        assert worker.read("destroyed")["seconds"] < 5.0
        assert worker.wait() == 0
        assert "Traceback" not in worker.errors()


def combinations():
    """Every collective over every link. In ``make test``, each collective has one of the links in turn."""
    for number, collective in enumerate(COLLECTIVES):
        for index, link in enumerate(LINKS):
            marks = [] if index == number % len(LINKS) or collective in BOTH_LINKS else [pytest.mark.slow]
            yield pytest.param(collective, link, marks=marks)


@pytest.mark.parametrize(("collective", "link"), [*combinations()])
def test_a_killed_rank_is_named(fleet, collective, link):
    workers, since = strike(fleet, collective, link, signal.SIGKILL)
    check(workers, since, collective)


def parts():
    """Over TCP every fourth collective in ``make test``, and over each link every one in ``make soak``."""
    for index, link in enumerate(LINKS):
        yield pytest.param(link, 2 + index, 4, id=f"{link}-some", marks=[pytest.mark.slow] * (link != "tcp"))
        for first in range(2):
            yield pytest.param(link, first, 2, marks=pytest.mark.slow, id=f"{link}-half-{first}")


@pytest.mark.parametrize(("link", "first", "stride"), [*parts()])
def test_a_stopped_rank_is_named(fleet, link, first, stride):
    # It takes two seconds to notice: the jobs start one after the other, and their waiting overlaps.
    names = [*COLLECTIVES][first::stride]
    jobs = [(name, *strike(fleet, name, link, signal.SIGSTOP)) for name in names]
    for name, workers, since in jobs:
        check(workers, since, name, limit_s=2 * LIMIT_S)
