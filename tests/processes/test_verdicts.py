"""Survivors that end in the moment in which they learn of a loss: each names the victim, and not another survivor."""

import ctypes
import os
import random
import shutil
import signal
import sys

import pytest
from environments import worker_environments

from totalreduce.launch.emulate import EmulatedNetwork

#: The silence that is allowed here, which a healthy rank of a loaded machine must not reach.
SILENCE_S = 4.0
#: What is promised, from a crash to the error on every survivor; and what is allowed beside other tests.
CRASH_S, LOADED_S = 1.0, 10.0
#: Operations in the fast lane or in one message; of several messages; and in the relay.
ELEMENTS = (100, 100_000, 2_000_000)

ENDS_AT_ITS_ERROR = """
if "NAMESPACE" in os.environ:
    import ctypes
    assert ctypes.CDLL(None).setns(os.open(os.environ["NAMESPACE"], os.O_RDONLY), 0x40000000) == 0
group = tr.init(os.environ["LINK"], timeout_s=60)
value = torch.ones(int(os.environ["ELEMENTS"]))
group.allreduce(value, name="w").wait()
say("ready")
try:
    while True:
        group.allreduce(value, name="w", op=tr.ReduceOp.MAX).wait()
except tr.PeerLost as error:
    say("lost", rank=error.rank, text=str(error))
    os._exit(0)
"""


def lose_one(fleet, link, number, size, seed, network=None, *, limit_s=CRASH_S):
    """Start a job, kill or stop a rank in the midst of it, and see what the others say."""
    chosen = random.Random(seed)
    by_rank = {}
    if network is not None:
        environments = worker_environments(
            {},
            size,
            workers_per_host=2,
            master_address=network.hosts[0].address,
            job_id=f"verdict-{os.urandom(4).hex()}",
        )
        for rank, environment in enumerate(environments):
            by_rank[rank] = {**environment, "NAMESPACE": f"/var/run/netns/{network.hosts[rank // 2].namespace}"}
    facts = {"LINK": link, "ELEMENTS": str(chosen.choice(ELEMENTS)), "TOTALREDUCE_PEER_TIMEOUT_S": str(SILENCE_S)}
    workers = fleet.start(size, ENDS_AT_ITS_ERROR, by_rank=by_rank, **facts)
    for worker in workers:
        worker.read("ready")
    victim = chosen.randrange(size)
    signal.sigtimedwait([], chosen.random() * 0.05)  # any moment
    since = workers[victim].send(number)
    survivors = [worker for worker in workers if worker.rank != victim]
    for worker in survivors:
        lost = worker.read("lost")
        print(f"rank {worker.rank} knew after {lost['at'] - since:.3f} s: {lost['text']}")
        assert lost["rank"] == victim, (seed, worker.rank, lost)
        assert lost["at"] - since < limit_s + SILENCE_S * (number is signal.SIGSTOP), (seed, worker.rank, lost)
    for worker in survivors:
        assert worker.wait(5) == 0
    fleet.end_jobs()


@pytest.mark.faults("F1", "F2", "F19")
@pytest.mark.parametrize(
    ("link", "number"),
    [
        ("shm", signal.SIGSTOP),
        ("tcp", signal.SIGKILL),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("shm", signal.SIGKILL), ("tcp", signal.SIGSTOP))),
    ],
)
def test_survivors_that_end_at_their_error_name_the_victim(fleet, link, number):
    lose_one(fleet, link, number, 4, seed=0, limit_s=LOADED_S)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_any_rank_in_any_moment(fleet, link, number, size):
    for seed in range(1, 21):
        lose_one(fleet, link, number, size, seed)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1200)
@pytest.mark.hosts
@pytest.mark.skipif(
    not sys.platform.startswith("linux")
    or os.geteuid() != 0
    or not shutil.which("tc")
    or not hasattr(ctypes.CDLL(None), "setns"),
    reason="needs root, ip and tc",
)
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_any_rank_of_several_hosts_in_any_moment(fleet, number, size):
    """Two ranks on each host: shared memory within a host, and TCP over links of 1 Gbit/s between hosts."""
    with EmulatedNetwork(size // 2, "1gbit") as network:
        for seed in range(1, 21):
            lose_one(fleet, "auto", number, size, seed, network)
