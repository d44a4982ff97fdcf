"""What a schedule's file declares: how a collective proceeds, and what it costs.

``make`` builds the program of one rank. ``cost`` says what the busiest rank pays; ``route`` says how much of that
leaves a host. ``estimate`` turns both into seconds, by which :class:`totalreduce.schedules.select.Selector` chooses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from totalreduce.foundation.partition import lane_count
from totalreduce.foundation.types import OpKind
from totalreduce.schedules.actions import NOTHING, Cost, Program, Send

__all__ = ["LinkModel", "Position", "Route", "ScheduleSpec", "Workload", "routes_of_neighbours", "routes_of_pairs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkModel:
    """What a message costs between two ranks: the latency-bandwidth model."""

    #: Seconds from submission on one rank to arrival on another host, for an empty message, software included.
    latency_s: float = 1.5e-4
    bytes_per_s: float = 1.25e8  #: Bandwidth of one host's link, in one direction.
    local_latency_s: float = 5e-5  #: The latency between ranks of one host.
    local_bytes_per_s: float = 4e9  #: The bandwidth between ranks of one host.
    source: str = "default"  #: ``default``, ``measured``, or the file from which the numbers were read.


class Position(NamedTuple):
    """The rank for which a program is made."""

    rank: int  #: Rank within the group of the operation.
    world_size: int
    root: int  #: The root of the collective; the sender of a message; the centre of a star.
    hosts: tuple[int, ...]  #: The host of every rank as a number; empty unless the schedule declares ``by_hosts``.


@dataclass(frozen=True, slots=True)
class Workload:
    """An operation whose schedule is to be chosen."""

    num_bytes: int  #: Bytes of the tensor; of all blocks of one rank together where there are blocks.
    hosts: tuple[int, ...]  #: The host of every rank of the operation, as a number.
    links: LinkModel  #: What messages cost.
    shared_memory: bool = True  #: Whether ranks of one host send through shared memory.
    #: How many bytes an unfinished sum has for each byte of an element: 2 where half types are added up in float32.
    widening: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host."""
        return len(set(self.hosts)) == 1

    @property
    def shared(self) -> bool:
        """Whether every message goes through shared memory."""
        return self.shared_memory and self.one_host

    @property
    def lanes(self) -> int:
        """Lanes that the engine's default settings give each half of the tensor."""
        return lane_count(self.num_bytes // 2, segment_bytes=512 * 1024, segment_bytes_min=128 * 1024, lanes_min=2)


@dataclass(frozen=True, slots=True)
class Route:
    """How much of a schedule's traffic leaves a host."""

    remote_share: float  #: The share of all bytes that travels between hosts, from 0 to 1.
    link_load: float  #: Tensors (all blocks together) that cross the busiest host's link in its busier direction.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScheduleSpec:
    """One schedule of one kind of operation."""

    kind: OpKind  #: The collective.
    name: str  #: The schedule's name, the same for all kinds for which its file has a schedule.
    make: Callable[[Position], Program]  #: Builds the program of one rank.
    #: What the busiest rank pays for a workload; ``None`` if the schedule is no candidate for it.
    cost: Callable[[Workload], Cost | None] = lambda _: None
    #: By the hosts of the ranks, how much leaves a host, as if rank 0 were the root. ``None``: counted from the
    #: programs of all ranks, which takes time for schedules of many messages.
    route: Callable[[tuple[int, ...]], Route] | None = None
    #: Instead of ``cost`` and ``route``, for schedules to which hosts make a difference.
    seconds: Callable[[Workload], float | None] | None = None
    congestion: float = 1.0  #: Factor on the time that bytes take: above 1 where a schedule cannot keep its links busy.
    by_hosts: bool = False  #: Whether the program depends on the hosts of the ranks.
    #: Whether the root is the engine's choice; it chooses by the operation's name, so that many operations spread over
    #: all ranks.
    spreads_roots: bool = False

    def estimate(self, workload: Workload) -> float | None:
        """Return the seconds that an operation takes by this schedule; ``None`` if it is no candidate."""
        if self.seconds is not None:
            return self.seconds(workload)
        cost, links = self.cost(workload), workload.links
        if cost is None:
            return None
        if workload.one_host:
            return cost.seconds(links.local_latency_s, links.local_bytes_per_s / self.congestion)
        route = _cached_route(self, workload.hosts)
        far, near = route.remote_share, 1 - route.remote_share
        latency_s = far * links.latency_s + near * links.local_latency_s
        # The time of the busiest rank, or of the busiest host's link.
        far_bytes = max(far * cost.bytes_sent, route.link_load * self.congestion * self._widened(workload, cost))
        carried_s = far_bytes / links.bytes_per_s + near * cost.bytes_sent / links.local_bytes_per_s
        return Cost(cost.steps, 0.0, cost.messages).seconds(latency_s, 1.0) + carried_s

    def _widened(self, workload: Workload, cost: Cost) -> float:
        """Return the bytes of the tensor, times what unfinished sums add on average to the bytes of all messages."""
        if workload.widening == 1:
            return workload.num_bytes
        plain = self.cost(dataclasses.replace(workload, widening=1))
        if plain is None or not plain.bytes_sent:  # of a tensor without elements
            return workload.num_bytes
        return workload.num_bytes * cost.bytes_sent / plain.bytes_sent


@functools.lru_cache(maxsize=1024)
def _cached_route(spec: ScheduleSpec, hosts: tuple[int, ...]) -> Route:
    return _counted_route(spec, hosts) if spec.route is None else spec.route(hosts)


def _counted_route(spec: ScheduleSpec, hosts: tuple[int, ...]) -> Route:
    remote, total = 0.0, 0.0
    load: defaultdict[tuple[int, bool], float] = defaultdict(float)
    for rank in range(len(hosts)):
        program = spec.make(Position(rank, len(hosts), 0, hosts if spec.by_hosts else ()))
        for action in program.actions:
            if isinstance(action, Send) and action.chunk != NOTHING:
                carried = action.span / program.num_chunks
                total += carried
                if hosts[rank] != hosts[action.peer]:
                    remote += carried
                    load[hosts[rank], True] += carried
                    load[hosts[action.peer], False] += carried
    return Route(remote / max(1.0, total), max(load.values(), default=0.0))


def routes_of_neighbours(tensors: float | None = None, *, halves: int = 1) -> Callable[[tuple[int, ...]], Route]:
    """Return the route of a schedule in which every rank sends as much to its right neighbour.

    Args:
        tensors: How often the tensor crosses every edge of the ring; ``None``: (n-1)/n times in each half.
        halves: 2 for an allreduce, which is a reduce-scatter and an allgather.
    """

    def route(hosts: tuple[int, ...]) -> Route:
        size = len(hosts)
        leaving = Counter(host for rank, host in enumerate(hosts) if hosts[(rank + 1) % size] != host)
        carried = halves * (size - 1) / size if tensors is None else tensors
        return Route(sum(leaving.values()) / size, max(leaving.values(), default=0) * carried)

    return route


def routes_of_pairs(link_load: Callable[[tuple[int, ...]], float]) -> Callable[[tuple[int, ...]], Route]:
    """Return the route of a schedule in which a rank's partners are any other ranks.

    ``link_load``: tensors that cross the busiest host's link, by the hosts of the ranks.
    """

    def route(hosts: tuple[int, ...]) -> Route:
        size = len(hosts)
        elsewhere = (size - max(Counter(hosts).values())) / max(1, size - 1)
        return Route(elsewhere, link_load(hosts))

    return route
