"""The interface of strategies, and the exchanges that several of them use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from totalreduce.codecs.codec import Codec
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allreduce, Exchange
from totalreduce.sparse.coded import coded_sum

__all__ = ["Pending", "Replica", "Strategy", "StrategySession", "mean_of", "plain_mean"]


class Replica(Protocol):
    """This rank's model: numbered tensors of floating-point numbers."""

    @property
    def sizes(self) -> Sequence[int]:
        """The number of elements of each tensor; equal on all ranks."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the arrays: float64 if all tensors have it, else float32."""

    def read(self, tensors: Sequence[int]) -> Array:
        """Return a copy of the elements of these tensors, one tensor after the other."""

    def write(self, tensors: Sequence[int], values: Array) -> None:
        """Set the elements of these tensors."""

    def read_state(self) -> Array:
        """Return a copy of the floating-point tensors in the state of the torch optimizer, as one array."""

    def write_state(self, values: Array) -> None:
        """Set these tensors."""


@dataclass(frozen=True, slots=True)
class Pending:
    """An exchange that begins after a step.

    Attributes:
        channel: Its number. Exchanges of one channel follow one another.
        due: The number of steps after which its result is applied; equal on all ranks. The step that has just ended
            means at once.
        exchange: Yields actions, beside later steps, and does not touch the replica.
        apply: Changes the replica, given the result of the exchange.
    """

    channel: int
    due: int
    exchange: Exchange
    apply: Callable[[Any], None]


class StrategySession(Protocol):
    """A strategy on one rank."""

    def exchanges_gradients(self) -> bool:
        """Whether the next step uses the gradients of all ranks, as synchronous training does."""

    def stepped(self, weight: float) -> list[Pending]:
        """Note that a step has ended; return the exchanges that begin now.

        Args:
            weight: What this step counts in averages, for instance its number of samples.
        """

    def state(self) -> Mapping[str, Any]:
        """Return the state, as numbers and arrays.

        Under ``"shared"`` is what is equal on all ranks, under ``"own"`` what belongs to this rank. No exchange is
        pending.
        """

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""


class Strategy(ABC):
    """The settings of a strategy, as a frozen dataclass; equal on all ranks.

    Attributes:
        name: The strategy's name.
    """

    __slots__ = ()

    name: ClassVar[str]

    @abstractmethod
    def session(self, replica: Replica, rank: int, world_size: int) -> StrategySession:
        """Return the session of one rank. All replicas are equal."""


def plain_mean(values: Array, weight: float, world_size: int) -> Generator[Action, Any, Array]:
    """Return the mean of all ranks' values, weighted; the same bits on every rank. The values are overwritten.

    If the weights of all ranks are zero, all ranks count alike.
    """
    weights = yield Allreduce(np.array([weight], np.float32))
    total = float(weights[0])
    values *= values.dtype.type(weight / total if total else 1 / world_size)
    mean: Array = yield Allreduce(values)
    return mean


def mean_of(
    values: Array, codec: Codec | None, rank: int, world_size: int, number: int
) -> Generator[Action, Any, Array]:
    """Return the mean of all ranks' values; the same bits on every rank.

    Args:
        values: Float32 or float64; becomes what was not sent: zeros without a codec.
        codec: Encodes the values, as float32. ``None``: they are sent as they are.
        rank: This rank.
        world_size: The number of ranks.
        number: The number of the exchange, of which the codec's pseudo-random numbers depend.
    """
    if codec is None:
        total: Array = yield Allreduce(values.copy())
        values[:] = 0.0
    else:
        narrow = np.ascontiguousarray(values, np.float32)
        total = yield from coded_sum(narrow, codec, rank, world_size, number)
        values[:] = narrow
    return (total / world_size).astype(values.dtype, copy=False)
