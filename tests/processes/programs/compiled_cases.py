"""``torch.compile`` around the library, case by case; ``tests/processes/test_compiled.py`` starts this.

The names of the cases are read from the variable CASES. Every case runs twice and returns tensors: on gloo and on our
back end, or, where gloo has no part in it, as it is and compiled. One line of JSON per case says how they compare.
"""

import contextlib
import functools
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import totalreduce as tr

LIBRARY = Path(tr.__path__[0])
COMPILERS = ("inductor", "aot_eager", "eager")
ON_BACK_ENDS, AS_IT_IS = {}, {}


def on_back_ends(function):
    """A case that gets a process group."""
    ON_BACK_ENDS[function.__name__] = function
    return function


def as_it_is(function):
    """A case that gets ``torch.compile``, or what leaves functions and modules as they are."""
    AS_IT_IS[function.__name__] = function
    return function


class Block(torch.nn.Module):
    # Dynamo takes up no module of torch's own by itself, so a Sequential would not be compiled within DDP.
    def __init__(self, before, after):
        super().__init__()
        self.linear = torch.nn.Linear(before, after)

    def forward(self, inputs):
        return torch.nn.functional.gelu(self.linear(inputs))


class Model(torch.nn.Module):
    def __init__(self, width=33, unused=False, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = Block(16, width)
        self.second = torch.nn.BatchNorm1d(width) if norm else Block(width, width)
        self.third = torch.nn.Linear(width, 16)
        self.unused = torch.nn.Linear(3, 3) if unused else None
        self.double()

    def forward(self, inputs):
        return self.third(self.second(self.first(inputs)))


def batches(number):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(8, 16, generator=generator, dtype=torch.float64) for _ in range(number)]


def loss_of(model, inputs):
    return ((model(inputs) - inputs) ** 2).mean()


def gradients(called, model, passes=1, no_sync=contextlib.nullcontext):
    """Gradients of three steps, equal on all ranks; ``passes`` backward passes each, of which the last one reduces."""
    found = []
    for step in range(3):
        for number, inputs in enumerate(batches(3 * passes)[step * passes : (step + 1) * passes]):
            with no_sync() if number + 1 < passes else contextlib.nullcontext():
                loss_of(called, inputs).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
                found.append(whole.detach().clone())
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return found


def sharded(model, group, compiler=None):
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in (model.first, model.second, model.third):
        if compiler is not None:
            layer.compile(backend=compiler)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compiled_ddp(group, compiler, passes=1, width=33, unused=False, norm=False, **options):
    model = Model(width, unused, norm)
    replica = DistributedDataParallel(model, process_group=group, **options)
    return gradients(torch.compile(replica, backend=compiler), model, passes, replica.no_sync)


def ddp_of_compiled(group, compiler):
    model = Model()
    replica = DistributedDataParallel(torch.compile(model, backend=compiler), process_group=group)
    return gradients(replica, model, 2, replica.no_sync)


def compiled_fsdp(group, compiler):
    model = sharded(Model(), group)
    return gradients(torch.compile(model, backend=compiler), model)


def fsdp_of_compiled(group, compiler):
    model = sharded(Model(), group, compiler)
    return gradients(model, model)


def functional_collectives(group, compiler):
    size, rank = dist.get_world_size(group), dist.get_rank(group)

    @torch.compile(backend=compiler, fullgraph=True)
    def exchange(own):
        total = functional.all_reduce(own * 2, "sum", group)
        everything = functional.all_gather_tensor(total + rank, 0, group)
        share = functional.reduce_scatter_tensor(everything * 3, "sum", 0, group)
        turned = functional.all_to_all_single(everything * own.sum(), None, None, group)
        given = functional.broadcast(own + 1, size - 1, group)
        several = functional.all_reduce_coalesced([own, total], "sum", group)
        gathered = functional.all_gather_into_tensor_coalesced([own, share], group)
        scattered = functional.reduce_scatter_tensor_coalesced([everything, turned], "sum", [0, 0], group)
        return [part.sin() for part in (total, everything, share, turned, given, *several, *gathered, *scattered)]

    return exchange(torch.arange(6.0).reshape(3, 2) + rank)


def plain_collectives(group, compiler):
    size, rank = dist.get_world_size(group), dist.get_rank(group)

    @torch.compile(backend=compiler, fullgraph=True)
    def exchange(own):
        total = own * 2
        dist.all_reduce(total, group=group)
        everything = own.new_empty(3 * size, 2)
        dist.all_gather_into_tensor(everything, total + rank, group=group)
        share = torch.empty_like(own)
        dist.reduce_scatter_tensor(share, everything * own.sum(), group=group)
        turned = torch.empty_like(everything)
        dist.all_to_all_single(turned, everything * own.sum(), group=group)
        listed = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(listed, own - 1, group=group)
        return [part.sin() for part in (total, everything, share, turned, *listed)]

    return exchange(torch.arange(6.0).reshape(3, 2) + rank)


for compiler in COMPILERS:
    for case in (compiled_ddp, ddp_of_compiled, compiled_fsdp, fsdp_of_compiled):
        ON_BACK_ENDS[f"{case.__name__}_{compiler}"] = functools.partial(case, compiler=compiler)
    for case in (functional_collectives, plain_collectives):
        ON_BACK_ENDS[f"{case.__name__}_{compiler}"] = functools.partial(case, compiler=compiler)


@on_back_ends
def graphs_split_at_buckets(group):
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    found = compiled_ddp(group, keep, width=500, bucket_cap_mb=1)
    assert len(graphs) == 2, len(graphs)
    return found


@on_back_ends
def static_graph(group):
    return compiled_ddp(group, "aot_eager", static_graph=True)


