"""The rounds of a rank that has no more data: what ``DistributedOptimizer.join`` does until all ranks have joined.

The losses of closures are here, too, because a rank that has joined takes part in their allreduce.
"""

from __future__ import annotations

from typing import Any, final

import torch

from totalreduce.foundation.errors import MissingTensorError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.reducer import Reducer
from totalreduce.pytorch.round import Round
from totalreduce.tensors.work import Work

__all__ = ["Joining", "reduced_loss"]


def reduced_loss(group: Group, name: str, loss: Any, divisor: int) -> Any:
    """Return the sum of the ranks' losses, divided, in the type of this rank's loss. Collective.

    Args:
        group: The ranks.
        name: The name of the optimizer.
        loss: A number, a tensor of one element, or ``None``, which counts as 0 and is returned as ``None``.
        divisor: A number that is equal on all ranks.
    """
    own = loss.item() if isinstance(loss, torch.Tensor) else loss
    total = _sum_of_losses(group, name, float(own or 0.0)).wait() / divisor
    if isinstance(loss, torch.Tensor):
        return total.to(loss.device, loss.dtype).reshape(loss.shape)
    return None if loss is None else total.item()


def _sum_of_losses(group: Group, name: str, loss: float) -> Work:
    """Begin to add up the losses of all ranks in float64. Ranks that have joined pass 0."""
    total = torch.tensor([loss], dtype=torch.float64)
    return group.control.allreduce(total, name=f"{name}.loss", op=ReduceOp.SUM, priority=0)


@final
class Joining:
    """The part of one rank in rounds for which it has no gradients, from its ``join`` until all ranks have joined.

    Attributes:
        skipped_steps: The number of these rounds that ended without a result.
    """

    def __init__(self, group: Group, name: str, rounds: Round, dense: Reducer) -> None:
        """``rounds``: none is in flight. ``dense``: the reducer of dense gradients, which has at least one bucket."""
        self._group, self._name, self._round, self._dense = group, name, rounds, dense
        self._num_rounds = self.skipped_steps = 0
        self._loss: Work | None = None
        self._last: Work | None = None

    def finish(self) -> int:
        """Take part until all ranks have joined; return the rank that joined last, equal on all ranks.

        Raises:
            DeadlineExceededError: A wait exceeded the group's ``timeout_s``. The next call goes on from there.
            PeerLost: A rank is lost.
        """
        while self._last is None:
            if self._loss is None:
                self._finish_round()
            if self._loss is not None:
                self._loss.wait()
                self._loss = None
            if not self._round.active:
                # Each rank contributes ``rank - rounds * world_size``. The rank that joined last has the fewest rounds,
                # so its value is the maximum, and the maximum modulo the world size is its rank. If several ranks
                # joined last, the highest one of them is returned.
                last = torch.tensor([self._group.rank - self._num_rounds * self._group.world_size])
                self._last = self._group.control.allreduce(last, name=f"{self._name}.joined", op=ReduceOp.MAX)
        return int(self._last.wait().item()) % self._group.world_size

    def _finish_round(self) -> None:
        """Open and finish a round, or finish the one that an earlier call has opened."""
        if not self._round.in_flight:
            self._num_rounds += 1
            self._round.open(joined=True)
            self._round.close()
        try:
            self._round.finish()
        except MissingTensorError:
            return  # The ranks with data raise it, too: they end their step, and reduce no loss.
        self.skipped_steps += self._round.skipped
        if self._dense.loss_follows:
            self._loss = _sum_of_losses(self._group, self._name, 0.0)
