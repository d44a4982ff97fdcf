"""The group of a coordinator, as far as the coordinator needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from totalreduce.tensors.memory import Operands

__all__ = ["Members"]


class Members(Protocol):
    """The ranks that take part, and what they share (see ``Group``, which has the same names)."""

    rank: int
    world_size: int
    ranks: tuple[int, ...]
    name: str

    def agree(self, name: str, document: Mapping[str, Any]) -> None:
        """Return if all ranks pass an equal JSON document."""

    def claim(self, operands: Operands, patience_s: float) -> Callable[[], None]:
        """Claim the memory of an operation; return what releases it."""

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the CPU; where possible, memory that the other ranks of the host can read."""
