"""``C10dDriver`` over gloo, with batches so small that an exchange between few ranks has several of them."""

import pytest

JOB = """
import numpy as np
from totalreduce.sparse import c10d_driver
from totalreduce.sparse.actions import Allgather, Alltoall, Messages

c10d_driver._BATCH_DISTANCES, c10d_driver._BATCHES_IN_FLIGHT = 1, int(os.environ["IN_FLIGHT"])
dist.init_process_group("gloo")
size = dist.get_world_size()
driver = c10d_driver.C10dDriver(dist.group.WORLD, torch.device("cpu"))


def block(source, target, length):
    return ((np.arange(length) * 3 + 7 * source + target) % 251).astype(np.uint8)


def carried_out(step, action):
    time.sleep(0.01 * ((rank + step) % 3))
    return driver.start(action, channel=0, step=step, priority=0).reply()


wrong = []
for step in range(6):
    lengths = [0 if (other + step) % 3 == 0 else 1000 + 100_000 * (other + step) for other in range(size)]
    gathered = carried_out(step, Allgather(block(rank, step, lengths[rank]), lengths))
    if not all(np.array_equal(gathered[other], block(other, step, lengths[other])) for other in range(size)):
        wrong.append(f"allgather {step}")
    blocks = [block(rank, other, lengths[other]) for other in range(size)]
    came = carried_out(step, Alltoall(blocks, [lengths[rank]] * size))
    if not all(np.array_equal(came[other], block(other, rank, lengths[rank])) for other in range(size)):
        wrong.append(f"alltoall {step}")
    # Even ranks send to all that are above them, and nobody else sends anything.
    sends = {other: block(rank, other, 77) for other in range(rank + 1, size) if rank % 2 == 0}
    receives = {other: 77 for other in range(0, rank, 2)}
    came = carried_out(step, Messages(sends, receives))
    if {other: each.tolist() for other, each in came.items()} != {o: block(o, rank, 77).tolist() for o in receives}:
        wrong.append(f"messages {step}")
dist.destroy_process_group()
say("done", wrong=wrong)
"""


@pytest.mark.parametrize(
    ("world_size", "in_flight"), [(2, 1), (4, 2), pytest.param(5, 1, marks=pytest.mark.slow), (5, 2)]
)
def test_blocks_arrive_as_they_were_sent(fleet, world_size, in_flight):
    workers = fleet.start(world_size, JOB, IN_FLIGHT=str(in_flight))
    for worker in workers:
        assert worker.read("done", 60.0)["wrong"] == []
        assert worker.wait() == 0, worker.errors()
