"""Which buckets may leave before the round is closed: those that have every gradient which the last rounds had.

A wrong guess costs time, never correctness: what has not left leaves when the round is closed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

__all__ = ["Readiness"]


@final
class Readiness:
    """Of the buckets of one plan.

    Args:
        members: The parameters of each bucket; one may be in several.
    """

    def __init__(self, members: Sequence[Collection[int]]) -> None:
        """At first everything is expected."""
        self._members = [frozenset(bucket) for bucket in members]
        self._buckets_of: dict[int, list[int]] = {}
        for index, bucket in enumerate(members):
            for member in bucket:
                self._buckets_of.setdefault(member, []).append(index)
        self._fired: list[set[int]] = [set() for _ in members]
        self._fired_before = [set(bucket) for bucket in members]
        self._awaited = [set(bucket) for bucket in members]

    def begin(self) -> None:
        """The next round."""
        for index, fired in enumerate(self._fired):
            if fired:
                self._fired_before[index] = fired
            self._fired[index] = set()

    def fired(self, member: int) -> list[int]:
        """A parameter's gradient is there: the buckets that now have all they wait for."""
        complete = []
        for index in self._buckets_of[member]:
            self._fired[index].add(member)
            self._awaited[index].discard(member)
            if not self._awaited[index]:
                complete.append(index)
        return complete

    def close(self) -> None:
        """The round is over: the next one waits for what this one and the one before had."""
        for index, fired in enumerate(self._fired):
            self._awaited[index] = (fired | self._fired_before[index]) or set(self._members[index])
