"""Who comes to a rendezvous, and whether these processes can be the ranks of one job. Knows no store."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from totalreduce.foundation.errors import RendezvousError
from totalreduce.foundation.version import VERSION
from totalreduce.foundation.world import World
from totalreduce.launch.address import host_identity

__all__ = ["Arrival", "find_conflict", "this_process"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a process says of itself when it comes.

    Attributes:
        rank: What it was told to be.
        world_size: How many ranks it was told that there are.
        job_id: Of the launcher; "" if there is none.
        version: Of this library.
        process: Equal for two arrivals of one process, and for no others.
        place: The process for a reader: its id and its host's name.
    """

    rank: int
    world_size: int
    job_id: str
    version: str
    process: str
    place: str

    @classmethod
    def of(cls, world: World) -> Arrival:
        """What this process says."""
        place = f"process {os.getpid()} on {socket.gethostname()}"
        return cls(world.rank, world.world_size, world.job_id, VERSION, this_process(), place)

    def to_text(self) -> str:
        """As it travels: JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Arrival:
        """The inverse of ``to_text``.

        Raises:
            RendezvousError: It is none.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            numbers = int(fields["rank"]), int(fields["world_size"])
            texts = (str(fields[name])[:300] for name in ("job_id", "version", "process", "place"))
            return cls(*numbers, *texts)
        except (ValueError, KeyError, TypeError) as error:
            raise RendezvousError(f"the store holds what no rank of this library writes: {text[:100]!r}") from error


def find_conflict(arrivals: Sequence[Arrival]) -> str | None:
    """Why these processes cannot be ranks of one job, with both values and what to do; ``None`` if they can.

    Each is compared with the lowest rank, that is rank 0 if it is there. The world size comes first: with different
    ones, everything that is looked for later is missing or of no meaning.
    """
    if not arrivals:
        return None
    others = sorted(arrivals, key=lambda arrival: arrival.rank)  # stable: of one rank, the first to come is first
    first = others.pop(0)
    for other in others:
        if other.world_size != first.world_size:
            return (
                f"rank {other.rank} was started with world size {other.world_size}, rank {first.rank} with "
                f"{first.world_size}. Start every rank with the same one (WORLD_SIZE, or the launcher's number of "
                "processes)"
            )
    for other in others:
        if other.job_id != first.job_id:
            return (
                f"rank {other.rank} ({other.place}) belongs to job {other.job_id!r}, rank {first.rank} ({first.place}) "
                f"to job {first.job_id!r}. Give every rank of a job the same TOTALREDUCE_JOB_ID, and two jobs on one "
                "host different MASTER_PORTs"
            )
    seen: dict[int, Arrival] = {}
    for arrival in arrivals:
        earlier = seen.setdefault(arrival.rank, arrival)
        if earlier.process != arrival.process:
            return (
                f"two processes are rank {arrival.rank}: {earlier.place}, and {arrival.place}, which came later. Give "
                "every process a rank of its own; if one was started again, start all of them again"
            )
    for other in others:
        if other.version != first.version:
            return (
                f"rank {other.rank} runs totalreduce {other.version}, rank {first.rank} {first.version}. Install the "
                "same version on every host"
            )
    return None


def this_process() -> str:
    """Equal whenever this process asks, and for no other process that shares a store with it."""
    # A process id is used again, and two containers may both have a process 1.
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return f"{host_identity()}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getpid()}/{started}"
