"""Strategies that bring their own steps, from floors above this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.group import Group
from totalreduce.pytorch.deferred import DeferredBuckets
from totalreduce.strategies.strategy import Replica, Strategy, StrategySession

if TYPE_CHECKING:
    from totalreduce.pytorch.served_steps import SynchronousSteps

__all__ = ["DeferringSteps", "OwnSteps", "SteppingStrategy"]


class OwnSteps(ABC):
    """The steps of a strategy on one rank.

    Attributes:
        strategy: Its settings.
        is_interrupted: Whether a call of ``step`` ran out of time, and must be repeated.
    """

    exchanges_gradients: ClassVar[Literal[False]] = False
    is_synchronous: ClassVar[Literal[False]] = False

    strategy: Strategy
    is_interrupted: bool

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with this rank's gradients; return the closure's loss."""

    @abstractmethod
    def stepped(self) -> None:
        """Count a step that was left out on this rank."""

    def use_buckets(self, buckets: Sequence[Sequence[int]]) -> None:  # noqa: B027  (most strategies do not)
        """Note the buckets of gradients in which the strategy may send them: parameters by number, last ones first."""

    def ready(self, number: int) -> None:  # noqa: B027
        """Note that backward has completed the gradient of a parameter of this step, by number. One call at a time."""

    @property
    @abstractmethod
    def waited_s(self) -> float:
        """The seconds for which steps were blocked by other ranks, as far as the engine does not know of it."""

    @abstractmethod
    def figures(self) -> dict[str, int | float | str]:
        """Return the strategy's name, and what was observed. Any thread, at any time."""

    @abstractmethod
    def trains(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether the strategy trains these parameters."""

    @abstractmethod
    def close(self) -> None:
        """End. Harmless when called twice."""


class DeferringSteps(OwnSteps):
    """Steps that can end before what they have asked for has come: it is taken over bucket by bucket.

    Attributes:
        arriving: What the last step has asked for.
    """

    arriving: DeferredBuckets

    @abstractmethod
    def begin_step(self, priorities: Mapping[int, int], defer: Callable[[], None], flush: Callable[[], None]) -> None:
        """Take a step up to the point where this rank would wait. Errors as of ``step``; repetitions go on.

        Args:
            priorities: By bucket: its place in the order in which forward needs them.
            defer: Notes that the buckets are on the way. Not called if a step is repeated that was to wait.
            flush: Has all buckets taken. Called before anything that needs the step to be over.
        """


class SteppingStrategy(Strategy):
    """The settings of a strategy that makes its own steps."""

    __slots__ = ()

    def session(self, replica: Replica, rank: int, world_size: int) -> StrategySession:
        """Refuse: such a strategy has no session that a driver carries out."""
        del replica, rank, world_size
        raise ConfigurationError(f"{self.name} makes its own steps")

    @abstractmethod
    def steps(
        self, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer, group: Group, name: str
    ) -> OwnSteps | SynchronousSteps:
        """Return the steps. Collective; arguments as for ``LocalSteps``."""
