"""What ``make gpu`` runs: each function is one check, run by every rank of a job of its own (see ``run.py``).

    python tests/gpu/programs.py NAME FIGURES.json [--device cpu] [--small]

A check asserts values, and rank 0 writes its figures as JSON. With ``--device cpu`` the same code runs without a GPU,
so that the checks themselves are tested where there is none.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import totalreduce as tr  # also makes the name of the back end known where the package is not installed

MIB = 1 << 20
BACK_ENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:gloo"}


#: The checks, by name.
CHECKS = {}


def check(function):
    """Make a check known."""
    CHECKS[function.__name__] = function
    return function


class Skipped(Exception):
    """The check cannot run here; the text says why."""


class Rank:
    """This rank's device and sizes."""

    def __init__(self, device, small):
        self.device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        self.small = small
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def wait(self):
        """Wait until the device has ended its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work, rounds=7):
        """The median time of a function, in seconds, with the work that it queues on the device."""
        times = []
        for _ in range(rounds + 2):
            self.wait()
            begin = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[2:])

    def device_seconds(self, work, rounds=7):
        """The median time between the beginning and the end of a function's kernels on the device, in seconds."""
        if self.device.type != "cuda":
            return self.seconds(work, rounds)
        times = []
        for _ in range(rounds + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(100_000)  # the first kernel is queued when this ends, so no launch is timed
            begin.record()
            work()
            end.record()
            self.wait()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times[2:])

    def model(self):
        """A multi-layer perceptron, equal on all ranks."""
        width = 64 if self.small else 2048
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        return torch.nn.Sequential(*layers, torch.nn.Linear(width, 8)).to(self.device)

    def batch(self, rank=None):
        """Inputs, which differ between ranks; by default those of this rank."""
        generator = torch.Generator().manual_seed(1 + (self.rank if rank is None else rank))
        width = 64 if self.small else 2048
        return torch.randn(16 if self.small else 512, width, generator=generator).to(self.device)

    @functools.cached_property
    def inputs(self):
        """This rank's batch."""
        return self.batch()

    def backward(self, model):
        """Compute the gradients of this rank's batch."""
        model.zero_grad()
        model(self.inputs).float().square().mean().backward()

    def train(self, model, optimizer, rounds=5):
        """The median time of a training step, in seconds. The loss must fall."""
        losses = []

        def step():
            optimizer.zero_grad()
            loss = model(self.inputs).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        seconds = self.seconds(step, rounds)
        assert losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]}"
        return seconds

    def check_equal(self, tensors, what):
        """Check that the tensors have the same bits on all ranks."""
        for number, tensor in enumerate(tensors):
            mine = tensor.detach().contiguous().view(-1).view(torch.uint8)
            theirs = mine.clone()
            dist.broadcast(theirs, 0)
            assert torch.equal(mine, theirs), f"{what}: tensor {number} differs between ranks 0 and {self.rank}"


