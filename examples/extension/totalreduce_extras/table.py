"""A carrier: ranks that are threads of one process add up in a dictionary, without messages.

It takes sums of float32 whose name begins with ``table``. A rank lays a copy of its tensor on the table. When all ranks
have done so, each one adds the copies up, in the order of the ranks.
"""

import threading
from collections.abc import Callable
from typing import final

import numpy as np

from totalreduce.engine.carrying import Carrier
from totalreduce.engine.operation import Carriage, Operation, Progress
from totalreduce.foundation.types import DType, OpKind, ReduceOp
from totalreduce.transports.base import Transport
from totalreduce.transports.inproc import InprocNetwork, InprocTransport


class Place:
    """The place of one operation on the table: the signature of the rank that came first, and the tensors by rank."""

    def __init__(self, signature: bytes) -> None:
        self.signature = signature
        self.tensors: dict[int, np.ndarray] = {}
        self.left: set[int] = set()


class Table:
    """What the ranks of a group share.

    Attributes:
        lock: Held for every access.
        places: By the key of the operation, which is equal on all ranks.
        wake: By rank: a function that wakes the thread that moves its messages.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.places: dict[tuple[int, int], Place] = {}
        self.wake: dict[int, Callable[[], None]] = {}


@final
class TableCarriage(Carriage):
    """One operation of one rank at the table."""

    def __init__(self, table: Table, operation: Operation, rank: int) -> None:
        self._table, self._operation, self._rank = table, operation, rank
        self._is_refused = False

    @property
    def _place(self) -> Place | None:
        return self._table.places.get(self._operation.key)

    def _are_all_there(self) -> bool:
        place = self._place
        return place is not None and len(place.tensors) == len(self._operation.ranks)

    def announce(self) -> Progress:
        """Lay the tensor on the table, if the place there is for the same operation."""
        operation, signature = self._operation, self._operation.layout.expectation.packed
        with self._table.lock:
            place = self._table.places.setdefault(operation.key, Place(signature))
            self._is_refused = place.signature != signature
            if not self._is_refused and operation.buffers:
                place.tensors[self._rank] = np.frombuffer(operation.buffers[0], np.float32).copy()
        if self._are_all_there():
            for rank in operation.ranks:
                self._table.wake[rank]()
        return self.advance(patient=False)

    def advance(self, *, patient: bool) -> Progress:
        """Add up, if all tensors are there."""
        del patient  # the transport wakes this rank
        if self._is_refused:
            return Progress.REFUSED
        with self._table.lock:
            if not self._are_all_there() or not self._operation.buffers:
                return Progress.WAITING
            tensors = [self._place.tensors[rank] for rank in self._operation.ranks]
        np.frombuffer(self._operation.buffers[0], np.float32)[:] = sum(tensors[1:], tensors[0])
        return Progress.DONE

    def has_changed(self) -> bool:
        """Return whether all tensors are there."""
        return self._are_all_there()

    def progress(self) -> str:
        """Return the progress in words."""
        place = self._place
        return f"{0 if place is None else len(place.tensors)} of {len(self._operation.ranks)} tensors on the table"

    def needs(self, peer: int) -> bool:
        """Return whether a peer has not come to the table."""
        place = self._place
        return peer in self._operation.ranks and (place is None or peer not in place.tensors)

    def end(self) -> None:
        """Leave the table. The last rank clears the place."""
        with self._table.lock:
            place = self._place
            if place is not None:
                place.left.add(self._rank)
                if place.left >= place.tensors.keys():
                    del self._table.places[self._operation.key]

    def fail(self) -> None:
        """Take the tensor back, unless others may be adding it up."""
        self.give_back()
        self.end()

    def give_back(self) -> bool:
        """Take the tensor back, unless all are there."""
        with self._table.lock:
            if self._are_all_there() and not self._is_refused:
                return False
            place = self._place
            if place is not None:
                place.tensors.pop(self._rank, None)
                if not place.tensors:
                    del self._table.places[self._operation.key]
            return True


@final
class TableCarrier(Carrier):
    """The carrier of one rank."""

    def __init__(self, table: Table, transport: Transport) -> None:
        self._table, self._rank = table, transport.rank
        table.wake[transport.rank] = transport.wake

    def take(self, operation: Operation) -> TableCarriage | None:
        """Take sums of float32 whose name begins with ``table``."""
        return TableCarriage(self._table, operation, self._rank) if self.may_take(operation) else None

    def may_take(self, operation: Operation) -> bool:
        """Return whether it is such a sum: the same on all ranks."""
        signature = operation.signature
        return operation.name.startswith("table") and (signature.kind, signature.dtype, signature.reduction) == (
            OpKind.ALLREDUCE,
            DType.FLOAT32,
            ReduceOp.SUM,
        )


#: One table for each group whose ranks are threads.
_tables: dict[InprocNetwork, Table] = {}


def make(transport: Transport) -> TableCarrier | None:
    """Make the carrier of a rank, if the ranks are threads of this process."""
    if not isinstance(transport, InprocTransport):
        return None
    return TableCarrier(_tables.setdefault(transport.network, Table()), transport)
