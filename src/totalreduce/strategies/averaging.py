"""Parameter averaging: every rank trains for some steps by itself, and then all take the average of their parameters.

The survey's "parameter averaging" with a period; McDonald, Hall and Mann, "Distributed Training Strategies for the
Structured Perceptron", NAACL 2010. Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR
2020, begin with synchronous steps (post-local SGD).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import numpy as np

from totalreduce.codecs.codec import Codec
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.strategies.strategy import Pending, Replica, Strategy, mean_of, plain_mean

__all__ = ["AveragingSession", "LocalSGD", "PostLocalSGD"]

OptimizerState = Literal["keep", "average"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGD(Strategy):
    """Settings of parameter averaging.

    Attributes:
        period: The number of steps between two averages. With 1 every step is synchronous.
        optimizer_state: ``"keep"``: each rank keeps the state of its optimizer. ``"average"``: it is averaged, too.
        weights: ``"equal"``, or ``"samples"``: a rank counts by the samples that it has used since the last average
            (``DistributedOptimizer.count_samples``).
        codec: Encodes the difference to the last average, with error feedback. ``None``: parameters are sent as they
            are.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "local_sgd"

    period: int = 16
    optimizer_state: OptimizerState = "keep"
    weights: Literal["equal", "samples"] = "equal"
    codec: Codec | None = None

    def __post_init__(self) -> None:
        checks.integer_fields(self, "period", minimum=1)
        checks.one_of("optimizer_state", self.optimizer_state, ("keep", "average"))
        checks.one_of("weights", self.weights, ("equal", "samples"))
        if self.codec is not None and self.weights != "equal":
            raise ConfigurationError("LocalSGD with a codec has equal weights: leave weights= or codec= out")

    def session(self, replica: Replica, rank: int, world_size: int) -> AveragingSession:
        """Return the session of one rank."""
        return AveragingSession(self, replica, rank, world_size, start=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PostLocalSGD(Strategy):
    """Synchronous steps at first, and then parameter averaging.

    Attributes:
        start: The number of synchronous steps.
        then: What follows.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "post_local_sgd"

    start: int
    then: LocalSGD = LocalSGD()

    def __post_init__(self) -> None:
        checks.integer_fields(self, "start", minimum=0)

    def session(self, replica: Replica, rank: int, world_size: int) -> AveragingSession:
        """Return the session of one rank."""
        return AveragingSession(self.then, replica, rank, world_size, start=self.start)


@final
class AveragingSession:
    """The session of parameter averaging."""

    def __init__(self, settings: LocalSGD, replica: Replica, rank: int, world_size: int, *, start: int) -> None:
        """``start``: the number of synchronous steps that come first."""
        self._settings, self._replica, self._start = settings, replica, start
        self._rank, self._world_size = rank, world_size
        self._steps = 0
        self._weight = 0.0
        self._tensors = range(len(replica.sizes))
        coded = settings.codec is not None
        #: With a codec: the last average, and what this rank has not sent of its difference to it.
        self._last = replica.read(self._tensors) if coded else np.empty(0, replica.dtype)
        self._rest = np.zeros_like(self._last)

    def exchanges_gradients(self) -> bool:
        """Whether the next step is synchronous."""
        return self._steps < self._start or self._settings.period == 1

    def stepped(self, weight: float) -> list[Pending]:
        """Begin an average if a period has ended."""
        was_synchronous = self.exchanges_gradients()
        self._steps += 1
        self._weight += weight
        if was_synchronous:
            if self._settings.codec is not None:
                self._last = self._replica.read(self._tensors)
            self._weight = 0.0
            return []
        if (self._steps - self._start) % self._settings.period:
            return []
        weight = self._weight if self._settings.weights == "samples" else 1.0
        self._weight = 0.0
        pending = [self._average_of_parameters(weight)]
        if self._settings.optimizer_state == "average":
            exchange = plain_mean(self._replica.read_state(), weight, self._world_size)
            pending.append(Pending(1, self._steps, exchange, self._replica.write_state))
        return pending

    def _average_of_parameters(self, weight: float) -> Pending:
        values, codec = self._replica.read(self._tensors), self._settings.codec
        if codec is None:
            exchange = plain_mean(values, weight, self._world_size)
            return Pending(0, self._steps, exchange, lambda mean: self._replica.write(self._tensors, mean))
        values += self._rest - self._last
        self._rest = values
        return Pending(0, self._steps, mean_of(values, codec, self._rank, self._world_size, self._steps), self._move)

    def _move(self, mean: Any) -> None:
        self._last += mean
        self._replica.write(self._tensors, self._last)

    def state(self) -> Mapping[str, Any]:
        """Return the number of steps, the last average and what was not sent."""
        shared = {"steps": self._steps, "last": self._last}
        return {"shared": shared, "own": {"rest": self._rest, "weight": self._weight}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._steps, self._last = state["shared"]["steps"], state["shared"]["last"].copy()
        self._rest, self._weight = state["own"]["rest"].copy(), state["own"]["weight"]