@check
def plain(here):
    """Under plain ``tr.init()``, device tensors have the bits of host tensors, and no call waits for a kernel."""
    group = tr.init()
    count = (1 if here.small else 16) * MIB // 4

    def values(device):
        generator = torch.Generator().manual_seed(here.rank)
        return torch.randn(count, generator=generator).to(device)

    def same(operation, outputs=1):
        both = []
        for device in ("cpu", here.device):
            out = torch.zeros(outputs * count, device=device)
            operation(out, values(device))
            both.append(out.cpu())
        assert torch.equal(*both)

    def reduce(out, x, op=tr.ReduceOp.SUM):
        out.copy_(x)
        group.allreduce(out, name="reduce", op=op).wait()

    for op in (tr.ReduceOp.SUM, tr.ReduceOp.AVG, tr.ReduceOp.MAX):
        same(functools.partial(reduce, op=op))
    same(lambda out, x: group.allgather(out, x, name="gather").wait(), here.size)
    same(lambda out, x: group.reduce_scatter(out[: count // here.size], x, name="scatter").wait())
    same(lambda out, x: group.broadcast(out.copy_(x), root=here.size - 1, name="spread"))
    figures, calls_s = {}, []
    for name, device in (("host", "cpu"), ("device", here.device)):
        x = values(device)
        figures[f"allreduce of {count * 4 // MIB} MiB, {name} tensor, ms"] = 1e3 * here.seconds(
            lambda x=x, name=name: group.allreduce(x, name=f"timed {name}", op=tr.ReduceOp.AVG).wait()
        )
    if here.device.type == "cuda":
        for _ in range(10):
            x = values(here.device)
            here.wait()
            torch.cuda._sleep(50_000_000)  # some 30 ms, after which the tensor has its values
            x.mul_(1)
            begin = time.perf_counter()
            work = group.allreduce(x, name="call")
            calls_s.append(time.perf_counter() - begin)
            work.wait()
        figures["call of allreduce behind a kernel of 30 ms, µs"] = 1e6 * statistics.median(calls_s)
        assert statistics.median(calls_s) < 0.005, f"the call waits for the kernel: {calls_s}"
    for name, sync in (("dense", None), ("Ok-Topk", tr.OkTopk(density=0.01)), ("DiLoCo", tr.DiLoCo(period=2))):
        seconds, parameters = _train(here, group, sync, 4)
        figures[f"step of DistributedOptimizer, {name}, ms"] = 1e3 * seconds
        for number, parameter in enumerate(parameters):
            theirs = parameter.detach().clone()
            group.broadcast(theirs, root=0, name="compare")
            if name != "DiLoCo":
                assert torch.equal(theirs, parameter), f"{name}: parameter {number} differs between ranks"
    group.close()
    return figures


@check
def staging(here):
    """Collectives of CUDA tensors through pinned memory, alone and beside matrix products."""
    dist.init_process_group("totalreduce")
    figures = {}
    for mib in (1,) if here.small else (1, 16, 64):
        tensor = torch.empty(mib * MIB // 4, device=here.device)
        host = torch.empty_like(tensor, device="cpu", pin_memory=here.device.type == "cuda")
        tensor.fill_(here.rank + 1)
        tensor.mul_(2)  # queued before: the copy must wait for it
        dist.all_reduce(tensor)
        assert (tensor == here.size * (here.size + 1)).all(), "the sum is wrong"
        figures[f"allreduce of {mib} MiB, ms"] = 1e3 * here.seconds(lambda t=tensor: dist.all_reduce(t))
        figures[f"copy of {mib} MiB to the host, ms"] = 1e3 * here.seconds(lambda t=tensor, h=host: h.copy_(t))
    gloo = dist.new_group(backend="gloo")
    for mib in (1,) if here.small else (1, 16, 64):
        tensor = torch.ones(mib * MIB // 4, device=here.device)
        figures[f"allreduce of {mib} MiB on gloo, ms"] = 1e3 * here.seconds(
            lambda t=tensor: dist.all_reduce(t, group=gloo)
        )
    width, repeats = (128, 4) if here.small else (4096, 24)
    left, right = torch.randn(width, width, device=here.device), torch.randn(width, width, device=here.device)
    buckets = [torch.ones(MIB // 4 if here.small else 4 * MIB, device=here.device) for _ in range(4)]

    def compute():
        for _ in range(repeats):
            torch.mm(left, right)

    def communicate():
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()

    def both():
        works = []
        for bucket in buckets:
            works.append(dist.all_reduce(bucket, async_op=True))
            for _ in range(repeats // len(buckets)):
                torch.mm(left, right)
        for work in works:
            work.wait()

    alone, sent, together = here.seconds(compute), here.seconds(communicate), here.seconds(both)
    figures |= {"matrix products, ms": 1e3 * alone, "4 allreduces, ms": 1e3 * sent, "both, ms": 1e3 * together}
    figures["hidden share of the shorter"] = (alone + sent - together) / min(alone, sent)
    return figures


@check
def ddp(here):
    """DistributedDataParallel on the back end "totalreduce", against gradients of one process; beside it on gloo."""
    dist.init_process_group("totalreduce")
    figures = {}
    reference = here.model()
    parameters = list(reference.parameters())
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for rank in range(here.size):
        gradients = torch.autograd.grad(reference(here.batch(rank)).square().mean(), parameters)
        for wanted, gradient in zip(total, gradients, strict=True):
            wanted += gradient / here.size
    model = torch.nn.parallel.DistributedDataParallel(here.model(), bucket_cap_mb=4)
    figures["step of DDP, ms"] = 1e3 * here.seconds(lambda: here.backward(model))
    with model.no_sync():
        figures["step without exchange, ms"] = 1e3 * here.seconds(lambda: here.backward(model))
    here.backward(model)
    for wanted, parameter in zip(total, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)
    here.check_equal([parameter.grad for parameter in model.parameters()], "DDP's gradients")
    gloo = dist.new_group(backend="gloo")
    other = torch.nn.parallel.DistributedDataParallel(here.model(), bucket_cap_mb=4, process_group=gloo)
    figures["step of DDP on gloo, ms"] = 1e3 * here.seconds(lambda: here.backward(other))
    return figures


@check
def ddp_hook(here):
    """The sparse hook of DDP, over "totalreduce" and over gloo: gradients and residuals lose nothing."""
    figures = {}
    for backend in ("totalreduce", BACK_ENDS[here.device.type]):
        dist.init_process_group(backend, timeout=timedelta(seconds=60))
        model = torch.nn.parallel.DistributedDataParallel(here.model(), bucket_cap_mb=4)
        state, hook = tr.ddp_hook(tr.OkTopk(density=0.01))
        model.register_comm_hook(state, hook)
        inputs = here.batch()
        plain = here.model()
        wanted = torch.autograd.grad(plain(inputs).square().mean(), list(plain.parameters()))
        model(inputs).square().mean().backward()
        # The sum of all ranks' gradients is the sum of what was applied and of what the ranks keep.
        kept = state.state_dict(model)["residuals"]
        for (name, parameter), gradient in zip(plain.named_parameters(), wanted, strict=True):
            applied = model.module.get_parameter(name).grad * here.size
            mine = kept[name] if name in kept else torch.zeros_like(parameter)
            parts = torch.stack([gradient, mine]).cpu()
            dist.all_reduce(parts)
            torch.testing.assert_close(applied.cpu(), parts[0] - parts[1], rtol=1e-3, atol=1e-5)

        name = "totalreduce" if backend == "totalreduce" else "gloo"
        figures[f"step with Ok-Topk on {name}, ms"] = 1e3 * here.seconds(
            lambda model=model: here.backward(model), rounds=5
        )
        here.check_equal([parameter.grad for parameter in model.parameters()], f"gradients on {name}")
        state.close()
        # The destructor of a gloo group joins the group's threads without giving up Python's lock (torch 2.13). A
        # thread that has carried out a collective needs the lock once more, to let go of the tensors: give it time.
        time.sleep(0.5)
        dist.destroy_process_group()
    return figures


def _train(here, group, sync, steps):
    """Train with ``DistributedOptimizer``; return the time of a step and the parameters."""
    model = here.model()
    tr.broadcast_parameters(model, group)
    options = {} if sync is None else {"sync": sync}
    optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, group=group, **options)
    return here.train(model, optimizer, steps), list(model.parameters())


def _native(here, backend):
    """Native collectives of a library, and ``DistributedOptimizer`` over it, dense and sparse."""
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=60))
        probe = torch.ones(1, device=here.device)
        dist.all_reduce(probe)
        here.wait()
    except (RuntimeError, ValueError) as error:
        raise Skipped(str(error).strip().splitlines()[-1]) from error
    group = tr.init(transport="torch", coordination="measure")
    config = group.coordinator.config
    figures = {"measured: fusion, MiB": config.fusion_bytes / MIB, "measured: cycle, ms": 1e3 * config.cycle_s}
    assert 1 <= figures["measured: fusion, MiB"] <= 128
    tensors = [torch.full((1000 + number,), float(here.rank + number), device=here.device) for number in range(8)]
    order = range(8) if here.rank % 2 else reversed(range(8))  # ranks submit in different orders
    works = [group.allreduce(tensors[number], name=f"tensor {number}") for number in order]
    for work in works:
        work.wait()
    ranks = sum(range(here.size))
    for number, tensor in enumerate(tensors):
        assert (tensor == ranks + number * here.size).all(), f"the sum of tensor {number} is wrong"
    mine = torch.full((here.rank + 1, 2), float(here.rank), device=here.device)
    gathered = group.coordinator.allgather(mine, name="rows").wait()
    assert gathered.device == here.device
    assert gathered[:, 0].tolist() == [float(rank) for rank in range(here.size) for _ in range(rank + 1)]
    for name, sync in (("dense", None), ("Ok-Topk", tr.OkTopk(density=0.01))):
        seconds, parameters = _train(here, group, sync, 5)
        figures[f"step of DistributedOptimizer, {name}, ms"] = 1e3 * seconds
        here.check_equal([parameter.to(here.device) for parameter in parameters], f"parameters, {name}")
    group.close()
    return figures


@check
def optimizer_gloo(here):
    """``DistributedOptimizer`` with parameters on the GPU, over gloo; ``coordination="measure"``."""
    return _native(here, BACK_ENDS[here.device.type])


@check
def optimizer_staged(here):
    """The same over the back end "totalreduce"."""
    return _native(here, "totalreduce")


@check
def nccl(here):
    """The same over NCCL."""
    if not dist.is_nccl_available():
        raise Skipped("this build of torch has no NCCL")
    return _native(here, "nccl")


@check
def selection(here):
    """Adding the residual and listing the large elements, in order, against the memory's bandwidth."""
    try:
        from totalreduce.kernels import device_triton
    except ImportError as error:
        raise Skipped(f"Triton is not installed: {error}") from error
    if here.device.type == "cpu" and "TRITON_INTERPRET" not in os.environ:
        raise Skipped("without a GPU Triton's kernels run only in its interpreter: set TRITON_INTERPRET=1")
    n = 20_000 if here.small else 1 << 28
    gradient, residual = torch.randn(n, device=here.device), torch.randn(n, device=here.device)
    bound, usual = (
        int(torch.quantile(values[: 1 << 20].abs(), 0.99).cpu().view(torch.int32))  # a hundredth is selected
        for values in (gradient[: 1 << 20] + residual[: 1 << 20], residual)
    )
    room = n // 50
    found = device_triton.accumulate(gradient.clone(), residual, 1.0, bound, room)
    total = gradient + residual
    places = ((total.view(torch.int32) & 0x7FFFFFFF) >= bound).nonzero().squeeze(1)
    assert found.complete
    assert torch.equal(found.indices, places)
    assert torch.equal(found.values, total[places])
    target = torch.empty_like(gradient)
    # A factor of zero keeps the sums finite however often the selection is repeated.
    selected = here.device_seconds(lambda: device_triton.accumulate(gradient, residual, 0.0, usual, room))
    copied = here.device_seconds(lambda: target.copy_(residual))
    figures = {
        "selection, GB/s": 12 * n / selected / 1e9,
        "copy, GB/s": 8 * n / copied / 1e9,
        "selection / copy": 12 * copied / (8 * selected),
    }
    if here.device.type == "cuda":
        properties = torch.cuda.get_device_properties(here.device)
        clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
        if clock and width:  # kHz and bits; two transfers in a cycle
            figures["selection / nominal bandwidth"] = 12 * n / selected / (2e3 * clock * width / 8)
        share = figures.get("selection / nominal bandwidth", figures["selection / copy"])
        assert share >= 0.7, f"the selection reaches {share:.0%} of the memory's bandwidth, not 70%: {figures}"
    return figures


@check
def collectives(here):
    """Every collective of c10d with tensors of the device, against the same collective with host tensors."""
    dist.init_process_group("totalreduce")
    generator = torch.Generator().manual_seed(here.rank)
    size, streams = here.size, [torch.cuda.Stream() for _ in range(3)] if here.device.type == "cuda" else [None]
    rows = 3 if here.small else 50_000

    def compare(what, call, *inputs):
        """``call`` gets inputs and returns what it has written, in the memory of the host and of the device."""
        expected = call(*[each.clone() for each in inputs])
        moved = [each.to(here.device) for each in inputs]
        for stream in streams:
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                # On the side stream these copies come late, so a collective that does not wait reads zeros.
                fresh = [torch.zeros_like(each) for each in moved]
                if stream is not None:
                    stream.wait_stream(torch.cuda.default_stream())
                    torch.cuda._sleep(2_000_000)
                for target, each in zip(fresh, moved, strict=True):
                    target.copy_(each)
                found = call(*fresh)
                results = [each.clone() for each in found]
            here.wait()
            for wanted, got in zip(expected, results, strict=True):
                assert got.device == here.device, f"{what}: on {got.device}"
                assert torch.equal(got.cpu(), wanted), f"{what}: other values than with host tensors"

    def done(work):
        work.wait()

    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool):
        values = (100 * torch.randn(rows, 2 * size, generator=generator)).to(dtype)
        operations = (dist.ReduceOp.MAX,) if dtype == torch.bool else (dist.ReduceOp.SUM, dist.ReduceOp.MIN)
        for op in operations:

            def all_reduce(t, op=op):
                dist.all_reduce(t, op)
                return [t]

            def transposed(t, op=op):
                view = t.t()[::2]
                done(dist.all_reduce(view, op, async_op=True))
                return [t]

            def reduce_scatter(t, op=op):
                output = torch.empty(rows, 2, dtype=t.dtype, device=t.device)
                dist.reduce_scatter_tensor(output, t.reshape(size * rows, 2), op)
                return [output]

            compare(f"all_reduce of {dtype}, {op}", all_reduce, values)
            compare(f"all_reduce of a view of {dtype}, {op}", transposed, values)
            compare(f"reduce_scatter_tensor of {dtype}, {op}", reduce_scatter, values)

        def gathered(t):
            parts = [torch.empty_like(t) for _ in range(size)]
            dist.all_gather(parts, t)
            whole = torch.empty(size * rows, 2 * size, dtype=t.dtype, device=t.device)
            done(dist.all_gather_into_tensor(whole, t, async_op=True))
            return [*parts, whole]

        def exchanged(t):
            output = torch.empty_like(t)
            dist.all_to_all_single(output.view(-1), t.view(-1))
            parts = [torch.empty(rows, 2, dtype=t.dtype, device=t.device) for _ in range(size)]
            dist.all_to_all(parts, [part.contiguous() for part in t.split(2, dim=1)])
            return [output, *parts]

        def rooted(t):
            dist.broadcast(t, size - 1)
            parts = [torch.empty_like(t) for _ in range(size)] if here.rank == 0 else None
            dist.gather(t, parts, 0)
            share = torch.empty_like(t)
            dist.scatter(share, parts, 0)
            return [t, share, *(parts or [])]

        def messages(t):
            received = torch.empty_like(t)
            ahead, behind = (here.rank + 1) % size, (here.rank - 1) % size
            pairs = [dist.P2POp(dist.isend, t, ahead), dist.P2POp(dist.irecv, received, behind)]
            for work in dist.batch_isend_irecv(pairs):
                work.wait()
            return [received]

        for call in (gathered, exchanged, rooted, messages):
            compare(f"{call.__name__} of {dtype}", call, values)
    coalesced = [torch.full((number,), float(here.rank), device=here.device) for number in range(5)]
    with dist._coalescing_manager(async_ops=False):
        for tensor in coalesced:
            dist.all_reduce(tensor)
    for tensor in coalesced:
        assert (tensor == sum(range(size))).all()
    here.check_equal([torch.cat([tensor.flatten() for tensor in coalesced])], "a coalesced allreduce")
    return {}


@check
def fsdp(here):
    """FSDP2 over "totalreduce": the losses are those of one process with the joint batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    figures = {}
    dist.init_process_group("totalreduce")
    mesh = init_device_mesh(here.device.type, (here.size,))
    for name, policy in (
        ("float32", MixedPrecisionPolicy()),
        ("bfloat16", MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    ):
        model, alone = here.model(), here.model()
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, alone)]
        tolerance = 1e-4 if name == "float32" else 5e-2
        for _ in range(4):
            mine = model(here.batch()).float().square().mean()
            mine.backward()
            total = mine.detach().clone()
            dist.all_reduce(total)
            wanted = sum(alone(here.batch(rank)).square().mean() for rank in range(here.size)) / here.size
            wanted.backward()
            torch.testing.assert_close(total / here.size, wanted.detach(), rtol=tolerance, atol=1e-5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        figures[f"step of FSDP2, {name}, ms"] = 1e3 * here.seconds(lambda model=model: here.backward(model))
    return figures


@check
def normalisation(here):
    """torch's SyncBatchNorm (needs a GPU) over "totalreduce", and ``tr.SyncBatchNorm``: values of the joint batch."""
    whole = torch.cat([here.batch(rank)[: 8 + rank] for rank in range(here.size)]).requires_grad_()
    single = torch.nn.BatchNorm1d(whole.shape[1]).to(here.device)
    single(whole).pow(3).sum().backward()
    start = sum(8 + rank for rank in range(here.rank))
    mine = slice(start, start + 8 + here.rank)

    def compare(model, what):
        inputs = whole.detach()[mine].clone().requires_grad_()
        model(inputs).pow(3).sum().backward()
        torch.testing.assert_close(inputs.grad, whole.grad[mine], rtol=1e-3, atol=1e-3, msg=lambda m: f"{what}: {m}")
        torch.testing.assert_close(model.running_var, single.running_var, rtol=1e-4, atol=1e-5)

    if here.device.type == "cuda":
        dist.init_process_group("totalreduce")
        layer = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(whole.shape[1])).to(here.device)
        compare(layer, "torch's SyncBatchNorm")
        dist.barrier()
        dist.destroy_process_group()
    dist.init_process_group(BACK_ENDS[here.device.type], timeout=timedelta(seconds=60))
    group = tr.init(transport="torch")
    layer = tr.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(whole.shape[1])), group)[0]
    compare(layer.to(here.device), "tr.SyncBatchNorm")
    group.close()
    return {}


@check
def methods(here):
    """Every sparse method and every strategy, with parameters on the device, over gloo."""
    figures = {}
    dist.init_process_group(BACK_ENDS[here.device.type], timeout=timedelta(seconds=60))
    group = tr.init(transport="torch")
    synchronous = {
        "dense": tr.Dense(),
        "TopkA": tr.TopkA(density=0.01),
        "GTopk": tr.GTopk(density=0.01),
        "TopkDSA": tr.TopkDSA(density=0.01),
        "GaussianK": tr.GaussianK(density=0.01),
        "SharedTopk": tr.SharedTopk(density=0.01),
        "PowerSGD": tr.PowerSGD(rank=4),
        "Coded, int8": tr.Coded(codec=tr.Int8()),
    }
    strategies = {
        "LocalSGD": tr.LocalSGD(period=3),
        "DiLoCo": tr.DiLoCo(period=3, codec=tr.Int8()),
        "DiLoCo, fragments": tr.DiLoCo(period=4, fragments=2, overlap=1, codec=tr.Int4()),
        "SlowMo": tr.SlowMo(period=3),
        "EASGD": tr.EASGD(period=3),
        "Gossip": tr.Gossip(),
        "AsyncGossip": tr.AsyncGossip(),
        "Strom": tr.Strom(threshold=1e-4),
        "Async": tr.Async(),
        "StaleSynchronous": tr.StaleSynchronous(slack=3),
        "SoftSync": tr.SoftSync(n=2),
        "Quorum": tr.Quorum(n=2, grace_s=0.05),
        "ParameterServer": tr.ParameterServer(),
    }
    for name, sync in (synchronous | strategies).items():
        model = here.model()
        tr.broadcast_parameters(model, group)
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model, group=group, sync=sync, name=name
        )
        figures[f"step with {name}, ms"] = 1e3 * here.train(model, optimizer)
        if name in strategies:
            optimizer.strategy_steps.finish()
        assert {parameter.device for parameter in model.parameters()} == {here.device}
        here.check_equal(list(model.parameters()), f"parameters, {name}")
        optimizer.close()
    group.close()
    return figures


