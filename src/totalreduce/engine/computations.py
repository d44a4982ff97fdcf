"""The computation list of the Total Reduce design: additions and copies that wait to be carried out, in order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from totalreduce.engine.layout import Region
from totalreduce.engine.operation import Arrival, Lane, Operation
from totalreduce.foundation.types import ReduceOp
from totalreduce.schedules.actions import Mode, Receive

__all__ = ["Computation", "ComputationList"]


@dataclass(slots=True, eq=False)
class Computation:
    """An entry of the computation list: combine ``incoming`` with ``local``, or copy it, into ``destination``.

    Attributes:
        operation: The operation.
        lane: The lane of the operation.
        index: The index of the receive in the operation's program.
        mode: Whether to copy, to combine, or to combine for the last time.
        local: The bytes of this rank.
        incoming: The bytes that have arrived.
        destination: Where the result goes; it may be ``local``.
        arrival: The owner of ``incoming``.
        local_partial: Whether ``local`` is a partial sum, which may have a wider element type.
        incoming_partial: Whether ``incoming`` is a partial sum.
        divisor: The number by which the result is divided.
    """

    operation: Operation
    lane: Lane
    index: int
    mode: Mode
    local: memoryview
    incoming: memoryview
    destination: memoryview
    arrival: Arrival
    local_partial: bool
    incoming_partial: bool
    divisor: int


class ComputationList:
    """Computations that wait, oldest first."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        """Begin without computations."""
        self._waiting: deque[Computation] = deque()

    def append(self, operation: Operation, lane: Lane, action: Receive, region: Region, arrival: Arrival) -> None:
        """Add the computation of the receive that is next in a lane, whose body has arrived."""
        assert arrival.buffer is not None
        arrival.computing = True
        mode = action.mode
        partial = mode is Mode.COMBINE
        average = mode is Mode.COMBINE_LAST and operation.signature.reduction is ReduceOp.AVG
        self._waiting.append(
            Computation(
                operation,
                lane,
                lane.position,
                mode,
                local=operation.segment(region, lane.index, partial=action.onto_partial),
                incoming=arrival.buffer,
                destination=operation.segment(region, lane.index, partial=True)
                if partial
                else operation.target(region),
                arrival=arrival,
                local_partial=action.onto_partial,
                incoming_partial=action.partial,
                divisor=len(operation.ranks) if average else 1,
            )
        )

    def peek(self) -> Computation | None:
        """Return the next computation, and leave it in the list."""
        return self._waiting[0] if self._waiting else None

    def take(self) -> Computation | None:
        """Take out the next computation. The engine is told when it has been carried out (``Engine.computed``)."""
        if not self._waiting:
            return None
        computation = self._waiting.popleft()
        computation.operation.computing += 1
        return computation

    def discard(self, operation: Operation) -> None:
        """Forget the computations of an operation that has failed, and release the memory of their bodies."""
        for computation in [waiting for waiting in self._waiting if waiting.operation is operation]:
            self._waiting.remove(computation)
            computation.arrival.release()
