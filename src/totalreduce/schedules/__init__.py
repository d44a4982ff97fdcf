"""Floor 3: how a collective proceeds. One schedule, one short file, one line in ``program_for``.

Invariant: a schedule never sees a transport, a buffer, a length or a clock, and is equal in structure for all lanes.
"""

from __future__ import annotations

import functools

from totalreduce.foundation.types import OpKind
from totalreduce.schedules import chain, dissemination, ring, star
from totalreduce.schedules.actions import Program, compile_program

__all__ = ["program_for", "star_program_for"]


@functools.lru_cache(maxsize=1024)
def program_for(kind: OpKind, rank: int, world_size: int, root: int) -> Program:
    """The compiled program of one kind of operation on one rank (cached: it is the same for every lane)."""
    match kind:
        case OpKind.ALLREDUCE:
            return compile_program(ring.ring_allreduce(rank, world_size), ring.num_chunks(world_size))
        case OpKind.BROADCAST:
            return compile_program(chain.chain_broadcast(rank, world_size, root), chain.num_chunks(world_size))
        case OpKind.BARRIER:
            program = dissemination.dissemination_barrier(rank, world_size)
            return compile_program(program, dissemination.num_chunks(world_size))


@functools.lru_cache(maxsize=1024)
def star_program_for(rank: int, world_size: int, root: int) -> Program:
    """The compiled program of a small allreduce by way of ``root``."""
    schedule = star.star_allreduce(rank, world_size, root)
    return compile_program(schedule, star.num_chunks(world_size), partial_sums=True)