@check
def states(here):
    """Parameters and optimizer states of rank 0 come to all ranks, on their device; Adasum; accumulated gradients."""
    dist.init_process_group(BACK_ENDS[here.device.type], timeout=timedelta(seconds=60))
    group = tr.init(transport="torch")
    model = here.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(here.rank)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if here.rank == 0:  # only this rank has a state
        model(here.batch()).square().mean().backward()
        adam.step()
    tr.broadcast_parameters(model, group)
    tr.broadcast_optimizer_state(adam, group)
    kept = [state[key] for state in adam.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert {tensor.device for tensor in (*kept, *model.parameters())} == {here.device}
    here.check_equal([*kept, *model.parameters()], "broadcast states")
    optimizer = tr.DistributedOptimizer(adam, model, group=group, backward_passes_per_step=2)
    optimizer.zero_grad()
    for _ in range(2):
        (model(here.batch()).square().mean() / 2).backward()
    wanted = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rank in range(here.size):
        gradients = torch.autograd.grad(model(here.batch(rank)).square().mean(), list(model.parameters()))
        for total, gradient in zip(wanted, gradients, strict=True):
            total += gradient / here.size
    optimizer.synchronize()
    for total, parameter in zip(wanted, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=1e-4, atol=1e-5)
    optimizer.step()
    optimizer.close()
    adasum = tr.AdasumOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, group=group)
    losses = []
    for _ in range(3):
        adasum.zero_grad()
        loss = model(here.batch()).square().mean()
        loss.backward()
        adasum.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    here.check_equal(list(model.parameters()), "parameters, Adasum")
    group.close()
    return {}


