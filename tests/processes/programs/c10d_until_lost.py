"""Runs one collective of torch.distributed over and over until a rank is lost, then says what torch was told.

c10d_until_lost.py NAME    a key of ``COLLECTIVES``

With the variable LINK set to tcp, ranks of one host share no memory. Prints lines, each a JSON object with an event:
``ready``, ``there`` (something large is under way), ``lost``, ``next`` and ``destroyed``.
"""

import datetime
import functools
import itertools
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import totalreduce  # noqa: F401  (brings the back end)
from totalreduce.transports import shm

NUMBERS = 3 << 19
"""Elements of the largest tensor: 6 MiB, milliseconds on any wire; a multiple of the world size, 3."""
MOVED_BYTES = 1 << 19
"""When so much has been sent or received, a collective counts as under way."""


def say(event, **facts):
    """One line to the test, with the time (the monotonic clock is the same in all processes)."""
    os.write(1, (json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n").encode())


class Tensors:
    """What a rank contributes and receives."""

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.whole = torch.ones(NUMBERS)
        self.part = torch.ones(NUMBERS // self.size)
        self.after, self.before = (self.rank + 1) % self.size, (self.rank - 1) % self.size

    @functools.cached_property
    def inputs(self):
        return [torch.ones(NUMBERS) for _ in range(self.size)]

    @functools.cached_property
    def outputs(self):
        return [torch.ones(NUMBERS) for _ in range(self.size)]

    @functools.cached_property
    def replica(self):
        layers = [torch.nn.Linear(512, 512) for _ in range(6)]
        return DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)

    @functools.cached_property
    def slices(self):
        mesh = init_device_mesh("cpu", (self.size,))
        layers = [fully_shard(torch.nn.Linear(512, 512), mesh=mesh) for _ in range(6)]
        return fully_shard(torch.nn.Sequential(*layers), mesh=mesh)

    def gather(self, root):
        return dist.gather(self.whole, self.outputs if self.rank == root else None, root, async_op=True)

    def scatter(self, root):
        return dist.scatter(self.whole, self.inputs if self.rank == root else None, root, async_op=True)

    @staticmethod
    def train(model):
        """Errors come out of the passes; there is nothing to wait for."""
        model(torch.ones(4, 512)).sum().backward()
        return []


# The victim is rank 1: it is once the root and once not.
COLLECTIVES = {
    "allreduce": lambda t: dist.all_reduce(t.whole, async_op=True),
    "broadcast from 0": lambda t: dist.broadcast(t.whole, 0, async_op=True),
    "broadcast from 1": lambda t: dist.broadcast(t.whole, 1, async_op=True),
    "reduce to 0": lambda t: dist.reduce(t.whole, 0, async_op=True),
    "reduce to 1": lambda t: dist.reduce(t.whole, 1, async_op=True),
    "all_gather": lambda t: dist.all_gather(t.outputs, t.whole, async_op=True),
    "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(t.whole, t.part, async_op=True),
    "reduce_scatter": lambda t: dist.reduce_scatter(t.whole, t.inputs, async_op=True),
    "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(t.part, t.whole, async_op=True),
    "all_to_all": lambda t: dist.all_to_all(t.outputs, t.inputs, async_op=True),
    "all_to_all_single": lambda t: dist.all_to_all_single(t.outputs[0], t.whole, async_op=True),
    "gather to 0": lambda t: t.gather(0),
    "gather to 1": lambda t: t.gather(1),
    "scatter from 0": lambda t: t.scatter(0),
    "scatter from 1": lambda t: t.scatter(1),
    "send and recv": lambda t: [dist.irecv(t.outputs[0], t.before), dist.isend(t.whole, t.after)],
    "recv from anybody": lambda t: [dist.irecv(t.outputs[0]), dist.isend(t.whole, t.after)],
    "barrier": lambda _: dist.barrier(async_op=True),
    "ddp": lambda t: t.train(t.replica),
    "fsdp": lambda t: t.train(t.slices),
}


def moved_bytes():
    """What this rank has sent and received."""
    statistics = dist.group.WORLD.group.statistics()
    return statistics.bytes_sent + statistics.bytes_received


def repeat(start):
    """Until an error; says ``there`` in the middle of one, but not of the first, which makes the connections."""
    tensors = Tensors()
    for turn in itertools.count():
        before = moved_bytes()
        works = start(tensors)
        works = works if isinstance(works, list) else [works]
        while turn == 1 and moved_bytes() < before + MOVED_BYTES and not all(work.is_completed() for work in works):
            time.sleep(0.0005)
        if turn == 1:
            say("there")
        for work in works:
            work.wait()


def expect_error(event, function, *arguments):
    """Say what was raised: its kinds, the rank it names, the text."""
    begin = time.monotonic()
    try:
        function(*arguments)
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        rank, seconds = getattr(error, "rank", None), time.monotonic() - begin
        say(event, kinds=kinds, rank=rank, text=str(error), seconds=seconds)
    else:
        say(event, kinds=[], rank=None, text="nothing was raised", seconds=time.monotonic() - begin)


def main(name):
    """One collective, until somebody is lost."""
    if os.environ.get("LINK") == "tcp":
        shm.shm_available = lambda *_: "it is not wanted here"
    torch.set_num_threads(1)
    dist.init_process_group("totalreduce", timeout=datetime.timedelta(seconds=60))
    say("ready", transport=type(dist.group.WORLD.group._runner.transport).__name__)
    expect_error("lost", repeat, COLLECTIVES[name])
    expect_error("next", lambda: dist.all_reduce(torch.ones(3)))
    begin = time.monotonic()
    dist.destroy_process_group()
    say("destroyed", seconds=time.monotonic() - begin)


if __name__ == "__main__":
    main(sys.argv[1])
