"""The pipelined chain: broadcast root -> root+1 -> ... and, the other way, reduce ... -> root+1 -> root.

Every lane is one piece, so pieces follow each other. With S pieces the last rank of a broadcast (the root of a reduce)
has everything after S+n-2 piece times: N(S+n-2)/(SB) seconds for N bytes at B bytes/s, which tends to N/B, the time of
one transfer, whatever the number of ranks. Source: the survey's pipelined broadcast; also van de Geijn, "On global
combine operations", J. Parallel Distrib. Comput. 22 (1994), DOI 10.1006/jpdc.1994.1091.

Behind a broadcast's first piece an empty message, the consent, runs back from the end of the chain. Without it the root
would be done, and tell its user so, before a rank that submitted something else under the same name had said a word.
"""

from __future__ import annotations

from totalreduce.schedules.actions import NOTHING, Cost, Mode, Receive, Schedule, Send

__all__ = ["chain_broadcast", "chain_reduce", "cost", "pieces"]


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


def pieces(world_size: int, num_bytes: int, piece_bytes_min: int) -> int:
    """How many pieces: so many that filling the pipeline (n-2 piece times) costs little, and none too small."""
    return max(1, min(24 * max(1, world_size - 2), num_bytes // piece_bytes_min))


def cost(world_size: int, num_bytes: int, num_pieces: int = 1, *, consent: bool = True) -> Cost:
    """n-1 hops for the first piece (and n-1 for the consent); the other pieces follow one after the other."""
    if world_size == 1:
        return Cost(0, 0.0)
    hops = world_size - 1
    return Cost(2 * hops if consent else hops, num_bytes * (num_pieces + hops - 1) / num_pieces, num_pieces - 1)
