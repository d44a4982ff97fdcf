"""Pipelined chain broadcast: root -> root+1 -> ... ; every lane is one piece, so pieces follow each other.

With S pieces the last rank has everything after S+n-2 piece times: N(S+n-2)/(SB) seconds for N bytes at B bytes/s,
which tends to N/B, the time of one transfer, whatever the number of ranks. Source: the survey's pipelined broadcast;
also van de Geijn, "On global combine operations", J. Parallel Distrib. Comput. 22 (1994), DOI 10.1006/jpdc.1994.1091.

An empty message, the consent, runs back from the end of the chain. Without it the root would be done, and tell its user
so, before a rank that submitted something else under the same name had said a word.
"""

from __future__ import annotations

from totalreduce.schedules.actions import NOTHING, Cost, Receive, Schedule, Send

__all__ = ["chain_broadcast", "cost", "num_chunks"]


def num_chunks(world_size: int) -> int:  # noqa: ARG001  (all schedules have the same signature)
    """The tensor stays whole; lanes are the pieces."""
    return 1


def chain_broadcast(rank: int, world_size: int, root: int) -> Schedule:
    """Yield the actions of one lane on ``rank``."""
    position, last = (rank - root) % world_size, world_size - 1
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    if position > 0:
        yield Receive(left, position - 1, 0)
    if position < last:
        yield Send(right, position, 0)
        yield Receive(right, 2 * last - 1 - position, NOTHING)
    if position > 0:
        yield Send(left, 2 * last - position, NOTHING)


def cost(world_size: int, num_bytes: int) -> Cost:
    """n-1 hops for the first piece, n-1 for the consent; every rank but the last sends the tensor once."""
    return Cost(2 * (world_size - 1), float(num_bytes if world_size > 1 else 0))
