"""The choice of a schedule for an operation: the cheapest one by its own estimate and the measured links.

The choice must be the same on all ranks, so it depends only on what is equal on all ranks: the kind and size of the
operation, its ranks and their hosts, and a ``LinkModel`` on which the ranks have agreed (see ``groups.probe``). An
explicit choice of the caller, or of the settings, always wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules import specs_of
from totalreduce.schedules.spec import LinkModel, Workload

__all__ = ["LinkModel", "Selector", "candidates"]

#: A ring that is expected to take at most so many times as long as recursive halving and doubling is chosen. Latencies
#: are measured where the processors are busy, and rounded to powers of four, so the estimates are not better than that;
#: and the relay carries out rings only. Measured with 4 MiB on 8 hosts at 1 Gbit/s, on two cores: 64 and 70 ms where
#: the estimates were 95 and 92.
_AS_GOOD: Final = 1.1


def candidates(
    kind: OpKind,
    num_bytes: int,
    hosts: Sequence[int],
    links: LinkModel,
    *,
    shared_memory: bool = True,
    widening: int = 1,
) -> dict[str, float]:
    """Return the estimated seconds of every schedule that is a candidate, by its name.

    Args:
        kind: The collective.
        num_bytes: Bytes of the tensor; of all blocks of one rank together where there are blocks.
        hosts: The host of every rank of the operation, as a number.
        links: What messages cost.
        shared_memory: Whether ranks of one host send through shared memory.
        widening: See ``Workload``.
    """
    workload = Workload(num_bytes, tuple(hosts), links, shared_memory, widening)
    seconds = {spec.name: spec.estimate(workload) for spec in specs_of(kind)}
    return {name: value for name, value in seconds.items() if value is not None}


@dataclass(slots=True)
class Selector:
    """Chooses schedules, and remembers its choices."""

    links: LinkModel  #: What messages cost; equal on all ranks.
    hosts: tuple[int, ...]  #: Host of every rank of the whole group; equal on all ranks.
    overrides: Mapping[OpKind, str] = field(default_factory=dict)  #: Explicit choices by kind, from the settings.
    shared_memory: bool = True  #: Whether ranks of one host send through shared memory; equal on all ranks.
    _chosen: dict[tuple[OpKind, int, tuple[int, ...], int], str] = field(default_factory=dict)

    def choose(self, kind: OpKind, num_bytes: int, ranks: tuple[int, ...], widening: int = 1) -> str:
        """Return the schedule for an operation of ``num_bytes`` on these ranks of the whole group.

        ``widening``: see ``Workload``. It counts between hosts only.
        """
        explicit = self.overrides.get(kind)
        if explicit is not None:
            return explicit
        key = (kind, num_bytes, ranks, widening)
        chosen = self._chosen.get(key)
        if chosen is None:
            if len(self._chosen) >= _REMEMBERED_MAX:
                self._chosen.clear()
            estimates = self.estimates(kind, num_bytes, ranks, widening)
            chosen = min(estimates, key=estimates.__getitem__)
            ring_s = estimates.get(Algorithm.RING, math.inf)
            if chosen == Algorithm.HALVING_DOUBLING and ring_s <= _AS_GOOD * estimates[chosen]:
                chosen = Algorithm.RING
            self._chosen[key] = chosen
        return chosen

    def estimates(self, kind: OpKind, num_bytes: int, ranks: tuple[int, ...], widening: int = 1) -> dict[str, float]:
        """Return the seconds by schedule that ``choose`` compares."""
        hosts = self.hosts_of(ranks)
        return candidates(
            kind,
            num_bytes,
            hosts,
            self.links,
            shared_memory=self.shared_memory,
            widening=widening if len(set(hosts)) > 1 else 1,
        )

    def hosts_of(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the hosts of some ranks, in the order of the ranks."""
        return tuple(self.hosts[rank] for rank in ranks)


_REMEMBERED_MAX = 4096
