"""Parameter averaging: every rank trains for some steps by itself, and then all take the average of their parameters.

The survey's "parameter averaging" with a period; McDonald, Hall and Mann, "Distributed Training Strategies for the
Structured Perceptron", NAACL 2010. Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR
2020, begin with synchronous steps (post-local SGD).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, ClassVar, Literal, final

import numpy as np

from totalreduce.codecs.codec import Codec, check_codec, load_kernels
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allgather, Allreduce, Exchange
from totalreduce.strategies.strategy import Pending, Replica, Strategy, mean_of

__all__ = ["AveragingSession", "LocalSGD", "PostLocalSGD"]

OptimizerState = Literal["keep", "average"]
#: The channels of the averages of parameters, and of the optimizer's state.
_PARAMETERS, _STATE = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGD(Strategy):
    """Settings of parameter averaging.

    Attributes:
        period: The number of steps between two averages. With 1 every step is synchronous.
        optimizer_state: ``"keep"``: each rank keeps the state of its optimizer. ``"average"``: it is averaged, too;
            all ranks must then have a state of the same parameters, otherwise all raise ``ConfigurationError``.
        weights: ``"equal"``, or ``"samples"``: a rank counts by the samples that it has used since the last average
            (``optimizer.strategy_steps.count_samples``), and all count alike if none has counted any; not with a period
            of 1, in which gradients count alike.
        codec: Encodes the difference to the last average, with error feedback; not with a period of 1, in which no
            parameters are sent. ``None``: parameters are sent as they are. So they are in an exchange in which a rank
            has values that no codec encodes (NaN, infinite, beyond 1e30), as with every strategy that takes a codec.

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
        check_codec(self.codec)
        if self.codec is not None and self.weights != "equal":
            raise ConfigurationError("LocalSGD with a codec has equal weights: leave weights= or codec= out")
        if self.period == 1 and (self.codec is not None or self.weights != "equal"):
            raise ConfigurationError(
                "LocalSGD(period=1) is the synchronous optimizer, without weights= and codec=: leave them out, or use "
                "a period of 2 or more"
            )

    def session(self, replica: Replica, rank: int, world_size: int) -> AveragingSession:
        """Return the session of one rank."""
        return AveragingSession(self, replica, rank, world_size, start=0)

    def can_join(self) -> bool:
        """Whether averages of parameters are all that is exchanged."""
        return self.period > 1

    def recovery_obstacle(self) -> str:
        """Return an obstacle if gradients are exchanged."""
        return "" if self.period > 1 else "LocalSGD(period=1) is the synchronous optimizer: use sync=None"


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
        if not isinstance(self.then, LocalSGD):
            raise ConfigurationError(f"then is a tr.LocalSGD(...), not {self.then!r}")

    def session(self, replica: Replica, rank: int, world_size: int) -> AveragingSession:
        """Return the session of one rank."""
        return AveragingSession(self.then, replica, rank, world_size, start=self.start)

    def recovery_obstacle(self) -> str:
        """Return an obstacle if gradients are exchanged in all steps."""
        return self.then.recovery_obstacle()


