"""Which schedule for which operation: the cheapest by each schedule's own cost function and the measured links.

The choice must be the same on all ranks, so it depends on nothing but what is equal everywhere: the kind, the size, the
group, where its ranks are, and a ``LinkModel`` that the ranks have agreed on (see ``groups.probe``). An explicit choice
always wins.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from totalreduce.foundation.partition import lane_count
from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules import chain, direct, dissemination, halving_doubling, hierarchical, ring, star, tree
from totalreduce.schedules.actions import NOTHING, Cost, Send

__all__ = ["LinkModel", "Selector", "candidates"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkModel:
    """What a message costs between two ranks: the latency-bandwidth model.

    Attributes:
        latency_s: From submission on one rank to arrival on the other, for an empty message, software included.
        bytes_per_s: Of one host's link, in one direction.
        local_latency_s: The same between ranks of one host.
        local_bytes_per_s: The same between ranks of one host.
        source: ``default``, ``measured``, or the file it was read from.
    """

    latency_s: float = 1.5e-4
    bytes_per_s: float = 1.25e8
    local_latency_s: float = 5e-5
    local_bytes_per_s: float = 4e9
    source: str = "default"


def candidates(
    kind: OpKind, num_bytes: int, hosts: Sequence[int], links: LinkModel, *, shared_memory: bool = True
) -> dict[Algorithm, float]:
    """Estimated seconds of every schedule that is worth considering.

    Args:
        kind: Which collective.
        num_bytes: Of the tensor; of all blocks of one rank together where there are blocks.
        hosts: Host of every rank of the group.
        links: What messages cost.
        shared_memory: Whether ranks of one host send through it.
    """
    size, counts = len(hosts), Counter(hosts)
    one_host = len(counts) == 1
    shared = one_host and shared_memory
    goes_direct = one_host and (shared or num_bytes <= _DIRECT_BYTES_MAX_UNSHARED)
    # As many lanes as the engine's default settings give each half of the tensor.
    pieces = lane_count(num_bytes // 2, segment_bytes=512 * 1024, segment_bytes_min=128 * 1024, lanes_min=2)
    costs: dict[Algorithm, Cost] = {}
    match kind:
        case OpKind.ALLREDUCE:
            costs = {
                Algorithm.RING: ring.cost(size, num_bytes),
                Algorithm.STAR: star.cost(size, num_bytes, shared=shared),
                Algorithm.TREE: tree.cost(size, num_bytes, pieces),
                Algorithm.HALVING_DOUBLING: halving_doubling.cost(size, num_bytes),
            }
            if goes_direct and num_bytes <= _DIRECT_BYTES_MAX:
                costs[Algorithm.DIRECT] = direct.cost(size, num_bytes, shared=shared)
        case OpKind.REDUCE | OpKind.BROADCAST:
            consent = kind is OpKind.BROADCAST
            num_pieces = chain.pieces(size, num_bytes, _PIECE_BYTES_MIN)
            costs = {
                Algorithm.CHAIN: chain.cost(size, num_bytes, num_pieces, consent=consent),
                Algorithm.TREE: tree.binomial_cost(size, num_bytes, consent=consent),
            }
        case OpKind.ALLGATHER | OpKind.REDUCE_SCATTER:
            costs = {Algorithm.RING: ring.half_cost(size, num_bytes)}
            if goes_direct:
                costs[Algorithm.DIRECT] = direct.half_cost(size, num_bytes)
        case OpKind.BARRIER:
            costs = {Algorithm.DISSEMINATION: dissemination.cost(size, num_bytes)}
        case OpKind.SEND_RECV:
            costs = {Algorithm.DIRECT: Cost(1, float(num_bytes))}
        case OpKind.ALLTOALL | OpKind.GATHER | OpKind.SCATTER:
            costs = {Algorithm.DIRECT: direct.half_cost(size, num_bytes)}
    seconds = {}
    for algorithm, cost in costs.items():
        if one_host:
            slower = _UNPIPELINED if algorithm is Algorithm.HALVING_DOUBLING else 1.0
            seconds[algorithm] = cost.seconds(links.local_latency_s, links.local_bytes_per_s / slower)
        else:
            seconds[algorithm] = _route(kind, algorithm, tuple(hosts)).seconds(cost, num_bytes, links)
    if kind is OpKind.ALLREDUCE and not one_host and max(counts.values()) > 1:
        between_s = hierarchical.cost(hosts, num_bytes).seconds(links.latency_s, links.bytes_per_s)
        inside = hierarchical.inside_cost(hosts, num_bytes)
        inside_s = inside.seconds(links.local_latency_s, links.local_bytes_per_s)
        seconds[Algorithm.HIERARCHICAL] = between_s + inside_s
    return seconds


_PIECE_BYTES_MIN = 64 * 1024
#: Of larger tensors what all others have staged has left the cache before it is read. Measured with 4 ranks: 64 MiB
#: direct 60-70 ms, ring 61-75; 256 MiB direct 300-350, ring 245-310.
_DIRECT_BYTES_MAX = 128 * 1024 * 1024
#: Without shared memory nothing is saved but hops. Measured over loopback TCP with 4 ranks, direct and ring: 4 MiB 11.1
#: and 9.6 ms, 16 MiB 32 and 28, 64 MiB 132 and 112.
_DIRECT_BYTES_MAX_UNSHARED = 1024 * 1024
#: What it costs that a rank of halving and doubling sends nothing while it adds, and that its messages, up to half of
#: the tensor, meet those of others at the switch. Measured: 1 MiB, 8 hosts at 1 Gbit/s: 1.5; larger ones less; 256 MiB,
#: 4 ranks on one host: 1.2.
_UNPIPELINED = 1.3


@dataclass(frozen=True, slots=True)
class _Route:
    """Which of a schedule's messages leave a host.

    Attributes:
        remote_share: Of all bytes that its messages carry, the share that does.
        link_load: Tensors (all blocks together) that cross the busiest host's link in its busier direction.
    """

    remote_share: float
    link_load: float

    def seconds(self, cost: Cost, num_bytes: int, links: LinkModel) -> float:
        """Seconds of a schedule that takes no notice of hosts: its busiest rank's or its busiest link's time."""
        far, near = self.remote_share, 1 - self.remote_share
        latency_s = far * links.latency_s + near * links.local_latency_s
        far_bytes = max(far * cost.bytes_sent, self.link_load * num_bytes)
        carried_s = far_bytes / links.bytes_per_s + near * cost.bytes_sent / links.local_bytes_per_s
        return Cost(cost.steps, 0.0, cost.messages).seconds(latency_s, 1.0) + carried_s


@functools.lru_cache(maxsize=1024)
def _route(kind: OpKind, algorithm: Algorithm, hosts: tuple[int, ...]) -> _Route:
    """The route of a schedule; of a rooted one as if rank 0 were the root."""
    size, most = len(hosts), max(Counter(hosts).values())
    elsewhere = (size - most) / max(1, size - 1)  # share of a rank's possible partners
    match kind, algorithm:
        case _, Algorithm.RING | Algorithm.CHAIN:
            # Every edge of the ring carries as much.
            leaving = Counter(host for place, host in enumerate(hosts) if hosts[(place + 1) % size] != host)
            edges = max(leaving.values(), default=0)
            carried = 1.0 if algorithm is Algorithm.CHAIN else (size - 1) / size
            return _Route(sum(leaving.values()) / size, edges * carried * (2 if kind is OpKind.ALLREDUCE else 1))
        case _, Algorithm.TREE | Algorithm.HALVING_DOUBLING:
            return _counted(kind, algorithm, hosts)
        case _, Algorithm.STAR:
            return _Route(elsewhere, 2 * (size - hosts.count(hosts[0])))
        case OpKind.SEND_RECV, _:
            return _Route(1.0, 1.0)
        case OpKind.GATHER | OpKind.SCATTER, _:
            return _Route(elsewhere, (size - hosts.count(hosts[0])) / size)
        case _:
            return _Route(elsewhere, max(each * (size - each) for each in Counter(hosts).values()) / size)


def _counted(kind: OpKind, algorithm: Algorithm, hosts: tuple[int, ...]) -> _Route:
    """The route of a schedule of few messages per rank, by looking at all of them."""
    size = len(hosts)
    remote, total = 0.0, 0.0
    out: defaultdict[int, float] = defaultdict(float)
    into: defaultdict[int, float] = defaultdict(float)
    for rank in range(size):
        if algorithm is Algorithm.HALVING_DOUBLING:
            chunks, schedule = (
                halving_doubling.num_chunks(size),
                halving_doubling.halving_doubling_allreduce(rank, size),
            )
        elif kind is OpKind.ALLREDUCE:
            chunks, schedule = 2, tree.double_tree_allreduce(rank, size)
        else:
            chunks, schedule = 1, tree.binomial_broadcast(rank, size, 0)
        for action in schedule:
            if isinstance(action, Send) and action.chunk != NOTHING:
                carried = action.span / chunks
                total += carried
                if hosts[rank] != hosts[action.peer]:
                    remote += carried
                    out[hosts[rank]] += carried
                    into[hosts[action.peer]] += carried
    busiest = max([*out.values(), *into.values()], default=0)
    if algorithm is Algorithm.HALVING_DOUBLING:
        busiest *= _UNPIPELINED
    return _Route(remote / max(1.0, total), busiest)


@dataclass(slots=True)
class Selector:
    """Chooses, and remembers what it chose.

    Attributes:
        links: What messages cost; equal on all ranks.
        hosts: Host of every rank of the whole group; equal on all ranks.
        overrides: Explicit choices by kind, from the settings.
        shared_memory: Whether ranks of one host send through it; equal on all ranks.
    """

    links: LinkModel
    hosts: tuple[int, ...]
    overrides: Mapping[OpKind, Algorithm] = field(default_factory=dict)
    shared_memory: bool = True
    _chosen: dict[tuple[OpKind, int, tuple[int, ...]], Algorithm] = field(default_factory=dict)

    def choose(self, kind: OpKind, num_bytes: int, ranks: tuple[int, ...]) -> Algorithm:
        """The schedule for an operation of ``num_bytes`` on these ranks of the whole group."""
        explicit = self.overrides.get(kind)
        if explicit is not None:
            return explicit
        key = (kind, num_bytes, ranks)
        algorithm = self._chosen.get(key)
        if algorithm is None:
            if len(self._chosen) >= _REMEMBERED_MAX:
                self._chosen.clear()
            estimates = self.estimates(kind, num_bytes, ranks)
            algorithm = self._chosen[key] = min(estimates, key=lambda each: (estimates[each], each))
        return algorithm

    def estimates(self, kind: OpKind, num_bytes: int, ranks: tuple[int, ...]) -> dict[Algorithm, float]:
        """What ``choose`` compares: seconds by schedule."""
        return candidates(kind, num_bytes, self.hosts_of(ranks), self.links, shared_memory=self.shared_memory)

    def hosts_of(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Hosts of some ranks, in their order."""
        return tuple(self.hosts[rank] for rank in ranks)


_REMEMBERED_MAX = 4096
