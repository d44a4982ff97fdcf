"""What ``totalreduce bench ps-faults`` tells its processes. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["PsFaultsConfig"]


@final
@dataclass(frozen=True, slots=True)
class PsFaultsConfig:
    """What the processes do.

    Attributes:
        folder: Where they write; a file ``stop`` there, with a number of steps, ends the job after so many steps.
        num_workers: The number of workers, which are the first ranks; the others only serve.
        num_servers: The number of servers, which are the last ranks. Some of them may be workers, too.
        keys: The number of keys.
        replicas: The number of servers that hold each key.
        rule: ``sequential``, ``bounded`` (by 2 steps) or ``eventual``.
        step_ms: How long the computation of a step takes.
    """

    folder: str
    num_workers: int
    num_servers: int
    keys: int
    replicas: int
    rule: str
    step_ms: float
