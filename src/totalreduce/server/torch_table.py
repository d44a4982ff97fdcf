"""Parts of a model's parameters as a table that a torch optimizer of the program's kind updates.

``Torch`` (``torch_rule``) is the rule of an optimizer that treats each element by itself, and has one set of settings.
Here groups of parameters may have different settings, and if no parameter is cut, the optimizer may be any one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, final

import numpy as np
import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.kernels.arrays import Array
from totalreduce.pytorch.intervals import Interval
from totalreduce.server.optimizers import Sum
from totalreduce.server.served_state import cut, saved
from totalreduce.server.shares import Shares
from totalreduce.server.table import Table

__all__ = ["TorchTable"]


class _Twin(NamedTuple):
    """A copy of a part of one of the program's parameters, which is a parameter of the server's torch optimizer.

    A copy of a whole parameter has its shape, another one is one-dimensional. It is contiguous, as its gradient and its
    state are: fused optimizers of torch ignore the order of the elements in memory.

    Attributes:
        original: The program's parameter.
        part: The part of it.
        copy: The copy.
    """

    original: torch.nn.Parameter
    part: Interval
    copy: torch.nn.Parameter

    @classmethod
    def of(cls, original: torch.nn.Parameter, part: Interval) -> Self:
        """Copy a part of a parameter."""
        values = _values_of(original, part).clone(memory_format=torch.contiguous_format)
        return cls(original, part, torch.nn.Parameter(values))

    def reload(self) -> None:
        """Take over the present values of the program's parameter."""
        self.copy.data.copy_(_values_of(self.original, self.part))


def _values_of(parameter: torch.nn.Parameter, part: Interval) -> torch.Tensor:
    values = parameter.detach()
    return values if part.size == values.numel() else values.reshape(-1)[part.begin : part.end]


@final
class TorchTable(Table):
    """The parts of parameters of which this rank is the server, in the keys of ``Shares``.

    Each update makes a new array of ``values``, so nobody changes an array that was answered.
    """

    def __init__(
        self,
        shares: Shares,
        share: int,
        parameters: Sequence[torch.nn.Parameter],
        inner: torch.optim.Optimizer,
        dtype: np.dtype[Any],
    ) -> None:
        """Copy parts of the program's parameters. ``dtype``: that of gradients and values in messages.

        Raises:
            ConfigurationError: No second optimizer can be made, or it takes no steps with a given dense gradient.
        """
        self._twins = [_Twin.of(parameters[part.parameter], part) for part in shares.parts[share]]
        self._updates = _optimizer_like(inner, self._twins)
        self._num_rates = 8 * len(inner.param_groups) // dtype.itemsize
        self._rates: Array = np.zeros(0)
        super().__init__(shares.layout, share, width=1, dtype=dtype, optimizer=Sum())
        self._read()

    @torch.no_grad()
    def _read(self) -> None:
        self.values, begin = np.empty_like(self.values), 0
        for twin in self._twins:
            part = torch.from_numpy(self.values[begin : begin + twin.part.size])
            part.copy_(twin.copy.reshape(-1))
            begin += twin.part.size
        self.values[begin:] = 0.0

    def state(self) -> list[tuple[torch.nn.Parameter, int, dict[str, Any]]]:
        """Return a copy of the optimizer's state: the program's parameter, the part's first element, and its state."""
        states = {} if self._updates is None else self._updates.state
        twins = [twin for twin in self._twins if twin.copy in states]
        return [(twin.original, twin.part.begin, saved(states[twin.copy])) for twin in twins]

    def reload(self, inner: torch.optim.Optimizer) -> None:
        """Take over the program's parameters and the state of its optimizer."""
        for twin in self._twins:
            twin.reload()
        self._updates = _optimizer_like(inner, self._twins)
        self._read()

    def take_rates(self, pushed: Array) -> Array:
        """Take over a worker's learning rates, by group of parameters, for the next update; return its gradient.

        Args:
            pushed: An element for each key (``Shares``). The learning rates are the last bytes, as float64.
        """
        gradient = pushed[: pushed.size - self._num_rates]
        self._rates = np.frombuffer(pushed[gradient.size :].tobytes(), np.float64)
        return gradient

    def apply(self, gradient: Array, factor: float) -> None:
        """Take a step with a gradient times a factor. Parts of which no rank had a gradient stay as they are."""
        begin, present = 0, gradient[gradient.size - len(self._twins) :]
        for number, twin in enumerate(self._twins):
            parameter = twin.copy
            part = torch.from_numpy(gradient[begin : begin + twin.part.size]).view(parameter.shape)
            begin += twin.part.size
            parameter.grad = (part * factor).to(parameter.device, parameter.dtype) if present[number] else None
        if self._updates is not None:
            for group, rate in zip(self._updates.param_groups, self._rates, strict=True):
                group["lr"] = float(rate)
            self._updates.step()
        self.version += 1
        self._read()


def _optimizer_like(inner: torch.optim.Optimizer, twins: Sequence[_Twin]) -> torch.optim.Optimizer | None:
    """Return an optimizer of the same kind, settings and state for parts of its parameters; ``None`` without any.

    Raises:
        ConfigurationError: No such optimizer can be made, or it takes no steps with a given dense gradient.
    """
    kind = type(inner).__name__
    if isinstance(inner, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ConfigurationError(
            f"a strategy with servers does not support {kind}: servers have dense gradients, and no closure. Use "
            "another torch optimizer, or a strategy without servers, as tr.LocalSGD()"
        )
    if not twins:
        return None
    groups = [
        {**group, "params": [twin.copy for each in group["params"] for twin in twins if twin.original is each]}
        for group in inner.param_groups
    ]
    accepted = inspect.signature(type(inner)).parameters
    try:
        made = type(inner)(groups, **{name: value for name, value in inner.defaults.items() if name in accepted})
    except Exception as error:
        raise ConfigurationError(
            f"a strategy with servers needs a second {kind} for the server, and it cannot be made of the settings of "
            f"the first one ({error}). Its constructor must take param_groups and its defaults"
        ) from error
    for parameter, part, twin in twins:
        if parameter in inner.state:
            made.state[twin] = cut(inner.state[parameter], parameter, part.begin, part.end)
    return made
