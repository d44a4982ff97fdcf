"""Messages that a rank sends to the others, and counters of what the agreement costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["NegotiationCounters", "Sender"]


@dataclass(slots=True)
class NegotiationCounters:
    """The work of one rank so far."""

    cycles: int = 0
    slow_cycles: int = 0  #: Cycles in which requests were gathered.
    messages: int = 0  #: Messages that this rank has sent.
    bytes: int = 0  #: Bytes of these messages.
    hits: int = 0  #: Operations that became ready by the response cache alone.
    misses: int = 0  #: Requests that this rank has sent to rank 0.
    invalid: int = 0  #: Cache entries that were out of date.


@final
class Sender:
    """Collects the messages of one rank for the caller of the negotiator, who sends them."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self.counters = NegotiationCounters()  #: The work of this rank so far.
        self.outbox: list[tuple[int, bytes]] = []  #: The messages, each with the rank that gets it.

    def send(self, peer: int, message: bytes) -> None:
        """Send a message to one rank."""
        self.counters.messages += 1
        self.counters.bytes += len(message)
        self.outbox.append((peer, message))

    def send_to_all(self, message: bytes) -> None:
        """Send a message to every other rank."""
        for peer in self._peers:
            self.send(peer, message)
