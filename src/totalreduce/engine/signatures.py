"""The agreement on what an operation is, as decided in docs/design/0008-disagreement.md.

The n-th operation of a name on one rank meets the n-th operation of this name on the others. The ranks compare the
*signatures* (kind, element type, shape, reduction, root, schedule): every message carries one in its header, and a rank
that submits an operation describes it to the ranks with which it exchanges messages (DESCRIBE), unless the previous
operation of the name had the same signature. A rank that finds a difference tells all ranks of the operation
(MISMATCH), and the operation fails wherever it has not ended.

This object compares, remembers and sends. It does not end operations: its methods return the error that an operation
fails with, and the engine acts.
"""

from __future__ import annotations

from collections.abc import Iterable

from totalreduce.engine.control import Description, encode_mismatch
from totalreduce.engine.counters import Counters
from totalreduce.engine.early import ENTRY_COST, BoundedTable
from totalreduce.engine.entries import Entries
from totalreduce.engine.layout import Expectation
from totalreduce.engine.members import Members
from totalreduce.engine.names import NameRecord
from totalreduce.engine.operation import Operation
from totalreduce.engine.table import OperationTable
from totalreduce.engine.telling import Telling
from totalreduce.foundation.errors import MismatchError
from totalreduce.foundation.header import Frame, unpack_schedule, unpack_signature
from totalreduce.foundation.types import OpKind

__all__ = ["ENDS_EARLY", "SignatureExchange"]

#: Kinds that can end on one rank, which may then leave the group, before another rank has submitted the operation.
ENDS_EARLY = frozenset({OpKind.BROADCAST, OpKind.REDUCE, OpKind.GATHER, OpKind.SCATTER, OpKind.SEND_RECV})
#: Kinds of these in which a late rank can still report a mismatch. SEND_RECV cannot: it has only two ranks.
_REPORTED_LATE = ENDS_EARLY - {OpKind.SEND_RECV}
#: Kinds whose root has received a message of every rank when it ends.
_COLLECTING = frozenset({OpKind.REDUCE, OpKind.GATHER})
#: Kinds whose blocks may have other sizes each time, and in which no rank ends before every rank has submitted.
_EXCHANGES = frozenset({OpKind.ALLGATHER, OpKind.ALLTOALL})
#: The memory for names and for descriptions, in bytes, each. They are for error messages: the oldest are forgotten.
_TEXT_BYTES_MAX = 4 * 1024 * 1024
#: Operations that have ended here before others began, at most; each takes some hundred bytes.
_ENDED_MAX = 16_384

_Key = tuple[int, int]


