"""The operations of one rank: those in flight, those that have ended, and the names under which they were submitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from totalreduce.engine.any_receives import AnyReceive
from totalreduce.engine.counters import Counters
from totalreduce.engine.early import EarlyFrames
from totalreduce.engine.layout import OperationLayout
from totalreduce.engine.names import NameRecord, NameTable
from totalreduce.engine.operation import Operation, State
from totalreduce.engine.submission import Submission
from totalreduce.foundation.errors import TotalReduceError

__all__ = ["OperationTable"]

_Key = tuple[int, int]


class OperationTable:
    """The message list of the Total Reduce design, and what became of its operations.

    Attributes:
        active: Operations from their submission until they end, by key (operation id, iteration).
        names: The names that were submitted here.
        completed: Operations that have ended and were not fetched; see ``pop_completed``.
        early: Control frames about operations that were not submitted here yet.
    """

    __slots__ = ("_active_since", "_counters", "_failing", "_num_submitted", "active", "completed", "early", "names")

    def __init__(self, counters: Counters) -> None:
        """Begin without operations."""
        self._counters = counters
        self.active: dict[_Key, Operation] = {}
        self.names = NameTable(self.active.keys())
        self.early = EarlyFrames()
        self.completed: list[Operation | AnyReceive] = []
        #: Operations that have failed and have not completed; and whether the other ranks have been told of the error.
        self._failing: dict[Operation, bool] = {}
        self._num_submitted = 0
        self._active_since: float | None = None

    @property
    def num_active(self) -> int:
        """The number of operations in flight."""
        return len(self.active)

    def make(
        self, submission: Submission, record: NameRecord, key: _Key, layout: OperationLayout, now: float, owner: Any
    ) -> Operation:
        """Make the record of an operation, which is the next one in the order of submission."""
        self._num_submitted += 1
        return Operation(
            record.shown(key[1], submission.title, submission.place),
            key,
            layout,
            submission.buffers,
            priority=submission.priority,
            sequence=self._num_submitted - 1,
            now=now,
            owner=owner,
        )

    def add(self, operation: Operation, now: float) -> None:
        """Take in an operation that was submitted."""
        self._counters.operations += 1
        self._counters.payload_bytes += operation.layout.num_bytes
        self.adopt(operation, now)

    def adopt(self, operation: Operation, now: float) -> None:
        """Take in an operation that was begun and counted before."""
        key = operation.key
        assert self.names.was_submitted(key)
        assert key not in self.active
        if not self.active:
            self._active_since = now
        self.active[key] = operation

    def end(
        self,
        operation: Operation,
        error: BaseException | None,
        now: float,
        *,
        group_goes_on: bool,
        is_told: bool = True,
    ) -> None:
        """Take out an operation that has ended, well or with an error.

        If the group goes on after an error (a mismatch, or the departure of a rank), the caller may use the tensor
        again at once. So the operation then completes only when no addition to its tensor is being carried out. Unless
        the other ranks have been told of the error (``is_told``), it also waits for ``complete_told``.
        """
        operation.error = error
        del self.active[operation.key]
        if not self.active and self._active_since is not None:
            self._counters.active_s += now - self._active_since
            self._active_since = None
        if group_goes_on and (operation.computing or not is_told):
            operation.enter(State.FAILING)
            self._failing[operation] = is_told
        else:
            operation.enter(State.DONE if error is None else State.FAILED)
            self.completed.append(operation)

    def addition_ended(self, operation: Operation) -> None:
        """Complete a failing operation if this was its last addition, and the other ranks know of its error."""
        if not operation.computing and self._failing.get(operation, False):
            self._complete([operation])

    def complete_told(self) -> None:
        """Complete failing operations to which nothing is being added: the other ranks know of their errors now."""
        self._failing = dict.fromkeys(self._failing, True)
        self._complete([operation for operation in self._failing if not operation.computing])

    def close(self) -> None:
        """Complete every failing operation: the group has ended, and nobody uses a tensor again at once."""
        self._complete(list(self._failing))

    def _complete(self, failing: list[Operation]) -> None:
        for operation in failing:
            del self._failing[operation]
            operation.enter(State.FAILED)
        self.completed += failing

    def end_receive(self, receive: AnyReceive, error: TotalReduceError) -> None:
        """Complete a receive from anybody that ended before a message had come."""
        receive.error = error
        self.completed.append(receive)

    def pop_completed(self) -> list[Operation | AnyReceive]:
        """Return the operations that completed since the last call, in order."""
        completed, self.completed = self.completed, []
        return completed

    def select(self, condition: Callable[[Operation], bool] = lambda _: True) -> list[Operation]:
        """Return the active operations that meet a condition; a copy, so that they may end meanwhile."""
        return [operation for operation in self.active.values() if condition(operation)]

    def was_submitted(self, key: _Key) -> bool:
        """Return whether the operation was submitted here; it has ended if it is not active."""
        return self.names.was_submitted(key)

    def active_s(self, now: float) -> float:
        """Return the seconds with at least one operation in flight since the group was made."""
        running = now - self._active_since if self._active_since is not None else 0.0
        return self._counters.active_s + running
