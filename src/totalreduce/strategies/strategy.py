"""The interface of strategies, and the exchanges that several of them use."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, final, runtime_checkable

import numpy as np

from totalreduce.codecs.codec import Codec
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.kernels import quantisation
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allreduce, Exchange
from totalreduce.sparse.coded import coded_sum

if TYPE_CHECKING:
    from totalreduce.groups.group import Group

__all__ = [
    "ROUNDS",
    "ElementsCopy",
    "HostCopy",
    "HostElements",
    "Later",
    "Pending",
    "Replica",
    "RestartableSession",
    "Strategy",
    "StrategySession",
    "TrainingOfRank",
    "mean_of",
]

T = TypeVar("T")

#: What programs do with a strategy whose state ``tr.recoverable`` cannot keep.
ROUNDS = "Or train in rounds of tr.attempts (docs/recovery-strategies.md, Rounds)"


class ElementsCopy(Protocol):
    """A copy of a range of a replica's elements (``Replica.copy``, ``Replica.place``)."""

    def values(self) -> Array:
        """Return the elements. Any thread; waits for kernels, so the thread that trains leaves it to the exchange."""


class Replica(Protocol):
    """This rank's model: numbered tensors of floating-point numbers."""

    @property
    def sizes(self) -> Sequence[int]:
        """The number of elements of each tensor; equal on all ranks."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the arrays: float64 if a tensor has it, else float32."""

    @property
    def learning_rate(self) -> float:
        """The largest learning rate with which the step that has just ended updated a tensor; 0 if none is known."""

    def read(self, tensors: Sequence[int]) -> Array:
        """Return a copy of the elements of these tensors, one tensor after the other."""

    def write(self, tensors: Sequence[int], values: Array) -> None:
        """Set the elements of these tensors."""

    def read_range(self, begin: int, end: int) -> Array:
        """Return a copy of a range of elements of all tensors, which lie one behind the other."""

    def write_range(self, begin: int, values: Array) -> None:
        """Set a range of elements."""

    def copy(self, begin: int, end: int) -> ElementsCopy:
        """Return a copy of a range of elements, which is in the memory of their device."""

    def place(self, begin: int, values: Array) -> ElementsCopy:
        """Bring values to where a range of elements is, for ``update``. Any thread; nobody changes them any more."""

    def update(
        self, begin: int, placed: ElementsCopy, compute: Callable[..., Any] | None = None, *operands: Any
    ) -> None:
        """Set a range of elements.

        Args:
            begin: The first one.
            placed: The values of all of them.
            compute: Returns other values instead, of the present ones, those of ``placed``, and the operands. It uses
                operators alone, because it gets arrays or tensors.
            operands: Copies of the same range, or numbers of the arrays' type.
        """

    def describe_state(self) -> str:
        """Name the tensors of ``read_state``, with their sizes."""

    def read_state(self) -> Array:
        """Return a copy of the floating-point tensors in the state of the torch optimizer, as one array."""

    def write_state(self, values: Array) -> None:
        """Set these tensors."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """An ``ElementsCopy`` in host memory."""

    array: Array

    def values(self) -> Array:
        """Return the array."""
        return self.array


class HostElements(ABC):
    """Copies of a ``Replica`` whose elements are in host memory."""

    @abstractmethod
    def read_range(self, begin: int, end: int) -> Array:
        """Return a copy of a range of elements."""

    @abstractmethod
    def write_range(self, begin: int, values: Array) -> None:
        """Set a range of elements."""

    def copy(self, begin: int, end: int) -> ElementsCopy:
        """Return a copy of a range of elements."""
        return HostCopy(self.read_range(begin, end))

    def place(self, begin: int, values: Array) -> ElementsCopy:
        """Return the values themselves: they are where they are needed."""
        del begin
        return HostCopy(values)

    def update(self, begin: int, placed: Any, compute: Callable[..., Any] | None = None, *operands: Any) -> None:
        """Set a range of elements (``Replica.update``)."""
        values = placed.array
        if compute is not None:
            others = [operand.array if isinstance(operand, HostCopy) else operand for operand in operands]
            values = compute(self.read_range(begin, begin + values.size), values, *others)
        self.write_range(begin, values)


@final
class Later(Generic[T]):
    """A value that is computed once, by the first thread that asks for it."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute: Callable[[], T] | None = compute
        self._lock = threading.Lock()
        self._value: list[T] = []

    def get(self) -> T:
        """Return the value; others that ask wait meanwhile."""
        with self._lock:
            if self._compute is not None:
                self._value, self._compute = [self._compute()], None
            return self._value[0]


@dataclass(frozen=True, slots=True)
class Pending:
    """An exchange that begins after a step."""

    channel: int  #: Its number. Exchanges of one channel follow one another.
    #: The number of steps after which its result is applied; equal on all ranks. The step that has just ended means at
    #: once.
    due: int
    exchange: Exchange  #: Yields actions, beside later steps, and does not touch the replica.


