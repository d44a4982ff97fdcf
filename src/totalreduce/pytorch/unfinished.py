"""Calls of ``DistributedOptimizer`` that a time-out has interrupted, and that must be repeated."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, ClassVar, final

import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.round import Phase
from totalreduce.tensors.work import Work

__all__ = ["INTERRUPTED_ROUND", "Call", "ClosureLoss", "ComparingPlans", "EndingPlan", "Unfinished"]

#: The error of a backward pass behind a round that was not waited for to its end.
INTERRUPTED_ROUND = (
    "the last step(), synchronize() or join() was interrupted and is unfinished. Repeat that call until it returns, "
    "then call backward()"
)


class Call(enum.Enum):
    """Calls of ``DistributedOptimizer`` that another call may have to precede."""

    BACKWARD = enum.auto()
    SYNCHRONIZE = enum.auto()
    STEP = enum.auto()  #: ``step()``
    STEP_WITH_CLOSURE = enum.auto()  #: ``step(closure)``
    ZERO_GRAD = enum.auto()
    JOIN = enum.auto()
    PLAN = enum.auto()  #: ``replan()`` and ``add_param_group()``
    RESIDUALS = enum.auto()  #: ``flush_residuals()``, ``residual_state_dict()`` and ``load_residual_state_dict()``


class Unfinished:
    """A call that a time-out has interrupted."""

    #: The calls that may be made meanwhile: the same one, which goes on, and those that do not disturb it.
    permits: ClassVar[frozenset[Call]]
    advice: ClassVar[str]  #: The error of other calls.
    advice_on_backward: ClassVar[str]  #: The error of a backward pass meanwhile.

    def check(self, call: Call) -> None:
        """Raise ``ConfigurationError`` if a call must not be made meanwhile."""
        if call not in self.permits:
            raise ConfigurationError(self.advice)

    def refuse_gradient(self, phase: Phase, close: Callable[[], None]) -> None:
        """Raise ``ConfigurationError``, because backward has added to a gradient meanwhile.

        Args:
            phase: That of the round.
            close: Closes the optimizer, if it cannot be used any more.
        """
        del phase, close
        raise ConfigurationError(self.advice_on_backward)


@final
class EndingPlan(Unfinished):
    """``replan()`` or ``add_param_group()`` while it ends the round, in which buckets have left without gradients."""

    permits = frozenset({Call.PLAN, Call.ZERO_GRAD})
    advice = (
        "the last replan() or add_param_group() ran out of time and is unfinished: repeat replan() or "
        "add_param_group() until it returns"
    )
    advice_on_backward = advice


@final
class ComparingPlans(Unfinished):
    """A comparison of plans, which no call can go on with: its operations are not kept."""

    permits = frozenset({Call.ZERO_GRAD})
    advice = "the ranks did not compare their plans in time: close this DistributedOptimizer"
    advice_on_backward = advice


@final
class ClosureLoss(Unfinished):
    """The loss that one call of a closure has returned on this rank.

    The sum of the losses travels as one float64 element. Only the ranks that had data in the round of the closure's
    gradients take part, because a rank that has joined does not know whether the other ranks use closures.
    """

    advice = "the last step(closure) ran out of time and is unfinished: repeat it until it returns, with a closure"
    advice_on_backward = INTERRUPTED_ROUND
    permits = frozenset({Call.STEP_WITH_CLOSURE, Call.BACKWARD, Call.SYNCHRONIZE, Call.RESIDUALS})

    def __init__(self, loss: Any) -> None:
        """``loss``: a number, a tensor of one element, or ``None``, which counts as 0 and is returned as ``None``.

        Raises:
            ConfigurationError: The loss has more than one element, or none.
        """
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise ConfigurationError(f"the closure must return a loss of one element, not of {loss.numel()}")
        self._loss = loss
        self._work: Work | None = None

    def refuse_gradient(self, phase: Phase, close: Callable[[], None]) -> None:
        """Raise an error; close the optimizer if the reduced gradients, which belong to the loss, have changed."""
        if phase is not Phase.CLOSED:
            close()
            raise ConfigurationError(
                "backward() has changed the reduced gradients of a step(closure) that a time-out had interrupted. "
                "The other ranks apply them unchanged, so this DistributedOptimizer is closed. Load a checkpoint"
            )
        super().refuse_gradient(phase, close)

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
