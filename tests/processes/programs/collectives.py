"""Runs the conformance suite's cases over the transport named as argument, and compares with torch's own arithmetic.

Run by every rank: ``mpirun -n 4 python collectives.py mpi``. Prints one line per rank: how many results were right.
"""

import os
import sys

import torch

import totalreduce as tr
from totalreduce.foundation.types import DType
from totalreduce.launch.transports import TRANSPORTS
from totalreduce.testing.conformance import check_record, run_on
from totalreduce.testing.conformance_cases import cases_for


def compare(result, reference, what):
    """Equal, or say where not."""
    if not torch.equal(result, reference):
        raise AssertionError(f"{what}: {result} is not {reference}")
    return 1


def run_cases(transport):
    """All cases, each with a group of its own beside one that lives all the time."""
    compared = 0
    with tr.init(transport, timeout_s=60.0) as world:
        for number, case in enumerate(cases_for(world.world_size)):
            with tr.init(transport, name=f"case {number}", engine=case.engine, timeout_s=60.0) as group:
                if case.hosts:
                    group._runner.transport.set_hosts(case.hosts)
                compared += check_record(case, group.rank, run_on(group, case), where=case.name)
                group.barrier()
        compared += run_large(world)
        compared += sum(run_others(world, size) for size in (7, 60_000))
        compared += run_native(world, transport)
    return compared


def run_large(group):
    """Bodies that travel as messages of their own, in both directions at once."""
    size, compared = 700_001, 0
    base = torch.arange(size, dtype=torch.float64)
    tensors = [base * (group.rank + 1) + index for index in range(4)]
    works = [group.allreduce(tensor, name=f"large {index}") for index, tensor in enumerate(tensors)]
    total = group.world_size * (group.world_size + 1) // 2
    for index, work in enumerate(works):
        compared += compare(work.wait(), base * total + index * group.world_size, f"large {index}")
    return compared


def run_others(group, size):
    """Every other collective, and messages, with ``size`` elements of every pair of ranks."""
    rank, world_size, compared = group.rank, group.world_size, 0
    ranks = range(world_size)

    def part(source, target):
        """What ``source`` has for ``target``; sizes differ."""
        return torch.arange(size + target, dtype=torch.float64) + 100 * source + target

    got = [torch.zeros(size + rank, dtype=torch.float64) for _ in ranks]
    group.alltoall(got, [part(rank, target) for target in ranks]).wait()
    for source in ranks:
        compared += compare(got[source], part(source, rank), f"alltoall from {source}")
    got = [torch.zeros(size + source, dtype=torch.float64) for source in ranks]
    group.allgather(got, part(rank, rank)).wait()
    for source in ranks:
        compared += compare(got[source], part(source, source), f"allgather from {source}")
    root = world_size - 1
    got = [torch.zeros(size + source, dtype=torch.float64) for source in ranks] if rank == root else None
    group.gather(got, part(rank, rank), root=root).wait()
    for source in ranks if got is not None else ():
        compared += compare(got[source], part(source, source), f"gather from {source}")
    mine = torch.zeros(size + rank, dtype=torch.float64)
    group.scatter(mine, [part(0, target) for target in ranks] if rank == 0 else None).wait()
    compared += compare(mine, part(0, rank), "scatter")
    group.reduce_scatter(mine, [part(rank, target) for target in ranks]).wait()
    total = sum(part(source, rank) for source in ranks)
    compared += compare(mine, total, "reduce_scatter")
    whole = part(rank, 0)
    group.reduce(whole, root=root).wait()
    compared += compare(whole, sum(part(source, 0) for source in ranks) if rank == root else part(rank, 0), "reduce")
    if world_size > 1:
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        sent = group.send(part(rank, right), dst=right, tag=3)
        group.recv(mine, src=left, tag=3).wait()
        sent.wait()
        compared += compare(mine, part(left, rank), "send and recv")
        half = group.subgroup(range(rank % 2, world_size, 2))
        whole = part(rank, 0)
        half.allreduce(whole).wait()
        compared += compare(whole, sum(part(source, 0) for source in half.ranks), "allreduce of every other rank")
        half.close()
    return compared


