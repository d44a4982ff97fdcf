"""Which rank sends which elements when a sharded state is loaded by other ranks than those that had it.

Plain objects: boxes of elements, and the transfers between the boxes that ranks have and the boxes that ranks need. The
design is that of the planners of ``torch.distributed.checkpoint``, whose own plans travel as pickles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from totalreduce.foundation.errors import RecoveryError

__all__ = ["Box", "Held", "Source", "Transfer", "choose", "distances", "transfers"]


@dataclass(frozen=True, slots=True)
class Box:
    """Some elements of a tensor: a range in each dimension."""

    offset: tuple[int, ...]  #: The first index in each dimension.
    shape: tuple[int, ...]  #: The number of indices in each dimension.

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box:
        """Return the elements that are in both boxes, perhaps none."""
        begins = [max(pair) for pair in zip(self.offset, other.offset, strict=True)]
        ends = [
            min(offset + extent, other_offset + other_extent)
            for offset, extent, other_offset, other_extent in zip(
                self.offset, self.shape, other.offset, other.shape, strict=True
            )
        ]
        return Box(tuple(begins), tuple(max(0, end - begin) for begin, end in zip(begins, ends, strict=True)))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the indices of these elements in a tensor that holds the elements of ``outer``."""
        return tuple(
            slice(offset - origin, offset - origin + extent)
            for offset, extent, origin in zip(self.offset, self.shape, outer.offset, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements of one tensor that one rank gives to another one, or to itself."""

    part: int  #: The part that has them: the rank that wrote it, among the ranks of that time.
    source: int  #: The rank that has this part now.
    target: int  #: The rank that needs the elements.
    box: Box  #: The elements.


def transfers(
    boxes: Mapping[int, Box], servers: Mapping[int, int], wanted: Sequence[Box], name: object
) -> list[Transfer]:
    """Plan the transfers of one tensor. All ranks compute the same plan. Raises ``RecoveryError``.

    Args:
        boxes: By part: the elements that it has. Parts have the same elements (replicas of HSDP), or none in common.
        servers: By part: the rank that has it now.
        wanted: By rank: the elements that it needs.
        name: The name of the tensor, for the error.
    """
    owners: dict[Box, list[int]] = {}
    for part, box in sorted(boxes.items()):
        if box.numel:
            owners.setdefault(box, []).append(part)
    plan = []
    for target, needed in enumerate(wanted):
        found = 0
        for box, parts in owners.items():
            overlap = box.overlap(needed)
            if overlap.numel:
                near = [part for part in parts if servers[part] == target]
                part = near[0] if near else parts[target % len(parts)]
                plan.append(Transfer(part, servers[part], target, overlap))
                found += overlap.numel
        if found != needed.numel:
            raise RecoveryError(
                f"rank {target} needs {needed.numel} elements of {name}, and the copies of all ranks have {found} of "
                "them"
            )
    return plan


# ----------------------------------------------------------------------------------------- which version, and where


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank has of one version."""

    epoch: int  #: The epoch in which the version was copied.
    version: int  #: The version of the state.
    world_size: int  #: The number of ranks of that epoch, which is the number of parts.
    parts: tuple[int, ...]  #: The parts that the rank has whole, its own first.


@dataclass(frozen=True, slots=True)
class Source:
    """Where the parts of a version are."""

    epoch: int  #: The epoch in which it was copied.
    version: int
    world_size: int  #: The number of parts.
    servers: dict[int, int]  #: By part: the rank that has it.
    missing: tuple[int, ...]  #: The parts that no rank has.


def choose(held: Sequence[Iterable[Held]]) -> Source | None:
    """Return the last version of which all parts are there.

    Returns:
        The version. If none is whole: the last one, which has ``missing`` parts. ``None``: no rank has anything.
    """
    sources: dict[tuple[int, int], Source] = {}
    for place in range(max((len(each.parts) for rank in held for each in rank), default=0)):
        for rank, versions in enumerate(held):  # a rank that has written a part comes before those that have a copy
            for each in versions:
                key = (each.epoch, each.version)
                source = sources.setdefault(key, Source(*key, each.world_size, {}, ()))
                for part in each.parts[place : place + 1]:
                    source.servers.setdefault(part, rank)
    found = [
        Source(each.epoch, each.version, each.world_size, each.servers, _missing(each))
        for _, each in sorted(sources.items(), reverse=True)
    ]
    return next((each for each in found if not each.missing), found[0] if found else None)


def _missing(source: Source) -> tuple[int, ...]:
    return tuple(part for part in range(source.world_size) if part not in source.servers)


def distances(hosts: Sequence[object], num_copies: int) -> list[int]:
    """Return how far the ranks are away that get the copies of a rank: ``rank + distance``, modulo the world size.

    Distances that lead to another host come first, because the ranks of a host may be lost together.
    """
    size = len(hosts)

    def num_near(distance: int) -> int:
        return sum(host == hosts[(rank + distance) % size] for rank, host in enumerate(hosts))

    return sorted(range(1, size), key=lambda distance: (num_near(distance), distance))[:num_copies]
