"""Direct messages between all pairs: alltoall, gather, scatter; reductions and allgather in one hop.

Destinations are rotated (rank r begins with r+1), so that not everybody sends to rank 0 first, and an alltoall is
throttled: a rank is at most ``WINDOW`` steps ahead of what it has received, so that one receiver's link is not flooded
by all others at once.

The reducing ones are for ranks that share memory: as many bytes as a ring, but two hops instead of 2(n-1), and every
rank adds all contributions to its own slice while that is in its cache. The order of addition is fixed: r-1, r-2, ...
"""

from __future__ import annotations

from collections import Counter

from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules.actions import Chunking, Cost, Mode, Receive, Schedule, Send, compile_program
from totalreduce.schedules.spec import Route, ScheduleSpec, Workload, routes_of_pairs

__all__ = [
    "SCHEDULES",
    "WINDOW",
    "alltoall",
    "cost",
    "direct_allgather",
    "direct_allreduce",
    "direct_reduce",
    "direct_reduce_scatter",
    "gather",
    "half_cost",
    "scatter",
    "send_receive",
]

#: Steps that a rank of an alltoall may be ahead. Measured with 8 hosts and 16 MiB: with a core for each rank, 2, 4 and
#: 8 steps take the same time at 1 Gbit/s. With 2 cores for all, 8 steps took 145 to 147 ms and 4 took 144 to 165
#: (medians of five runs in turns); at 200 Mbit/s, where the processors do not limit, 700 to 770 and 740 to 810. A
#: single step takes 820 to 1,000 there: a rank that has sent to a slow receiver waits. To let a lane wait until each
#: message has left, or to begin one lane after the other, was slower as well.
WINDOW = 8
#: Of larger tensors the bytes that the other ranks have staged have left the cache before they are read. Measured with
#: 4 ranks: 64 MiB direct 60-70 ms, ring 61-75; 256 MiB direct 300-350, ring 245-310.
_ALLREDUCE_BYTES_MAX = 128 * 1024 * 1024
#: Between hosts no unfinished sum travels, so half types that are added up in float32 send fewer bytes than in a ring.
#: A rank tells another one that an operation has begun, without being asked, where it expects more bytes than these
#: (``EngineConfig.eager_bytes``); and the connections of more ranks are more than the relay has.
_APART_BYTES_MIN = 1024 * 1024
_APART_RANKS_MAX = 32
#: Without shared memory nothing is saved but hops. Measured over loopback TCP with 4 ranks, direct and ring: 4 MiB 11.1
#: and 9.6 ms, 16 MiB 32 and 28, 64 MiB 132 and 112.
_UNSHARED_BYTES_MAX = 1024 * 1024


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


def _combine(rank: int, world_size: int, chunk: int, into: int | None) -> Schedule:
    for distance in range(1, world_size):
        mode = Mode.COMBINE_LAST if distance == world_size - 1 else Mode.COMBINE
        yield Receive(
            (rank - distance) % world_size,
            0,
            chunk,
            mode,
            onto_partial=distance > 1,
            into=into if mode is Mode.COMBINE_LAST else None,
        )


def _order(rank: int, world_size: int) -> list[int]:
    """Return the ranks in the order in which ``_combine`` adds their contributions on a rank."""
    return [(rank - distance) % world_size for distance in range(world_size)]


def direct_reduce_scatter(rank: int, world_size: int) -> Schedule:
    """Yield the actions of one lane on ``rank``; chunk ``world_size`` is the output."""
    for distance in range(1, world_size):
        target = (rank + distance) % world_size
        yield Send(target, 0, target)
    yield from _combine(rank, world_size, rank, world_size)


def direct_reduce(rank: int, world_size: int, root: int) -> Schedule:
    """Yield the actions of one lane: the root adds the tensors of all others, and nobody else adds."""
    if rank != root:
        yield Send(root, 0, 0)
    else:
        yield from _combine(root, world_size, 0, None)


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
    yield from _combine(rank, world_size, rank, None)
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


def _is_candidate(work: Workload, halves: int = 1) -> bool:
    """Return whether direct messages pay where a ring would do.

    They do on one host, for what memory or few hops favour, and between hosts for what has wide sums. ``halves``: 2 for
    an allreduce, which is a reduce-scatter and an allgather.
    """
    if work.one_host:
        return work.shared or work.num_bytes <= _UNSHARED_BYTES_MAX
    is_apart = len(set(work.hosts)) == work.world_size
    is_large = halves * work.num_bytes > _APART_BYTES_MIN * work.world_size
    return work.widening > 1 and is_apart and is_large and work.world_size <= _APART_RANKS_MAX


