"""A schedule: allreduce along a line of ranks, for hosts that are connected one to the next.

The sum travels from the last rank to rank 0, and the result travels back. Only neighbours exchange messages. A tensor
is cut into many lanes, which follow each other along the line.
"""

from totalreduce.foundation.types import OpKind
from totalreduce.schedules.actions import Cost, Mode, Program, Receive, Schedule, Send, compile_program
from totalreduce.schedules.spec import Position, ScheduleSpec, Workload


def line_allreduce(rank: int, world_size: int) -> Schedule:
    """Yield the actions of one lane on one rank. A rank sends its sum with step 0 and the result with step 1."""
    last = world_size - 1
    if rank < last:
        mode = Mode.COMBINE if rank else Mode.COMBINE_LAST
        # Every rank but the last sends an unfinished sum, which may be wider than the tensor's elements.
        yield Receive(rank + 1, 0, 0, mode, partial=rank + 1 < last)
    if rank > 0:
        yield Send(rank - 1, 0, 0, partial=rank < last)
        yield Receive(rank - 1, 1, 0)
    if rank < last:
        yield Send(rank + 1, 1, 0)


def _program(at: Position) -> Program:
    schedule = line_allreduce(at.rank, at.world_size)
    return compile_program(schedule, 1, partial_sums=at.world_size > 2, pipeline_ranks=at.world_size)


def _seconds(workload: Workload) -> float | None:
    """Return the time of the two ways along the line.

    Neighbours have a cable of their own here, four times as fast as the network between other hosts. Where the program
    alone decides, ``cost`` and ``route`` take the place of this function.
    """
    if workload.one_host:
        return None  # then this schedule is no candidate
    hops = 2 * (workload.world_size - 1)
    return Cost(hops, 2.0 * workload.num_bytes).seconds(workload.links.latency_s, 4 * workload.links.bytes_per_s)


SCHEDULES = ScheduleSpec(kind=OpKind.ALLREDUCE, name="line", make=_program, seconds=_seconds)
