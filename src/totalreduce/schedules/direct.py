"""Direct messages between all pairs: alltoall, gather, scatter; and reduce-scatter, allgather, allreduce in one hop.

Destinations are rotated (rank r begins with r+1), so that not everybody sends to rank 0 first, and an alltoall is
throttled: a rank is at most ``WINDOW`` steps ahead of what it has received, so that one receiver's link is not flooded
by all others at once.

The reducing ones are for ranks that share memory: as many bytes as a ring, but two hops instead of 2(n-1), and every
rank adds all contributions to its own slice while that is in its cache. The order of addition is fixed: r-1, r-2, ...
"""

from __future__ import annotations

from totalreduce.schedules.actions import Cost, Mode, Receive, Schedule, Send

__all__ = [
    "WINDOW",
    "alltoall",
    "cost",
    "direct_allgather",
    "direct_allreduce",
    "direct_reduce_scatter",
    "gather",
    "half_cost",
    "scatter",
    "send_receive",
]

#: Steps that a rank of an alltoall may be ahead.
WINDOW = 4


def alltoall(rank: int, world_size: int) -> Schedule:
    """Yield the actions of one lane: chunks 0 to n-1 are what goes to each rank, n to 2n-1 what comes from each."""
    for distance in range(1, world_size):
        yield Send((rank + distance) % world_size, distance, (rank + distance) % world_size)
        if distance >= WINDOW:
            source = (rank - distance + WINDOW - 1) % world_size
            yield Receive(source, distance - WINDOW + 1, world_size + source)
    for distance in range(max(1, world_size - WINDOW + 1), world_size):
        source = (rank - distance) % world_size
        yield Receive(source, distance, world_size + source)


def gather(rank: int, world_size: int, root: int) -> Schedule:
    """Yield the actions of one lane: chunk r is rank r's block; the root has all of them."""
    if rank != root:
        yield Send(root, 0, rank)
        return
    for distance in range(1, world_size):
        source = (root + distance) % world_size
        yield Receive(source, 0, source)


def scatter(rank: int, world_size: int, root: int) -> Schedule:
    """Yield the actions of one lane: chunk r is rank r's block; the root has all of them."""
    if rank != root:
        yield Receive(root, 0, rank)
        return
    for distance in range(1, world_size):
        target = (root + distance) % world_size
        yield Send(target, 0, target)


def send_receive(rank: int, world_size: int, root: int) -> Schedule:  # noqa: ARG001  (all schedules look alike)
    """Yield the actions of one lane of a message from ``root``, one of two ranks, to the other."""
    if rank == root:
        yield Send(1 - root, 0, 0)
    else:
        yield Receive(root, 0, 0)


def _combine(rank: int, world_size: int, into: int | None) -> Schedule:
    for distance in range(1, world_size):
        mode = Mode.COMBINE_LAST if distance == world_size - 1 else Mode.COMBINE
        yield Receive(
            (rank - distance) % world_size,
            0,
            rank,
            mode,
            onto_partial=distance > 1,
            into=into if mode is Mode.COMBINE_LAST else None,
        )


def direct_reduce_scatter(rank: int, world_size: int) -> Schedule:
    """Yield the actions of one lane on ``rank``; chunk ``world_size`` is the output."""
    for distance in range(1, world_size):
        target = (rank + distance) % world_size
        yield Send(target, 0, target)
    yield from _combine(rank, world_size, world_size)


def direct_allgather(rank: int, world_size: int) -> Schedule:
    """Yield the actions of one lane on ``rank``, whose own block is chunk ``rank``."""
    for distance in range(1, world_size):
        yield Send((rank + distance) % world_size, 1, rank)
    for distance in range(1, world_size):
        source = (rank - distance) % world_size
        yield Receive(source, 1, source, anytime=True)


def direct_allreduce(rank: int, world_size: int) -> Schedule:
    """Yield the actions of one lane on ``rank``."""
    for distance in range(1, world_size):
        target = (rank + distance) % world_size
        yield Send(target, 0, target)
    yield from _combine(rank, world_size, None)
    yield from direct_allgather(rank, world_size)


def cost(world_size: int, num_bytes: int, *, shared: bool = False) -> Cost:
    """An allreduce: two hops, but 2(n-1) messages on every rank; as many bytes as a ring.

    With ``shared`` memory the second half's messages carry one body, which is put there once: of the two times that
    other bytes pass through memory (in, and added or out) only the second remains.
    """
    half = half_cost(world_size, num_bytes)
    again = (half.bytes_sent + num_bytes / world_size) / 2 if shared and world_size > 1 else half.bytes_sent
    return Cost(2 * half.steps, half.bytes_sent + again, 2 * half.messages)


def half_cost(world_size: int, num_bytes: int) -> Cost:
    """One hop, n-1 messages: ``num_bytes`` is everything one rank has to send, its own block included."""
    return Cost(1, (world_size - 1) * num_bytes / world_size, max(0, world_size - 2))
