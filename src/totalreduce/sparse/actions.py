"""The actions of exchanges: the collectives and messages that a session asks a ``Carrier`` to carry out.

All blocks are uint8 arrays; all ranks ask for the same kinds of actions in the same order. The carrier calls
``meanwhile`` once, when the action has begun: local work that does not need the reply.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from totalreduce.kernels.arrays import Array

__all__ = [
    "Action",
    "Allgather",
    "Allreduce",
    "Alltoall",
    "Broadcast",
    "Carried",
    "Carrier",
    "Exchange",
    "Messages",
]


@dataclass(frozen=True, slots=True)
class Allgather:
    """Reply: the blocks of all ranks, by rank. ``sizes``: in bytes, by rank; equal on all ranks."""

    block: Array
    sizes: Sequence[int]
    meanwhile: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Alltoall:
    """Send block r to rank r. Reply: the blocks for this rank, by source. ``sizes``: of these blocks, in bytes."""

    blocks: Sequence[Array]
    sizes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Allreduce:
    """Reply: the sum over all ranks, in place; the same bits everywhere. ``values``: float32, float64 or int64."""

    values: Array


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Reply: the root's block. ``size``: in bytes, known to all ranks. The other ranks' ``block`` is ignored."""

    block: Array
    size: int
    root: int


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages between pairs of ranks. Reply: the received blocks, by source."""

    sends: Mapping[int, Array]  #: Blocks by destination.
    receives: Mapping[int, int]  #: Sizes in bytes, by source, of the blocks that these ranks send in the same action.


Action = Allgather | Alltoall | Allreduce | Broadcast | Messages
#: A session's ``exchange``: it yields actions and is sent their replies.
Exchange = Generator[Action, Any, Any]


class Carried(Protocol):
    """An action under way."""

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once when the action has ended, with or without an error; at once if it has."""

    def push(self, timeout_s: float) -> None:
        """Move messages in this thread for ``timeout_s`` at most, if that is possible; ``reply`` raises errors."""

    def reply(self) -> Any:
        """Wait until the action has ended, and return the reply for the exchange.

        Raises:
            TotalReduceError: The action failed.
        """


class Carrier(Protocol):
    """Ranks that can exchange blocks."""

    rank: int
    world_size: int

    def start(self, action: Action, *, channel: int, step: int, priority: int) -> Carried:
        """Begin an action; return at once.

        Args:
            action: The action.
            channel: The number of its exchange; exchanges of different channels may run at the same time.
            step: The number of actions of this exchange that came before.
            priority: Smaller is more urgent.
        """
