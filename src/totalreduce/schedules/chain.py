"""The pipelined chain: broadcast root -> root+1 -> ... and, the other way, reduce ... -> root+1 -> root.

Every lane is one piece, so pieces follow each other. With S pieces the last rank of a broadcast (the root of a reduce)
has everything after S+n-2 piece times: N(S+n-2)/(SB) seconds for N bytes at B bytes/s, which tends to N/B, the time of
one transfer, whatever the number of ranks. Source: the survey's pipelined broadcast; also van de Geijn, "On global
combine operations", J. Parallel Distrib. Comput. 22 (1994), DOI 10.1006/jpdc.1994.1091.

Behind a broadcast's first piece an empty message, the consent, runs back from the end of the chain. Without it the root
would be done, and tell its user so, before a rank that submitted something else under the same name had said a word.
"""

from __future__ import annotations

from totalreduce.foundation.partition import PIECE_BYTES_MIN, pipeline_pieces
from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules.actions import NOTHING, Cost, Mode, Receive, Schedule, Send, compile_program
from totalreduce.schedules.spec import ScheduleSpec, Workload, routes_of_neighbours

__all__ = ["SCHEDULES", "chain_broadcast", "chain_reduce", "cost"]


def chain_broadcast(rank: int, world_size: int, root: int) -> Schedule:
    """Yield the actions of one lane on ``rank``."""
    position, last = (rank - root) % world_size, world_size - 1
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    if position > 0:
        yield Receive(left, position - 1, 0)
    if position < last:
        yield Send(right, position, 0)
        yield Receive(right, 2 * last - 1 - position, NOTHING, once=True)
    if position > 0:
        yield Send(left, 2 * last - position, NOTHING, once=True)


def chain_reduce(rank: int, world_size: int, root: int) -> Schedule:
    """Yield the actions of one lane on ``rank``: the far end begins, the root has the sum."""
    position, last = (rank - root) % world_size, world_size - 1
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    if position < last:
        mode = Mode.COMBINE_LAST if position == 0 else Mode.COMBINE
        yield Receive(right, last - position - 1, 0, mode, partial=position + 1 < last)
    if position > 0:
        yield Send(left, last - position, 0, partial=position < last)


def cost(world_size: int, num_bytes: int, num_pieces: int = 1, *, consent: bool = True) -> Cost:
    """n-1 hops for the first piece (and n-1 for the consent); the other pieces follow one after the other."""
    if world_size == 1:
        return Cost(0, 0.0)
    hops = world_size - 1
    return Cost(2 * hops if consent else hops, num_bytes * (num_pieces + hops - 1) / num_pieces, num_pieces - 1)


def _cost(work: Workload, *, consent: bool) -> Cost:
    num_pieces = pipeline_pieces(work.world_size, work.num_bytes, PIECE_BYTES_MIN)
    return cost(work.world_size, work.num_bytes, num_pieces, consent=consent)


SCHEDULES = (
    ScheduleSpec(
        kind=OpKind.BROADCAST,
        name=Algorithm.CHAIN,
        make=lambda at: compile_program(
            chain_broadcast(at.rank, at.world_size, at.root), 1, pipeline_ranks=at.world_size
        ),
        cost=lambda work: _cost(work, consent=True),
        route=routes_of_neighbours(1.0),
    ),
    ScheduleSpec(
        kind=OpKind.REDUCE,
        name=Algorithm.CHAIN,
        make=lambda at: compile_program(
            chain_reduce(at.rank, at.world_size, at.root),
            1,
            partial_sums=at.world_size > 2,
            preserves=at.rank != at.root,
            pipeline_ranks=at.world_size,
            contributions=lambda _: [(at.root - 1 - distance) % at.world_size for distance in range(at.world_size)],
        ),
        cost=lambda work: _cost(work, consent=False),
        route=routes_of_neighbours(1.0),
    ),
)
