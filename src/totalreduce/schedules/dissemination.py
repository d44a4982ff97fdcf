"""Dissemination barrier: in round k tell rank r + 2**k and hear from rank r - 2**k; ceil(log2 n) rounds, no bytes.

Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", Int. J. Parallel Program. 17 (1988),
DOI 10.1007/BF01379320.
"""

from __future__ import annotations

from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules.actions import Cost, Receive, Schedule, Send, compile_program
from totalreduce.schedules.spec import ScheduleSpec

__all__ = ["SCHEDULES", "cost", "dissemination_barrier"]


def dissemination_barrier(rank: int, world_size: int) -> Schedule:
    """Yield the actions of the single lane on ``rank``."""
    step, distance = 0, 1
    while distance < world_size:
        yield Send((rank + distance) % world_size, step, 0)
        yield Receive((rank - distance) % world_size, step, 0)
        step, distance = step + 1, 2 * distance


def cost(world_size: int, num_bytes: int) -> Cost:  # noqa: ARG001
    """ceil(log2 n) message latencies."""
    return Cost((world_size - 1).bit_length(), 0.0)


SCHEDULES = (
    ScheduleSpec(
        kind=OpKind.BARRIER,
        name=Algorithm.DISSEMINATION,
        make=lambda at: compile_program(dissemination_barrier(at.rank, at.world_size), 1),
        cost=lambda work: cost(work.world_size, work.num_bytes),
    ),
)