@check
def scaled(here):
    """Mixed precision with a ``GradScaler``: an overflow on one rank skips the step on all of them."""
    dist.init_process_group(BACK_ENDS[here.device.type], timeout=timedelta(seconds=60))
    group = tr.init(transport="torch")
    for name, sync in (("dense", None), ("Ok-Topk", tr.OkTopk(density=0.01))):
        model = here.model()
        tr.broadcast_parameters(model, group)
        options = {} if sync is None else {"sync": sync}
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model, group=group, name=name, **options
        )
        scaler = torch.amp.GradScaler(here.device.type, init_scale=256.0)
        inputs, losses = here.batch(), []
        for number in range(6):
            optimizer.zero_grad()
            with torch.autocast(
                here.device.type, dtype=torch.float16 if here.device.type == "cuda" else torch.bfloat16
            ):
                loss = model(inputs).float().square().mean()
            if number == 3 and here.rank == here.size - 1:
                loss = loss * float("inf")
            before = [parameter.detach().clone() for parameter in model.parameters()]
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert moved == (number != 3), f"{name}: step {number} moved: {moved}"
            losses.append(loss.item())
        assert scaler.get_scale() == 128.0
        assert losses[-1] < losses[0], losses
        here.check_equal(list(model.parameters()), f"parameters, {name}")
        optimizer.close()
    group.close()
    return {}


