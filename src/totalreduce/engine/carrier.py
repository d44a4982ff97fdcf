"""What carries operations out without messages, if it can: the engine offers every operation before it queues messages.

An operation that a carrier has taken is in flight like any other, and has no messages. It ends in one of two ways: all
ranks have given it to their carriers, and these carry it out (``Engine.carried``); or a rank has given it to its
engine, and says so. In the second case no carrier can have begun, because that rank is missing, and the operation is
carried out by messages after all.
"""

from __future__ import annotations

from typing import Any, Protocol

from totalreduce.engine.operation import Carriage, Operation

__all__ = ["Carrier"]


class Carrier(Protocol):
    """Carries operations out for an engine. All methods are called under the engine's lock and return at once."""

    def offer(self, operation: Operation) -> Carriage | None:
        """Take an operation that was just submitted, or return ``None``."""

    def adopt(self, operation: Operation, carriage: Any) -> None:
        """Note the engine's record of an operation that was begun without one; ``carriage``: what is kept of it."""

    def may_take(self, operation: Operation) -> bool:
        """Return whether another rank may have given such an operation to its carrier."""

    def take_back(self, operation: Operation) -> bool:
        """Give an operation back to the engine; false if all ranks have given it to their carriers."""

    def needs(self, operation: Operation, peer: int) -> bool:
        """Return whether a peer still has something to do for an operation."""

    def ended(self, operation: Operation, *, failed: bool) -> None:
        """Note that an operation has ended, well or with an error: then before the program can change its tensors."""
