"""The model of this rank as strategies see it, and the check that all ranks begin with the same parameters."""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np
import torch

from totalreduce.foundation.errors import ConfigurationError, PlanMismatchError
from totalreduce.foundation.partition import parts_of_range
from totalreduce.groups.group import Group
from totalreduce.kernels.arrays import Array
from totalreduce.strategies.strategy import ElementsCopy, HostCopy, HostElements
from totalreduce.tensors.flats import FlatCopies
from totalreduce.tensors.modes import write
from totalreduce.tensors.streams import is_on_accelerator

__all__ = ["ModelReplica", "check_equal"]


@final
class ModelReplica(HostElements):
    """The trained parameters of a model as a ``Replica``.

    Attributes:
        parameters: The parameters.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        """Note the parameters. ``dtype``: that of the arrays; by default one that holds all parameters exactly.

        Raises:
            ConfigurationError: A parameter is not a floating-point tensor.
        """
        odd = [parameter.dtype for parameter in parameters if not parameter.dtype.is_floating_point]
        if odd:
            raise ConfigurationError(f"a strategy averages floating-point parameters, and one is of {odd[0]}")
        self.parameters, self._optimizer = list(parameters), optimizer
        self._sizes = [parameter.numel() for parameter in parameters]
        wide = any(parameter.dtype == torch.float64 for parameter in parameters)
        self._dtype = dtype or np.dtype(np.float64 if wide else np.float32)
        self._copies = FlatCopies()

    @property
    def sizes(self) -> Sequence[int]:
        """The number of elements of each parameter."""
        return self._sizes

    @property
    def dtype(self) -> np.dtype[Any]:
        """Float64 if a parameter has it, else float32."""
        return self._dtype

    @property
    def num_frozen(self) -> int:
        """The number of parameters that require no gradients any more."""
        return sum(not parameter.requires_grad for parameter in self.parameters)

    @property
    def learning_rate(self) -> float:
        """The largest learning rate of the optimizer's groups of parameters; 0 if none has one."""
        rates = (group.get("lr") for group in self._optimizer.param_groups)
        return max((float(rate) for rate in rates if rate is not None), default=0.0)  # Adafactor may have no rate

    def read(self, tensors: Sequence[int]) -> Array:
        """Return a copy of the elements of these parameters."""
        return self._flat([self.parameters[tensor] for tensor in tensors])

    def write(self, tensors: Sequence[int], values: Array) -> None:
        """Set the elements of these parameters."""
        self._set([self.parameters[tensor] for tensor in tensors], values)

    def read_range(self, begin: int, end: int) -> Array:
        """Return a copy of a range of elements of all parameters, which lie one behind the other."""
        return self._flat(self._range(begin, end))

    def write_range(self, begin: int, values: Array) -> None:
        """Set a range of elements."""
        self.write_parts(parts_of_range(self._sizes, begin, begin + values.size), values)

    def write_parts(self, parts: Iterable[tuple[int, int, int]], values: Array) -> None:
        """Set parts of parameters: a parameter's number, the first element, and that behind the last one."""
        with self._written(parts) as targets:
            self._set(targets, values)

    def copy(self, begin: int, end: int) -> ElementsCopy:
        """Return a copy of a range of elements, which is in the memory of their device."""
        if self._is_on_host:
            return super().copy(begin, end)
        return self._copies.copy(self._range(begin, end), self._dtype)

    def place(self, begin: int, values: Array) -> ElementsCopy:
        """Bring values to where a range of elements is. Any thread."""
        if self._is_on_host:
            return super().place(begin, values)
        return self._copies.place(self._range(begin, begin + values.size), values)

    def update(self, begin: int, placed: Any, compute: Callable[..., Any] | None = None, *operands: Any) -> None:
        """Set a range of elements, by kernels for which nobody waits."""
        if isinstance(placed, HostCopy):
            super().update(begin, placed, compute, *operands)
            return
        with self._written(parts_of_range(self._sizes, begin, begin + placed.size)) as targets:
            self._copies.write(targets, placed, compute, operands)

    @property
    def _is_on_host(self) -> bool:
        return not any(map(is_on_accelerator, self.parameters))

    def _range(self, begin: int, end: int) -> list[torch.Tensor]:
        parts = parts_of_range(self._sizes, begin, end)
        return [self.parameters[tensor].detach().reshape(-1)[first:last] for tensor, first, last in parts]

    @contextlib.contextmanager
    def _written(self, parts: Iterable[tuple[int, int, int]]) -> Iterator[list[torch.Tensor]]:
        """Return tensors for these parts of parameters, into which the block writes."""
        targets, flat = [], {}
        for tensor, first, last in parts:
            if tensor not in flat:  # a copy where the memory has another order than the elements
                flat[tensor] = self.parameters[tensor].detach().reshape(-1)
            targets.append(flat[tensor][first:last])
        yield targets
        for tensor, elements in flat.items():
            parameter = self.parameters[tensor].detach()
            if elements.data_ptr() != parameter.data_ptr():
                write(parameter, elements.view(parameter.shape))

    def describe_state(self) -> str:
        """Name the tensors of ``read_state``, with their sizes."""
        return " ".join(f"{name}:{value.numel()}" for name, value in self._state())

    def read_state(self) -> Array:
        """Return a copy of the floating-point tensors in the optimizer's state."""
        return self._flat([value for _, value in self._state()])

    def write_state(self, values: Array) -> None:
        """Set these tensors."""
        self._set([value for _, value in self._state()], values)

    def holds(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether these are the parameters."""
        return len(parameters) == len(self.parameters) and all(map(operator.is_, parameters, self.parameters))

    def _state(self) -> list[tuple[str, torch.Tensor]]:
        """Return names and tensors, in the order of parameters and names. Ranks may lack those of some parameters."""
        state = self._optimizer.state
        return [
            (f"{number}.{name}", value)
            for number, parameter in enumerate(self.parameters)
            for name, value in sorted(state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point
        ]

    @torch.no_grad()
    def _flat(self, tensors: Sequence[torch.Tensor]) -> Array:
        if any(map(is_on_accelerator, tensors)):
            return self._copies.copy(tensors, self._dtype).values()
        flat = np.empty(sum(tensor.numel() for tensor in tensors), self._dtype)
        begin = 0
        for tensor in tensors:
            part = torch.from_numpy(flat[begin : begin + tensor.numel()])
            part.copy_(tensor.detach().reshape(-1))
            begin += tensor.numel()
        return flat

    @torch.no_grad()
    def _set(self, tensors: Sequence[torch.Tensor], values: Array) -> None:
        if any(map(is_on_accelerator, tensors)):
            self._copies.write(tensors, self._copies.place(tensors, values))
            return
        begin = 0
        for tensor in tensors:
            part = torch.from_numpy(values[begin : begin + tensor.numel()])
            write(tensor, part.view(tensor.shape))
            begin += tensor.numel()


def check_equal(replica: ModelReplica, strategy: str, group: Group, name: str) -> None:
    """Raise ``ConfigurationError`` on all ranks unless all have the same parameters. Collective."""
    everything = replica.read(range(len(replica.sizes)))
    digest = hashlib.sha256(everything.data).hexdigest()
    try:
        group.agree(f"{name}/strategy", {"the parameters at the begin": digest})
    except PlanMismatchError as error:
        raise ConfigurationError(
            f"the ranks begin with different parameters, which {strategy} does not bring together: call "
            "tr.broadcast_parameters(model, group) before DistributedOptimizer on every rank"
        ) from error
