"""The rounds of a rank that has no more data (``DistributedOptimizer.join``)."""

from __future__ import annotations

from typing import final

import torch

from totalreduce.foundation.errors import MissingTensorError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.round import Round
from totalreduce.pytorch.unfinished import INTERRUPTED_ROUND, Call, Unfinished
from totalreduce.tensors.work import Work

__all__ = ["Joining"]


@final
class Joining(Unfinished):
    """The part of one rank in rounds for which it has no gradients, from its ``join`` until all ranks have joined."""

    advice = "this rank has announced that it has no more data: repeat join() until it returns"
    advice_on_backward = INTERRUPTED_ROUND
    permits = frozenset({Call.JOIN, Call.ZERO_GRAD})

    def __init__(self, group: Group, name: str, rounds: Round) -> None:
        """``rounds``: none is in flight, and the first of its reducers has at least one bucket of dense gradients."""
        self._group, self._name, self._round = group, name, rounds
        self._num_rounds = 0
        self.skipped_steps = 0  #: The number of these rounds whose gradients were not finite on some rank.
        self._last: Work | None = None

    def finish(self) -> int:
        """Take part until all ranks have joined; return the rank that joined last, equal on all ranks.

        Raises:
            DeadlineExceededError: A wait exceeded the group's ``timeout_s``. The next call goes on from there.
            PeerLost: A rank is lost.
        """
        while self._last is None:
            if self._finish_round() and not self._round.active:
                # Each rank contributes ``rank - rounds * world_size``. The rank that joined last has the fewest rounds,
                # so its value is the maximum, and the maximum modulo the world size is its rank. If several ranks
                # joined last, the highest one of them is returned.
                mine = self._group.rank - self._num_rounds * self._group.world_size
                last = torch.tensor([mine], dtype=torch.int64, device="cpu")
                self._last = self._group.control.allreduce(last, name=f"{self._name}.joined", op=ReduceOp.MAX)
        return int(self._last.wait().item()) % self._group.world_size

    def _finish_round(self) -> bool:
        """Open and finish a round, or finish the one that an earlier call opened; return whether it has a result."""
        if not self._round.in_flight:
            self._num_rounds += 1
            self._round.open(joined=True)
            self._round.close()
        try:
            self._round.finish()
        except MissingTensorError:
            return False  # the ranks with data raise it, too, and go on with another round
        self._round.commit()  # this rank does not learn whether the others leave the step out
        self.skipped_steps += self._round.skipped
        return True