def _allreduce_cost(work: Workload) -> Cost | None:
    if not _is_candidate(work, halves=2) or (work.one_host and work.num_bytes > _ALLREDUCE_BYTES_MAX):
        return None
    return cost(work.world_size, work.num_bytes, shared=work.shared)


def _reduce_cost(work: Workload) -> Cost | None:
    """One hop, in which the root receives the tensors of all others."""
    others = work.world_size - 1
    return Cost(1, float(others * work.num_bytes), max(0, others - 1)) if _is_candidate(work) else None


def _half_cost(work: Workload) -> Cost | None:
    return half_cost(work.world_size, work.num_bytes) if _is_candidate(work) else None


def _all_pairs_load(hosts: tuple[int, ...]) -> float:
    return max(count * (len(hosts) - count) for count in Counter(hosts).values()) / len(hosts)


def _root_load(hosts: tuple[int, ...]) -> float:
    return (len(hosts) - hosts.count(hosts[0])) / len(hosts)


_BETWEEN_ALL = routes_of_pairs(_all_pairs_load)
_WITH_ROOT = routes_of_pairs(_root_load)

SCHEDULES = (
    ScheduleSpec(
        kind=OpKind.ALLREDUCE,
        name=Algorithm.DIRECT,
        make=lambda at: compile_program(
            direct_allreduce(at.rank, at.world_size),
            at.world_size,
            contributions=lambda chunk: _order(chunk, at.world_size),
        ),
        cost=_allreduce_cost,
        route=_BETWEEN_ALL,
    ),
    ScheduleSpec(
        kind=OpKind.ALLGATHER,
        name=Algorithm.DIRECT,
        make=lambda at: compile_program(
            direct_allgather(at.rank, at.world_size), at.world_size, chunking=Chunking.BLOCKS
        ),
        cost=_half_cost,
        route=_BETWEEN_ALL,
    ),
    ScheduleSpec(
        kind=OpKind.REDUCE_SCATTER,
        name=Algorithm.DIRECT,
        make=lambda at: compile_program(
            direct_reduce_scatter(at.rank, at.world_size),
            at.world_size + 1,
            chunking=Chunking.BLOCKS,
            partial_sums=at.world_size > 2,
            preserves=True,
            contributions=lambda chunk: _order(chunk, at.world_size),
        ),
        cost=_half_cost,
        route=_BETWEEN_ALL,
    ),
    ScheduleSpec(
        kind=OpKind.REDUCE,
        name=Algorithm.DIRECT,
        make=lambda at: compile_program(
            direct_reduce(at.rank, at.world_size, at.root),
            1,
            partial_sums=at.world_size > 2,
            preserves=at.rank != at.root,
            contributions=lambda _: _order(at.root, at.world_size),
        ),
        cost=_reduce_cost,
        route=_WITH_ROOT,
    ),
    ScheduleSpec(
        kind=OpKind.GATHER,
        name=Algorithm.DIRECT,
        make=lambda at: compile_program(
            gather(at.rank, at.world_size, at.root), at.world_size, chunking=Chunking.BLOCKS
        ),
        cost=lambda work: half_cost(work.world_size, work.num_bytes),
        route=_WITH_ROOT,
    ),
    ScheduleSpec(
        kind=OpKind.SCATTER,
        name=Algorithm.DIRECT,
        make=lambda at: compile_program(
            scatter(at.rank, at.world_size, at.root), at.world_size, chunking=Chunking.BLOCKS
        ),
        cost=lambda work: half_cost(work.world_size, work.num_bytes),
        route=_WITH_ROOT,
    ),
    ScheduleSpec(
        kind=OpKind.ALLTOALL,
        name=Algorithm.DIRECT,
        make=lambda at: compile_program(alltoall(at.rank, at.world_size), 2 * at.world_size, chunking=Chunking.BLOCKS),
        cost=lambda work: half_cost(work.world_size, work.num_bytes),
        route=_BETWEEN_ALL,
    ),
    ScheduleSpec(
        kind=OpKind.SEND_RECV,
        name=Algorithm.DIRECT,
        make=lambda at: compile_program(send_receive(at.rank, at.world_size, at.root), 1, chunking=Chunking.BLOCKS),
        cost=lambda work: Cost(1, float(work.num_bytes)),
        route=lambda _hosts: Route(1.0, 1.0),
    ),
)
