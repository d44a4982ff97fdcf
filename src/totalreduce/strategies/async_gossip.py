"""Asynchronous gossip: pairs of ranks average their parameters, and no rank waits for another one.

Lian, Zhang, Zhang and Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018 (AD-PSGD). As
in the paper, ranks are *active* or *passive*. An active rank sends its parameters to a passive one, which answers at
once, also while it computes. Each of the two moves to their average: it adds half of the difference when its present
step ends. What one adds the other subtracts, so the sum of all ranks' parameters changes by local steps alone.

An active rank has one exchange under way at most, and goes on training meanwhile. Active ranks are never asked, so no
two ranks ask each other, and there is no circle of ranks that wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, final

import numpy as np

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ProtocolError
from totalreduce.kernels.arrays import Array
from totalreduce.strategies.strategy import ROUNDS, Strategy, TrainingOfRank

__all__ = ["AsyncGossip", "GossipNode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncGossip(Strategy):
    """Settings of asynchronous gossip.

    Attributes:
        period: The smallest number of steps between two exchanges that a rank begins.
        seed: Of the random choice of partners.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "async_gossip"

    period: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        checks.integer_fields(self, "period", minimum=1)
        checks.integer_fields(self, "seed", minimum=0)

    def steps(self, training: TrainingOfRank) -> Any:
        """Return the steps of one rank. Collective."""
        return training.by_gossip(self)

    def recovery_obstacle(self) -> str:
        """Return that ranks are at different steps."""
        return f"an exchange may be under way between two steps. Use tr.Gossip(...). {ROUNDS}"


@final
class GossipNode:
    """One rank. A plain object; the caller carries messages, and has one thread at a time call it."""

    def __init__(self, settings: AsyncGossip, rank: int, world_size: int, values: Array) -> None:
        """Begin."""
        self._period, self._random = settings.period, Random(settings.seed * 1_000_003 + rank)
        self.is_active = rank % 2 == 0  #: Whether this rank asks others; otherwise it is asked.
        self._partners: Sequence[int] = range(1, world_size, 2) if self.is_active else ()
        #: What has come and is not in the parameters yet.
        self._pending = np.zeros_like(values)
        #: Of a passive rank: its parameters after its last step, and what it has agreed to since.
        self._published = np.zeros_like(values)
        self._has_published = False
        self._since = 0
        self.asks: int | None = None  #: The rank whose answer has not come; ``None``: there is none.
        self.exchanges = 0  #: The number of averages in which this rank had a part.

    def stepped(self, values: Array) -> int | None:
        """Note that a local step has ended.

        Args:
            values: The parameters; what others have added is added in place.

        Returns:
            The rank to which these parameters are to be sent; ``None``: none.
        """
        self.settle(values)
        self._since += 1
        if not self._partners or self.asks is not None or self._since < self._period:
            return None
        self._since = 0
        self.asks = self._random.choice(self._partners)
        return self.asks

    def settle(self, values: Array) -> None:
        """Add what others have added to the parameters, in place."""
        values += self._pending
        self._pending[:] = 0
        self._published[:] = values
        self._has_published = True

    def asked(self, values: Array) -> Array:
        """Average with an active rank that has these parameters; return what that one adds. Raises ``ProtocolError``.

        Before the first step of this rank, its parameters are not known here: nothing changes, and the answer is zeros.
        """
        if self.is_active or values.shape != self._published.shape:
            raise ProtocolError(
                f"a rank sends {values.size} parameters for an average to one that is "
                f"{'active' if self.is_active else 'passive'} and has {self._published.size}"
            )
        if not self._has_published:
            return np.zeros_like(self._published)
        change: Array = (values - self._published) * values.dtype.type(0.5)
        self._published += change
        self._pending += change
        self.exchanges += 1
        np.negative(change, out=change)
        return change

    def answered(self, change: Array) -> None:
        """Take the answer to the last question in."""
        self.asks = None
        self._pending += change
        self.exchanges += 1
