"""The records that ``totalreduce bench faults`` and its workers exchange. They need no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SAMPLES", "FaultsConfig", "Final"]

#: The number of samples of an epoch.
SAMPLES = 1000


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
    """

    folder: str
    step_ms: float
    optimizer: str
    sync: str
    dtype: str
    elements: int
    replicas: int
    snapshot_every: int = 0


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
