"""The records that ``totalreduce bench faults`` and its workers exchange. They need no torch."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["SAMPLES", "FaultsConfig", "Final", "end_job_after", "last_block", "read_lines", "read_stop"]

#: The number of samples of an epoch.
SAMPLES = 1000
#: The end of a log that is looked at: longer than the lines of several blocks.
_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class FaultsConfig:
    """What the workers do.

    Attributes:
        folder: Where they write; a file ``stop`` there, with a version in it, ends the job at that version.
        step_ms: How long the computation of a step takes, beside the small model's own.
        optimizer: ``adamw`` or ``momentum``.
        sync: ``none`` or ``oktopk``.
        dtype: The dtype of the parameters.
        elements: The number of elements of a further parameter, so that the state has a size.
        replicas: The number of ranks that have a copy of each rank's residuals.
        snapshot_every: The number of versions from one snapshot on disk to the next; 0: there are none.
        num_ranks: The number of ranks with which the job begins.
    """

    folder: str
    step_ms: float
    optimizer: str
    sync: str
    dtype: str
    elements: int
    replicas: int
    snapshot_every: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Final:
    """The end of the job on one rank.

    Attributes:
        version: The version of the state.
        digest: SHA-256 of parameters and optimizer state.
        buffers: SHA-256 of the buffers of the rank's model, which differ from rank to rank.
        world_size: The number of ranks.
        step_s: The median time of a block.
    """

    version: int
    digest: str
    buffers: str
    world_size: int
    step_s: float


def last_block(path: Path) -> dict[str, Any] | None:
    """Return the last line of a worker's log about a block that took effect; ``None`` if there is none near its end."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().split(b"\n")[1:-1]  # the first one and the last one may be incomplete
    done: list[dict[str, Any]] = [json.loads(line) for line in lines if b'"done"' in line]
    return done[-1] if done else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a worker's log; the last line of a killed process may be cut off."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def end_job_after(folder: Path, version: int) -> None:
    """Have the job end 25 blocks after a version. The workers see the file as a whole or not at all."""
    temporary = folder / "stop.new"
    temporary.write_text(str(version + 25), encoding="utf-8")
    temporary.rename(folder / "stop")


def read_stop(folder: Path) -> int:
    """Return the version at which the job ends; 0 if nobody has said so yet."""
    path = folder / "stop"
    if not path.exists():
        return 0
    text = path.read_text(encoding="utf-8")
    return int(text) if text else 0
