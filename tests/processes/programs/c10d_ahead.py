"""One rank of torch.distributed is far ahead of the other one, or makes many names; the other one checks every value.

The variables say what happens: KIND, a key of ``KINDS``; NUMBER, how often; PAUSE_S, how long the late rank sleeps (0:
until the other one waits for room). With ROOM_BYTES the bounds of what is kept of a rank that is ahead are so small.
With LINK set to tcp, the ranks share no memory. Each rank prints one line, a JSON object: the number of right values,
seconds, and the growth of its memory.
"""

import datetime
import json
import os
import time

import torch
import torch.distributed as dist

import totalreduce  # noqa: F401  (brings the back end)
from totalreduce.engine import early
from totalreduce.foundation.config import EngineConfig
from totalreduce.transports import shm

NUMBER, PAUSE_S = int(os.environ["NUMBER"]), float(os.environ.get("PAUSE_S", "0"))
AHEAD, LATE = 1, 0


def memory(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def engine():
    return dist.group.WORLD.group._runner.engine


def be_late():
    """Sleep, or wait until the other rank waits for room here."""
    time.sleep(PAUSE_S)
    deadline = time.monotonic() + 60
    while not PAUSE_S and not engine()._rendezvous.asking:
        if any(record.requested for record in [*engine().table.early.records.values()]):
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)


def messages(rank, *, has_tags=False, size=4):
    """Return how many messages were right."""
    right, tensor = 0, torch.zeros(size)
    for number in range(NUMBER):
        tag = number if has_tags else 0
        if rank == AHEAD:
            dist.send(torch.full((size,), float(number)), LATE, tag=tag)
        else:
            dist.recv(tensor, AHEAD, tag=tag)
            right += bool(tensor.eq(number).all())
    return right


def tags(rank):
    return messages(rank, has_tags=True)


def sizes(rank):
    """Messages whose sizes change, so that each one is described."""
    right = 0
    for number in range(NUMBER):
        tensor = torch.full((1 + number % 7,), float(number) if rank == AHEAD else -1.0)
        dist.send(tensor, LATE) if rank == AHEAD else dist.recv(tensor, AHEAD)
        right += bool(tensor.eq(number).all())
    return right


def broadcasts(rank):
    """Of 4 MiB, a hundred at once."""
    right, tensors = 0, [torch.zeros(1 << 20) for _ in range(100)]
    for first in range(0, NUMBER, len(tensors)):
        works = []
        for index, tensor in enumerate(tensors):
            tensor.fill_(first + index if rank == AHEAD else -1)
            works.append(dist.broadcast(tensor, AHEAD, async_op=True))
        for index, work in enumerate(works):
            work.wait()
            right += bool(tensors[index].eq(first + index).all())
    return right


def exchanges(rank):
    """Alltoalls; the rank that is ahead begins all of them before it waits for one."""
    begun, right = [], 0
    for number in range(NUMBER):
        received, sent = torch.empty(3000), torch.full((3000,), float(number))
        begun.append((received, dist.all_to_all_single(received, sent, async_op=True)))
        if rank == LATE:
            begun[-1][1].wait()
    for number, (received, work) in enumerate(begun):
        work.wait()
        right += bool(received.eq(number).all())
    return right


def receives(rank):
    """The rank that is ahead receives, and has begun to do so for all messages; the tags are sent in reverse."""
    right, tensors = 0, []
    if rank == AHEAD:
        tensors = [torch.empty(4) for _ in range(NUMBER)]
        works = [dist.irecv(tensor, LATE, tag=tag) for tag, tensor in enumerate(tensors)]
        for number, work in enumerate(works):
            work.wait()
            right += bool(tensors[number].eq(number).all())
    else:
        for number in reversed(range(NUMBER)):
            dist.send(torch.full((4,), float(number)), AHEAD, tag=number)
    return right


def groups(rank):
    """Groups that are made, used and destroyed."""
    right = 0
    for number in range(NUMBER):
        group, tensor = dist.new_group([0, 1]), torch.full((4,), float(number))
        dist.all_reduce(tensor, group=group)
        if rank == AHEAD:
            dist.send(tensor, LATE, group=group)
        else:
            dist.recv(tensor, AHEAD, group=group)
        dist.destroy_process_group(group)
        right += bool(tensor.eq(2 * number).all())
    return right


KINDS = {function.__name__: function for function in (messages, tags, sizes, broadcasts, exchanges, receives, groups)}
NEVER_LATE = {"groups"}


def main():
    if os.environ.get("LINK") == "tcp":
        shm.shm_available = lambda *_: "it is not wanted here"
    if "ROOM_BYTES" in os.environ:
        early.PEER_BYTES_MAX = int(os.environ["ROOM_BYTES"])
        EngineConfig.__init__.__kwdefaults__["floating_bytes_max"] = int(os.environ["ROOM_BYTES"])
    torch.set_num_threads(1)
    dist.init_process_group("totalreduce", timeout=datetime.timedelta(minutes=10))
    rank, name = dist.get_rank(), os.environ["KIND"]
    dist.barrier()
    before, begin = memory("VmRSS"), time.monotonic()
    if rank == LATE and name not in NEVER_LATE and name != "receives":
        be_late()
    right = KINDS[name](rank)
    seconds = time.monotonic() - begin
    dist.barrier()
    facts = {"right": right, "seconds": seconds, "grown": memory("VmHWM") - before, "held": memory("VmRSS") - before}
    facts["floating"] = engine().reception.floating.peak_bytes
    os.write(1, (json.dumps({"event": "done", **facts}) + "\n").encode())
    dist.destroy_process_group()
