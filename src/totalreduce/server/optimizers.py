"""The optimizers of a parameter server: how what is pushed changes the values of a key.

An optimizer is per key: a key that is not pushed does not change, nor does its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self, final

import numpy as np

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.kernels import updates
from totalreduce.kernels.arrays import Array

__all__ = ["FTRL", "SGD", "Adagrad", "Adam", "Momentum", "Optimizer", "StateKind", "Sum"]


@dataclass(frozen=True, slots=True)
class StateKind:
    """An array of an optimizer's state.

    Attributes:
        initial: The value with which it begins.
        is_per_key: It has one element for each key, and not one for each value.
        name: Its name in the optimizer, if the settings of the optimizer decide which arrays there are.
    """

    initial: float = 0.0
    is_per_key: bool = False
    name: str = ""


@dataclass(frozen=True)
class Optimizer(ABC):
    """The settings of an optimizer, equal on all ranks."""

    def describe(self) -> dict[str, Any]:
        """Return name and settings as JSON values."""
        return {"name": type(self).__name__, **asdict(self)}

    @property
    def states(self) -> tuple[StateKind, ...]:
        """The arrays of its state."""
        return ()

    def check_rate(self, lr: float) -> None:
        """Raise ``ConfigurationError`` unless a push may have this learning rate."""
        if all(field.name != "lr" for field in fields(self)):
            raise ConfigurationError(f"tr.ps.{type(self).__name__} has no learning rate: push without lr=")
        checks.real_number("lr", lr, above=0)

    def at_rate(self, lr: float) -> Self:
        """Return this optimizer with another learning rate, which was checked."""
        return replace(self, **{"lr": lr})  # noqa: PIE804 (an optimizer without a rate has no such field)

    @abstractmethod
    def update(self, values: Array, states: tuple[Array, ...], rows: Array, width: int, gradients: Array) -> None:
        """Apply a push to some rows of a table. It releases the GIL.

        Args:
            values: float32 or float64, one-dimensional: the values, changed in place.
            states: The arrays of the state, likewise.
            rows: int64: ascending rows, each once; empty: all rows of ``values``.
            width: The number of values for each row.
            gradients: What was pushed, one-dimensional, of the type of the values.
        """


@final
@dataclass(frozen=True)
class Sum(Optimizer):
    """What is pushed is added: ``value += pushed``."""

    def update(self, values: Array, states: tuple[Array, ...], rows: Array, width: int, gradients: Array) -> None:
        del states
        updates.add(values, rows, width, gradients, values.dtype.type(1))


@final
@dataclass(frozen=True)
class SGD(Optimizer):
    """``value -= lr * gradient``."""

    lr: float

    def __post_init__(self) -> None:
        checks.real_field(self, "lr", above=0)

    def update(self, values: Array, states: tuple[Array, ...], rows: Array, width: int, gradients: Array) -> None:
        del states
        updates.add(values, rows, width, gradients, values.dtype.type(-self.lr))


@final
@dataclass(frozen=True)
class Momentum(Optimizer):
    """SGD with momentum, as ``torch.optim.SGD(momentum=...)``; the momentum of a key decays when it is pushed."""

    lr: float
    momentum: float = 0.9

    def __post_init__(self) -> None:
        checks.real_field(self, "lr", above=0)
        checks.real_field(self, "momentum", minimum=0, below=1)

    @property
    def states(self) -> tuple[StateKind, ...]:
        return (StateKind(),)

    def update(self, values: Array, states: tuple[Array, ...], rows: Array, width: int, gradients: Array) -> None:
        kind = values.dtype.type
        updates.momentum(values, *states, rows, width, gradients, kind(self.lr), kind(self.momentum))


@final
@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad, as ``torch.optim.Adagrad`` (Duchi et al., 2011)."""

    lr: float
    initial_sum: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        checks.real_field(self, "lr", above=0)
        checks.real_field(self, "initial_sum", minimum=0)
        checks.real_field(self, "eps", above=0)

    @property
    def states(self) -> tuple[StateKind, ...]:
        return (StateKind(self.initial_sum),)

    def update(self, values: Array, states: tuple[Array, ...], rows: Array, width: int, gradients: Array) -> None:
        kind = values.dtype.type
        eps = max(kind(self.eps), np.finfo(kind).tiny)  # a division by zero would end the server
        updates.adagrad(values, *states, rows, width, gradients, kind(self.lr), eps)


@final
@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, as ``torch.optim.Adam`` (Kingma and Ba, 2015); each key counts its own updates."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        checks.real_field(self, "lr", above=0)
        checks.real_field(self, "beta1", minimum=0, below=1)
        checks.real_field(self, "beta2", above=0, below=1)
        checks.real_field(self, "eps", above=0)

    @property
    def states(self) -> tuple[StateKind, ...]:
        return StateKind(), StateKind(), StateKind(is_per_key=True)

    def update(self, values: Array, states: tuple[Array, ...], rows: Array, width: int, gradients: Array) -> None:
        updates.adam(values, *states, rows, width, gradients, self.lr, self.beta1, self.beta2, self.eps)


@final
@dataclass(frozen=True)
class FTRL(Optimizer):
    """FTRL-Proximal with L1 and L2 regularisation (McMahan et al., 2013): most values of a linear model become zero.

    FTRL computes a value from its state alone. So the first push of a key replaces the key's initial value.
    """

    alpha: float = 0.1
    beta: float = 1.0
    l1: float = 1.0
    l2: float = 1.0

    def __post_init__(self) -> None:
        checks.real_field(self, "alpha", above=0)
        for name in ("beta", "l1", "l2"):
            checks.real_field(self, name, minimum=0)
        if self.beta / self.alpha + self.l2 <= 0:
            raise ConfigurationError("beta and l2 of FTRL are both 0: its steps have no bound; one must be positive")

    @property
    def states(self) -> tuple[StateKind, ...]:
        return StateKind(), StateKind()

    def update(self, values: Array, states: tuple[Array, ...], rows: Array, width: int, gradients: Array) -> None:
        updates.ftrl(values, *states, rows, width, gradients, self.alpha, self.beta, self.l1, self.l2)


@final
@dataclass(frozen=True)
class Replace(Optimizer):
    """What is pushed replaces the value: with ``Sequential(combine="mean")``, the mean of what workers have pushed."""

    def update(self, values: Array, states: tuple[Array, ...], rows: Array, width: int, gradients: Array) -> None:
        del states
        values.reshape(-1, width)[rows if rows.size else slice(None)] = gradients.reshape(-1, width)
