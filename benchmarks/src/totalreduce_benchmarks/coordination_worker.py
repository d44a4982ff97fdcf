"""One rank of ``bench coordination``: many small tensors under negotiated names, and one of their total size."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from totalreduce.bench.context import Context
from totalreduce.bench.values import WrongResultError
from totalreduce.foundation.observer import Observer
from totalreduce.groups.engine_collectives import EngineCollectives
from totalreduce.native.coordinator import Coordinator
from totalreduce_benchmarks.coordination import CoordinationParameters, CoordinationSamples

_WARMUP_STEPS = 20
_SEED = 7


class _Recorder(Observer):
    """When the last tensor of a step was submitted here, and when the ranks had agreed on the last one."""

    def __init__(self) -> None:
        self.last_submitted = self.last_agreed = 0.0

    def coordinated(self, name: str, iteration: int, **facts: Any) -> None:  # noqa: ARG002  (an observer's method)
        """Of many tensors the last ones count."""
        if name.startswith("many."):
            self.last_submitted = max(self.last_submitted, facts["submitted"])
            self.last_agreed = max(self.last_agreed, facts["agreed"])


def measure(context: Context, parameters: CoordinationParameters) -> CoordinationSamples:
    """Take turns: a step of many tensors, and one of a single tensor."""
    group = context.group
    coordinator = group.coordinator
    if coordinator is None:
        coordinator = group.coordinate(EngineCollectives(group.subgroup(range(group.world_size)).operations))
    recorder = _Recorder()
    group.observers.append(recorder)
    count = parameters.tensors
    tensors = [torch.empty(1) for _ in range(count)]
    one = torch.empty(count)
    order = list(range(count))
    generator = random.Random(_SEED + context.rank)
    samples: dict[str, list[float]] = {"many": [], "one": [], "submitted": [], "agreed": []}
    spent = [0, 0, 0]
    for step in range(_WARMUP_STEPS + parameters.steps):
        if parameters.shuffle:
            generator.shuffle(order)
        recorder.last_submitted = recorder.last_agreed = 0.0
        before = _spent(coordinator)
        many = _step(context, coordinator, [tensors[index] for index in order], [f"many.{index}" for index in order])
        after = _spent(coordinator)
        single = _step(context, coordinator, [one], ["one"])
        if step >= _WARMUP_STEPS:
            samples["many"].append(many)
            samples["one"].append(single)
            samples["submitted"].append(recorder.last_submitted)
            samples["agreed"].append(recorder.last_agreed)
            spent = [total + now - then for total, now, then in zip(spent, after, before, strict=True)]
    cycles, slow_cycles, messages = (total / parameters.steps for total in spent)
    return CoordinationSamples(**samples, cycles=cycles, slow_cycles=slow_cycles, messages=messages)


def _step(context: Context, coordinator: Coordinator, tensors: list[torch.Tensor], names: list[str]) -> float:
    for tensor in tensors:
        tensor.fill_(context.rank + 1)
    context.barrier()
    begin = time.monotonic()
    works = [coordinator.allreduce(tensor, name=name) for tensor, name in zip(tensors, names, strict=True)]
    for work in works:
        work.wait()
    seconds = time.monotonic() - begin
    context.barrier()  # nobody checks while another rank still works
    wanted = context.world_size * (context.world_size + 1) / 2
    if any((tensor != wanted).any() for tensor in tensors):
        raise WrongResultError(f"a sum over {context.world_size} ranks is not {wanted}")
    return seconds


def _spent(coordinator: Coordinator) -> tuple[int, int, int]:
    counters = coordinator.counters
    return counters.cycles, counters.slow_cycles, counters.messages
