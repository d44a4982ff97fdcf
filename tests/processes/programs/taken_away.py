"""Takes the memory of an operation away while it is in flight, in five ways, and says what each rank got.

Run by every rank with the transport as argument, or with ``c10d`` for torch.distributed's back end. For each way it
prints one line: the way, whether the memory that was in flight holds the right sum, and the error of ``wait``.
"""

import gc
import os
import sys

import pytest
import torch
import torch.distributed as dist

import totalreduce as tr

COUNT = 1_000_003


def numbers(rank):
    """Whole numbers, so that sums are exact."""
    return torch.arange(COUNT, dtype=torch.float32) % 1000 + rank


def other_data(tensor):
    """Replace the data."""
    tensor.data = torch.zeros(3)


def other_storage(tensor):
    """Replace the storage."""
    tensor.set_(torch.zeros(3))


def grown(tensor):
    """Resize the tensor, which must be refused."""
    refused(tensor.resize_, 4 * COUNT)


def emptied(tensor):
    """Free the storage, which must be refused."""
    refused(tensor.untyped_storage().resize_, 0)


def forgotten(tensor):
    """Free the tensor, and use the memory for something else."""
    tensor.data = torch.zeros(0)
    gc.collect()
    for _ in range(20):
        torch.full((COUNT,), 7.0)


def refused(resize, size):
    """Call it, and want torch's error."""
    with pytest.raises(RuntimeError, match="not resizable"):
        resize(size)


def run_way(way, start, meet):
    """Whether the sum is right where the memory was, and the error of ``wait``."""
    rank, world_size = RANK_AND_SIZE
    tensor = numbers(rank)
    memory = tensor[:]
    if rank:
        meet()  # so that the operation cannot have ended before rank 0 takes its memory away
    work = start(tensor)
    if rank == 0:
        way(tensor)
        meet()
    error = "none"
    try:
        work.wait()
    except (tr.TotalReduceError, RuntimeError) as raised:
        error = type(raised).__name__
    return torch.equal(memory, sum(numbers(other) for other in range(world_size))), error


if __name__ == "__main__":
    torch.set_num_threads(1)
    door = sys.argv[1]
    group = None
    if door == "c10d":
        dist.init_process_group("totalreduce")
        RANK_AND_SIZE = dist.get_rank(), dist.get_world_size()
        others = dist.new_group()
        start, meet = (lambda tensor: dist.all_reduce(tensor, async_op=True)), (lambda: dist.barrier(others))
    else:
        if door in ("gloo", "torch"):
            dist.init_process_group("gloo")
        group = tr.init(door, timeout_s=60.0)
        RANK_AND_SIZE = group.rank, group.world_size
        start, meet = (lambda tensor: group.allreduce(tensor, name="w")), group.barrier
    for way in (other_data, other_storage, grown, emptied, forgotten):
        right, error = run_way(way, start, meet)
        os.write(1, f"{RANK_AND_SIZE[0]} {way.__name__} {'right' if right else 'wrong'} {error}\n".encode())
    if group is None:
        dist.destroy_process_group()
    else:
        group.close()
