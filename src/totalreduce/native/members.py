"""The group of a coordinator, as far as the coordinator needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from totalreduce.runner.runner import Runner
from totalreduce.tensors.memory import Operands

__all__ = ["Members"]


class Members(Protocol):
    """The ranks of a group, and the resources that their operations share (see ``groups.operations.Operations``)."""

    rank: int
    world_size: int
    ranks: tuple[int, ...]
    name: str
    runner: Runner

    def claim(self, operands: Operands, patience_s: float) -> Callable[[], None]:
        """Claim the memory of an operation; return the function that releases it."""

    def patience(self, timeout_s: float | None) -> float:
        """The time-out in force, in seconds."""

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the CPU; where possible, memory that the other ranks of the host can read."""
