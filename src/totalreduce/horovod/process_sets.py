"""Sets of ranks that operations may be restricted to."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, final

from totalreduce.foundation.errors import ConfigurationError

__all__ = ["ProcessSet", "global_process_set"]


@final
class ProcessSet:
    """Some ranks of the job. Operations take one as ``process_set=`` once ``init`` or ``add_process_set`` knows it.

    Args:
        ranks_or_comm: Ranks of the job, in any order; or an mpi4py communicator, whose ranks they are.

    Raises:
        ConfigurationError: Not ranks, or one twice.

    Attributes:
        process_set_id: Equal on all ranks; ``None`` before it is known and after it was removed.
        ranks: Ascending; ``None`` after it was removed.
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
        """How many ranks it has; ``None`` while it is not known."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's place in it, from 0; ``None`` while it is not known.

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
        """Whether this process is a member; ``None`` while it is not known."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return self._own in self.ranks

    def register(self, number: int, ranks: Iterable[int], own: int) -> None:
        """Make it known. For ``init`` and ``add_process_set``.

        Args:
            number: Its id.
            ranks: Its members.
            own: This process's rank in the job.
        """
        self.process_set_id, self.ranks, self._own = number, list(ranks), own

    def invalidate(self) -> None:
        """Forget it: it was removed, or the job has ended."""
        self.process_set_id = self.ranks = self._own = None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


def ranks_of_communicator(communicator: Any) -> list[int] | None:
    """Ranks in ``COMM_WORLD`` of an mpi4py communicator's members; ``None`` for anything else."""
    if not hasattr(communicator, "Get_group"):
        return None
    from mpi4py import MPI

    group = communicator.Get_group()
    return list(group.Translate_ranks(list(range(group.Get_size())), MPI.COMM_WORLD.Get_group()))


#: All ranks of the job. Known between ``init`` and ``shutdown``.
global_process_set = ProcessSet([])
