"""Who sends data to whom, where some ranks have it and others need it: a computation without I/O.

The ranks are the nodes of a binary tree: the parent of rank r is (r - 1) // 2. Data moves along edges of the tree, as
in Rabit (Chen, Cano, Zhou: RABIT, 2015, routing protocol). There each rank exchanges two rounds of messages with its
neighbours. Here all ranks know who holds what and who needs what, so each rank computes the result of both rounds: the
distance of each rank to the nearest holder, and then who asks whom.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["Route", "find_route"]


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one piece of data."""

    distances: tuple[int, ...]  #: By rank: the number of edges to the nearest holder.
    #: By rank: the neighbour that sends the data to this rank; ``None``: the rank holds it, or does not get it.
    sources: tuple[int | None, ...]
    #: By rank: the neighbours to which this rank sends the data, after it has received it.
    targets: tuple[tuple[int, ...], ...]


def find_route(world_size: int, holders: Collection[int], requesters: Collection[int]) -> Route:
    """Return how every requester gets the data from the nearest holder, over each edge of the tree at most once.

    Args:
        world_size: The number of ranks.
        holders: The ranks that have the data.
        requesters: The ranks that need it. A holder that is among them sends nothing to itself.

    Raises:
        ValueError: There is no holder.
    """
    if not holders:
        raise ValueError("there is no holder")
    distances = _distances(world_size, holders)
    targets: list[list[int]] = [[] for _ in range(world_size)]
    sources: list[int | None] = [None] * world_size
    for requester in sorted(requesters):
        rank = requester
        while distances[rank] and sources[rank] is None:
            source = min(near for near in _neighbours(rank, world_size) if distances[near] == distances[rank] - 1)
            sources[rank] = source
            targets[source].append(rank)
            rank = source
    return Route(distances, tuple(sources), tuple(map(tuple, targets)))


def _distances(world_size: int, holders: Collection[int]) -> tuple[int, ...]:
    """Return by rank the distance to the nearest holder: first from the leaves to the root, then back."""
    distances = [world_size] * world_size
    for holder in holders:
        distances[holder] = 0
    for rank in range(world_size - 1, 0, -1):
        distances[_parent(rank)] = min(distances[_parent(rank)], distances[rank] + 1)
    for rank in range(1, world_size):
        distances[rank] = min(distances[rank], distances[_parent(rank)] + 1)
    return tuple(distances)


def _parent(rank: int) -> int:
    return (rank - 1) // 2


def _neighbours(rank: int, world_size: int) -> list[int]:
    parent = [_parent(rank)] if rank else []
    return parent + [child for child in (2 * rank + 1, 2 * rank + 2) if child < world_size]
