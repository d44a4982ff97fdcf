"""Which messages may leave before the receiver is known to have submitted their operation.

This is the eager allowance of docs/design/0003-eager-and-rendezvous.md. A message that arrives before its operation was
submitted takes memory of the receiver, so every sender has an allowance. A message within the allowance leaves at once,
with the flag EAGER. Beyond the allowance the sender holds the messages of the operation, and asks once (REQUEST). The
receiver answers (POSTED) when it has submitted the operation, and returns allowance (CREDIT) when memory is free.
"""

from __future__ import annotations

from collections.abc import Callable

from totalreduce.engine.counters import Counters
from totalreduce.engine.early import EarlyRecord
from totalreduce.engine.floating import FloatingStore, floating_cost
from totalreduce.engine.operation import Operation
from totalreduce.engine.outbox import NO_KEY, Outbox, QueuedMessage
from totalreduce.engine.table import OperationTable
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import Flag, Frame

__all__ = ["Rendezvous"]

_Key = tuple[int, int]


class Rendezvous:
    """The allowances of this rank at its peers, and of its peers here.

    Attributes:
        share: The bytes that each peer may have floating here, and this rank at each peer.
    """

    __slots__ = ("_counters", "_eager_bytes", "_floating", "_outbox", "_table", "_used", "share")

    def __init__(
        self,
        config: EngineConfig,
        share: int,
        table: OperationTable,
        floating: FloatingStore,
        outbox: Outbox,
        counters: Counters,
    ) -> None:
        """Begin with full allowances."""
        self.share, self._eager_bytes = share, config.eager_bytes
        self._table, self._floating = table, floating
        self._outbox, self._counters = outbox, counters
        floating.on_credit = self.return_credit
        outbox.writers[Frame.CREDIT] = self._write_credit
        self._used: dict[int, int] = {}  #: By peer: the part of the allowance there that this rank has used.

    # ------------------------------------------------------------------------------------------------- as the sender

    def admit(self, message: QueuedMessage) -> int | None:
        """Return the flags with which a message leaves now, or hold it back and return ``None``."""
        operation, peer = message.operation, message.action.peer
        if peer in operation.posted_by:
            return Flag.NONE
        body_bytes = message.region.body_bytes
        cost = floating_cost(body_bytes)
        used, sent = self._used.get(peer, 0), operation.eager_sent.get(peer, 0)
        held = operation.held.get(peer)
        # Once one message is held, later ones of the operation are: messages of a lane must not overtake each other.
        if held is None and sent + body_bytes <= self._eager_bytes and used + cost <= self.share:
            self._used[peer] = used + cost
            operation.eager_sent[peer] = sent + body_bytes
            return Flag.EAGER
        if held is None:
            held = operation.held[peer] = []
            self._outbox.control(peer, Frame.REQUEST, key=operation.key)
        held.append(message)
        self._counters.held_messages += 1
        return None

    def posted(self, operation: Operation, peer: int) -> None:
        """Note that a peer has submitted an operation: messages that were held for it may leave."""
        operation.posted_by.add(peer)
        if operation.relayed is not None:
            operation.relayed.posted(peer)
        self._release_held(operation, peer)

    def on_posted(self, peer: int, key: _Key) -> None:
        """Handle a POSTED frame."""
        operation = self._table.active.get(key)
        if operation is not None:
            self.posted(operation, peer)
        elif not self._table.was_submitted(key):
            self._table.early.note_posted(peer, key)

    def on_credit(self, peer: int, amount: int) -> None:
        """Handle a CREDIT frame: the peer returns a part of this rank's allowance.

        Raises:
            ProtocolError: The peer returns more than this rank has used.
        """
        used = self._used.get(peer, 0)
        if amount > used:
            raise ProtocolError(f"rank {peer} gave back {amount} bytes of an allowance of which {used} are used")
        self._used[peer] = used - amount
        for operation in self._table.select(lambda active: peer in active.held):
            if operation.eager_sent.get(peer, 0) < self._eager_bytes:
                self._release_held(operation, peer)

    def _release_held(self, operation: Operation, peer: int) -> None:
        held = operation.held.pop(peer, None)
        if held:
            self._outbox.push_back(peer, held)

    # ----------------------------------------------------------------------------------------------- as the receiver

    def submitted(self, operation: Operation, early: EarlyRecord) -> None:
        """Tell peers that an operation was submitted here: those that have asked, and those that will send much."""
        large = {peer for peer, count in operation.layout.expected_bytes.items() if count > self._eager_bytes}
        for peer in large.union(early.requested):
            self._outbox.control(peer, Frame.POSTED, key=operation.key)
        operation.posted_by.update(early.posted)

    def on_request(self, peer: int, key: _Key, *, ended: Callable[[_Key], bool]) -> bool:
        """Handle a REQUEST frame: the peer holds messages of an operation until this rank has submitted it.

        ``ended`` tells whether the operation has ended here and its signature is remembered: its messages are then
        received and compared, so that the peer learns of a mismatch. Returns whether the peer waits for a submission.
        """
        self.return_credit(peer, everything=True)
        if key in self._table.active or ended(key):
            self._outbox.answer(peer, Frame.POSTED, key)
        elif not self._table.was_submitted(key):
            self._table.early.note_requested(peer, key)
            return True
        return False

    def return_credit(self, peer: int, *, everything: bool = False) -> None:
        """Return allowance to a peer, if a quarter of its share is due; any amount, if ``everything`` is set."""
        if self._floating.is_credit_due(peer, flush=everything):
            self._outbox.answer(peer, Frame.CREDIT, NO_KEY)

    def _write_credit(self, peer: int, _key: _Key) -> tuple[_Key, bytes]:
        return (self._floating.take_credit(peer), 0), b""

    def validate(self) -> None:
        """Check that no allowance is overdrawn."""
        for used in self._used.values():
            assert 0 <= used <= self.share
