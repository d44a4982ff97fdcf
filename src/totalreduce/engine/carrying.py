"""Carriers: what carries operations out in place of the engine's messages.

Docs: docs/design/0021-carriers.md. The engine asks its carriers about every operation, one after the other, at two
moments:

* before another rank has heard of the operation (``Carrier.take``). A carrier that takes it needs no message. If the
  carrier of another rank does not take it, a message of that rank shows this, and the carrier here *gives it back*:
  messages carry it out.
* before its first message (``Carrier.wants``). A carrier that wants it exchanges the messages of the schedule itself.
  The engine then sends none until the carrier has taken it (``Carrying.taken``) or declined it (``declined``).

An operation with a carrier is in flight like any other: it has a deadline, it can stall, and it fails if a rank is
lost. The carrier reports its progress (``Carrying.advanced``), and hears of its end through the ``Carriage``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set as AbstractSet
from typing import Any, Final, Protocol

from totalreduce.engine.counters import Counters
from totalreduce.engine.early import NO_FRAMES, EarlyRecord
from totalreduce.engine.layout import OperationLayout
from totalreduce.engine.members import Members
from totalreduce.engine.names import NameRecord, following, preceding
from totalreduce.engine.operation import Carriage, Operation, Progress, State
from totalreduce.engine.reception import Delivery, Reception
from totalreduce.engine.rendezvous import Rendezvous
from totalreduce.engine.submission import Submission
from totalreduce.engine.table import OperationTable
from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import Header
from totalreduce.foundation.observer import Observer

__all__ = ["Carrier", "Carrying", "EngineCalls"]

_Key = tuple[int, int]
#: Names whose carriages are kept. A carriage of the fast lane has some two KiB.
_KEPT_MAX: Final = 1024


class Carrier:
    """Carries operations out in place of the engine's messages. By default it takes none.

    All methods are called under the engine's lock and return at once.
    """

    __slots__ = ()

    def take(self, operation: Operation) -> Carriage | None:  # noqa: ARG002  (the carrier's business)
        """Take an operation that was just submitted, or return ``None``. No other rank has heard of it."""
        return None

    def may_take(self, operation: Operation) -> bool:  # noqa: ARG002
        """Return whether ``take`` may have taken such an operation on another rank; the same answer on all ranks."""
        return False

    def wants(self, operation: Operation) -> bool:  # noqa: ARG002
        """Return whether the first message of an operation shall wait until ``taken`` or ``declined`` is called."""
        return False

    def tick(self, now: float) -> None:
        """Do what is due. Called a few times a second."""

    def arriving(self) -> AbstractSet[int]:
        """Return the peers of which a message is arriving through the carrier."""
        return frozenset()


class EngineCalls(Protocol):
    """What ``Carrying`` calls of the engine."""

    def carry_by_messages(self, operation: Operation, record: NameRecord, early: EarlyRecord, now: float) -> None:
        """Have messages carry an operation out."""

    def run_lanes(self, operation: Operation, now: float) -> None:
        """Queue the first messages of an operation."""

    def first_byte(self, operation: Operation, now: float) -> None:
        """Note that the first byte of an operation is on its way."""

    def end_if_done(self, operation: Operation, now: float) -> None:
        """End an operation of which nothing is left to do."""


class Carrying:
    """The operations that carriers have, between the engine and its carriers.

    Attributes:
        carriers: The carriers, in the order in which they are asked.
        carried: The operations in flight that carriers have, and the carriage of each. The thread that moves messages
            advances the carriages.
    """

    __slots__ = (
        "_counters",
        "_engine",
        "_kept",
        "_members",
        "_observers",
        "_reception",
        "_rendezvous",
        "_table",
        "carried",
        "carriers",
    )

    def __init__(
        self,
        engine: EngineCalls,
        table: OperationTable,
        members: Members,
        reception: Reception,
        rendezvous: Rendezvous,
        observers: list[Observer],
        counters: Counters,
    ) -> None:
        """Begin without carriers."""
        self._engine, self._table, self._members = engine, table, members
        self._reception, self._rendezvous = reception, rendezvous
        self._observers, self._counters = observers, counters
        self.carriers: list[Carrier] = []
        self.carried: dict[Operation, Carriage] = {}
        #: Names whose records have a carriage; the one that was used longest ago comes first.
        self._kept: OrderedDict[NameRecord, None] = OrderedDict()

    # ------------------------------------------------------------------------------------------------ for the engine

    def take(self, operation: Operation, record: NameRecord, early: EarlyRecord) -> bool:
        """Offer an operation that was just submitted to the carriers; return whether one has taken it.

        It is not offered if another rank needs a message about it: because that rank has sent one, because it has asked
        for news of all operations, or because any rank has departed.
        """
        if early is not NO_FRAMES or self._members.departed or operation.key in self._reception.floating:
            return False
        if self._rendezvous.is_asked(operation.ranks):
            return False
        for carrier in self.carriers:
            carriage = carrier.take(operation)
            if carriage is not None:
                operation.carriage = self.carried[operation] = carriage
                self._keep(record, carriage)
                return True
        return False

    def _keep(self, record: NameRecord, carriage: Carriage) -> None:
        """Keep a carriage for the next operation of its name; forget that of the name that was used longest ago."""
        is_used_once = self._table.names.by_id.get(record.op_id) is not record
        if is_used_once or record.is_numbered:  # several operations without a name may be in flight at the same time
            return
        record.carriage = carriage
        self._kept[record] = None
        self._kept.move_to_end(record)
        if len(self._kept) > _KEPT_MAX:
            self._kept.popitem(last=False)[0].carriage = None

    def may_be_taken(self, operation: Operation) -> bool:
        """Return whether another rank may have given such an operation to a carrier that sends no message of it."""
        return any(carrier.may_take(operation) for carrier in self.carriers)

    def is_wanted(self, operation: Operation) -> bool:
        """Return whether the first message of an operation waits for a carrier (``taken``, ``declined``).

        Not if there are observers: they are to see every message, and carriers do not report messages.
        """
        return not self._observers and any(carrier.wants(operation) for carrier in self.carriers)

    def accept(self, operation: Operation, peer: int, header: Header, now: float) -> Delivery | None:
        """Act on a message of an operation that a carrier has; ``None``: the engine receives its body as any other.

        If the carrier needs no messages, the message shows that the peer's carrier does not have the operation. So the
        carrier gives it back. If it cannot, all ranks had given it to their carriers, and the message is superfluous.

        Raises:
            ProtocolError: The carrier exchanges the messages, and another one is the next.
        """
        self.give_back(operation, now)
        carriage = operation.carriage
        if operation.finished:  # it may have failed because it was given back
            return self._reception.sink(peer, header)
        if carriage is None:
            return None
        if not carriage.exchanges_messages:
            return self._reception.sink(peer, header)
        if not carriage.accepts(peer, header.lane, header.step):
            raise ProtocolError(
                f"rank {peer} sent lane {header.lane}, step {header.step} of {operation.name!r} out of turn"
            )
        if header.body_bytes:
            return None
        carriage.receive(peer, header.lane, header.step, None)
        return self._reception.empty(peer, header)

    def end(self, operation: Operation, *, well: bool) -> None:
        """Tell the carrier of an operation that it has ended."""
        carriage = self.carried.pop(operation)
        if well:
            carriage.end()
        else:
            carriage.fail()

    def tick(self, now: float) -> None:
        """Have the carriers do what is due."""
        for carrier in self.carriers:
            carrier.tick(now)

    def arriving(self) -> set[int]:
        """Return the peers of which a message is arriving through a carrier."""
        return set[int]().union(*(carrier.arriving() for carrier in self.carriers))

    # ------------------------------------------------------------------------------------------------- for the carriers

    def taken(self, operation: Operation, carriage: Carriage, now: float) -> None:
        """Note that a carrier has taken an operation whose messages it exchanges from now on."""
        operation.carriage = self.carried[operation] = carriage
        if operation.state is State.WAITING:
            self._engine.first_byte(operation, now)

    def declined(self, operation: Operation, now: float) -> None:
        """Have the engine send the first message of an operation that a carrier has wanted and does not take now."""
        self._engine.run_lanes(operation, now)

    def give_back(self, operation: Operation, now: float) -> None:
        """Have messages carry an operation out, unless its carrier will finish it."""
        record, carriage = self._table.names.get(operation.key[0]), operation.carriage
        if carriage is None or record is None or operation.finished:
            return
        if carriage.give_back():
            operation.carriage = None
            del self.carried[operation]
            self._engine.carry_by_messages(operation, record, NO_FRAMES, now)

    def advanced(self, operation: Operation, progress: Progress, now: float) -> None:
        """Note how far a carrier has come with an operation."""
        carriage = operation.carriage
        if carriage is None or operation.finished or progress is Progress.WAITING:
            return
        if progress is Progress.REFUSED:
            self.give_back(operation, now)
            return
        if operation.state is State.WAITING:
            self._engine.first_byte(operation, now)
        if progress is Progress.DONE:
            self.count(carriage)
            operation.lanes_left = 0
            self._engine.end_if_done(operation, now)

    def count(self, carriage: Carriage) -> None:
        """Count the bytes of an operation that was carried out."""
        self._counters.bytes_sent += carriage.bytes_sent
        self._counters.bytes_received += carriage.bytes_received

    # --------------------------------------------------------------------------- operations that begin without a record

    def find(self, submission: Submission) -> Carriage | None:
        """Return the carriage of the last operation of a name, if the submitted operation is of the same layout.

        Any thread may call it.
        """
        record = self._table.names.by_name.get((submission.scope, submission.name))
        if record is None or record.carriage is None or record.layout is None or submission.repeats:
            return None
        signature, ranks = record.layout.signature, submission.ranks
        if signature is not submission.signature and signature != submission.signature:
            return None
        return record.carriage if ranks is None or ranks == record.layout.ranks else None

    def begin_again(self, layout: OperationLayout, op_id: int) -> _Key | None:
        """Reserve the next iteration of a name for an operation that only a carrier knows; return its key.

        Until ``adopt`` is called, the engine counts the operation but has no record of it. It takes messages with this
        key for messages of an operation that has ended, and discards them; and it cannot fail the operation when a rank
        is lost. If the operation has not ended, the caller must therefore call ``adopt`` before it calls any other
        method of the engine.

        Returns ``None`` and changes nothing if the operation must be submitted.
        """
        members, table, floating, counters = self._members, self._table, self._reception.floating, self._counters
        if members.verdict is not None or members.closed or members.departed or self._observers:
            return None
        record = table.names.by_id.get(op_id)
        if record is None:
            return None
        key = op_id, record.next_iteration
        is_in_flight = table.active and (op_id, preceding(key[1])) in table.active
        has_arrived = key in table.early.records or (floating.total_bytes and key in floating)  # a frame or a message
        if is_in_flight or has_arrived or record.layout is not layout or self._rendezvous.is_asked(layout.ranks):
            return None
        record.next_iteration = following(key[1])
        counters.operations += 1
        counters.payload_bytes += layout.num_bytes
        return key

    def adopt(self, submission: Submission, key: _Key, carriage: Carriage, now: float, *, owner: Any) -> Operation:
        """Make the engine's record of an operation that a carrier has begun (``begin_again``)."""
        record = self._table.names.get(key[0])
        assert record is not None
        assert record.layout is not None
        operation = self._table.make(submission, record, key, record.layout, now, owner)
        # First, because Ctrl-C may strike here: every operation of the table with a carriage is in ``carried``.
        operation.carriage = self.carried[operation] = carriage
        self._table.adopt(operation, now)
        return operation
