"""What ``make gpu`` runs: each function is one check, run by every rank of a job of its own (see ``run.py``).

    python tests/gpu/programs.py NAME FIGURES.json [--device cpu] [--small]

A check asserts values, and rank 0 writes its figures as JSON. With ``--device cpu`` the same code runs without a GPU,
so that the checks themselves are tested where there is none.
"""

import argparse
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

MIB = 1 << 20
BACK_ENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:gloo"}


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

    def model(self):
        """A multi-layer perceptron, equal on all ranks."""
        width = 64 if self.small else 2048
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width), torch.nn.ReLU()] * 4
        return torch.nn.Sequential(*layers[:-1], torch.nn.Linear(width, 8)).to(self.device)

    def batch(self, rank=None):
        """Inputs, which differ between ranks; by default those of this rank."""
        generator = torch.Generator().manual_seed(1 + (self.rank if rank is None else rank))
        width = 64 if self.small else 2048
        return torch.randn(16 if self.small else 512, width, generator=generator).to(self.device)

    def check_equal(self, tensors, what):
        """Check that the tensors have the same bits on all ranks."""
        for number, tensor in enumerate(tensors):
            mine = tensor.detach().contiguous().view(-1).view(torch.uint8)
            theirs = mine.clone()
            dist.broadcast(theirs, 0)
            assert torch.equal(mine, theirs), f"{what}: tensor {number} differs between ranks 0 and {self.rank}"


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


def ddp(here):
    """DistributedDataParallel on the back end "totalreduce", against gradients of one process."""
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
    inputs = here.batch()

    def step():
        model.zero_grad()
        model(inputs).square().mean().backward()

    figures["step of DDP, ms"] = 1e3 * here.seconds(step)
    with model.no_sync():
        figures["step without exchange, ms"] = 1e3 * here.seconds(step)
    step()
    for wanted, parameter in zip(total, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)
    here.check_equal([parameter.grad for parameter in model.parameters()], "DDP's gradients")
    return figures


def ddp_hook(here):
    """The sparse hook of DDP, over "totalreduce" and over gloo: gradients and residuals lose nothing."""
    import totalreduce as tr

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

        def step(model=model, inputs=inputs):
            model.zero_grad()
            model(inputs).square().mean().backward()

        name = "totalreduce" if backend == "totalreduce" else "gloo"
        figures[f"step with Ok-Topk on {name}, ms"] = 1e3 * here.seconds(step, rounds=5)
        here.check_equal([parameter.grad for parameter in model.parameters()], f"gradients on {name}")
        state.close()
        # The destructor of a gloo group joins the group's threads without giving up Python's lock (torch 2.13). A
        # thread that has carried out a collective needs the lock once more, to let go of the tensors: give it time.
        time.sleep(0.5)
        dist.destroy_process_group()
    return figures


def _train(here, group, sync, steps):
    """Train with ``DistributedOptimizer``; return the time of a step and the parameters."""
    import totalreduce as tr

    model = here.model()
    tr.broadcast_parameters(model, group)
    options = {} if sync is None else {"sync": sync}
    optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, group=group, **options)
    inputs, losses = here.batch(), []

    def step():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    seconds = here.seconds(step, steps)
    assert losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]}"
    return seconds, list(model.parameters())


def _native(here, backend):
    """Native collectives of a library, and ``DistributedOptimizer`` over it, dense and sparse."""
    import totalreduce as tr

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


def optimizer_gloo(here):
    """``DistributedOptimizer`` with parameters on the GPU, over gloo; ``coordination="measure"``."""
    return _native(here, BACK_ENDS[here.device.type])


def nccl(here):
    """The same over NCCL."""
    if not dist.is_nccl_available():
        raise Skipped("this build of torch has no NCCL")
    return _native(here, "nccl")


def selection(here):
    """The pass that adds residuals and lists large elements, against the memory's bandwidth."""
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
    # A factor of zero keeps the sums finite however often the pass is repeated.
    one_pass = here.seconds(lambda: device_triton.launch(gradient, residual, 0.0, usual, room, adds=True))
    whole = here.seconds(lambda: device_triton.accumulate(gradient, residual, 0.0, usual, room))
    copied = here.seconds(lambda: target.copy_(residual))
    figures = {
        "selection, GB/s": 12 * n / one_pass / 1e9,
        "copy, GB/s": 8 * n / copied / 1e9,
        "selection / copy": 12 * copied / (8 * one_pass),
        "selection with sorted lists, GB/s": 12 * n / whole / 1e9,
    }
    if here.device.type == "cuda":
        properties = torch.cuda.get_device_properties(here.device)
        clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
        if clock and width:  # kHz and bits; two transfers in a cycle
            figures["selection / nominal bandwidth"] = 12 * n / one_pass / (2e3 * clock * width / 8)
        share = figures.get("selection / nominal bandwidth", figures["selection / copy"])
        assert share >= 0.7, f"the selection reaches {share:.0%} of the memory's bandwidth, not 70%: {figures}"
    return figures


CHECKS = {check.__name__: check for check in (staging, ddp, ddp_hook, optimizer_gloo, nccl, selection)}


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
