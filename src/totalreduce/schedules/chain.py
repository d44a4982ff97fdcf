"""Pipelined chain broadcast: root -> root+1 -> ... ; every lane is one piece, so pieces follow each other.

With S pieces the last rank has everything after S+n-2 piece times: N(S+n-2)/(SB) seconds for N bytes at B bytes/s,
which tends to N/B, the time of one transfer, whatever the number of ranks. Source: the survey's pipelined broadcast;
also van de Geijn, "On global combine operations", J. Parallel Distrib. Comput. 22 (1994), DOI 10.1006/jpdc.1994.1091.
"""

from __future__ import annotations

from totalreduce.schedules.actions import Cost, Receive, Schedule, Send

__all__ = ["chain_broadcast", "cost", "num_chunks"]


def num_chunks(world_size: int) -> int:  # noqa: ARG001  (all schedules have the same signature)
    """The tensor stays whole; lanes are the pieces."""
    return 1


def chain_broadcast(rank: int, world_size: int, root: int) -> Schedule:
    """Yield the actions of one lane on ``rank``."""
    position = (rank - root) % world_size
    if position > 0:
        yield Receive((rank - 1) % world_size, position - 1, 0)
    if position < world_size - 1:
        yield Send((rank + 1) % world_size, position, 0)


def cost(world_size: int, num_bytes: int) -> Cost:
    """n-1 hops for the first piece; every rank but the last sends the tensor once."""
    return Cost(world_size - 1, float(num_bytes if world_size > 1 else 0))