class StrategySession(Protocol):
    """A strategy on one rank."""

    def exchanges_gradients(self) -> bool:
        """Whether the next step uses the gradients of all ranks, as synchronous training does.

        ``tr.recoverable`` relies on it that such steps come before all others.
        """
        return False

    def ends_exchange(self) -> bool:
        """Whether the next step ends with an exchange, or applies the result of one. Gradients do not count.

        Equal on all ranks. The first step behind synchronous ones counts as such a step: then the parameters of the
        ranks begin to differ, and ``tr.recoverable`` copies them.
        """

    def stepped(self, weight: float) -> list[Pending]:
        """Note that a step has ended; return the exchanges that begin now.

        Args:
            weight: What this step counts in averages, for instance its number of samples.
        """

    def apply(self, channel: int, result: Any) -> None:
        """Change the replica: the result of a channel's exchange, an array or ``None``, is due."""

    def ending(self) -> list[Pending]:
        """Make the replicas of all ranks equal, at the end of training: return the exchange that this needs, if any.

        All results of earlier exchanges have been applied. More steps may follow.
        """

    def state(self) -> Mapping[str, Any]:
        """Return the state: dicts and lists of numbers and arrays, which are not copied.

        Under ``"shared"`` is what is equal on all ranks, under ``"own"`` what belongs to this rank. Results that are
        not due yet may be saved beside it. Exchanges run meanwhile only if they can be restarted from the state.
        """

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of a session with these settings and this model. Its arrays may be taken over."""


@runtime_checkable
class RestartableSession(StrategySession, Protocol):
    """A session whose exchanges may be under way between two steps, and can then be restarted from its state."""

    def restart(self, channel: int, due: int) -> Pending:
        """Return an exchange that has begun, and whose result is not applied, from its beginning.

        If the session has another number of ranks than when the exchange began, so has the exchange now.

        Args:
            channel: Its number.
            due: The number of steps after which its result is applied.
        """


class TrainingOfRank(Protocol):
    """A model that is trained on one rank, and the ways in which a strategy can train it (``pytorch/training.py``)."""

    @property
    def parameters(self) -> Sequence[Any]:
        """The parameters that are trained, torch's."""

    @property
    def optimizer(self) -> Any:
        """The program's torch optimizer."""

    @property
    def group(self) -> Group:
        """The ranks."""

    @property
    def name(self) -> str:
        """A name that no other optimizer of the group has."""

    @property
    def compares(self) -> bool:
        """Whether ranks compare the parameters that they begin with. Otherwise they begin together later."""

    def by_exchanges(self, strategy: Any) -> Any:
        """Return steps between which all ranks exchange what the strategy's sessions say (``Strategy.session``)."""

    def by_gossip(self, strategy: Any) -> Any:
        """Return steps between which two ranks exchange parameters (``async_gossip.AsyncGossip``)."""


class Strategy(ABC):
    """The settings of a strategy, as a frozen dataclass; equal on all ranks.

    Attributes:
        name: The strategy's name.
        can_defer: Whether its steps can end before what they have asked for has come (``overlap="iterations"``).
        can_sum: Whether ``op=SUM`` is supported.
        can_form_group: Whether its steps can form a group whose ranks can be replaced, and find out by themselves
            whether the ranks agree.
    """

    __slots__ = ()

    name: ClassVar[str]
    can_defer: ClassVar[bool] = False
    can_sum: ClassVar[bool] = True
    can_form_group: ClassVar[bool] = False

    def steps(self, training: TrainingOfRank) -> Any:
        """Return the steps of one rank, a ``pytorch.stepping.StrategySteps``. Collective."""
        return training.by_exchanges(self)

    def session(self, replica: Replica, rank: int, world_size: int) -> StrategySession:
        """Return the session of one rank. All replicas are equal.

        Raises:
            ConfigurationError: The strategy has no exchanges in which all ranks take part.
        """
        del replica, rank, world_size
        raise ConfigurationError(f"{self.name} has no exchanges in which all ranks take part")

    def can_join(self) -> bool:
        """Whether a rank without data may take part in the exchanges of the others (``DistributedOptimizer.join``)."""
        return False

    def recovery_obstacle(self) -> str:
        """Return why ``tr.recoverable`` cannot keep the state of the sessions; an empty text if it can.

        It can if each exchange that is under way between two steps can be restarted, and not all steps are synchronous.
        """
        return ""


def mean_of(
    values: Array, codec: Codec | None, rank: int, world_size: int, number: int
) -> Generator[Action, Any, Array]:
    """Return the mean of all ranks' values; the same bits on every rank.

    If a rank has values that no codec can encode (NaN, infinite, beyond 1e30), all ranks send them as they are: the
    mean shows what has happened, as it does without a codec.

    Args:
        values: Float32 or float64; becomes what was not sent: zeros without a codec.
        codec: Encodes the values, as float32. ``None``: they are sent as they are.
        rank: This rank.
        world_size: The number of ranks.
        number: The number of the exchange, of which the codec's pseudo-random numbers depend.
    """
    is_coded = codec is not None
    if codec is not None:
        with np.errstate(over="ignore"):
            narrow = np.ascontiguousarray(values, np.float32)
        refused = yield Allreduce(np.array([not quantisation.within_limit(narrow)], np.int64))
        is_coded = not refused[0]
    if codec is not None and is_coded:
        total: Array = yield from coded_sum(narrow, codec, rank, world_size, number)
        values[:] = narrow
    else:
        total = yield Allreduce(values.copy())
        values[:] = 0.0
    return (total / world_size).astype(values.dtype, copy=False)
