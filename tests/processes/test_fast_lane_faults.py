"""A rank that is killed or stopped within the fast lane is named in time, whatever it was doing there."""

import random
import signal
import time

import pytest

LOOP = """
torch.set_num_threads(1)
group = tr.init("shm", timeout_s=60)
tensors = [torch.ones(10), torch.ones(300_000), torch.ones(900_000), group.empty(700_000)]
prepared = [group.prepare_allreduce(tensor, name=f"p{index}") for index, tensor in enumerate(tensors)]
for operation in prepared:
    operation.start().wait()
say("ready")
turn = 0
try:
    while True:
        turn += 1
        for index, tensor in enumerate(tensors):
            tensor.fill_(1.0)
            if turn % 2:
                prepared[index].start().wait()
            else:
                group.allreduce(tensor, name=f"w{index}").wait()
except tr.PeerLost as error:
    say("lost", rank=error.rank)
hear()
"""


def strike(fleet, number: int, seed: int, limit_s: float) -> None:
    choice = random.Random(seed)
    workers = fleet.start(3, LOOP)
    for worker in workers:
        worker.read("ready")
    time.sleep(choice.random() * 0.2)
    victim = choice.randrange(3)
    since = workers[victim].send(number)
    for rank, worker in enumerate(workers):
        if rank != victim:
            facts = worker.read("lost", timeout_s=20)
            assert facts["rank"] == victim
            assert facts["at"] - since < limit_s
    fleet.end_jobs()


@pytest.mark.faults("F1")
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 105))])
def test_a_rank_that_is_killed_is_named_at_once(fleet, seed: int) -> None:
    strike(fleet, signal.SIGKILL, seed, 0.5 if seed >= 5 else 5.0)  # other tests run meanwhile, but not in the soak


@pytest.mark.faults("F2")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 31))])
def test_a_rank_that_is_stopped_is_named_after_the_limit_of_silence(fleet, seed: int) -> None:
    strike(fleet, signal.SIGSTOP, seed, 3.0 if seed else 5.0)
