"""One rank of ``bench observe``: blocks of training steps whose figures are written, and others, in turn."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

import totalreduce as tr
from totalreduce.observe.publisher import Publisher
from totalreduce.runner.meter import Meter
from totalreduce_benchmarks.observe import OBSERVED, ObserveConfig, ObserveSamples

_WARMUP_STEPS = 20
_LAYERS = 6
_COUNTED = 20_000


def measure(parameters: ObserveConfig) -> ObserveSamples:
    """Run both kinds of blocks in turn."""
    group = tr.init()
    torch.manual_seed(1)
    layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(parameters.width, parameters.width), nn.ReLU())]
    model = nn.Sequential(*layers)
    optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model, group=group)
    inputs = torch.randn(parameters.batch, parameters.width)

    def run(steps: int) -> tuple[float, float]:
        """Return the time of a step, and the processor time."""
        group.barrier()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        return (time.perf_counter() - begin) / steps, (time.process_time() - cpu_begin) / steps

    run(_WARMUP_STEPS)
    steps = group.broadcast_object(max(2, round(parameters.block_s / run(_WARMUP_STEPS)[0])))
    observed, plain = [], []
    cpu_s, documents = 0.0, 0
    flag, runner = Path(parameters.folder) / OBSERVED, group.operations.runner
    for index in range(parameters.blocks):
        # A B, B A, A B: what one kind of block leaves to the next one cancels out.
        for is_observed in (index % 2 == 0, index % 2 == 1):
            if not is_observed:
                plain.append(run(steps))
                continue
            publisher = Publisher(Path(parameters.board), group.rank, interval_s=1 / parameters.per_second)
            if group.rank == 0:
                flag.touch()
            publisher.follow(runner)
            observed.append(run(steps))
            publisher.leave(runner)
            cpu_s, documents = cpu_s + publisher.cpu_s, documents + publisher.documents
            if group.rank == 0:
                flag.unlink()
    group.barrier()
    return ObserveSamples(
        observed_s=[seconds for seconds, _ in observed],
        plain_s=[seconds for seconds, _ in plain],
        observed_cpu_s=[cpu for _, cpu in observed],
        plain_cpu_s=[cpu for _, cpu in plain],
        document_cpu_s=cpu_s / max(1, documents),
        end_step_s=_seconds_of_counting(),
        documents_per_s=documents / (steps * sum(seconds for seconds, _ in observed)),
    )


def _seconds_of_counting() -> float:
    meter = Meter()
    begin = time.perf_counter()
    for _ in range(_COUNTED):
        meter.blocked(1e-3)
        meter.end_step()
    return (time.perf_counter() - begin) / _COUNTED
