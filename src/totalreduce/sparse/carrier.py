"""The interface of the objects that carry out the actions of exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from totalreduce.sparse.actions import Action

__all__ = ["Carried", "Carrier"]


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
