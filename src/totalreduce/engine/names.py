"""Names of operations: ids equal on all ranks without asking, and what is remembered from iteration to iteration."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from totalreduce.engine.layout import OperationLayout
from totalreduce.engine.operation import Carriage
from totalreduce.foundation import checks
from totalreduce.foundation.call_names import UNNAMED, call_name
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import operation_id
from totalreduce.kernels.counts import Counts

__all__ = ["NameRecord", "NameTable", "following", "is_later", "preceding"]

#: Different names of one engine, at most: 200 MB of idle names.
_NAMES_MAX = 1 << 24
#: After so many new records, those of idle names are given up: 3 MB of records.
_NEW_RECORDS: Final = 4096
#: If names come back soon after their records were given up, the number is doubled, up to this one.
_NEW_RECORDS_MAX: Final = 65_536
#: Among so many idle names, one new record is allowed, so that merging them takes constant time for each record.
_IDLE_PER_RECORD: Final = 128
#: Ended operations whose names were used once, and whose ids are remembered. Each takes some 70 bytes.
_ENDED_ONCE_MAX: Final = 65_536
#: Iterations are counted modulo this number, which is what a header has room for.
_ITERATIONS = 1 << 32


def following(iteration: int) -> int:
    """Return the iteration after this one; after the last one comes 0."""
    return (iteration + 1) % _ITERATIONS


def preceding(iteration: int) -> int:
    """Return the iteration before this one; before 0 comes the last one."""
    return (iteration - 1) % _ITERATIONS


def is_later(iteration: int, other: int) -> bool:
    """Return whether an iteration comes after another one, by the shorter way round (as RFC 1982 compares numbers)."""
    return 0 < (iteration - other) % _ITERATIONS < _ITERATIONS // 2


@dataclass(slots=True, eq=False)
class NameRecord:
    """A name under which operations were submitted here.

    Attributes:
        place: The scope and the name.
        name: The name for people.
        text: The scope and the name. The id is its hash, except where the name is used once: there it is the text of
            unnamed operations, so that the planner decides the same for all of them.
        op_id: The id.
        next_iteration: How often the name was submitted here, modulo 2**32.
        seen: The value of ``next_iteration`` when the table last looked for idle names.
        layout: The layout of the last operation of the name.
        carriage: What a carrier kept of the last operation of the name that a carrier has taken, so that the next one
            can begin from it (``Carrying``).
        described: The layout that was described to the peers last; ``None``: the next one is described in any case.
        known_to: Peers that were told the name since the last mismatch.
        is_numbered: Whether it stands for all operations of the scope that have no name.
    """

    place: tuple[str, str | None]
    name: str
    text: str
    op_id: int
    next_iteration: int = 0
    seen: int = -1
    layout: OperationLayout | None = None
    carriage: Carriage | None = None
    described: OperationLayout | None = None
    known_to: set[int] = field(default_factory=set)
    is_numbered: bool = False

    def shown(self, iteration: int, title: str = "", place: str = "") -> str:
        """Return the name of an operation for people; ``unnamed#3`` for those without a name and a title.

        ``title``, ``place``: as in ``Submission``.
        """
        if not self.is_numbered:
            return title or self.name
        return call_name(title, iteration, place) if title else f"{UNNAMED}#{iteration}"


class NameTable:
    """The names that were submitted here.

    A record is given up if the name was not used for some time and no operation of it is in flight. How often the name
    was submitted is kept, because the ranks of an operation find each other by that number: a rank may use a name again
    that another rank still uses. Then a record is made again.

    Attributes:
        by_id: The records by id; others only read it.
        by_name: The records by scope and name; others only read it.
    """

    def __init__(self, active: Collection[tuple[int, int]]) -> None:
        """Begin without names. ``active``: the keys of the operations in flight."""
        self.by_id: dict[int, NameRecord] = {}
        self.by_name: dict[tuple[str, str | None], NameRecord] = {}
        self._active, self._idle = active, Counts()
        self._limit = self._new_records = _NEW_RECORDS
        self._num_returned = 0
        #: The records of names that are used once, of operations in flight; others only read it.
        self.once: dict[int, NameRecord] = {}
        #: Ids of such operations that have ended, and their order. A slower rank may still send frames about them.
        self._ended_once: set[int] = set()
        self._order_of_ends: deque[int] = deque()

    def __len__(self) -> int:
        """Return the number of names that have a record."""
        return len(self.by_id)

    def __iter__(self) -> Iterator[NameRecord]:
        """Iterate over all records."""
        return iter(self.by_id.values())

    def record(self, scope: str, name: str | None, place: str = "") -> NameRecord:
        """Return the record of a name within a scope, or make one. ``None`` stands for operations without a name.

        ``place``: where these are counted, for people (``Submission.place``).

        Raises:
            ConfigurationError: The name is too long, there are too many, or two of them have the same id.
        """
        record = self.by_name.get((scope, name))
        if record is not None:
            return record
        text = scope + (UNNAMED if name is None else f"n:{name}")
        op_id = operation_id(text)
        if op_id in self.by_id:
            known = self.by_id[op_id].text
            raise ConfigurationError(f"the names {text!r} and {known!r} have the same id; rename one of them")
        checks.operation_name(text)
        if len(self.by_id) >= self._limit:
            self._give_up_idle_records()
        count = self._idle.get(op_id)
        if count is None and len(self.by_id) + len(self._idle) >= _NAMES_MAX:
            raise ConfigurationError(f"{_NAMES_MAX} different names in one group: reuse names, one per tensor")
        self._num_returned += count is not None
        shown = name if name is not None else f"calls {place}" if place else UNNAMED
        record = NameRecord((scope, name), shown, text, op_id, count or 0, is_numbered=name is None)
        self.by_name[record.place] = self.by_id[op_id] = record
        return record

    def get(self, op_id: int) -> NameRecord | None:
        """Return the record of an id, if its name was submitted here and is in use.

        A name that is used once must be in flight.
        """
        return self.by_id.get(op_id) or self.once.get(op_id)

    def was_submitted(self, key: tuple[int, int]) -> bool:
        """Return whether the operation was submitted here. It has ended if it is not active."""
        record = self.by_id.get(key[0])
        if record is not None:
            return is_later(record.next_iteration, key[1])
        count = self._idle.get(key[0])
        if count is None:
            return key[0] in self.once or key[0] in self._ended_once
        return is_later(count, key[1])

    def _give_up_idle_records(self) -> None:
        """Give up the records of names that were not used since the last call and have no operation in flight."""
        in_flight = {op_id for op_id, _ in self._active}
        idle = [
            record
            for record in self.by_id.values()
            if record.seen == record.next_iteration and record.op_id not in in_flight
        ]
        self._idle.update({record.op_id: record.next_iteration for record in idle})
        for record in idle:
            del self.by_id[record.op_id], self.by_name[record.place]
        for record in self.by_id.values():
            record.seen = record.next_iteration
        if 2 * self._num_returned > self._new_records:  # a program that uses many names in turn
            self._new_records = min(2 * self._new_records, _NEW_RECORDS_MAX)
        self._num_returned = 0
        # Where most names are in flight, a look at all of them must not come too often.
        self._limit = len(self.by_id) + max(
            self._new_records, len(self._idle) // _IDLE_PER_RECORD, len(self.by_id) // 4
        )

    # ----------------------------------------------------------------------------------------- names that are used once

    def record_once(self, scope: str, once: str, name: str) -> NameRecord:
        """Return the record of an operation whose name no other operation has; ``begin_once`` enters it.

        Args:
            scope: The scope.
            once: The name, equal on all ranks.
            name: The name for people.

        Raises:
            ConfigurationError: An operation of this name was submitted before, or has the same id.
        """
        op_id = operation_id(f"{scope}once:{once}")
        if op_id in self.by_id or op_id in self.once or op_id in self._ended_once:
            raise ConfigurationError(f"{name}: an operation with the same id was submitted before")
        return NameRecord((scope, once), name, scope + UNNAMED, op_id)

    def begin_once(self, record: NameRecord) -> None:
        """Enter the record of an operation that is submitted."""
        self.once[record.op_id] = record

    def is_over(self, op_id: int) -> bool:
        """Return whether an operation with this id has ended whose name was used once."""
        return op_id in self._ended_once

    def end_once(self, op_id: int) -> None:
        """Keep nothing of an operation that has ended but its id, and that for a while."""
        self.once.pop(op_id, None)
        self._ended_once.add(op_id)
        self._order_of_ends.append(op_id)
        if len(self._order_of_ends) > _ENDED_ONCE_MAX:
            self._ended_once.discard(self._order_of_ends.popleft())
