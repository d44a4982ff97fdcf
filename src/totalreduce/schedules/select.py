"""Which schedule for which operation: the cheapest by each schedule's own cost function and the measured links.

The choice must be the same on all ranks, so it depends on nothing but what is equal everywhere: the kind, the size, the
group, where its ranks are, and a ``LinkModel`` that the ranks have agreed on (see ``groups.probe``). An explicit choice
always wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules import chain, direct, halving_doubling, hierarchical, ring, star, tree

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


def candidates(kind: OpKind, num_bytes: int, hosts: Sequence[int], links: LinkModel) -> dict[Algorithm, float]:
    """Estimated seconds of every schedule that can carry the operation out.

    Args:
        kind: Which collective.
        num_bytes: Of the tensor; of all blocks together where there are blocks.
        hosts: Host of every rank of the group.
        links: What messages cost.
    """
    size = len(hosts)
    one_host = len(set(hosts)) == 1
    shared = max(sum(1 for other in hosts if other == host) for host in set(hosts))
    latency_s = links.local_latency_s if one_host else links.latency_s
    bytes_per_s = links.local_bytes_per_s if one_host else links.bytes_per_s

    costs = {}
    match kind:
        case OpKind.ALLREDUCE:
            costs = {
                Algorithm.RING: ring.cost(size, num_bytes),
                Algorithm.STAR: star.cost(size, num_bytes),
                Algorithm.TREE: tree.cost(size, num_bytes),
                Algorithm.HALVING_DOUBLING: halving_doubling.cost(size, num_bytes),
            }
            if one_host:
                costs[Algorithm.DIRECT] = direct.cost(size, num_bytes)
        case OpKind.REDUCE | OpKind.BROADCAST:
            num_pieces = chain.pieces(size, num_bytes, _PIECE_BYTES_MIN)
            costs = {
                Algorithm.CHAIN: chain.cost(size, num_bytes, num_pieces),
                Algorithm.TREE: tree.binomial_cost(size, num_bytes),
            }
        case OpKind.ALLGATHER | OpKind.REDUCE_SCATTER:
            costs = {Algorithm.RING: ring.half_cost(size, num_bytes)}
            if one_host:
                costs[Algorithm.DIRECT] = direct.half_cost(size, num_bytes)
        case OpKind.BARRIER:
            return {Algorithm.DISSEMINATION: (size - 1).bit_length() * latency_s}
        case _:
            return {Algorithm.DIRECT: direct.half_cost(size, num_bytes).seconds(latency_s, bytes_per_s)}
    seconds = {}
    for algorithm, cost in costs.items():
        # A ring crosses every host's link once in each direction; whoever pairs up over any distance shares it with the
        # other ranks of the host, and the switch with everybody.
        scattered = algorithm in _SCATTERED and not one_host
        seconds[algorithm] = cost.seconds(latency_s, bytes_per_s / (_DETOUR * shared) if scattered else bytes_per_s)
    if kind is OpKind.ALLREDUCE and not one_host and shared > 1:
        inside_s = 2 * links.local_latency_s + 2 * num_bytes / links.local_bytes_per_s
        seconds[Algorithm.HIERARCHICAL] = hierarchical.cost(hosts, num_bytes).seconds(latency_s, bytes_per_s) + inside_s
    return seconds


_PIECE_BYTES_MIN = 64 * 1024
_DETOUR = 1.1
_SCATTERED = frozenset({Algorithm.TREE, Algorithm.HALVING_DOUBLING, Algorithm.STAR})


@dataclass(slots=True)
class Selector:
    """Chooses, and remembers what it chose.

    Attributes:
        links: What messages cost; equal on all ranks.
        hosts: Host of every rank of the whole group; equal on all ranks.
        overrides: Explicit choices by kind, from the settings.
    """

    links: LinkModel
    hosts: tuple[int, ...]
    overrides: Mapping[OpKind, Algorithm] = field(default_factory=dict)
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
            estimates = candidates(kind, num_bytes, self.hosts_of(ranks), self.links)
            algorithm = self._chosen[key] = min(estimates, key=lambda each: (estimates[each], each))
        return algorithm

    def hosts_of(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Hosts of some ranks, in their order."""
        return tuple(self.hosts[rank] for rank in ranks)


_REMEMBERED_MAX = 4096
