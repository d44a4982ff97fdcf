"""The processes that come to a rendezvous, and whether they can be the ranks of one job."""

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
    """The description of a process that comes to a rendezvous."""

    rank: int  #: Rank according to its launcher.
    world_size: int  #: Number of ranks according to its launcher.
    job_id: str  #: Id of the job according to its launcher; "" if there is none.
    version: str  #: Version of this library.
    process: str  #: Equal for two arrivals of one process, and for no others.
    label: str  #: Id of the process and name of its host, for messages.

    @classmethod
    def of(cls, world: World) -> Arrival:
        """Return the description of this process."""
        name = f"process {os.getpid()} on {socket.gethostname()}"
        return cls(world.rank, world.world_size, world.job_id, VERSION, this_process(), name)

    def to_text(self) -> str:
        """Return the JSON for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Arrival:
        """Return the arrival of ``to_text``. Raises ``RendezvousError`` if the text is none."""
        try:
            fields: dict[str, Any] = json.loads(text)
            numbers = int(fields["rank"]), int(fields["world_size"])
            texts = (str(fields[name])[:300] for name in ("job_id", "version", "process", "label"))
            return cls(*numbers, *texts)
        except (ValueError, KeyError, TypeError) as error:
            raise RendezvousError(f"the store holds what no rank of this library writes: {text[:100]!r}") from error


def find_conflict(arrivals: Sequence[Arrival]) -> str | None:
    """Return why these processes cannot be ranks of one job, with both values and a remedy; ``None`` if they can.

    Each process is compared with the lowest rank, which is rank 0 if it has come. The world size is compared first:
    if it differs, the later comparisons have no meaning.
    """
    if not arrivals:
        return None
    others = sorted(arrivals, key=lambda arrival: arrival.rank)  # stable: the first to come of equal ranks
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
                f"rank {other.rank} ({other.label}) belongs to job {other.job_id!r}, rank {first.rank} ({first.label}) "
                f"to job {first.job_id!r}. Give every rank of a job the same TOTALREDUCE_JOB_ID, and two jobs on one "
                "host different MASTER_PORTs"
            )
    seen: dict[int, Arrival] = {}
    for arrival in arrivals:
        earlier = seen.setdefault(arrival.rank, arrival)
        if earlier.process != arrival.process:
            return (
                f"two processes are rank {arrival.rank}: {earlier.label}, and {arrival.label}, which came later. Give "
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
    """Return a text that identifies this process among all processes that share a store with it."""
    # A process id is used again, and two containers may both have a process 1.
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return f"{host_identity()}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getpid()}/{started}"