def run_native(group, transport):
    """What the library underneath does by itself."""
    native, size, compared = TRANSPORTS[transport].library(group._runner.transport, 30.0), group.world_size, 0
    assert native is not None
    for dtype in DType:
        for op in (tr.ReduceOp.SUM, tr.ReduceOp.AVG, tr.ReduceOp.MAX, tr.ReduceOp.BXOR):
            element = getattr(torch, dtype.name.lower())
            inputs = [(torch.arange(37) * (rank + 1) % 5).to(element) for rank in range(size)]
            tensor = inputs[group.rank].clone()
            try:
                assert native.allreduce(tensor, op).wait(30.0)
            except tr.UnsupportedError:
                bitwise_of_floats = op is tr.ReduceOp.BXOR and dtype.is_floating_point
                assert bitwise_of_floats or (op is tr.ReduceOp.AVG and dtype is DType.BOOL), (dtype, op)
                continue
            reference = inputs[0].clone()
            for other in inputs[1:]:
                match op:
                    case tr.ReduceOp.MAX:
                        reference = torch.maximum(reference, other)
                    case tr.ReduceOp.BXOR:
                        reference = reference ^ other
                    case _:
                        reference = reference + other
            if op is tr.ReduceOp.AVG:
                reference = torch.div(reference, size, rounding_mode=None if dtype.is_floating_point else "trunc")
            compared += compare(tensor, reference.to(element), f"native {op.name} of {dtype.name}")
            tensor = inputs[group.rank].clone()
            assert native.reduce(tensor, size - 1, op).wait(30.0)
            if group.rank == size - 1:
                compared += compare(tensor, reference.to(element), f"native reduce, {op.name} of {dtype.name}")
        part = torch.full((5,), group.rank + 1).to(element)
        whole = torch.zeros(5 * size, dtype=element)
        assert native.allgather(whole, part).wait(30.0)
        wanted = torch.arange(1, size + 1).repeat_interleave(5).to(element)
        compared += compare(whole, wanted, f"native allgather of {dtype.name}")
        assert native.broadcast(part, size - 1).wait(30.0)
        compared += compare(part, torch.full((5,), size).to(element), f"native broadcast of {dtype.name}")
        if dtype is not DType.BOOL:
            rows = (torch.arange(3 * size) % 4 + group.rank).to(element)
            mine = torch.empty(3, dtype=element)
            assert native.reduce_scatter(mine, rows, tr.ReduceOp.SUM).wait(30.0)
            wanted = sum((torch.arange(3 * size) % 4 + rank for rank in range(size)), torch.zeros(3 * size).long())
            wanted = wanted[3 * group.rank : 3 * group.rank + 3].to(element)
            compared += compare(mine, wanted, f"native reduce_scatter of {dtype.name}")
        sent = torch.cat([torch.full((rank + 1,), group.rank % 2) for rank in range(size)]).to(element)
        got = torch.empty((group.rank + 1) * size, dtype=element)
        assert native.alltoall(got, sent, [group.rank + 1] * size, [rank + 1 for rank in range(size)]).wait(30.0)
        wanted = (torch.arange(size) % 2).repeat_interleave(group.rank + 1).to(element)
        compared += compare(got, wanted, f"native alltoall of {dtype.name}")
    half = native.split(range(group.rank % 2, size, 2), 30.0)
    tensor = torch.tensor([float(group.rank)])
    assert half.allreduce(tensor, tr.ReduceOp.SUM).wait(30.0)
    compared += compare(
        tensor, torch.tensor([float(sum(range(group.rank % 2, size, 2)))]), "native allreduce of a half"
    )
    half.close()
    return compared


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = run_cases(sys.argv[1])
    os.write(1, f"compared {count}\n".encode())