@on_back_ends
def unused_parameters(group):
    return compiled_ddp(group, "aot_eager", unused=True, find_unused_parameters=True)


@on_back_ends
def accumulation(group):
    return compiled_ddp(group, "aot_eager", passes=3)


@on_back_ends
def buffers_are_broadcast(group):
    return compiled_ddp(group, "aot_eager", norm=True)


@on_back_ends
def whole_steps(group):
    """Forward, backward and optimizer in one compiled function: DDP's hooks run in a thread where Dynamo is active."""
    model = Model()
    replica = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @torch.compile(backend="eager")
    def step(inputs):
        optimizer.zero_grad()
        loss_of(replica, inputs).backward()
        optimizer.step()

    for inputs in batches(3):
        step(inputs)
    return [parameter.detach() for parameter in model.parameters()]


@on_back_ends
def reducer_in_python(group):
    model = Model()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True):
        replica = DistributedDataParallel(model, process_group=group)
        called, found = torch.compile(replica, backend="aot_eager"), []

        @torch.compile(backend="aot_eager")
        def step(inputs):
            loss_of(called, inputs).backward()

        for inputs in batches(2):
            step(inputs)
            found += [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
    return found


@on_back_ends
def collectives_between_graphs(group):
    """What Dynamo has no graph for: handles, futures, messages, barriers."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)

    @torch.compile(backend="aot_eager")
    def exchange(own):
        given = own * 2
        dist.broadcast(given, 0, group=group)
        given = given + 1
        dist.barrier(group)
        total = given * (rank + 1)
        dist.all_reduce(total, group=group, async_op=True).wait()
        received = torch.zeros_like(total)
        right, left = (rank + 1) % size, (rank - 1) % size
        operations = [dist.P2POp(dist.irecv, received, left, group), dist.P2POp(dist.isend, own, right, group)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        future = dist.all_reduce(given, group=group, async_op=True).get_future()
        sines = future.then(lambda done: done.value()[0].sin()).wait()
        return given.cos(), total.sin(), received.sin(), sines

    return exchange(torch.arange(6.0).reshape(3, 2) + rank)


@as_it_is
def own_collectives(compiled):
    group = dist.group.WORLD.group

    @compiled
    def exchange(own):
        total = own * 2
        group.allreduce(total).wait()
        work = group.allreduce(total.sin(), name="sines")
        group.barrier().wait()
        return total.cos(), work.wait()

    return [part for _ in range(3) for part in exchange(torch.arange(5.0) + dist.get_rank())]


@as_it_is
def a_monitored_barrier(compiled):
    @compiled
    def exchange(own):
        total = own * 2
        dist.monitored_barrier()
        return total + 1

    return [exchange(torch.ones(3))]


@as_it_is
def a_sparse_hook_in_whole_steps(compiled):
    model = Model()
    replica = DistributedDataParallel(model)
    state, hook = tr.ddp_hook(tr.OkTopk(density=0.5))
    replica.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward = compiled(lambda inputs: loss_of(replica, inputs).backward())
    step = compiled(optimizer.step)
    for number, inputs in enumerate(batches(5)):
        optimizer.zero_grad()
        backward(inputs)
        if number != 3:  # its residuals go back
            step()
    state.close()
    return [each for parameter in model.parameters() for each in (parameter, parameter.grad)]


@as_it_is
def the_optimizer_in_whole_steps(compiled):
    model, group = Model(), dist.group.WORLD.group
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = tr.DistributedOptimizer(inner, model, group=group, overlap="iterations", name=f"of {compiled.__name__}")

    @compiled
    def step(inputs):
        optimizer.zero_grad()
        loss_of(model, inputs).backward()
        optimizer.step()

    for inputs in batches(3):
        step(inputs)
    optimizer.flush()
    return [parameter.detach() for parameter in model.parameters()]


@as_it_is
def synchronised_batch_norm(compiled):
    model = tr.convert_sync_batchnorm(Model(norm=True), dist.group.WORLD.group, name=f"of {compiled.__name__}")
    return gradients(compiled(model), model)


def unchanged(target):
    return target


def compiled(target):
    return torch.compile(target, backend="eager")


def run(call):
    """What a case returned, how many graphs Dynamo made meanwhile, and which files of the library it traced."""
    torch._dynamo.reset()
    counters.clear()
    found = [tensor.detach() for tensor in call()]
    codes = [reference() for reference in convert_frame.input_codes.seen]
    files = {Path(code.co_filename) for code in codes if code is not None}
    traced = sorted(str(file.relative_to(LIBRARY)) for file in files if file.is_relative_to(LIBRARY))
    return found, counters["stats"]["unique_graphs"], traced


def difference(expected, found):
    """The largest one of any two elements, in units of the largest expected element."""
    assert len(expected) == len(found)
    return max(
        ((one - other).abs().max() / one.abs().max().clamp_min(1e-30)).item()
        for one, other in zip(expected, found, strict=True)
    )


def agree(tensors):
    """Whether all ranks have the same bits."""
    digest = hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    return len(set(digests)) == 1


def main():
    dist.init_process_group("totalreduce")
    gloo, ours = dist.new_group(backend="gloo"), dist.group.WORLD
    for name in json.loads(os.environ["CASES"]):
        if name in ON_BACK_ENDS:
            first, second = (functools.partial(ON_BACK_ENDS[name], group) for group in (gloo, ours))
        else:
            first, second = (functools.partial(AS_IT_IS[name], wrap) for wrap in (unchanged, compiled))
        expected, *_ = run(first)
        found, graphs, traced = run(second)
        facts = {"graphs": graphs, "traced": traced, "difference": difference(expected, found), "agree": agree(found)}
        print(json.dumps({"event": "case", "name": name, **facts}), flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo may abort when Python ends


if __name__ == "__main__":
    main()
