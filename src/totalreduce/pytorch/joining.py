"""Calls of ``DistributedOptimizer`` that are unfinished after a time-out; the rounds of joined ranks; closures' losses.

``DistributedOptimizer.join`` makes a ``Joining``; ``DistributedOptimizer.step`` makes a ``ClosureLoss`` for each call
of its closure, and the ranks with data reduce these losses. Both can go on after a time-out where it struck.
``DistributedOptimizer.replan`` and ``add_param_group`` make an ``EndingPlan`` or a ``ComparingPlans`` at a time-out.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch

from totalreduce.foundation.errors import ConfigurationError, MissingTensorError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.round import Round
from totalreduce.tensors.work import Work

__all__ = ["ClosureLoss", "ComparingPlans", "EndingPlan", "Joining", "Unfinished"]


class Unfinished:
    """A call that a time-out has interrupted.

    Attributes:
        advice: The text of the error of other calls as long as this one is unfinished.
    """

    advice: ClassVar[str]


@final
class EndingPlan(Unfinished):
    """``replan()`` or ``add_param_group()`` while it ends the round, in which buckets have left without gradients."""

    advice = (
        "the last replan() or add_param_group() ran out of time and is unfinished: repeat replan() or "
        "add_param_group() until it returns"
    )


@final
class ComparingPlans(Unfinished):
    """A comparison of plans, which no call can complete: its operations are not kept."""

    advice = "the ranks did not compare their plans in time: close this DistributedOptimizer"


@final
class ClosureLoss(Unfinished):
    """The loss that one call of a closure has returned on this rank.

    The sum of the losses travels as one float64 element. Only the ranks that had data in the round of the closure's
    gradients take part, because a rank that has joined does not know whether the other ranks use closures.
    """

    advice = "the last step(closure) ran out of time and is unfinished: repeat it until it returns, with a closure"

    def __init__(self, loss: Any) -> None:
        """``loss``: a number, a tensor of one element, or ``None``, which counts as 0 and is returned as ``None``.

        Raises:
            ConfigurationError: The loss has more than one element, or none.
        """
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise ConfigurationError(f"the closure must return a loss of one element, not of {loss.numel()}")
        self._loss = loss
        self._work: Work | None = None

    def reduced(self, group: Group, name: str, ranks: tuple[int, ...], divisor: int) -> Any:
        """Return the sum of the losses of ``ranks``, divided, in the type of this rank's loss. Collective among them.

        Raises:
            DeadlineExceededError: The wait exceeded the group's ``timeout_s``. The call may be repeated.
        """
        loss = self._loss
        if self._work is None:
            own = loss.item() if isinstance(loss, torch.Tensor) else loss
            total = torch.tensor([float(own or 0.0)], dtype=torch.float64, device="cpu")
            control = group.control
            members = control if len(ranks) == group.world_size else control.subgroup(ranks, name=f"{name}.losses")
            self._work = members.allreduce(total, name=f"{name}.loss", op=ReduceOp.SUM, priority=0)
        mean = self._work.wait() / divisor
        if isinstance(loss, torch.Tensor):
            return mean.to(loss.device, loss.dtype).reshape(loss.shape)
        return None if loss is None else mean.item()


@final
class Joining(Unfinished):
    """The part of one rank in rounds for which it has no gradients, from its ``join`` until all ranks have joined.

    Attributes:
        skipped_steps: The number of these rounds whose gradients were not finite on some rank.
    """

    advice = "this rank has announced that it has no more data: repeat join() until it returns"

    def __init__(self, group: Group, name: str, rounds: Round) -> None:
        """``rounds``: none is in flight, and the first of its reducers has at least one bucket of dense gradients."""
        self._group, self._name, self._round = group, name, rounds
        self._num_rounds = self.skipped_steps = 0
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
