"""One of the two processes with which ``totalreduce plan --measure`` measures the costs of messages."""

from __future__ import annotations

import os
import threading
import time
from statistics import fmean

import torch

from totalreduce.bench.context import Context
from totalreduce.bench.plan_calibration import CalibrationParameters, CalibrationSamples, Cost
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.types import Algorithm, ReduceOp
from totalreduce.groups.group import Group
from totalreduce.groups.probe import selector_of, survey

_SMALL_BYTES = 64
_SHORT_BYTES = 32 * 1024
_UNTIMED = 5
#: Pauses after which a thread wakes up, and the size of what threads multiply meanwhile.
_NAPS, _NAP_S = 100, 0.005
_MATRIX = 1024
#: Between two looks at the clock; equal on both ranks.
_IN_A_ROW = 10


def measure(context: Context, parameters: CalibrationParameters) -> CalibrationSamples:
    """Measure three kinds of allreduces by the ring, whose messages and bytes are the same on both ranks."""
    short = EngineConfig(segment_bytes=_SHORT_BYTES, segment_bytes_min=_SHORT_BYTES)
    split = context.another_group("split", engine=short)
    large = torch.zeros(parameters.large_bytes // 4)
    return CalibrationSamples(
        small=_cost(context, context.group, torch.zeros(_SMALL_BYTES // 4), parameters.seconds),
        large=_cost(context, context.group, large, parameters.seconds),
        split=_cost(context, split, large, parameters.seconds),
        latency_s=_latency_s(context.group),
        wake_s=_wake_s(context),
    )


def _latency_s(group: Group) -> float:
    links = survey(group).links
    return links.latency_s if len(set(selector_of(group).hosts)) > 1 else links.local_latency_s


def _wake_s(context: Context) -> float:
    """Return how much later than on an idle machine this thread wakes up while threads compute on all cores.

    Both processes compute, each in its share of the cores. torch computes without the interpreter's lock.
    """
    cores = len(os.sched_getaffinity(0))
    context.barrier()
    idle_s = _lateness()
    context.barrier()
    ended = threading.Event()
    threads = [
        threading.Thread(target=_compute, args=(ended,), daemon=True) for _ in range(-(-cores // context.world_size))
    ]
    for thread in threads:
        thread.start()
    busy_s = _lateness()
    context.barrier()
    ended.set()
    for thread in threads:
        thread.join()
    return max(0.0, busy_s - idle_s)


def _compute(ended: threading.Event) -> None:
    matrix = torch.ones(_MATRIX, _MATRIX)
    while not ended.is_set():
        torch.mm(matrix, matrix)


def _lateness() -> float:
    """Return how many seconds too late this thread wakes up on average."""
    late = []
    for _ in range(_NAPS):
        begin = time.monotonic()
        time.sleep(_NAP_S)
        late.append(time.monotonic() - begin - _NAP_S)
    return fmean(late)


def _cost(context: Context, group: Group, tensor: torch.Tensor, seconds: float) -> Cost:
    def reduce() -> None:
        group.allreduce(tensor, name="calibration", op=ReduceOp.SUM, schedule=Algorithm.RING).wait()

    for _ in range(_UNTIMED):
        reduce()
    context.barrier()
    before, begin, deadline, count = group.statistics(), time.process_time(), time.monotonic() + seconds, 0
    while True:
        for _ in range(_IN_A_ROW):
            reduce()
        count += _IN_A_ROW
        [[is_late], [also_late]] = context.exchange([float(time.monotonic() > deadline)])
        if is_late or also_late:
            break
    took, after = time.process_time() - begin, group.statistics()
    return Cost(
        processor_s=took / count,
        messages=(after.messages_sent - before.messages_sent) / count,
        num_bytes=(after.bytes_sent - before.bytes_sent) / count,
        reduced_bytes=tensor.numel() * 4 / 2,
    )
