"""How a collective proceeds. One schedule, one short file, one line in ``_SCHEDULES``; ``select`` chooses.

Invariant: a schedule never sees a transport, a buffer, a length or a clock, and is equal in structure for all lanes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules import (
    chain,
    direct,
    dissemination,
    halving_doubling,
    hierarchical,
    ring,
    star,
    tree,
)
from totalreduce.schedules.actions import Layout, Program, compile_program

__all__ = ["algorithms_of", "program_for"]

#: Makes the program of one rank: from (rank, world size, root, host of every rank).
_Maker = Callable[[int, int, int, Sequence[int]], Program]


def _hierarchical(rank: int, size: int, root: int, hosts: Sequence[int]) -> Program:  # noqa: ARG001
    return compile_program(
        hierarchical.hierarchical_allreduce(rank, hosts),
        hierarchical.num_chunks(hosts),
        partial_sums=size > 2,
        span_max=hierarchical.span_max(hosts),
    )


def _halving_doubling(rank: int, size: int, root: int, hosts: Sequence[int]) -> Program:  # noqa: ARG001
    num_chunks = halving_doubling.num_chunks(size)
    schedule = halving_doubling.halving_doubling_allreduce(rank, size)
    return compile_program(schedule, num_chunks, partial_sums=size > 2, span_max=num_chunks)


_BLOCKS = Layout.BLOCKS

_SCHEDULES: dict[tuple[OpKind, Algorithm], _Maker] = {
    (OpKind.ALLREDUCE, Algorithm.RING): lambda r, n, _root, _hosts: compile_program(ring.ring_allreduce(r, n), n),
    (OpKind.ALLREDUCE, Algorithm.STAR): lambda r, n, root, _hosts: compile_program(
        star.star_allreduce(r, n, root), 1, partial_sums=n > 2
    ),
    (OpKind.ALLREDUCE, Algorithm.TREE): lambda r, n, _root, _hosts: compile_program(
        tree.double_tree_allreduce(r, n), 2, partial_sums=n > 2
    ),
    (OpKind.ALLREDUCE, Algorithm.HALVING_DOUBLING): _halving_doubling,
    (OpKind.ALLREDUCE, Algorithm.DIRECT): lambda r, n, _root, _hosts: compile_program(direct.direct_allreduce(r, n), n),
    (OpKind.ALLREDUCE, Algorithm.HIERARCHICAL): _hierarchical,
    (OpKind.BROADCAST, Algorithm.CHAIN): lambda r, n, root, _hosts: compile_program(
        chain.chain_broadcast(r, n, root), 1
    ),
    (OpKind.BROADCAST, Algorithm.TREE): lambda r, n, root, _hosts: compile_program(
        tree.binomial_broadcast(r, n, root), 1
    ),
    (OpKind.REDUCE, Algorithm.CHAIN): lambda r, n, root, _hosts: compile_program(
        chain.chain_reduce(r, n, root), 1, partial_sums=n > 2, preserves=r != root
    ),
    (OpKind.REDUCE, Algorithm.TREE): lambda r, n, root, _hosts: compile_program(
        tree.binomial_reduce(r, n, root), 1, partial_sums=n > 2, preserves=r != root
    ),
    (OpKind.BARRIER, Algorithm.DISSEMINATION): lambda r, n, _root, _hosts: compile_program(
        dissemination.dissemination_barrier(r, n), 1
    ),
    (OpKind.ALLGATHER, Algorithm.RING): lambda r, n, _root, _hosts: compile_program(
        ring.ring_allgather(r, n), n, layout=_BLOCKS
    ),
    (OpKind.ALLGATHER, Algorithm.DIRECT): lambda r, n, _root, _hosts: compile_program(
        direct.direct_allgather(r, n), n, layout=_BLOCKS
    ),
    (OpKind.REDUCE_SCATTER, Algorithm.RING): lambda r, n, _root, _hosts: compile_program(
        ring.ring_reduce_scatter(r, n), n + 1, layout=_BLOCKS, partial_sums=n > 2, preserves=True
    ),
    (OpKind.REDUCE_SCATTER, Algorithm.DIRECT): lambda r, n, _root, _hosts: compile_program(
        direct.direct_reduce_scatter(r, n), n + 1, layout=_BLOCKS, partial_sums=n > 2, preserves=True
    ),
    (OpKind.GATHER, Algorithm.DIRECT): lambda r, n, root, _hosts: compile_program(
        direct.gather(r, n, root), n, layout=_BLOCKS
    ),
    (OpKind.SCATTER, Algorithm.DIRECT): lambda r, n, root, _hosts: compile_program(
        direct.scatter(r, n, root), n, layout=_BLOCKS
    ),
    (OpKind.ALLTOALL, Algorithm.DIRECT): lambda r, n, _root, _hosts: compile_program(
        direct.alltoall(r, n), 2 * n, layout=_BLOCKS
    ),
    (OpKind.SEND_RECV, Algorithm.DIRECT): lambda r, n, root, _hosts: compile_program(
        direct.send_receive(r, n, root), 1, layout=_BLOCKS
    ),
}


def algorithms_of(kind: OpKind) -> tuple[Algorithm, ...]:
    """The schedules there are for a kind of operation."""
    return tuple(algorithm for other, algorithm in _SCHEDULES if other is kind)


@functools.lru_cache(maxsize=4096)
def program_for(
    kind: OpKind, algorithm: Algorithm, rank: int, world_size: int, root: int = 0, hosts: tuple[int, ...] = ()
) -> Program:
    """The compiled program of one kind of operation on one rank (cached: it is the same for every lane).

    Args:
        kind: Which collective.
        algorithm: Which schedule; not ``AUTO``.
        rank: Rank within the group that takes part.
        world_size: Size of that group.
        root: Where there is one; of a star the rank in the middle; of a message its sender.
        hosts: Host of every rank, for the hierarchical schedule.

    Raises:
        ConfigurationError: There is no such schedule for this kind.
    """
    maker = _SCHEDULES.get((kind, algorithm))
    if maker is None:
        known = ", ".join(known.name.lower() for known in algorithms_of(kind))
        raise ConfigurationError(
            f"{kind.name.lower()} has no schedule {algorithm.name.lower()!r}; there is {known}, and auto"
        )
    return dataclasses.replace(maker(rank, world_size, root, hosts), algorithm=algorithm)
