"""One of the two processes with which ``totalreduce plan --measure`` measures the costs of messages."""

from __future__ import annotations

import os
import threading
import time
from statistics import fmean
from typing import final

import torch

from totalreduce.bench.context import Context
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.types import Algorithm, ReduceOp
from totalreduce.groups.group import Group
from totalreduce.groups.probe import selector_of, survey
from totalreduce.planning.calibration import CalibrationParameters, CalibrationSamples, Cost

_SMALL_BYTES = 64
_SHORT_BYTES = 32 * 1024
_UNTIMED = 3
#: Messages of each rank that are answered, and the pauses before them.
_ANSWERS, _PAUSE_S = 60, 0.01
#: Rows of the matrices that stand for training. Three of them are larger than a core's own caches, and a product takes
#: about a millisecond.
_MATRIX = 384
#: Between two looks at the clock; equal on both ranks.
_IN_A_ROW = 4


def measure(context: Context, parameters: CalibrationParameters) -> CalibrationSamples:
    """Measure three kinds of allreduces by the ring, whose messages and bytes are the same on both ranks.

    They are measured twice: on cores that have nothing else to do, by the processor time of this process, and beside
    threads that train on all cores, by what these get done less.
    """
    short = EngineConfig(segment_bytes=_SHORT_BYTES, segment_bytes_min=_SHORT_BYTES)
    split = context.another_group("split", engine=short)
    large = torch.zeros(parameters.large_bytes // 4)
    kinds = ((context.group, torch.zeros(_SMALL_BYTES // 4)), (context.group, large), (split, large))
    alone = [_cost(context, group, tensor, parameters.seconds) for group, tensor in kinds]
    latency_s, answers_s = _latency_s(context.group), [_answer_s(context)]
    context.barrier()
    threads = -(-len(os.sched_getaffinity(0)) // context.world_size)
    with _Training(threads) as training:
        answers_s.append(_answer_s(context))
        beside = [_cost(context, group, tensor, parameters.seconds, training) for group, tensor in kinds[:2]]
        with _Training(threads) as more:
            context.barrier()
            shared = training.speed(parameters.seconds, more)
            context.barrier()
            answers_s.append(_answer_s(context))
            context.barrier()
        context.barrier()
        unshared = training.speed(parameters.seconds)
        context.barrier()
    return CalibrationSamples(
        alone=alone,
        beside=beside,
        answers_s=answers_s,
        latency_s=latency_s,
        sharing_loss=max(0.0, 1.0 - shared / unshared),
    )


def _latency_s(group: Group) -> float:
    links = survey(group).links
    return links.latency_s if len(set(selector_of(group).hosts)) > 1 else links.local_latency_s


@final
class _Training:
    """Threads that compute all the time, as those that train. torch computes without the interpreter's lock."""

    def __init__(self, threads: int) -> None:
        self._ended = False
        self._counts = [0] * threads
        self._threads = [
            threading.Thread(target=self._compute, args=(number,), daemon=True) for number in range(threads)
        ]

    def __enter__(self) -> _Training:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join()

    @property
    def threads(self) -> int:
        """The number of threads."""
        return len(self._threads)

    @property
    def done(self) -> int:
        """How many matrices were multiplied."""
        return sum(self._counts)

    def speed(self, seconds: float, more: _Training | None = None) -> float:
        """Return how many matrices are multiplied in a second, those of ``more`` threads included."""
        begin, before = time.monotonic(), self.done + (more.done if more else 0)
        time.sleep(seconds)
        return (self.done + (more.done if more else 0) - before) / (time.monotonic() - begin)

    def _compute(self, number: int) -> None:
        first, second = torch.ones(_MATRIX, _MATRIX), torch.ones(_MATRIX, _MATRIX)
        product = torch.empty(_MATRIX, _MATRIX)
        while not self._ended:
            torch.mm(first, second, out=product)
            self._counts[number] += 1


def _answer_s(context: Context) -> float:
    """Return how long a rank waits for the answer of another one that has been waiting for its message.

    Pauses lie between the messages, as in a training: threads that seldom run are not kept waiting because of what they
    have used before.
    """
    took_s, tensor = [], torch.zeros(_SMALL_BYTES // 4)
    for turn in range(2 * _ANSWERS):
        if turn % 2 == context.rank:
            time.sleep(_PAUSE_S)
        begin = time.monotonic()
        context.group.allreduce(tensor, name="answer", op=ReduceOp.SUM, schedule=Algorithm.RING).wait()
        if turn % 2 == context.rank:
            took_s.append(time.monotonic() - begin)
    return fmean(took_s)


def _cost(
    context: Context, group: Group, tensor: torch.Tensor, seconds: float, training: _Training | None = None
) -> Cost:
    """Return the costs of an allreduce: the processor time of this process, or what threads that train do less.

    How fast the threads are without communication is measured right before and after: what else runs on the machine
    slows them down then, too.
    """

    def reduce() -> None:
        group.allreduce(tensor, name="calibration", op=ReduceOp.SUM, schedule=Algorithm.RING).wait()

    for _ in range(_UNTIMED):
        reduce()
    context.barrier()
    speeds = [training.speed(seconds / 2)] if training else []
    context.barrier()
    before, processor_s, begin = group.statistics(), time.process_time(), time.monotonic()
    count, done = 0, training.done if training else 0
    while True:
        for _ in range(_IN_A_ROW):
            reduce()
        count += _IN_A_ROW
        if any(is_late for [is_late] in context.exchange([float(time.monotonic() > begin + seconds)])):
            break
    took_s, after = time.monotonic() - begin, group.statistics()
    if training is None:
        processor_s = time.process_time() - processor_s
    else:
        done = training.done - done
        context.barrier()
        speeds.append(training.speed(seconds / 2))
        # The cores of this process in processor seconds, of which a thread that trains alone would have used all.
        processor_s = training.threads * (took_s - done / fmean(speeds))
    return Cost(
        processor_s=max(0.0, processor_s) / count,
        messages=(after.messages_sent - before.messages_sent) / count,
        num_bytes=(after.bytes_sent - before.bytes_sent) / count,
        reduced_bytes=tensor.numel() * 4 / 2,
    )
