"""EASGD: each rank explores by itself, and an elastic force pulls it to a centre that all ranks have.

Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015, in its synchronous form. The
centre is equal on all ranks, so there is no server. With momentum in the torch optimizer it is the paper's EAMSGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from totalreduce.codecs.codec import Codec, check_codec, load_kernels
from totalreduce.foundation import checks
from totalreduce.strategies.strategy import Pending, Replica, Strategy, StrategySession, mean_of

__all__ = ["EASGD", "EASGDSession"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EASGD(Strategy):
    """Settings of EASGD.

    Attributes:
        period: The number of steps between two pulls.
        beta: The force of all ranks together on the centre, the paper's beta: a rank moves by ``beta / world_size`` of
            its distance. Above 0, at most 1.
        codec: Encodes distances, with error feedback. ``None``: they are sent as they are.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "easgd"

    period: int = 10
    beta: float = 0.9
    codec: Codec | None = None

    def __post_init__(self) -> None:
        checks.integer_fields(self, "period", minimum=1)
        checks.real_field(self, "beta", above=0, maximum=1)
        check_codec(self.codec)

    def session(self, replica: Replica, rank: int, world_size: int) -> EASGDSession:
        """Return the session of one rank."""
        return EASGDSession(self, replica, rank, world_size)


@final
class EASGDSession(StrategySession):
    """The session of EASGD."""

    def __init__(self, settings: EASGD, replica: Replica, rank: int, world_size: int) -> None:
        """The centre begins where all ranks are."""
        load_kernels(settings.codec)
        self._settings, self._replica = settings, replica
        self._rank, self._world_size = rank, world_size
        self._steps = 0
        self._tensors = range(len(replica.sizes))
        self._centre = replica.read(self._tensors)
        self._rest = np.zeros_like(self._centre)
        self._pulled = np.empty(0, self._centre.dtype)  #: While ranks and centre move: where this rank moves to.

    def ends_exchange(self) -> bool:
        """Whether a period ends with the next step."""
        return (self._steps + 1) % self._settings.period == 0

    def stepped(self, weight: float) -> list[Pending]:
        """Begin a pull if a period has ended."""
        del weight
        ends_period = self.ends_exchange()
        self._steps += 1
        if not ends_period:
            return []
        values = self._replica.read(self._tensors)
        distance = values - self._centre
        self._rest += distance
        self._pulled = values - values.dtype.type(self._settings.beta / self._world_size) * distance
        exchange = mean_of(self._rest, self._settings.codec, self._rank, self._world_size, self._steps)
        return [Pending(0, self._steps, exchange)]

    def apply(self, channel: int, result: Any) -> None:
        """Move this rank to the centre, and the centre to all ranks."""
        del channel
        self._replica.write(self._tensors, self._pulled)
        self._pulled = np.empty(0, self._centre.dtype)
        self._centre += self._centre.dtype.type(self._settings.beta) * result

    def ending(self) -> list[Pending]:
        """Set the parameters to the centre, which is the result of training, and equal on all ranks."""
        self._replica.write(self._tensors, self._centre)
        return []

    def state(self) -> Mapping[str, Any]:
        """Return the number of steps, the centre, and what was not sent."""
        return {"shared": {"steps": self._steps, "centre": self._centre}, "own": {"rest": self._rest}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._steps, self._centre = state["shared"]["steps"], state["shared"]["centre"]
        self._rest = state["own"]["rest"]