@check
def horovod(here):
    """Horovod's door with tensors of the device, without and with a process group of "totalreduce"."""
    import totalreduce.horovod as hvd

    hvd.init()
    tensor = torch.full((1000,), here.rank + 1.0, device=here.device)  # goes through the memory of the host
    assert hvd.allreduce(tensor, op=hvd.Max).tolist() == [float(here.size)] * 1000
    hvd.shutdown()
    dist.init_process_group("totalreduce")
    hvd.init()
    for dtype in (torch.float32, torch.float16, torch.int64):
        tensor = torch.arange(1000, device=here.device).to(dtype) * (here.rank + 1)
        wanted = torch.arange(1000, device=here.device).to(dtype) * sum(range(1, here.size + 1))
        found = hvd.allreduce(tensor, op=hvd.Sum, name=f"sum of {dtype}")
        assert found.device == here.device
        assert torch.equal(found, wanted)
        rows = hvd.allgather(tensor[: here.rank + 1])
        assert rows.device == here.device
        assert len(rows) == sum(range(1, here.size + 1))
    model = here.model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    figures = {"step of Horovod's optimizer, ms": 1e3 * here.train(model, optimizer)}
    everybody = hvd.allgather(torch.cat([each.detach().flatten() for each in model.parameters()])[None])
    assert all(torch.equal(everybody[0], each) for each in everybody), "the parameters differ between ranks"
    hvd.shutdown()
    dist.barrier()
    return figures


