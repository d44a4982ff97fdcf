"""How a collective proceeds. One schedule, one short file, one line in ``SCHEDULES``; ``select`` chooses among them.

Invariant: a schedule never sees a transport, a buffer, a length or a clock, and is equal in structure for all lanes.

Packages outside add schedules with entry points of the group ``totalreduce.schedules``, programs with
``SCHEDULES.add(name, specs)`` before they make a group; all ranks must have the same.
"""

from __future__ import annotations

import dataclasses
import functools

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.extensions import Extensions
from totalreduce.foundation.header import declare_schedule
from totalreduce.foundation.types import OpKind
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
from totalreduce.schedules.actions import Program
from totalreduce.schedules.spec import Position, ScheduleSpec

__all__ = ["SCHEDULES", "algorithms_of", "program_for", "spec_of", "specs_of"]

Specs = tuple[ScheduleSpec, ...]


def _check(name: str, item: object) -> Specs:
    specs = item if isinstance(item, tuple) else (item,)
    for spec in specs:
        if not isinstance(spec, ScheduleSpec) or spec.name != name:
            raise ConfigurationError(
                f"the schedules {name!r} are a ScheduleSpec, or a tuple of them, with name={name!r}, not {spec!r}"
            )
    declare_schedule(name)
    return specs


#: The schedules of each file, by their name; the order decides between equal estimates.
SCHEDULES: Extensions[Specs] = Extensions(
    "schedule",
    "totalreduce.schedules",
    {
        "ring": ring.SCHEDULES,
        "star": star.SCHEDULES,
        "tree": tree.SCHEDULES,
        "halving_doubling": halving_doubling.SCHEDULES,
        "chain": chain.SCHEDULES,
        "direct": direct.SCHEDULES,
        "hierarchical": hierarchical.SCHEDULES,
        "dissemination": dissemination.SCHEDULES,
    },
    _check,
)


@functools.lru_cache(maxsize=8)
def _by_kind(names: tuple[str, ...]) -> dict[OpKind, dict[str, ScheduleSpec]]:
    found: dict[OpKind, dict[str, ScheduleSpec]] = {kind: {} for kind in OpKind}
    for name in names:
        for spec in SCHEDULES[name]:
            found[spec.kind][name] = spec
    return found


def specs_of(kind: OpKind) -> Specs:
    """Return the schedules that there are for a kind of operation."""
    return tuple(_by_kind(SCHEDULES.names)[kind].values())


def algorithms_of(kind: OpKind) -> tuple[str, ...]:
    """Return the names of the schedules that there are for a kind of operation."""
    return tuple(spec.name for spec in specs_of(kind))


def spec_of(kind: OpKind, algorithm: str) -> ScheduleSpec:
    """Return one schedule. Raises ``ConfigurationError``."""
    spec = _by_kind(SCHEDULES.names)[kind].get(algorithm)
    if spec is None:
        known = ", ".join(algorithms_of(kind))
        raise ConfigurationError(f"{kind.name.lower()} has no schedule {str(algorithm)!r}; there is {known}, and auto")
    return spec


@functools.lru_cache(maxsize=4096)
def _program_for(spec: ScheduleSpec, at: Position) -> Program:
    return dataclasses.replace(spec.make(at), algorithm=spec.name)


def program_for(
    kind: OpKind, algorithm: str, rank: int, world_size: int, root: int = 0, hosts: tuple[int, ...] = ()
) -> Program:
    """Return the compiled program of one kind of operation on one rank (cached: it is the same for every lane).

    Args:
        kind: The collective.
        algorithm: Name of the schedule; not ``auto``.
        rank: Rank within the group that takes part.
        world_size: Size of that group.
        root: The root, where there is one; the centre of a star; the sender of a message.
        hosts: Host of every rank, for schedules that depend on them.

    Raises:
        ConfigurationError: There is no such schedule for this kind.
    """
    spec = spec_of(kind, algorithm)
    return _program_for(spec, Position(rank, world_size, root, hosts if spec.by_hosts else ()))
