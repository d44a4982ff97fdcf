"""Recursive halving and doubling: an allreduce in about 2 log2 n steps that sends as little as a ring, for any n.

Let p be the largest power of two up to n. The first 2(n-p) ranks pair up, and the odd one of a pair gives its tensor to
the even one. The p ranks that are left exchange halves with partners at distance p/2, p/4, ... 1, adding what they
keep, and then the finished parts at distance 1, 2, ... p/2; at last the odd ones of the pairs are given the result.

Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, DOI 10.1007/978-3-540-24685-5_1;
Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19 (2005), DOI 10.1177/1094342005051521.
"""

from __future__ import annotations

from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules.actions import Cost, Mode, Program, Receive, Schedule, Send, compile_program
from totalreduce.schedules.spec import Position, ScheduleSpec

__all__ = ["SCHEDULES", "cost", "halving_doubling_allreduce", "num_chunks"]

_BEFORE, _AFTER = 0, 1
#: What it costs that a rank of halving and doubling sends nothing while it adds, and that its messages, up to half of
#: the tensor, meet those of other ranks at the switch. Measured: 1 MiB, 8 hosts at 1 Gbit/s: 1.5; larger ones less;
#: 256 MiB, 4 ranks on one host: 1.2.
_CONGESTION = 1.3


def num_chunks(world_size: int) -> int:
    """One per rank that takes part in the exchange: the largest power of two up to ``world_size``."""
    return 1 << (world_size.bit_length() - 1)


def halving_doubling_allreduce(rank: int, world_size: int) -> Schedule:
    """Yield the actions of one lane on ``rank``."""
    size = num_chunks(world_size)
    extra = world_size - size
    if rank < 2 * extra and rank % 2:
        yield Send(rank - 1, _BEFORE, 0, span=size)
        yield Receive(rank - 1, _AFTER, 0, span=size)
        return

    def member(index: int) -> int:
        return 2 * index if index < extra else index + extra

    index = rank // 2 if rank < 2 * extra else rank - extra
    paired = rank < 2 * extra
    if paired:
        yield Receive(rank + 1, _BEFORE, 0, Mode.COMBINE, span=size)
    first, span, step = 0, size, 2
    while span > 1:
        span //= 2
        partner = member(index ^ span)
        keep = first + span if index & span else first
        give = first if index & span else first + span
        # Before the first exchange only the paired ranks hold sums.
        theirs = step > 2 or index ^ span < extra
        mine = step > 2 or paired
        yield Send(partner, step, give, partial=mine, span=span)
        mode = Mode.COMBINE_LAST if span == 1 else Mode.COMBINE
        yield Receive(partner, step, keep, mode, partial=theirs, onto_partial=mine, span=span)
        first, step = keep, step + 1
    while span < size:
        partner = member(index ^ span)
        theirs_first = first ^ span
        yield Send(partner, step, first, span=span)
        yield Receive(partner, step, theirs_first, span=span)
        first, span, step = min(first, theirs_first), 2 * span, step + 1
    if paired:
        yield Send(rank + 1, _AFTER, 0, span=size)


def cost(world_size: int, num_bytes: int, widening: int = 1) -> Cost:
    """2 log2 p steps and 2(p-1)/p of the bytes; the pairs add two steps and the whole tensor twice.

    ``widening``: of unfinished sums, which are all that is halved, but for what a rank without a pair sends first.
    """
    size = num_chunks(world_size)
    steps, half = 2 * (size.bit_length() - 1), (size - 1) / size * num_bytes
    if size == world_size:
        return Cost(steps, 2 * half + (widening - 1) * max(0.0, half - num_bytes / 2))
    return Cost(steps + 2, (1 + widening) * half + 2.0 * num_bytes)


def _program(at: Position) -> Program:
    chunks, schedule = num_chunks(at.world_size), halving_doubling_allreduce(at.rank, at.world_size)
    return compile_program(schedule, chunks, partial_sums=at.world_size > 2, span_max=chunks)


SCHEDULES = (
    ScheduleSpec(
        kind=OpKind.ALLREDUCE,
        name=Algorithm.HALVING_DOUBLING,
        make=_program,
        # In shared memory the order of addition of the other schedules is one that the fast lane can keep.
        cost=lambda work: None if work.shared else cost(work.world_size, work.num_bytes, work.widening),
        congestion=_CONGESTION,
    ),
)
