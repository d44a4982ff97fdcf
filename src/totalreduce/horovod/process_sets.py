"""Process sets: sets of ranks to which operations may be restricted."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, final

from totalreduce.foundation.errors import ConfigurationError

__all__ = ["ProcessSet", "global_process_set"]


@final
class ProcessSet:
    """Some ranks of the job. Operations take it as ``process_set=`` after ``init`` or ``add_process_set``.

    Args:
        ranks_or_comm: Ranks of the job, in any order; or an mpi4py communicator with these ranks.

    Raises:
        ConfigurationError: These are no ranks, or a rank comes twice.

    Attributes:
        process_set_id: Equal on all ranks; ``None`` before the set is registered and after it was removed.
        ranks: The ranks, ascending; ``None`` after the set was removed.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        try:
            ranks = ranks_of_communicator(ranks_or_comm) or [operator.index(rank) for rank in ranks_or_comm]
        except TypeError:
            ranks = [-1]
        if any(rank < 0 for rank in ranks) or len(set(ranks)) != len(ranks):
            raise ConfigurationError(
                f"a process set is made of different ranks of the job, not of {ranks_or_comm!r:.120}"
            )
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = sorted(ranks)
        self._own: int | None = None

    def size(self) -> int | None:
        """Return the number of ranks; ``None`` while the set is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the rank of this process in the set; ``None`` while the set is not registered.

        Roots of operations are ranks of the job, not of the set.

        Raises:
            ConfigurationError: This process is no member.
        """
        if self.process_set_id is None or self.ranks is None or self._own is None:
            return None
        if self._own not in self.ranks:
            raise ConfigurationError(f"rank {self._own} is not a member of {self}")
        return self.ranks.index(self._own)

    def included(self) -> bool | None:
        """Whether this process is a member; ``None`` while the set is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return self._own in self.ranks

    def register(self, number: int, ranks: Iterable[int], own: int) -> None:
        """Register the set, for ``init`` and ``add_process_set``."""
        self.process_set_id, self.ranks, self._own = number, list(ranks), own

    def invalidate(self) -> None:
        """Note that the set was removed, or that the job has ended."""
        self.process_set_id = self.ranks = self._own = None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


def ranks_of_communicator(communicator: Any) -> list[int] | None:
    """Return the ranks in ``COMM_WORLD`` of an mpi4py communicator's members; ``None`` for other objects."""
    if not hasattr(communicator, "Get_group"):
        return None
    from mpi4py import MPI

    group = communicator.Get_group()
    return list(group.Translate_ranks(list(range(group.Get_size())), MPI.COMM_WORLD.Get_group()))


#: The set of all ranks. Registered between ``init`` and ``shutdown``.
global_process_set = ProcessSet([])
