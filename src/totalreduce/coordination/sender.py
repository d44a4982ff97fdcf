"""Messages that a rank sends to the others, and counters of what the agreement costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["NegotiationCounters", "Sender"]


@dataclass(slots=True)
class NegotiationCounters:
    """The work of one rank so far.

    Attributes:
        cycles: Cycles.
        slow_cycles: Cycles in which requests were gathered.
        messages: Messages that this rank has sent.
        bytes: Bytes of these messages.
        hits: Operations that became ready by the response cache alone.
        misses: Requests that this rank has sent to rank 0.
        invalid: Cache entries that were out of date.
    """

    cycles: int = 0
    slow_cycles: int = 0
    messages: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    invalid: int = 0


@final
class Sender:
    """Collects the messages of one rank for the caller of the negotiator, who sends them.

    Attributes:
        outbox: The messages, each with the rank that gets it.
        counters: The work of this rank so far.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self.counters = NegotiationCounters()
        self.outbox: list[tuple[int, bytes]] = []

    def send(self, peer: int, message: bytes) -> None:
        """Send a message to one rank."""
        self.counters.messages += 1
        self.counters.bytes += len(message)
        self.outbox.append((peer, message))

    def send_to_all(self, message: bytes) -> None:
        """Send a message to every other rank."""
        for peer in self._peers:
            self.send(peer, message)
