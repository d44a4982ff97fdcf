"""The vote of a block: one small allreduce, which passes on a rank only if all ranks have come to it."""

from __future__ import annotations

from typing import final

import numpy as np
import torch

from totalreduce.foundation.errors import ConfigurationError, PeerLost
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.tensors.work import Work

__all__ = ["Vote"]


@final
class Vote:
    """The votes of the blocks of a job, one after the other.

    A vote may have a second round, if the ranks learn in the first one that they must do something before it can pass.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        #: What ranks vote with (``begin``), and the total with its sign changed, so that MAX finds the smallest one. An
        #: element of a tensor takes 20 times as long to set.
        self._ballot = np.zeros(5, np.int64)
        self._given = (0, 0)  #: The ballot of this rank, and its number of samples.
        self._work: Work | PeerLost | None = None  #: The round in flight, or why it could not begin.
        self.is_second = False  #: Whether the second round is the present one. It may not have begun.
        self.layout = 0  #: A number that this rank tells the others in its ballot.
        #: The number that all ranks have told in the last round; ``None`` if ranks have told different ones.
        self.layouts: int | None = 0

    @property
    def is_in_flight(self) -> bool:
        """Whether this rank has voted, and does not know the result."""
        return self._work is not None or self.is_second

    def prepare(self) -> None:
        """Prepare the votes of a new group. ``OwnState.restore`` and ``RankStates.restore`` do it."""
        ballot = torch.from_numpy(self._ballot)
        self._vote = self._group.control.prepare_allreduce(ballot, name="recovery/vote", op=ReduceOp.MAX)
        self._work, self.is_second = None, False

    def begin(self, ballot: int, num_samples: int) -> None:
        """Give this rank's ballot, unless the vote of this block has begun. Collective, with ``end``."""
        if not self.is_in_flight:
            self._given = ballot, num_samples
            self._start()

    def _start(self) -> None:
        ballot, num_samples = self._given
        self._ballot[:] = ballot, num_samples, -num_samples, self.layout, -self.layout
        try:
            self._work = self._vote.start()
        except PeerLost as error:
            self._work = error

    def end(self) -> int:
        """Return the largest ballot of all ranks, when all have come to the vote.

        Raises:
            ConfigurationError: The ranks disagree about the number of samples. On every rank.
            PeerLost: A rank is lost, and others may have the result.
            DeadlineExceededError: A rank has not come to the vote in time. The call may be repeated.
        """
        assert self._work is not None, "begin comes first"
        if isinstance(self._work, PeerLost):
            raise self._work
        self._work.wait()
        self._work, self.is_second = None, False
        largest, most, fewest, last, first = self._ballot.tolist()
        if most != -fewest:
            raise ConfigurationError(
                f"a step has {-fewest} samples on some rank and {most} on another one; on rank {self._group.rank} it "
                f"has {self._given[1]}: the data set must be the same on all ranks"
            )
        self.layouts = last if last == -first else None
        return int(largest)

    def announce_second(self) -> None:
        """Note that a second round follows: the vote is still in flight. On all ranks, after ``end``."""
        self.is_second = True

    def begin_second(self) -> None:
        """Give the same ballot in the second round. Collective, with ``end``."""
        self._start()

    @property
    def has_begun(self) -> bool:
        """Whether the present round has begun on this rank."""
        return self._work is not None
