"""The calibration of ``totalreduce plan``: what messages, bytes and selections cost on this machine's processor.

What ranks exchange is measured with two processes over TCP. From allreduces of three kinds follow three costs: of an
operation, of a message, of a byte. They are measured twice, because a process's own processor time is not all that a
message costs: the kernel handles packets in whatever thread runs, and threads that are woken displace what others have
in caches. So the processor time of both processes is measured while nothing else runs, and then the time that threads
lose which train on all cores. The difference is the cost beside the process. The rest is arithmetic in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean, median
from typing import Any

from totalreduce.bench.launching import Setting, run_benchmark
from totalreduce.bench.machine import describe_machine
from totalreduce.launch.emulate import rate_bits_per_s
from totalreduce.planning.machines import Calibration

__all__ = ["CalibrationParameters", "CalibrationSamples", "Cost", "measure_calibration", "solve"]

_REPETITIONS = 5
#: Large enough that no cache holds them.
_COPIED_BYTES = 64 << 20
#: A large allreduce takes about so long on a slow link, and has so many bytes at least.
_LARGE_S, _LARGE_BYTES_MIN = 0.1, 1 << 20
#: On slower links so few bytes pass in a second that what training loses by them cannot be told from disturbances.
_VISIBLE_BITS_PER_S = 500e6
_SEGMENT_BYTES = 512 * 1024
_SELECTED_ELEMENTS = 4_000_000
_MERGING_RANKS = 4
_DENSITY = 0.01


@dataclass(frozen=True, slots=True)
class CalibrationParameters:
    """How the processes measure."""

    large_bytes: int = 8 << 20  #: The size of the allreduces in which bytes count.
    seconds: float = 1.0  #: How long each kind of allreduce is repeated.


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs of an average allreduce on one rank."""

    processor_s: float  #: Processor seconds.
    messages: float  #: Sent, and as many received.
    num_bytes: float  #: Sent, and as many received, headers included.
    reduced_bytes: float  #: Added.


@dataclass(frozen=True, slots=True)
class CalibrationSamples:
    """The costs of one rank.

    Three kinds of allreduces are measured: of a few bytes, a large one in segments of the usual length, and a large one
    in many short segments.
    """

    alone: list[Cost]  #: The costs of each kind while nothing else runs: the processor time of this process.
    #: The same of the first two kinds beside threads that train on all cores: the processor time that these lose.
    beside: list[Cost]
    #: Seconds from a message to a rank that waits for it to its answer: while nothing else runs, while a thread trains
    #: on every core, and while two do.
    answers_s: list[float]
    latency_s: float  #: Seconds that an empty message takes to the other rank, software included.
    sharing_loss: float  #: The share of the processor time that is lost where two threads train on every core.


def measure_calibration(rate: str | None = None) -> tuple[Calibration, float]:
    """Measure this machine, in about twenty seconds; return the costs and the latency between the two ranks in seconds.

    Args:
        rate: The rate of emulated hosts, between which messages are measured: their links take processor time, too.
            ``None``: messages go over the loopback interface.

    Raises:
        BenchmarkFailedError: A process failed.
    """
    setting = Setting(ranks=2, transport="tcp") if rate is None else Setting(ranks=2, hosts=2, rate=rate)
    parameters = CalibrationParameters()
    if rate is not None:
        large_bytes = int(rate_bits_per_s(rate) / 8 * _LARGE_S)
        parameters = replace(parameters, large_bytes=max(_LARGE_BYTES_MIN, min(parameters.large_bytes, large_bytes)))
    samples = run_benchmark("totalreduce.planning.calibration_worker", parameters, setting, CalibrationSamples).ranks
    reduce_bytes_per_s = _SEGMENT_BYTES / _median_s(_reducing())
    alone, beside = (_mean_costs(ranks) for ranks in zip(*((each.alone, each.beside) for each in samples), strict=True))
    operation_s, message_s, byte_s = solve(alone, reduce_bytes_per_s)
    beside_message_s, beside_byte_s = 0.0, 0.0
    if rate is None or rate_bits_per_s(rate) >= _VISIBLE_BITS_PER_S:
        beside_message_s, beside_byte_s = solve_beside(alone, beside)
    # A message and its answer wake up a thread each.
    idle_s, one_s, two_s = (fmean(column) for column in zip(*(each.answers_s for each in samples), strict=True))
    wake_s, crowded_wake_s = (max(0.0, answer_s - idle_s) / 2 for answer_s in (one_s, two_s))
    select_s, merge_s = _selecting()
    latency_s = max(sample.latency_s for sample in samples)
    machine, where = describe_machine(), "loopback" if rate is None else f"emulated hosts at {rate}"
    calibration = Calibration(
        message_s=message_s,
        byte_s=byte_s,
        beside_message_s=beside_message_s,
        beside_byte_s=beside_byte_s,
        operation_s=operation_s,
        wake_s=wake_s,
        crowded_wake_s=max(wake_s, crowded_wake_s),
        sharing_loss=fmean(sample.sharing_loss for sample in samples),
        reduce_bytes_per_s=reduce_bytes_per_s,
        copy_bytes_per_s=_COPIED_BYTES / _median_s(_copying()),
        select_elements_per_s=1 / select_s,
        merge_bytes_per_s=1 / merge_s,
        source=f"measured on {machine.processor}, {machine.cores} cores, {where}",
    )
    return calibration, latency_s


