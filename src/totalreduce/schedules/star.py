"""Star allreduce for small tensors: everybody sends to a root, the root reduces in rank order and sends back.

Two message latencies whatever the number of ranks, against 2(n-1) of the ring; but the root sends and receives n-1
times the tensor. The root is chosen by the operation's id, so many small operations spread over all ranks. The root
combines in a fixed order and everybody copies its bits, so all ranks hold the same.
"""

from __future__ import annotations

from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules.actions import Cost, Mode, Receive, Schedule, Send, compile_program
from totalreduce.schedules.spec import ScheduleSpec, routes_of_pairs

__all__ = ["SCHEDULES", "cost", "star_allreduce"]


def star_allreduce(rank: int, world_size: int, root: int) -> Schedule:
    """Yield the actions of one lane on ``rank``."""
    if rank != root:
        yield Send(root, 0, 0)
        yield Receive(root, 1, 0)
        return
    others = [peer for peer in range(world_size) if peer != root]
    for peer in others:
        mode = Mode.COMBINE_LAST if peer == others[-1] else Mode.COMBINE
        yield Receive(peer, 0, 0, mode, onto_partial=peer != others[0])
    for peer in others:
        yield Send(peer, 1, 0)


def cost(world_size: int, num_bytes: int, *, shared: bool = False) -> Cost:
    """Two steps; the root receives everybody's tensor, and then sends as much.

    With ``shared`` memory the others put their tensors there, and take the result out, all at the same time: bytes pass
    once for each of these, n-1 times where the root adds, and once for the result.
    """
    passes = (world_size + 2) / 2 if shared and world_size > 1 else 2 * (world_size - 1)
    return Cost(2, float(passes * num_bytes), max(0, world_size - 2))


SCHEDULES = (
    ScheduleSpec(
        kind=OpKind.ALLREDUCE,
        name=Algorithm.STAR,
        make=lambda at: compile_program(
            star_allreduce(at.rank, at.world_size, at.root),
            1,
            partial_sums=at.world_size > 2,
            contributions=lambda _: [at.root, *(rank for rank in range(at.world_size) if rank != at.root)],
        ),
        cost=lambda work: cost(work.world_size, work.num_bytes, shared=work.shared),
        route=routes_of_pairs(lambda hosts: 2 * (len(hosts) - hosts.count(hosts[0]))),
        spreads_roots=True,
    ),
)
