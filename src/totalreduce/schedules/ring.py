"""The ring: reduce-scatter, allgather, and allreduce, which is one after the other.

Every rank sends only to its right neighbour and receives only from its left one. After n-1 steps of scatter-reduce
rank r holds the finished chunk r+1; n-1 further steps carry the finished chunks round. A chunk is summed in the order
of the ring, so its bits do not depend on timing, and everybody copies the owner's bits.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
Comput. 69 (2009), DOI 10.1016/j.jpdc.2008.09.002; chosen by the Total Reduce design because the ring's neighbours are
known in advance, which lets a message guide itself.
"""

from __future__ import annotations

from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules.actions import Chunking, Cost, Mode, Receive, Schedule, Send, compile_program
from totalreduce.schedules.spec import ScheduleSpec, routes_of_neighbours

__all__ = ["SCHEDULES", "cost", "half_cost", "ring_allgather", "ring_allreduce", "ring_reduce_scatter"]


def ring_allreduce(rank: int, world_size: int) -> Schedule:
    """Yield the actions of one lane on ``rank``."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    last = world_size - 2
    for step in range(world_size - 1):
        # The first hop carries a rank's own contribution; from the second on it is a partial sum.
        yield Send(right, step, (rank - step) % world_size, partial=step > 0)
        mode = Mode.COMBINE_LAST if step == last else Mode.COMBINE
        yield Receive(left, step, (rank - step - 1) % world_size, mode, partial=step > 0)
    for turn in range(world_size - 1):
        step = world_size - 1 + turn
        yield Send(right, step, (rank + 1 - turn) % world_size)
        yield Receive(left, step, (rank - turn) % world_size)


def ring_reduce_scatter(rank: int, world_size: int) -> Schedule:
    """Yield the actions of one lane on ``rank``; chunk ``world_size`` is the output: the sum of chunk ``rank``."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    last = world_size - 2
    for step in range(world_size - 1):
        yield Send(right, step, (rank - step - 1) % world_size, partial=step > 0)
        chunk = (rank - step - 2) % world_size
        if step == last:
            yield Receive(left, step, chunk, Mode.COMBINE_LAST, partial=step > 0, into=world_size)
        else:
            yield Receive(left, step, chunk, Mode.COMBINE, partial=step > 0)


def ring_allgather(rank: int, world_size: int) -> Schedule:
    """Yield the actions of one lane on ``rank``, whose own block is chunk ``rank``."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        yield Send(right, step, (rank - step) % world_size)
        yield Receive(left, step, (rank - step - 1) % world_size)


def cost(world_size: int, num_bytes: int, widening: int = 1) -> Cost:
    """2(n-1) steps and 2(n-1)/n of the bytes: the least any allreduce can send, if sums are no wider than elements."""
    first, second = half_cost(world_size, num_bytes, widening), half_cost(world_size, num_bytes)
    return Cost(first.steps + second.steps, first.bytes_sent + second.bytes_sent)


def half_cost(world_size: int, num_bytes: int, widening: int = 1) -> Cost:
    """Reduce-scatter or allgather of ``num_bytes`` in all blocks together: half of an allreduce.

    ``widening``: of the sums of a reduce-scatter, which travel from the second step on.
    """
    sums = max(0, world_size - 2) * (widening - 1)
    return Cost(world_size - 1, (world_size - 1 + sums) * num_bytes / world_size)


SCHEDULES = (
    ScheduleSpec(
        kind=OpKind.ALLREDUCE,
        name=Algorithm.RING,
        make=lambda at: compile_program(
            ring_allreduce(at.rank, at.world_size),
            at.world_size,
            contributions=lambda chunk: [(chunk + step) % at.world_size for step in range(at.world_size)],
        ),
        cost=lambda work: cost(work.world_size, work.num_bytes, work.widening),
        route=routes_of_neighbours(halves=2),
    ),
    ScheduleSpec(
        kind=OpKind.ALLGATHER,
        name=Algorithm.RING,
        make=lambda at: compile_program(
            ring_allgather(at.rank, at.world_size), at.world_size, chunking=Chunking.BLOCKS
        ),
        cost=lambda work: half_cost(work.world_size, work.num_bytes),
        route=routes_of_neighbours(),
    ),
    ScheduleSpec(
        kind=OpKind.REDUCE_SCATTER,
        name=Algorithm.RING,
        make=lambda at: compile_program(
            ring_reduce_scatter(at.rank, at.world_size),
            at.world_size + 1,
            chunking=Chunking.BLOCKS,
            partial_sums=at.world_size > 2,
            preserves=True,
            contributions=lambda chunk: [(chunk + 1 + step) % at.world_size for step in range(at.world_size)],
        ),
        cost=lambda work: half_cost(work.world_size, work.num_bytes, work.widening),
        route=routes_of_neighbours(),
    ),
)