@final
class AveragingSession:
    """The session of parameter averaging."""

    def __init__(self, settings: LocalSGD, replica: Replica, rank: int, world_size: int, *, start: int) -> None:
        """``start``: the number of synchronous steps that come first."""
        load_kernels(settings.codec)
        self._settings, self._replica, self._start = settings, replica, start
        self._rank, self._world_size = rank, world_size
        self._steps = 0
        #: What this rank has done since the last average: samples, or steps.
        self._weight = 0.0
        self._has_joined = False
        self.num_active = world_size  #: The number of ranks that had data at the last average.
        self._tensors = range(len(replica.sizes))
        coded = settings.codec is not None
        #: With a codec: the last average, and what this rank has not sent of its difference to it.
        self._last = replica.read(self._tensors) if coded else np.empty(0, replica.dtype)
        self._rest = np.zeros_like(self._last)

    def exchanges_gradients(self) -> bool:
        """Whether the next step is synchronous."""
        return self._steps < self._start or self._settings.period == 1

    def ends_exchange(self) -> bool:
        """Whether a period ends with the next step, or synchronous steps have ended with the last one."""
        is_first = self._steps == self._start > 0
        return not self.exchanges_gradients() and (is_first or self._ends_period(self._steps + 1))

    def _ends_period(self, steps: int) -> bool:
        """Whether so many steps are a whole number of periods behind the synchronous ones."""
        return (steps - self._start) % self._settings.period == 0

    def stepped(self, weight: float) -> list[Pending]:
        """Begin an average if a period has ended."""
        was_synchronous = self.exchanges_gradients()
        self._steps += 1
        self._weight += weight if self._settings.weights == "samples" else 1.0
        if was_synchronous:
            if self._settings.codec is not None and not self.exchanges_gradients():
                self._last = self._replica.read(self._tensors)
            self._weight = 0.0
            return []
        return self._begin_averages() if self._ends_period(self._steps) else []

    def join(self) -> list[Pending]:
        """Begin the average that ranks with data begin next: this rank has no more data.

        What it has done since the last average counts in this one; in later ones it counts nothing.
        """
        self._has_joined = True
        period = self._settings.period
        self._steps = self._start + period * ((self._steps - self._start) // period + 1)
        return self._begin_averages()

    def end_join(self) -> None:
        """Note that all ranks have joined: training may go on."""
        self._has_joined, self.num_active = False, self._world_size

    def ending(self) -> list[Pending]:
        """Begin an average without a codec, unless the last step has ended a period or was synchronous."""
        if self._steps <= self._start or self._ends_period(self._steps):
            return []
        weight, self._weight = self._weight, 0.0
        values = self._difference()
        if self._settings.codec is not None:
            values += self._rest
            self._rest = np.zeros_like(self._rest)
        return [Pending(_PARAMETERS, self._steps, self._average_of(values, weight, None))]

    def _begin_averages(self) -> list[Pending]:
        weight, self._weight = self._weight, 0.0
        exchange = self._average_of(self._difference(), weight, self._settings.codec)
        pending = [Pending(_PARAMETERS, self._steps, exchange)]
        if self._settings.optimizer_state == "average":
            pending.append(Pending(_STATE, self._steps, self._average_of_state(weight)))
        return pending

    def _difference(self) -> Array:
        """Return a copy of the parameters; with a codec, their difference to the last average."""
        values = self._replica.read(self._tensors)
        if self._settings.codec is not None:
            values -= self._last
        return values

    def _average_of_state(self, weight: float) -> Exchange:
        values, layout = self._replica.read_state(), self._replica.describe_state()
        digest = np.frombuffer(sha256(layout.encode()).digest(), np.uint8)
        digests = yield Allgather(digest, [digest.size] * self._world_size)
        if any(not np.array_equal(other, digest) for other in digests):
            raise ConfigurationError(
                "optimizer_state='average' needs states of the same tensors on all ranks, and they differ. Perhaps a "
                "parameter has had no gradient yet on some ranks: give it one (zeros), or use optimizer_state='keep'"
            )
        return (yield from self._average_of(values, weight, None))

    def _average_of(
        self, values: Array, weight: float, codec: Codec | None
    ) -> Generator[Action, Any, tuple[Array | None, int]]:
        """Return the average, weighted, and the number of ranks with data.

        If no rank has counted anything, the ranks with data count alike; without a rank with data there is no average.
        """
        counts = yield Allreduce(np.array([weight, not self._has_joined], np.float64))
        total, num_active = float(counts[0]), int(counts[1])
        if not total:
            if not num_active:
                return None, num_active
            total, weight = float(num_active), float(not self._has_joined)
        factor = weight * self._world_size / total
        if factor != 1.0:  # ranks differ in what they have done
            values *= values.dtype.type(factor)
        if codec is not None:
            values += self._rest
            self._rest = values
        return (yield from mean_of(values, codec, self._rank, self._world_size, self._steps)), num_active

    def apply(self, channel: int, result: Any) -> None:
        """Take an average over."""
        average, self.num_active = result
        if average is None:
            return
        if channel == _STATE:
            self._replica.write_state(average)
        elif self._settings.codec is None:
            self._replica.write(self._tensors, average)
        else:
            self._last += average
            self._replica.write(self._tensors, self._last)

    def state(self) -> Mapping[str, Any]:
        """Return the number of steps, the last average and what was not sent."""
        shared = {"steps": self._steps, "last": self._last}
        return {"shared": shared, "own": {"rest": self._rest, "weight": self._weight}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._steps, self._last = state["shared"]["steps"], state["shared"]["last"]
        self._rest, self._weight = state["own"]["rest"], state["own"]["weight"]
