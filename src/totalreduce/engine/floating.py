"""Floating messages: arrived before their operation was submitted here, claimed on submission.

The store is bounded. Every peer has the same share of ``floating_bytes_max``; a sender knows what it has spent
(messages it sent with the ``EAGER`` flag) and what came back (``CREDIT``), so a correct peer never overdraws, and one
that does is refused before any memory is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import Header
from totalreduce.transports.base import Lease

__all__ = ["FloatingMessage", "FloatingStore", "floating_cost"]

#: Bookkeeping of one floating message, counted so that a flood of empty messages is bounded too.
_OVERHEAD_BYTES = 768


def floating_cost(body_bytes: int) -> int:
    """What a message of ``body_bytes`` takes of an allowance; the same on both sides."""
    return body_bytes + _OVERHEAD_BYTES


@dataclass(slots=True, eq=False)
class FloatingMessage:
    """A message that nobody here has asked for yet. ``lease``: the transport's memory that ``body`` is, if it is."""

    peer: int
    header: Header
    body: memoryview
    cost: int
    complete: bool = False
    dropped: bool = False  #: its operation failed while the body was arriving
    lease: Lease | None = None


class FloatingStore:
    """All floating messages of one rank, by operation key and peer, within their bounds."""

    def __init__(self, share_bytes: int) -> None:
        """``share_bytes``: what each peer may have floating here."""
        self._share_bytes = share_bytes
        self._messages: dict[tuple[int, int], list[FloatingMessage]] = {}
        self._held: dict[int, int] = {}
        self._owed: dict[int, int] = {}
        self.total_bytes = 0
        self.peak_bytes = 0

    def __len__(self) -> int:
        """How many messages float."""
        return sum(len(messages) for messages in self._messages.values())

    def accept(self, peer: int, header: Header, lease: Lease | None = None) -> FloatingMessage:
        """Take memory for a message, which the sender has flagged as eager, or keep the transport's.

        Raises:
            ProtocolError: The peer has more floating here than its share.
        """
        cost = floating_cost(header.body_bytes)
        held = self._held.get(peer, 0) + cost
        if held > self._share_bytes:
            raise ProtocolError(f"rank {peer} would have {held} floating bytes here; its share is {self._share_bytes}")
        body = memoryview(bytearray(header.body_bytes)) if lease is None else lease.body
        message = FloatingMessage(peer, header, body, cost, lease=lease)
        self._held[peer] = held
        self.total_bytes += cost
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)
        self._messages.setdefault((header.operation, header.iteration), []).append(message)
        return message

    def __contains__(self, key: tuple[int, int]) -> bool:
        """Whether messages of an operation float here."""
        return key in self._messages

    def claim(self, key: tuple[int, int]) -> list[FloatingMessage]:
        """Hand over the messages of an operation; their memory still counts until ``release``."""
        return self._messages.pop(key, [])

    def release(self, message: FloatingMessage) -> None:
        """The memory of a floating message is free again; the peer is owed the credit."""
        if message.lease is not None:
            message.lease.release()
        self._held[message.peer] -= message.cost
        self.total_bytes -= message.cost
        self.owe(message.peer, message.cost)

    def owe(self, peer: int, cost: int) -> None:
        """An eager message needed no floating memory, or needs it no more: the peer is owed the credit."""
        self._owed[peer] = self._owed.get(peer, 0) + cost

    def is_credit_due(self, peer: int, *, flush: bool = False) -> bool:
        """Whether to give credit back to ``peer`` now: when a quarter of its share is owed, or any, if ``flush``."""
        owed = self._owed.get(peer, 0)
        return owed >= self._share_bytes // 4 if not flush else owed > 0

    def take_credit(self, peer: int) -> int:
        """All that is owed to ``peer``, which is told now."""
        return self._owed.pop(peer, 0)
