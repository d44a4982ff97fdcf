"""What a method's exchange asks for. All blocks are uint8 arrays; ranks ask for the same kinds in the same order.

Who carries them out calls ``meanwhile`` once, when an action is under way: local work that needs no reply.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Action", "Allgather", "Allreduce", "Alltoall", "Array", "Broadcast", "Exchange", "Messages"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Allgather:
    """Reply: everybody's block, by rank. ``sizes``: in bytes, by rank; equal on all ranks."""

    block: Array
    sizes: Sequence[int]
    meanwhile: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Alltoall:
    """Block r goes to rank r. Reply: the blocks for this rank, by source. ``sizes``: theirs, in bytes."""

    blocks: Sequence[Array]
    sizes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Allreduce:
    """Reply: the sum over all ranks, in place; the same bits everywhere. ``values``: float32 or int64."""

    values: Array


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Reply: the root's block. ``size``: in bytes, known to all; the others' ``block`` is ignored."""

    block: Array
    size: int
    root: int


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages between pairs of ranks. Reply: what came, by source.

    Attributes:
        sends: Blocks by destination.
        receives: Sizes in bytes by source; what these ranks send in the same action.
    """

    sends: Mapping[int, Array]
    receives: Mapping[int, int]


Action = Allgather | Alltoall | Allreduce | Broadcast | Messages
#: What a session's ``exchange`` is: it yields an action and is sent the reply.
Exchange = Generator[Action, Any, Any]
