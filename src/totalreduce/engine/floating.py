"""Floating messages: messages that arrived before their operation was submitted here. Submission claims them.

The store is bounded. Every peer has the same share of ``floating_bytes_max`` (``allowance``). A peer that exceeds it is
refused before memory is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from totalreduce.engine.allowance import Allowance
from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import Header
from totalreduce.transports.base import Lease

__all__ = ["FloatingMessage", "FloatingStore", "floating_cost"]

#: Bookkeeping of one floating message: measured, and rounded up. So a flood of empty messages is bounded, too.
_OVERHEAD_BYTES = 960


def floating_cost(body_bytes: int) -> int:
    """Return the part of an allowance that a message of ``body_bytes`` takes; sender and receiver count the same."""
    return body_bytes + _OVERHEAD_BYTES


@dataclass(slots=True, eq=False)
class FloatingMessage:
    """A message whose operation was not submitted when its header arrived.

    Attributes:
        store: The store that the message belongs to.
        peer: The sender.
        header: The header.
        body: The bytes; they are all there when ``complete`` is set.
        cost: The part of the sender's allowance that the message takes.
        complete: Whether the body has arrived.
        dropped: Whether the operation failed while the body was arriving.
        lease: The transport's memory, if ``body`` is that.
    """

    store: FloatingStore
    peer: int
    header: Header
    body: memoryview
    cost: int
    complete: bool = False
    dropped: bool = False
    lease: Lease | None = None

    def release(self) -> None:
        """Give the memory back to the store, which returns the allowance to the sender. Called once."""
        self.store.release(self)


class FloatingStore:
    """All floating messages of one rank, by operation key and peer, within their bounds.

    Attributes:
        allowance: The messages of the peers, in bytes.
        total_bytes: The bytes that all messages take.
        peak_bytes: The largest value of ``total_bytes`` so far.
    """

    def __init__(self, share_bytes: int) -> None:
        """``share_bytes``: the bytes that each peer may have floating here."""
        self.allowance = Allowance(share_bytes)
        self._messages: dict[tuple[int, int], list[FloatingMessage]] = {}
        self.total_bytes = 0
        self._num_held = 0
        self.peak_bytes = 0

    def __len__(self) -> int:
        """Return the number of floating messages."""
        return sum(len(messages) for messages in self._messages.values())

    @property
    def num_held(self) -> int:
        """The number of messages that take memory: those that float, and those that were claimed and not released."""
        return self._num_held

    def accept(self, peer: int, header: Header, lease: Lease | None = None) -> FloatingMessage:
        """Take memory for a message that has the flag EAGER, or keep the memory of the transport.

        Raises:
            ProtocolError: The peer has more floating here than its share.
        """
        cost = floating_cost(header.body_bytes)
        if not self.allowance.take(peer, cost):
            raise ProtocolError(
                f"rank {peer} would have {self.allowance.used(peer) + cost} floating bytes here; its share is "
                f"{self.allowance.share}"
            )
        body = memoryview(bytearray(header.body_bytes)) if lease is None else lease.body
        message = FloatingMessage(self, peer, header, body, cost, lease=lease)
        self.total_bytes += cost
        self._num_held += 1
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)
        self._messages.setdefault((header.operation, header.iteration), []).append(message)
        return message

    def __contains__(self, key: tuple[int, int]) -> bool:
        """Return whether messages of an operation float here."""
        return key in self._messages

    def claim(self, key: tuple[int, int]) -> list[FloatingMessage]:
        """Take out the messages of an operation. Their memory counts until they are released."""
        return self._messages.pop(key, [])

    def release(self, message: FloatingMessage) -> None:
        """Count the memory of a message as free, and owe its sender the allowance."""
        if message.lease is not None:
            message.lease.release()
        self.total_bytes -= message.cost
        self._num_held -= 1
        self.allowance.free(message.peer, message.cost)