@check
def mixed(here):
    """ "cpu:totalreduce,cuda:nccl": host tensors over this library, CUDA tensors over NCCL, in one process group."""
    if here.device.type != "cuda" or not dist.is_nccl_available():
        raise Skipped("needs a GPU and NCCL")
    dist.init_process_group("cpu:totalreduce,cuda:nccl", timeout=timedelta(seconds=60))
    for device in (torch.device("cpu"), here.device):
        tensor = torch.full((1000,), here.rank + 1.0, device=device)
        dist.all_reduce(tensor)
        assert (tensor == sum(range(1, here.size + 1))).all()
    model = torch.nn.parallel.DistributedDataParallel(here.model(), device_ids=[here.device])
    figures = {"step of DDP over NCCL, ms": 1e3 * here.seconds(lambda: here.backward(model))}
    dist.barrier()
    return figures


@check
def memory(here):
    """Two thousand exchanges leave the memory of the host and of the device as it was after the first hundred."""
    import resource

    if here.device.type != "cuda":
        raise Skipped("needs a GPU")
    dist.init_process_group("totalreduce")
    tensors = [torch.ones(1000 * (number + 1), device=here.device) for number in range(20)]
    taken = []
    for number in range(100):
        for work in [dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True) for tensor in tensors]:
            work.wait()
        if number in (4, 99):
            here.wait()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            taken.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident))
    first, last = taken
    assert last[0] <= first[0], f"allocated on the device: {first[0]}, later {last[0]} bytes"
    assert last[1] <= first[1] + 4 * MIB, f"reserved on the device: {first[1]}, later {last[1]} bytes"
    assert last[2] <= first[2] + 32 * MIB, f"resident in the host: {first[2]}, later {last[2]} bytes"
    return {"host memory that 1900 exchanges added, MiB": (last[2] - first[2]) / MIB}


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CHECKS)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    here = Rank(arguments.device, arguments.small)
    try:
        outcome = {"figures": CHECKS[arguments.name](here)}
    except Skipped as reason:
        outcome = {"skipped": str(reason)}
    if here.rank == 0:
        arguments.figures.write_text(json.dumps(outcome))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
