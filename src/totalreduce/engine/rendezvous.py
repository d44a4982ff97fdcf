"""Which messages may leave before the receiver is known to have submitted their operation.

This is the eager allowance of docs/design/0003-eager-and-rendezvous.md. A message that arrives before its operation was
submitted takes memory of the receiver, so every sender has an allowance. A message within the allowance leaves at once,
with the flag EAGER. Beyond the allowance the sender holds the messages of the operation, and asks once (REQUEST). The
receiver answers (POSTED) when it has submitted the operation, and returns allowance (CREDIT) when memory is free.

The REQUEST takes memory of the receiver, too. ``entries`` has the allowance for such frames, and says what follows if
it is used up: the sender is *asking*, and the receiver tells it of every operation that it submits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from totalreduce.engine.counters import Counters
from totalreduce.engine.early import EarlyRecord
from totalreduce.engine.entries import Entries, returned
from totalreduce.engine.floating import FloatingStore, floating_cost
from totalreduce.engine.operation import Operation
from totalreduce.engine.outbox import NO_KEY, Outbox, QueuedMessage
from totalreduce.engine.table import OperationTable
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.header import Flag, Frame

__all__ = ["Rendezvous"]

_Key = tuple[int, int]


class Rendezvous:
    """The allowances of this rank at its peers, and of its peers here.

    Attributes:
        share: The bytes that each peer may have floating here, and this rank at each peer.
        asking: Peers whose frames about further operations wait there: they are told of every operation that is
            submitted here.
    """

    __slots__ = (
        "_counters",
        "_eager_bytes",
        "_entries",
        "_floating",
        "_holding",
        "_outbox",
        "_table",
        "_used",
        "asking",
        "share",
    )

    def __init__(
        self,
        config: EngineConfig,
        table: OperationTable,
        floating: FloatingStore,
        outbox: Outbox,
        entries: Entries,
        counters: Counters,
    ) -> None:
        """Begin with full allowances."""
        self.share, self._eager_bytes = floating.allowance.share, config.eager_bytes
        self._table, self._floating = table, floating
        self._outbox, self._entries, self._counters = outbox, entries, counters
        floating.allowance.on_credit = table.early.allowance.on_credit = self.return_credit
        entries.on_leave = self._release
        outbox.writers[Frame.CREDIT] = self._write_credit
        self.asking: set[int] = set()
        self._used: dict[int, int] = {}  #: By peer: the part of the allowance there that this rank has used.
        #: By peer: the operations that hold messages for it, oldest first.
        self._holding: dict[int, dict[Operation, None]] = {}

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
        waits = bool(self._entries.waiting) and self._entries.waits(peer, operation.key)
        # Once one message is held, later ones of the operation are: messages of a lane must not overtake each other.
        if not held and not waits and sent + body_bytes <= self._eager_bytes and used + cost <= self.share:
            self._used[peer] = used + cost
            operation.eager_sent[peer] = sent + body_bytes
            return Flag.EAGER
        if held is None:
            held = operation.held[peer] = []
            if not waits:  # otherwise the peer is asked already
                self._entries.tell(peer, Frame.REQUEST, operation.key, operation)
        held.append(message)
        self._holding.setdefault(peer, {})[operation] = None
        self._counters.held_messages += 1
        return None

    def posted(self, operation: Operation, peer: int) -> None:
        """Note that a peer has submitted an operation: messages that were held for it may leave."""
        operation.posted_by.add(peer)
        if operation.carriage is not None:
            operation.carriage.posted(peer)
        if self._entries.waiting:
            self._entries.posted(peer, operation.key)
        if operation.held:
            self._release(operation, peer)

    def on_posted(self, peer: int, key: _Key) -> None:
        """Handle a POSTED frame."""
        operation = self._table.active.get(key)
        if operation is not None:
            self.posted(operation, peer)
            return
        self._entries.posted(peer, key)
        if not self._table.was_submitted(key):
            self._table.early.note_posted(peer, key)

    def on_credit(self, peer: int, amount: int, entries: int) -> None:
        """Handle a CREDIT frame: the peer returns a part of this rank's allowances of messages and of entries.

        Raises:
            ProtocolError: The peer returns more than this rank has used.
        """
        self._used[peer] = returned(self._used.get(peer, 0), peer, amount)
        self._entries.on_credit(peer, entries)
        room, released = self.share - self._used[peer], []
        for operation in self._holding.get(peer, ()):
            if self._entries.waits(peer, operation.key):
                break  # so do most of the later ones
            held = operation.held[peer]
            if operation.eager_sent.get(peer, 0) + held[0].region.body_bytes <= self._eager_bytes:
                if room < floating_cost(held[0].region.body_bytes):
                    break
                room -= sum(floating_cost(message.region.body_bytes) for message in held)
                released.append(operation)
        for operation in released:
            self._release(operation, peer)
            operation.held[peer] = []  # the peer has its REQUEST

    def discard(self, operation: Operation) -> None:
        """Forget the messages of an operation that has failed."""
        for peer, held in operation.held.items():
            if held:
                del self._holding[peer][operation]
        operation.held.clear()

    def forget(self, peer: int) -> None:
        """Forget what a peer that has left was told of, and what waits for it."""
        self.asking.discard(peer)
        self._entries.forget(peer)

    def _release(self, operation: Operation, peer: int) -> None:
        """Queue the messages again that were held for a peer."""
        held = operation.held.pop(peer, None)
        if held:
            del self._holding[peer][operation]
            self._outbox.push_back(peer, held)

    # ----------------------------------------------------------------------------------------------- as the receiver

    def submitted(self, operation: Operation, early: EarlyRecord, others: Collection[int] | None) -> None:
        """Tell peers that an operation was submitted here: those that have asked, and those that will send much.

        ``others``: all other ranks of the operation, if they must know it before they submit the operation.
        """
        operation.posted_by.update(early.posted, early.requested, early.described)
        if others is not None:
            for peer in others:
                self._entries.tell(peer, Frame.POSTED, operation.key, operation)
            return
        told = {peer for peer, count in operation.layout.expected_bytes.items() if count > self._eager_bytes}
        told.update(early.requested)
        if self.asking:
            told.update(self.asking.intersection(operation.ranks))
        for peer in told:
            self._outbox.control(peer, Frame.POSTED, key=operation.key)

    def is_asked(self, ranks: Collection[int]) -> bool:
        """Return whether one of these ranks is told of every operation that is submitted here."""
        return bool(self.asking) and not self.asking.isdisjoint(ranks)

    def on_request(self, peer: int, key: _Key, *, ended: Callable[[_Key], bool]) -> bool:
        """Handle a REQUEST frame: the peer holds messages of an operation until this rank has submitted it.

        ``ended`` tells whether the operation has ended here and its signature is remembered: its messages are then
        received and compared, so that the peer learns of a mismatch. Returns whether the peer waits for a submission.
        """
        if key == NO_KEY:
            self.asking.discard(peer)
        elif key in self._table.active or ended(key):
            self._outbox.answer(peer, Frame.POSTED, key)
        elif not self._table.was_submitted(key):
            if not self._table.early.note_requested(peer, key):
                self.asking.add(peer)
            return True
        return False

    def return_credit(self, peer: int) -> None:
        """Return allowance to a peer, if a quarter of it is due."""
        if self._floating.allowance.is_due(peer) or self._table.early.allowance.is_due(peer):
            self._outbox.answer(peer, Frame.CREDIT, NO_KEY)

    def _write_credit(self, peer: int, _key: _Key) -> tuple[_Key, bytes]:
        return (self._floating.allowance.take_credit(peer), self._table.early.allowance.take_credit(peer)), b""

    def validate(self) -> None:
        """Check that no allowance is overdrawn."""
        for used in self._used.values():
            assert 0 <= used <= self.share
        self._entries.validate()
