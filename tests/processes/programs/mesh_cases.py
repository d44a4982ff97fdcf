"""Operations of a group over a mesh, case by case; ``tests/processes/test_mesh.py`` asks for them.

``RANKS_PER_HOST`` ranks in a row are on one host, as far as the library knows. Every rank reads names of cases from
standard input, and prints for each a JSON line with the event ``case`` and the traceback, if it failed.
"""

import json
import os
import sys
import traceback

import torch
import torch.distributed as dist

import totalreduce as tr
from totalreduce.launch import transports

CASES = {}
PER_HOST = int(os.environ["RANKS_PER_HOST"])
LARGE = 300_007  # elements; neither 2 nor 3 divides it


def case(function):
    """Make a function known."""
    CASES[function.__name__] = function
    return function


def numbers(of, count=LARGE, dtype=torch.float32, seed=0):
    """Values of one rank; small integers, of which the order of the sum changes nothing."""
    made = torch.randint(1, 9, (count,), generator=torch.Generator().manual_seed(100 * seed + of))
    return made.to(dtype)


def stacked(**options):
    return torch.stack([numbers(of, **options) for of in range(size)])


def same_bits(tensor):
    """Every rank has the same bytes."""
    everybody = [torch.empty_like(tensor) for _ in range(size)]
    group.control.allgather(everybody, tensor).wait()
    assert all(torch.equal(each.view(torch.uint8), tensor.view(torch.uint8)) for each in everybody)


@case
def reductions():
    """Sums, averages and the others, of sizes that divide evenly and that do not, in each type of the libraries."""
    for count in (size * 100_000, LARGE, 1000):
        values = stacked(count=count)
        expected = {
            tr.ReduceOp.SUM: values.sum(0),
            tr.ReduceOp.AVG: values.sum(0) / size,
            tr.ReduceOp.MAX: values.amax(0),
            tr.ReduceOp.MIN: values.amin(0),
            tr.ReduceOp.PRODUCT: values.prod(0),
        }
        for op, wanted in expected.items():
            tensor = numbers(rank, count)
            assert group.allreduce(tensor, name=f"{op}", op=op).wait() is tensor
            assert torch.equal(tensor, wanted), (count, op)
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        tensor = numbers(rank, dtype=dtype)
        group.allreduce(tensor, name=f"{dtype}").wait()
        assert torch.equal(tensor, stacked(dtype=dtype).sum(0).to(dtype)), dtype


@case
def what_the_library_lacks():
    """Types and reductions that gloo or NCCL do not have: the engine carries them out."""
    tensor = numbers(rank, dtype=torch.int16)
    group.allreduce(tensor, name="int16").wait()
    assert torch.equal(tensor, stacked(dtype=torch.int16).sum(0).to(torch.int16))
    tensor = numbers(rank, dtype=torch.int32)
    group.allreduce(tensor, name="or", op=tr.ReduceOp.BOR).wait()
    wanted = numbers(0, dtype=torch.int32)
    for of in range(1, size):
        wanted |= numbers(of, dtype=torch.int32)
    assert torch.equal(tensor, wanted)
    try:
        group.allreduce(torch.ones(LARGE, dtype=torch.bool), name="average", op=tr.ReduceOp.AVG).wait()
    except tr.UnsupportedError:
        pass
    else:
        raise AssertionError("an average of bool")


@case
def the_order_of_the_sum():
    """Values of which each order of the sum has other bits: those of all ranks are equal, and of each run."""
    runs = []
    for dtype in (torch.float32, torch.bfloat16):
        for _ in range(2):
            tensor = torch.randn(LARGE, generator=torch.Generator().manual_seed(rank)).to(dtype)
            exact = sum(torch.randn(LARGE, generator=torch.Generator().manual_seed(of)).double() for of in range(size))
            group.allreduce(tensor, name="order").wait()
            same_bits(tensor)
            runs.append(tensor)
            assert torch.allclose(tensor.double(), exact, rtol=torch.finfo(dtype).eps * 4, atol=0.1)
        assert torch.equal(runs[-1], runs[-2])


@case
def any_order():
    """Many at once, in another order on each rank, in tensors that are not contiguous, and small ones between."""
    tensors = {f"t{index}": numbers(rank, LARGE - index, seed=index) for index in range(8)}
    tensors["transposed"] = numbers(rank, 600 * 500, seed=9).view(600, 500).t()
    tensors["small"] = numbers(rank, 10, seed=10)
    names = sorted(tensors)
    works = {name: group.allreduce(tensors[name], name=name) for name in names[rank:] + names[:rank]}
    for work in works.values():
        work.wait()
    for index in range(8):
        assert torch.equal(tensors[f"t{index}"], stacked(count=LARGE - index, seed=index).sum(0))
    assert torch.equal(tensors["transposed"].t().reshape(-1), stacked(count=600 * 500, seed=9).sum(0))
    assert torch.equal(tensors["small"], stacked(count=10, seed=10).sum(0))


