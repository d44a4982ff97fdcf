"""What ``DistributedOptimizer`` knows of a strategy: its steps on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.group import Group
from totalreduce.pytorch.deferred import DeferredBuckets, DeferredUpdates
from totalreduce.pytorch.round import RoundGuard
from totalreduce.strategies.strategy import Strategy

__all__ = ["GradientSteps", "StrategySteps"]


class StrategySteps(ABC):
    """The steps of a strategy on one rank.

    If the next step exchanges gradients, ``DistributedOptimizer`` takes it as without a strategy, and then calls
    ``stepped``. Otherwise it calls ``take``.
    """

    is_synchronous: ClassVar[bool] = False  #: Whether all steps exchange gradients.
    #: Whether these steps can go on in a group with other members (``undo``, ``enter``).
    outlives_group: ClassVar[bool] = False
    sees_gradients: ClassVar[bool] = False  #: Whether ``ready`` is to be called.

    strategy: Strategy | None  #: The settings; ``None``: there is no strategy.
    is_interrupted: bool = False  #: Whether a call of ``step`` ran out of time, and must be repeated.
    #: The buckets whose updates may arrive after the end of the step that has asked for them; ``None``: a step never
    #: ends before its updates have come.
    arriving: DeferredBuckets | None = None

    @property
    def exchanges_gradients(self) -> bool:
        """Whether the next step uses the gradients of all ranks."""
        return False

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with this rank's gradients; return the closure's loss."""

    def take(
        self,
        closure: Callable[[], Any] | None,
        guard: RoundGuard | None,
        deferred: DeferredUpdates,
        flush: Callable[[], None],
    ) -> Any:
        """Take a step as ``step`` does. It may end before its updates have arrived, or need the consent of a guard.

        Args:
            closure: As of ``step``. With a guard there is none.
            guard: Agrees to each step of steps that outlive their group. ``undo`` undoes a step to which it has not.
            deferred: Makes the updates of ``arriving`` buckets in the next forward pass, where that is possible.
            flush: Makes all deferred updates at once. It is called before anything that needs them.
        """
        del guard, deferred, flush
        return self.step(closure)

    @abstractmethod
    def stepped(self) -> None:
        """Count a step that ``step`` has not taken: one with the gradients of all ranks, or one that was left out."""

    def use_buckets(self, buckets: Sequence[Sequence[int]]) -> None:  # noqa: B027  (most strategies do not)
        """Note in which buckets the strategy may send gradients: numbers of parameters, the last layer first."""

    def ready(self, number: int) -> None:  # noqa: B027
        """Note that backward has completed the gradient of parameter ``number`` in this step. One call at a time."""

    def note_gradient(self, parameter: torch.Tensor, *, keeps_sparse: bool) -> None:
        """Note a gradient of this rank, which may become dense. Raises ``ConfigurationError``."""
        if self.is_interrupted:
            raise ConfigurationError(
                "the last step() was interrupted and is unfinished. Repeat that call until it returns, then call "
                "backward()"
            )
        if not keeps_sparse and parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()

    def join(self, *, is_guarded: bool) -> int:
        """Take part in the exchanges of the others until all ranks have joined; return the rank with the most steps.

        Collective. ``is_guarded``: whether ranks train in ``tr.recoverable``. Raises ``ConfigurationError``.
        """
        where = " in tr.recoverable" if is_guarded else ""
        raise ConfigurationError(
            f"join() does not support sync={_name(self.strategy)!r}{where}: give all ranks the same number of steps"
        )

    @property
    def waited_s(self) -> float:
        """The seconds for which steps were blocked by other ranks, as far as the engine does not know of it."""
        return 0.0

    @abstractmethod
    def figures(self) -> dict[str, int | float | str]:
        """Return the strategy's name, and what was observed. Any thread, at any time."""

    @abstractmethod
    def trains(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether the strategy trains these parameters."""

    def check_trains(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raise ``ConfigurationError`` if these are not the parameters that the strategy has begun with."""
        if not self.trains(parameters):
            raise ConfigurationError(
                f"sync={_name(self.strategy)!r} goes on with the trainable parameters that it has begun with: replan() "
                "and add_param_group() cannot change them. Close this optimizer, call "
                "tr.broadcast_parameters(model, group), and build a new DistributedOptimizer"
            )

    def undo(self) -> None:  # noqa: B027
        """Undo a guarded step to which the guard has not agreed, if there is one."""

    def enter(self, group: Group, name: str) -> None:
        """Go on after ``close``, in the group with its new members. Collective. Only if ``outlives_group``.

        ``name``: different from that of every other optimizer of the group.
        """
        raise NotImplementedError("these steps end with their group (outlives_group)")

    def close(self) -> None:  # noqa: B027
        """End. Harmless when called twice."""


def _name(strategy: Strategy | None) -> str | None:
    return None if strategy is None else strategy.name


class GradientSteps(StrategySteps):
    """Steps that all exchange gradients, as those without a strategy do."""

    is_synchronous = True
    exchanges_gradients = True
    strategy: Strategy | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raise an error: ``DistributedOptimizer`` takes these steps."""
        raise NotImplementedError("DistributedOptimizer takes the steps that exchange gradients")

    def stepped(self) -> None:
        """Do nothing."""

    def figures(self) -> dict[str, int | float | str]:
        """Return nothing."""
        return {}

    def trains(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Return true: the parameters may change."""
        del parameters
        return True
