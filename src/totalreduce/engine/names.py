"""Names of operations: ids equal on all ranks without asking, and what is remembered from iteration to iteration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from totalreduce.engine.layout import OperationLayout
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import operation_id

__all__ = ["UNNAMED", "NameRecord", "NameTable", "following", "is_later", "preceding"]

#: Different names of one engine, at most.
_NAMES_MAX = 1_000_000
UNNAMED = "unnamed"
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
        name: The name for people.
        text: The scope and the name, of which the id is the hash.
        op_id: The id.
        next_iteration: How often the name was submitted here, modulo 2**32.
        layout: The layout of the last operation of the name.
        described: The layout that was described to the peers last; ``None``: the next one is described in any case.
        known_to: Peers that were told the name since the last mismatch.
    """

    name: str
    text: str
    op_id: int
    next_iteration: int = 0
    layout: OperationLayout | None = None
    described: OperationLayout | None = None
    known_to: set[int] = field(default_factory=set)

    def shown(self, iteration: int) -> str:
        """Return the name for people; ``unnamed#3`` for operations without a name."""
        return self.name if self.text.endswith(f"n:{self.name}") else f"{UNNAMED}#{iteration}"


class NameTable:
    """The names that were submitted here."""

    def __init__(self) -> None:
        """Begin without names."""
        #: The records by id; others only read it.
        self.by_id: dict[int, NameRecord] = {}
        self._by_name: dict[tuple[str, str | None], NameRecord] = {}

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.by_id)

    def __iter__(self) -> Iterator[NameRecord]:
        """Iterate over all records."""
        return iter(self.by_id.values())

    def record(self, scope: str, name: str | None) -> NameRecord:
        """Return the record of a name within a scope, or make one. ``None`` stands for operations without a name.

        Raises:
            ConfigurationError: The name is too long, there are too many, or two of them have the same id.
        """
        record = self._by_name.get((scope, name))
        if record is not None:
            return record
        text = scope + (UNNAMED if name is None else f"n:{name}")
        op_id = operation_id(text)
        if op_id in self.by_id:
            known = self.by_id[op_id].text
            raise ConfigurationError(f"the names {text!r} and {known!r} have the same id; rename one of them")
        checks.operation_name(text)
        if len(self.by_id) >= _NAMES_MAX:
            raise ConfigurationError("a million different names in one group: reuse names, one per tensor")
        record = NameRecord(UNNAMED if name is None else name, text, op_id)
        self._by_name[scope, name] = self.by_id[op_id] = record
        return record

    def get(self, op_id: int) -> NameRecord | None:
        """Return the record of an id, if its name was submitted here."""
        return self.by_id.get(op_id)

    def was_submitted(self, key: tuple[int, int]) -> bool:
        """Return whether the operation was submitted here. It has ended if it is not active."""
        record = self.by_id.get(key[0])
        return record is not None and is_later(record.next_iteration, key[1])