@case
def everything_else():
    """Other collectives, prepared operations, named schedules and barriers go through the engine."""
    root, mine = size - 1, numbers(rank)
    assert torch.equal(group.broadcast(numbers(rank), root=root).wait(), numbers(root))
    blocks = [torch.empty(LARGE) for _ in range(size)]
    group.allgather(blocks, mine).wait()
    assert torch.equal(torch.stack(blocks), stacked())
    part = torch.empty(LARGE)
    group.reduce_scatter(part, [mine] * size, op=tr.ReduceOp.MAX).wait()
    assert torch.equal(part, stacked().amax(0))
    prepared = group.prepare_allreduce(mine, name="prepared")
    for round_ in range(2):
        mine.copy_(numbers(rank, seed=round_))
        prepared.start().wait()
        assert torch.equal(mine, stacked(seed=round_).sum(0))
    tensor = numbers(rank)
    group.allreduce(tensor, name="ring", schedule="ring").wait()
    assert torch.equal(tensor, stacked().sum(0))
    group.barrier()
    assert group.allgather_object(rank) == list(range(size))


@case
def subgroups():
    """A subgroup is a mesh if its hosts have several ranks each; else the engine does all."""
    for members in (range(size - 1, -1, -1), range(0, size, PER_HOST), range(PER_HOST), range(size - 1)):
        listed = list(members)
        if rank in listed:
            part = group.subgroup(listed)
            counts = {sum(of // PER_HOST == host for of in listed) for host in range(size // PER_HOST)} - {0}
            assert (part.coordinator is not None) == (len(counts) == 1 and counts != {1}), listed
            tensor = numbers(rank)
            part.allreduce(tensor, name="part").wait()
            assert torch.equal(tensor, torch.stack([numbers(of) for of in listed]).sum(0)), listed
            part.close()
        group.barrier()


@case
def bytes_between_hosts():
    """Each rank sends its part's share to other hosts, and nothing else: S / L on two hosts, each way."""
    tensor = torch.ones(1 << 21)
    hosts = size // PER_HOST
    for start in (lambda: group.allreduce(tensor, name="counted").wait(), planned(tensor)):
        start()
        group.barrier()
        before = group.statistics()
        group.barrier()  # only now may another rank send
        start()
        group.barrier()
        after = group.statistics()
        group.barrier()
        share = 2 * (hosts - 1) / hosts * tensor.nbytes / PER_HOST
        for kind in ("bytes_sent", "bytes_received"):
            moved = getattr(after, kind) - getattr(before, kind)
            assert share <= moved <= 1.01 * share + 20_000, (kind, moved, share)


def planned(tensor):
    stream = group.planned(["planned"])

    def start():
        stream.begin()
        stream.submit(0, tensor, op=tr.ReduceOp.SUM, priority=0).wait()

    return start


@case
def training():
    """``DistributedOptimizer`` has the parameters of one process with the whole batch, in buckets of both kinds."""
    torch.manual_seed(7)
    whole = torch.nn.Sequential(torch.nn.Linear(40, 3001), torch.nn.Tanh(), torch.nn.Linear(3001, 5)).double()
    mine = torch.nn.Sequential(torch.nn.Linear(40, 3001), torch.nn.Tanh(), torch.nn.Linear(3001, 5)).double()
    mine.load_state_dict(whole.state_dict())
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    optimizer = tr.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1), mine, group=group)
    batches = torch.randn(3, 4 * size, 40, dtype=torch.float64)
    for batch in batches:
        for model, part, steps in ((whole, batch, reference), (mine, batch[rank * 4 : rank * 4 + 4], optimizer)):
            steps.zero_grad()
            model(part).square().mean().backward()
            steps.step()
    optimizer.close()
    for ours, theirs in zip(mine.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
        same_bits(ours.detach())


@case
def mismatches():
    """Ranks that pass different shapes or reductions get ``MismatchError``, and go on."""
    for tensor, op in (
        (numbers(rank, LARGE + rank), tr.ReduceOp.SUM),
        (numbers(rank), (tr.ReduceOp.SUM, tr.ReduceOp.MAX)[rank > 0]),
    ):
        try:
            group.allreduce(tensor, name="different", op=op).wait()
        except tr.MismatchError:
            pass
        else:
            raise AssertionError("no mismatch")


if __name__ == "__main__":
    torch.set_num_threads(1)
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    here = transports.host_identity()
    transports.host_identity = lambda: f"{here}/{rank // PER_HOST}"
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    group = tr.init(inner="gloo", timeout_s=60)
    print(json.dumps({"event": "ready", "coordinated": group.coordinator is not None}), flush=True)
    for line in sys.stdin:
        failure = None
        try:
            CASES[line.strip()]()
        except BaseException:
            failure = traceback.format_exc()
        print(json.dumps({"event": "case", "failure": failure}), flush=True)
    group.close()
    dist.destroy_process_group()
