"""Record a trace: time a real model's backward and forward pass with hooks, in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch
from torch import nn

from totalreduce.planning.traces import Layer, Trace, as_document, parse_trace
from totalreduce.planning.workloads import Workload, loss_of

_WARMUP_STEPS = 2


class _Recorder:
    """Times of one period: from a backward pass's first gradient into the next forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
        self.ready: dict[int, float] = {}
        self.needed: dict[int, float] = {}
        for index, module in enumerate(self.owners):
            module.register_forward_pre_hook(lambda _module, _args, index=index: self._need(index))
            for parameter in module.parameters(recurse=False):
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _parameter, index=index: self._be_ready(index)
                )

    def _need(self, index: int) -> None:
        self.needed.setdefault(index, time.perf_counter())

    def _be_ready(self, index: int) -> None:
        self.ready[index] = time.perf_counter()  # the last of the module's parameters counts

    @property
    def first(self) -> float:
        """When the first gradient of this period was ready."""
        return min(self.ready.values())

    def take(self) -> list[tuple[float, float]]:
        """Ready and needed times of every module since the first gradient; forgets them."""
        zero = self.first
        times = [(self.ready[index] - zero, self.needed[index] - zero) for index in range(len(self.owners))]
        self.ready.clear()
        self.needed.clear()
        return times

    def shapes(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a module's own parameters."""
        return tuple(tuple(parameter.shape) for parameter in self.owners[index].parameters(recurse=False))


def record_trace(workload: Workload, *, num_steps: int, seed: int = 0) -> Trace:
    """Train a few steps and take every layer's median times."""
    torch.set_num_threads(1)
    model = workload.model(seed)
    source = f"totalreduce bench trace --model {workload.name}: torch {torch.__version__}, one CPU thread, SGD"

    def loss(step: int) -> torch.Tensor:
        return loss_of(model, *workload.batch_of(seed, 0, step))

    return record_model(model, loss, num_steps=num_steps, name=workload.name, source=source)


def record_model(
    model: nn.Module, loss_of_step: Callable[[int], torch.Tensor], *, num_steps: int, name: str, source: str
) -> Trace:
    """Train any model by SGD for a few steps and take every layer's median times.

    Args:
        model: The model.
        loss_of_step: Returns the model's loss on the batch of a step, whose number it is given.
        num_steps: Periods to record, after two that are not.
        name: The model's name in the trace.
        source: Where the trace comes from.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    recorder = _Recorder(model)
    periods: list[list[tuple[float, float]]] = []
    began: list[float] = []
    loss = loss_of_step(0)
    recorder.needed.clear()
    for step in range(_WARMUP_STEPS + num_steps):
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss = loss_of_step(step + 1)
        began.append(recorder.first)
        times = recorder.take()
        if step >= _WARMUP_STEPS:
            periods.append(times)
    layers = [
        Layer(
            round(median(period[index][0] for period in periods), 6),
            round(median(period[index][1] for period in periods), 6),
            sum(map(math.prod, recorder.shapes(index))),
            recorder.shapes(index),
        )
        for index in range(len(recorder.owners))
    ]
    layers.sort(key=lambda layer: layer.needed_s)
    step_s = round(median(later - earlier for earlier, later in pairwise(began[_WARMUP_STEPS - 1 :])), 6)
    # Through the parser, so that the written trace can be read.
    return parse_trace(as_document(Trace(name, source, tuple(layers), step_s)), name)
