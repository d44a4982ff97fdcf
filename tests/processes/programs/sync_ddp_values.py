"""``tr.sync_ddp`` with gradient accumulation in ``no_sync`` and a ``GradScaler``, of which one step overflows.

All numbers are small integers over powers of two, so that the expected parameters are computed exactly, by hand.
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import totalreduce as tr

STEPS, PASSES, LR, OVERFLOWS = 6, 2, 0.5, 2
SHAPES = {"first": (9, 4), "second": (5, 6), "bias": (7,)}


class Planned(torch.nn.Module):
    """A model whose gradients are the tensors that it is called with."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients):
        return sum((parameter * gradients[name]).sum() for name, parameter in self.named_parameters())


def gradients(step, number, rank):
    """The gradients of a backward pass: other integers in every element, so that no two magnitudes are equal."""
    random = np.random.default_rng([step, number, rank])
    count = sum(int(np.prod(shape)) for shape in SHAPES.values())
    flat = random.permutation(np.arange(1, 1 + count)) * 64 + 32 * number + random.integers(32, size=count)
    flat = (flat * random.choice([-1, 1], size=count)).astype(np.float32)
    parts = np.split(flat, np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])[:-1])
    return {name: torch.from_numpy(part.reshape(SHAPES[name])) for name, part in zip(SHAPES, parts, strict=True)}


def of_step(step, rank):
    """The sum of a rank's gradients in a step, as one array; its first elements are those that are compressed."""
    passes = [gradients(step, number, rank) for number in range(PASSES)]
    return np.concatenate([sum(each[name] for each in passes).numpy().ravel() for name in SHAPES])


def expected_sparse(density, world_size):
    """The parameters after each step: Top-k with error feedback; the vector is summed."""
    compressed = sum(int(np.prod(shape)) for shape in SHAPES.values() if len(shape) > 1)
    selected = round(density * compressed)
    residuals, total = np.zeros((world_size, compressed)), 0.0
    for step in range(STEPS):
        if step != OVERFLOWS:
            applied = np.sum([of_step(step, rank) for rank in range(world_size)], axis=0)
            applied[:compressed] = 0
            for rank, residual in enumerate(residuals):
                residual += of_step(step, rank)[:compressed]
                largest = np.argsort(abs(residual))[-selected:]
                applied[largest] += residual[largest]
                residual[largest] = 0
            total = total - LR * applied / world_size
        yield total


def expected_local(period, world_size):
    """This rank's parameters after each step: local steps, and the average after each period."""
    totals = np.zeros((world_size, of_step(0, 0).size))
    for step in range(STEPS):
        for rank, total in enumerate(totals):
            if (step, rank) != (OVERFLOWS, world_size - 1):  # without an exchange nobody else has a gradient of it
                total -= LR * of_step(step, rank)
        if (step + 1) % period == 0:
            totals[:] = totals.mean(axis=0)
        yield totals[dist.get_rank()].copy()


def train(sync, expected, where, set_to_none):
    """Train; compare parameters and the scale after each step. ``where``: the pass that overflows on the last rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = DistributedDataParallel(Planned())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    feedback = None if isinstance(sync, tr.LocalSGD) else tr.ErrorFeedback(elements_min=0)
    optimizer = tr.sync_ddp(model, sgd, sync, feedback=feedback, grad_scaler=scaler)
    scales = []
    for step, wanted in enumerate(expected):
        optimizer.zero_grad(set_to_none=set_to_none)
        for number in range(PASSES):
            planned = gradients(step, number, rank)
            if (step, number, rank) == (OVERFLOWS, where, last):
                planned["second"][1, 2] = torch.inf
            if number + 1 < PASSES:
                with model.no_sync():
                    scaler.scale(model(planned)).backward()
            else:
                scaler.scale(model(planned)).backward()
        before = scaler.get_scale()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before and optimizer is not sgd:
            optimizer.strategy_steps.stepped()
        scales.append(scaler.get_scale())
        got = np.concatenate([parameter.detach().numpy().ravel() for parameter in model.module.parameters()])
        assert np.array_equal(got, wanted), (sync, where, set_to_none, step, np.flatnonzero(got != wanted))
    return scales


def main():
    dist.init_process_group(sys.argv[1])
    size, overflows = dist.get_world_size(), [64.0, 128.0, 64.0, 64.0, 128.0, 128.0]
    is_last = dist.get_rank() == size - 1
    for where in range(PASSES):
        set_to_none = where == 0
        sync = tr.TopkA(density=0.1, values="float32")
        scales = train(sync, expected_sparse(sync.density, size), where, set_to_none)
        assert scales == overflows, scales
        scales = train(tr.LocalSGD(period=2), expected_local(2, size), where, set_to_none)
        assert scales == (overflows if is_last else [64.0, 128.0, 128.0, 256.0, 256.0, 512.0]), scales
    dist.destroy_process_group()


main()