class SignatureExchange:
    """What this rank and its peers have said of the signatures of operations."""

    __slots__ = (
        "_counters",
        "_descriptions",
        "_ended",
        "_entries",
        "_members",
        "_names",
        "_rank",
        "_table",
        "_telling",
    )

    def __init__(
        self,
        rank: int,
        table: OperationTable,
        entries: Entries,
        members: Members,
        telling: Telling,
        counters: Counters,
    ) -> None:
        """Begin without knowledge of the peers."""
        self._rank, self._table, self._telling = rank, table, telling
        self._entries, self._members, self._counters = entries, members, counters
        #: Name and signature of operations that have ended here well; other ranks may still submit them with another
        #: signature.
        self._ended: BoundedTable[_Key, tuple[str, Expectation]] = BoundedTable(_ENDED_MAX)
        #: Names that peers have told, by operation id.
        self._names: BoundedTable[int, str] = BoundedTable(_TEXT_BYTES_MAX, lambda name: ENTRY_COST + len(name))
        #: By peer and operation id: the signature that the peer described last, packed and in words.
        self._descriptions: BoundedTable[tuple[int, int], tuple[bytes, str]] = BoundedTable(
            _TEXT_BYTES_MAX, lambda value: ENTRY_COST + len(value[1])
        )

    def name_of(self, op_id: int) -> str:
        """Return the name of an operation id for people; a hexadecimal number if no rank has told it."""
        record = self._table.names.get(op_id)
        return record.name if record is not None else self._names.get(op_id, f"{op_id:#018x}")

    # ---------------------------------------------------------------------------------------------------- describing

    def submitted(self, operation: Operation, record: NameRecord) -> None:
        """Describe a new operation to its neighbours, unless the previous one of its name had the same signature."""
        if record.described is not operation.layout:
            self._describe(operation, record)
            record.described = operation.layout

    def describe_late(self, operations: Iterable[Operation]) -> None:
        """Describe operations whose neighbours had to conclude the signature from the previous one of the name.

        This is done where a neighbour may have concluded the wrong signature.
        """
        for operation in operations:
            record = self._table.names.get(operation.key[0])
            if not operation.described and operation.has_messages and record is not None:
                self._describe(operation, record)

    def _describe(self, operation: Operation, record: NameRecord) -> None:
        """Describe the operation to every rank with which this rank would exchange a message.

        A schedule connects all ranks. So if ranks have submitted different signatures, two of them with different
        signatures are neighbours in one of their schedules, and the receiver of that description finds the difference.

        The sizes of an allgather or an all-to-all are new in every step of a sparse method. They are not described to a
        peer that knows the name and is sent a message that waits for no block of the peer: its header has the sizes.
        """
        layout = operation.layout
        kind, program = layout.signature.kind, layout.program
        # A message has a header, so the receiver of a point-to-point message need not describe what it waits for.
        neighbours = program.targets if kind is OpKind.SEND_RECV else (*program.targets, *program.sources)
        learn_from_headers = program.addressed if kind in _EXCHANGES else ()
        operation.described = True
        for peer in dict.fromkeys(neighbours):
            if peer in self._members.departed or (peer in learn_from_headers and peer in record.known_to):
                continue
            record.known_to.add(peer)
            body = Description(record.name, layout.describe_to(peer)).encode()
            self._entries.tell(
                peer, Frame.DESCRIBE, operation.key, operation, body=body, signature=layout.signature_to(peer)
            )

    # ----------------------------------------------------------------------------------------------------- comparing

    def compare(self, operation: Operation, peer: int, theirs: bytes) -> MismatchError | None:
        """Compare the packed signature that a peer has sent with that of an active operation.

        If they differ, all ranks are told. Returns the error that the operation fails with.
        """
        expected = operation.layout.expectation
        if theirs == expected.signature_from(peer):
            return None
        return self._disagree(operation.name, operation.key, expected, peer, theirs)

    def compare_past(self, peer: int, key: _Key, theirs: bytes) -> None:
        """Compare the packed signature that a peer has sent with that of an operation that has ended here.

        If they differ, the ranks that still wait are told, once for each operation.
        """
        name, expected = self._ended.get(key, ("", None))
        if expected is not None and theirs != expected.signature_from(peer):
            del self._ended[key]
            self._disagree(name, key, expected, peer, theirs)

    def ended_well(self, operation: Operation) -> None:
        """Remember the signature of an operation that has ended, if a late rank can still submit another one."""
        kind, program = operation.layout.signature.kind, operation.layout.program
        if kind in _REPORTED_LATE and (program.targets or kind not in _COLLECTING):
            self._ended[operation.key] = operation.name, operation.layout.expectation

    def has_ended(self, key: _Key) -> bool:
        """Return whether the signature of the operation, which has ended here, is remembered."""
        return key in self._ended

    def described(self, peer: int, key: _Key, signature: bytes, description: Description) -> MismatchError | None:
        """A peer has described an operation. Returns the error that it fails with here, if it is active and differs."""
        if not self._table.names.is_over(key[0]):
            self._names[key[0]] = description.name
            self._descriptions[peer, key[0]] = signature, description.text
        operation = self._table.active.get(key)
        if operation is not None:
            return self.compare(operation, peer, signature)
        if self._table.was_submitted(key):
            self.compare_past(peer, key, signature)
        elif self._table.early.of(key).failure is None:
            self._table.early.note_described(peer, key, signature)
        return None

    def forget(self, operation: Operation) -> None:
        """Forget what peers have said of an operation that has ended, whose name no other operation has."""
        op_id = operation.key[0]
        if op_id in self._names:
            del self._names[op_id]
        for peer in operation.ranks:
            if (peer, op_id) in self._descriptions:
                del self._descriptions[peer, op_id]

    def distrust(self, key: _Key) -> None:
        """Describe the later operations of a name, and the next one: ranks disagreed about this one.

        Their neighbours may have concluded a wrong signature from it.
        """
        record = self._table.names.get(key[0])
        if record is not None:
            record.described = None
            record.known_to.clear()
            self.describe_late(self._table.select(lambda later: later.key[0] == key[0] and later.key[1] > key[1]))

    def _disagree(self, name: str, key: _Key, expected: Expectation, peer: int, theirs: bytes) -> MismatchError:
        """Tell all ranks of an operation the signatures of this rank and of ``peer``."""
        described, value = self._descriptions.get((peer, key[0]), (b"", ""))
        mine = shown = expected.describe(peer)
        if described != theirs:  # the peer has not described this operation, or has described a later one since
            value, shown = unpack_signature(theirs), unpack_signature(expected.signature_from(peer))
        if value == shown:  # the words are equal: the schedules differ, or shapes of which the header has a digest only
            if unpack_schedule(theirs) != unpack_schedule(expected.packed):
                value = f"{mine}, carried out by {unpack_schedule(theirs)}"
                mine = f"{mine}, carried out by {unpack_schedule(expected.packed)}"
            else:
                value = f"{value}, of another shape"
        error = MismatchError(name, (self._rank, peer), (mine, value))
        self._counters.mismatches += 1
        self._telling.tell(expected.ranks, Frame.MISMATCH, encode_mismatch(error), key, self._table.active.get(key))
        self.distrust(key)
        return error
