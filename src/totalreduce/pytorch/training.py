"""A model that a strategy trains on this rank, and the ways in which it can train it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from totalreduce.groups.group import Group
from totalreduce.pytorch.stepping import StrategySteps
from totalreduce.strategies.strategy import Strategy

if TYPE_CHECKING:
    from totalreduce.strategies.async_gossip import AsyncGossip

__all__ = ["Training"]


@final
@dataclass(frozen=True, slots=True)
class Training:
    """A model that a strategy trains on this rank. A strategy makes its steps of it (``Strategy.steps``)."""

    parameters: Sequence[torch.nn.Parameter]  #: The parameters that are trained.
    optimizer: torch.optim.Optimizer  #: The program's torch optimizer.
    group: Group  #: The ranks.
    name: str  #: Different from that of every other optimizer of the group.
    #: Whether ranks compare the parameters that they begin with. Otherwise they begin together later
    #: (``LocalSteps.load_shared``).
    compares: bool

    def by_exchanges(self, strategy: Strategy) -> StrategySteps:
        """Return steps with exchanges in which all ranks take part (``Strategy.session``). Collective."""
        from totalreduce.pytorch.local_steps import LocalSteps

        return LocalSteps(strategy, self)

    def by_gossip(self, strategy: AsyncGossip) -> StrategySteps:
        """Return steps between which pairs of ranks exchange parameters. Collective."""
        from totalreduce.pytorch.gossip_steps import GossipSteps

        return GossipSteps(strategy, self)
