"""Hierarchical allreduce: inside the host first, one slice per local rank across hosts, then spread inside the host.

A host's link carries 2(H-1)/H of the tensor for H hosts, however many ranks a host has; a flat ring over R ranks
carries 2(R-1)/R. With two hosts that is the tensor once instead of nearly twice. The tensor is cut into L slices (L:
ranks of the smallest host) of H chunks each. Local rank i < L of every host

1. adds slice i of all ranks of its host (directly, as in ``direct``),
2. takes part in a ring over hosts that reduces slice i,
3. gives the result to the other ranks of its host.

Lanes are in different phases, so links and memory are busy at the same time. Source: the survey's two-level allreduce;
Jia et al., "Highly scalable deep learning training system with mixed-precision" (2018), arXiv 1807.11205.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules.actions import Cost, Mode, Program, Receive, Schedule, Send, compile_program
from totalreduce.schedules.spec import Position, ScheduleSpec, Workload

__all__ = ["SCHEDULES", "cost", "hierarchical_allreduce", "inside_cost", "num_chunks", "span_max"]

_GIVE, _SPREAD, _RING = 0, 1, 2


def _members(hosts: Sequence[int]) -> list[list[int]]:
    """Ranks of every host, hosts by their first rank."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return list(members.values())


def _shape(hosts: Sequence[int]) -> tuple[int, int]:
    members = _members(hosts)
    return min(map(len, members)), len(members)


def num_chunks(hosts: Sequence[int]) -> int:
    """Slices times hosts."""
    num_slices, num_hosts = _shape(hosts)
    return num_slices * num_hosts


def span_max(hosts: Sequence[int]) -> int:
    """A slice: one chunk per host."""
    return _shape(hosts)[1]


def hierarchical_allreduce(rank: int, hosts: Sequence[int]) -> Schedule:
    """Yield the actions of one lane on ``rank``; ``hosts``: a number per rank that says which host it is on."""
    members = _members(hosts)
    num_slices, num_hosts = _shape(hosts)
    place = next(index for index, ranks in enumerate(members) if rank in ranks)
    locals_ = members[place]
    mine = locals_.index(rank)
    for distance in range(1, len(locals_)):
        owner = (mine + distance) % len(locals_)
        if owner < num_slices:
            yield Send(locals_[owner], _GIVE, owner * num_hosts, span=num_hosts)
    if mine < num_slices:
        yield from _gather_host(mine, locals_, num_hosts)
        if num_hosts > 1:
            yield from _ring_over_hosts(place, [ranks[mine] for ranks in members], members, mine * num_hosts)
        for distance in range(1, len(locals_)):
            peer = locals_[(mine + distance) % len(locals_)]
            yield Send(peer, _SPREAD, mine * num_hosts, span=num_hosts)
    for distance in range(1, len(locals_)):
        owner = (mine - distance) % len(locals_)
        if owner < num_slices:
            # What was there has left: the owner needed it for what now comes.
            yield Receive(locals_[owner], _SPREAD, owner * num_hosts, anytime=True, span=num_hosts)


def _gather_host(mine: int, locals_: Sequence[int], num_hosts: int) -> Schedule:
    for distance in range(1, len(locals_)):
        peer = locals_[(mine - distance) % len(locals_)]
        last = num_hosts == 1 and distance == len(locals_) - 1
        mode = Mode.COMBINE_LAST if last else Mode.COMBINE
        yield Receive(peer, _GIVE, mine * num_hosts, mode, onto_partial=distance > 1, span=num_hosts)


def _ring_over_hosts(place: int, ring: Sequence[int], members: Sequence[Sequence[int]], first: int) -> Schedule:
    size = len(ring)
    right, left = ring[(place + 1) % size], ring[(place - 1) % size]
    # The first hop carries a sum too where the host has several ranks.
    summed = [len(ranks) > 1 for ranks in members]
    for step in range(size - 1):
        chunk = (place - step) % size
        yield Send(right, _RING + step, first + chunk, partial=step > 0 or summed[place])
        mode = Mode.COMBINE_LAST if step == size - 2 else Mode.COMBINE
        yield Receive(
            left,
            _RING + step,
            first + (place - step - 1) % size,
            mode,
            partial=step > 0 or summed[(place - 1) % size],
            onto_partial=summed[place],
        )
    for turn in range(size - 1):
        step = _RING + size - 1 + turn
        yield Send(right, step, first + (place + 1 - turn) % size)
        yield Receive(left, step, first + (place - turn) % size)


def cost(hosts: Sequence[int], num_bytes: int, widening: int = 1) -> Cost:
    """What a host's link carries, shared by its ranks: a ring over hosts. ``widening``: of unfinished sums."""
    num_hosts = len(set(hosts))
    steps = num_hosts - 1
    return Cost(2 * steps, steps * (1 + widening) * num_bytes / num_hosts)


def inside_cost(hosts: Sequence[int], num_bytes: int) -> Cost:
    """What a rank of the largest host pays inside it, before and after: as a direct allreduce there."""
    most = max(map(len, _members(hosts)))
    return Cost(2, 2 * (most - 1) * num_bytes / most, 2 * max(0, most - 2))


def _program(at: Position) -> Program:
    return compile_program(
        hierarchical_allreduce(at.rank, at.hosts),
        num_chunks(at.hosts),
        partial_sums=at.world_size > 2,
        span_max=span_max(at.hosts),
    )


def _seconds(work: Workload) -> float | None:
    if work.one_host or max(Counter(work.hosts).values()) == 1:
        return None  # there is only one level
    links = work.links
    between_s = cost(work.hosts, work.num_bytes, work.widening).seconds(links.latency_s, links.bytes_per_s)
    inside = inside_cost(work.hosts, work.num_bytes)
    return between_s + inside.seconds(links.local_latency_s, links.local_bytes_per_s)


SCHEDULES = (
    ScheduleSpec(kind=OpKind.ALLREDUCE, name=Algorithm.HIERARCHICAL, make=_program, seconds=_seconds, by_hosts=True),
)
