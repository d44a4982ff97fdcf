"""Ranks of one host as processes over shared memory: same results, and what the others see when one dies or freezes."""

import json
import signal

import pytest

CRASH_S, SILENCE_S = 3.0, 6.0  # wide, for other tests run meanwhile; test_faults.py measures closely
"""What is promised: from the event to the error on every survivor."""

#: Says where it listens, is told where the others do, and has a group then.
GROUP = """
from totalreduce.engine.engine import Engine
from totalreduce.runner.runner import Runner
from totalreduce.foundation.config import EngineConfig, TcpConfig
from totalreduce.groups.group import Group
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.shm import ShmTransport, listen
import json
door, name = listen()
say("listens", name=name)
names = json.loads(hear())
config = EngineConfig(timeout_s=30)
link = ShmTransport(rank, names, door, JobIdentity(bytes(range(32)), "test", 0), TcpConfig())
group = Group(Runner(Engine(rank, len(names), config), link), "test")
group.barrier(timeout_s=20)
"""

RESULTS = (
    GROUP
    + """
sums = []
for turn, count in enumerate([1, 1000, 20_001, 300_007, 3_000_001]):
    values = torch.arange(count, dtype=torch.float64) * (rank + 1) + turn
    group.allreduce(values, name=f"turn {count}").wait()
    factor = len(names) * (len(names) + 1) // 2
    assert torch.equal(values, torch.arange(count, dtype=torch.float64) * factor + turn * len(names))
    sums.append(float(values.sum()))
say("results", sums=sums, world=link.ranks_per_host)
group.close()
"""
)

UNTIL_LOST = (
    GROUP
    + """
say("ready")
big = torch.ones(4 << 20)
moment = hear()
try:
    if moment == "busy":
        group.allreduce(big, name="big").wait()
        say("there")
        while True:
            group.allreduce(big, name="big").wait()
    say("there")
    hear()
    while True:
        group.allreduce(torch.ones(1000), name="small").wait()
except tr.PeerLost as error:
    say("lost", rank=error.rank, text=str(error))
group.close()
say("closed")
"""
)


def start(fleet, count, source):
    """A job whose ranks know where the others listen."""
    workers = fleet.start(count, source)
    names = [worker.read("listens")["name"] for worker in workers]
    for worker in workers:
        worker.tell(json.dumps(names))
    return workers


@pytest.mark.parametrize("count", [2, 4])
def test_processes_get_the_same_results(fleet, count):
    workers = start(fleet, count, RESULTS)
    answers = [worker.read("results") for worker in workers]
    assert [answer["sums"] for answer in answers] == [answers[0]["sums"]] * count
    assert [answer["world"] for answer in answers] == [count] * count
    assert [worker.wait() for worker in workers] == [0] * count


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("moment", ["busy", "idle"])
def test_a_dead_or_frozen_rank_is_named_on_every_survivor(fleet, moment, number):
    workers = start(fleet, 4, UNTIL_LOST)
    for worker in workers:
        worker.read("ready")
        worker.tell(moment)
    for worker in workers:
        worker.read("there")
    since = workers[2].send(number)
    survivors = [worker for worker in workers if worker.rank != 2]
    if moment == "idle":
        for worker in survivors:
            worker.tell()
    for worker in survivors:
        lost = worker.read("lost")
        assert lost["rank"] == 2
        assert ("its connection ended" in lost["text"]) == (number == signal.SIGKILL)
        assert ("silent for" in lost["text"]) == (number == signal.SIGSTOP)
        assert lost["at"] - since < (CRASH_S if number == signal.SIGKILL else SILENCE_S)
        worker.read("closed")
    assert [worker.wait() for worker in survivors] == [0, 0, 0]
    assert not any("Traceback" in worker.errors() for worker in survivors)


def test_a_job_that_was_stopped_as_a_whole_goes_on(fleet):
    source = (
        GROUP + 'say("ready")\nhear()\ngroup.allreduce(torch.ones(9), name="x").wait()\nsay("done")\ngroup.close()\n'
    )
    workers = start(fleet, 3, source)
    for worker in workers:
        worker.read("ready")
    since = max(worker.send(signal.SIGSTOP) for worker in workers)
    waiting = fleet.start(1, "time.sleep(2.5)\nsay('awake')")[0]  # longer than silence_s
    assert waiting.read("awake")["at"] - since > 2.0
    for worker in workers:
        worker.send(signal.SIGCONT)
    for worker in workers:
        worker.tell()
    for worker in workers:
        worker.read("done")
    assert [worker.wait() for worker in workers] == [0, 0, 0]