def solve(costs: Sequence[Cost], reduce_bytes_per_s: float) -> tuple[float, float, float]:
    """Return the processor seconds of an operation, and those of a message and of a byte on one of its two ranks. Pure.

    A rank's processor time is that of the operation, of the messages and bytes that it sends and receives, and of the
    additions. Two large allreduces that differ in the number of messages give the cost of a message.

    Args:
        costs: Of the three kinds of allreduces, in the order of ``CalibrationSamples``.
        reduce_bytes_per_s: Bytes that are added in a processor second.
    """
    small, large, split = costs
    more = split.messages - large.messages
    # What is below zero is noise.
    message_s = max(0.0, (split.processor_s - large.processor_s) / (2 * more)) if more > 0 else 0.0
    operation_s = max(0.0, small.processor_s - 2 * small.messages * message_s)
    additions_s = large.reduced_bytes / reduce_bytes_per_s
    rest_s = large.processor_s - additions_s - operation_s - 2 * large.messages * message_s
    return operation_s, message_s, max(0.0, rest_s / (2 * large.num_bytes))


def solve_beside(alone: Sequence[Cost], beside: Sequence[Cost]) -> tuple[float, float]:
    """Return how many processor seconds a message and a byte cost beside the process. Pure.

    An allreduce of a few bytes shows what messages cost, a large one what bytes cost.
    """
    small_s, large_s = (lost.processor_s - own.processor_s for own, lost in zip(alone[:2], beside[:2], strict=True))
    message_s = max(0.0, small_s / (2 * beside[0].messages))
    return message_s, max(0.0, (large_s - 2 * beside[1].messages * message_s) / (2 * beside[1].num_bytes))


def _mean_costs(ranks: Sequence[Sequence[Cost]]) -> list[Cost]:
    """Return the mean costs of each kind of allreduce over ranks."""
    names = [field.name for field in fields(Cost)]
    return [Cost(*(fmean(getattr(cost, name) for cost in kind) for name in names)) for kind in zip(*ranks, strict=True)]


def _median_s(work: Callable[[], Any]) -> float:
    """Return the median of the processor seconds that a piece of work takes in this thread.

    The first time is not counted, because it makes memory and compiles.
    """
    work()
    took = []
    for _ in range(_REPETITIONS):
        begin = time.thread_time()
        work()
        took.append(time.thread_time() - begin)
    return median(took)


def _reducing() -> Callable[[], Any]:
    """Return the addition of a segment, from memory that no cache holds."""
    import torch

    from totalreduce.foundation.types import DType, ReduceOp
    from totalreduce.kernels.reduction import combine

    memory = torch.ones(_COPIED_BYTES, dtype=torch.uint8).numpy().data
    arriving = torch.zeros(_SEGMENT_BYTES, dtype=torch.uint8).numpy().data
    turn = 0

    def work() -> None:
        nonlocal turn
        begin = turn * _SEGMENT_BYTES
        turn = (turn + 1) % (_COPIED_BYTES // _SEGMENT_BYTES)
        place, kind = memory[begin : begin + _SEGMENT_BYTES], DType.FLOAT32
        combine(
            ReduceOp.SUM,
            *(place, arriving, place),
            local_dtype=kind,
            incoming_dtype=kind,
            destination_dtype=kind,
        )

    return work


def _copying() -> Callable[[], Any]:
    import torch

    source, target = torch.ones(_COPIED_BYTES // 4), torch.zeros(_COPIED_BYTES // 4)
    return lambda: target.copy_(source)


def _selecting() -> tuple[float, float]:
    """Return the processor seconds of an element that is accumulated, and of a byte that is merged, by Ok-Topk."""
    import numpy as np

    from totalreduce.bench.methods import make_method
    from totalreduce.planning.traffic import script_of
    from totalreduce.sparse.accumulator import HostAccumulator
    from totalreduce.sparse.session import BucketShape
    from totalreduce.testing.lockstep import run_exchanges

    method, count = make_method("oktopk", _DENSITY), _SELECTED_ELEMENTS
    sessions = [method.session(BucketShape(((count,),)), rank, _MERGING_RANKS) for rank in range(_MERGING_RANKS)]
    generator = np.random.default_rng(0)
    residuals = [np.zeros(count, np.float32) for _ in sessions]
    select_s, merge_s = 0.0, 0.0
    for turn in range(_REPETITIONS):
        selected_s = []
        for rank, session in enumerate(sessions):
            gradient = generator.standard_normal(count, dtype=np.float32)
            begin = time.thread_time()
            session.accumulate(HostAccumulator([gradient]), HostAccumulator([residuals[rank]]), 1.0)
            selected_s.append(time.thread_time() - begin)
            residuals[rank] = gradient
        exchanges = [session.exchange(np.ones(1, np.bool_)) for session in sessions]
        if turn < _REPETITIONS - 1:
            select_s, begin = median(selected_s), time.thread_time()
            run_exchanges(exchanges)
            merge_s = time.thread_time() - begin
        else:  # recording would take part in the time, so it is done apart
            script = script_of(exchanges)
            received = sum(each.received(rank) for each in script for rank in range(_MERGING_RANKS))
            merge_s /= max(1, received)
    return select_s / count, merge_s
