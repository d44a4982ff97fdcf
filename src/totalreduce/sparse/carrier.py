"""Who carries out what exchanges ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from totalreduce.sparse.actions import Action

__all__ = ["Carried", "Carrier"]


class Carried(Protocol):
    """An action under way."""

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once when it has ended, well or not; at once if it has."""

    def push(self, timeout_s: float) -> None:
        """Help it along for so long at most, if there is a way to; errors are for ``reply``."""

    def reply(self) -> Any:
        """What the exchange is sent. Only after it has ended, or it waits.

        Raises:
            TotalReduceError: What went wrong.
        """


class Carrier(Protocol):
    """Ranks that can exchange blocks."""

    rank: int
    world_size: int

    def start(self, action: Action, *, channel: int, step: int, priority: int) -> Carried:
        """Begin an action; returns at once.

        Args:
            action: What to do.
            channel: Which exchange it belongs to; exchanges of different channels may run at the same time.
            step: How many actions of this exchange came before.
            priority: Smaller is more urgent.
        """
