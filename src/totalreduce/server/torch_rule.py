"""An optimizer of ``torch.optim`` as the optimizer of a parameter server."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, final

import numpy as np
import torch

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.kernels.arrays import Array
from totalreduce.pytorch.elementwise import ELEMENTWISE
from totalreduce.server.optimizers import Optimizer, StateKind

__all__ = ["Torch"]

#: Settings that do not change what is computed.
_HOW: Final = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the torch optimizer's state of a parameter.

    Attributes:
        name: Its name.
        dtype: That of a tensor with one number; ``None``: the entry has an element for each one of the parameter.
    """

    name: str
    dtype: torch.dtype | None


@final
@dataclass(frozen=True)
class Torch(Optimizer):
    """An optimizer of ``torch.optim`` that treats each element by itself, with the bits of torch.

    Attributes:
        kind: The name of its class: ``"SGD"``, ``"Adam"``, ``"AdamW"``, ``"Adagrad"``, ``"RMSprop"``, ``"Adadelta"``,
            ``"Adamax"``, ``"NAdam"``, ``"RAdam"``, ``"ASGD"`` or ``"Rprop"``.
        settings: The arguments of its constructor, besides the parameters.

    Raises:
        ConfigurationError: It is none of these, or it does not take these settings.
    """

    kind: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Check the settings, and find out what state the optimizer has."""
        if self.kind not in ELEMENTWISE:
            raise ConfigurationError(
                f"a server has no torch optimizer {self.kind!r}: it updates parts of the values alone, which is "
                f"possible with {', '.join(ELEMENTWISE)}"
            )
        try:
            settings = json.loads(json.dumps({k: v for k, v in self.settings.items() if k not in _HOW}))
            parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float32, device="cpu"))
            parameter.grad = torch.ones(2, dtype=torch.float32, device="cpu")
            with torch.device("cpu"):  # for the tensors that torch makes itself
                probe = getattr(torch.optim, self.kind)([parameter], **settings)
                probe.step()
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(f"torch.optim.{self.kind} does not take {dict(self.settings)}: {error}") from error
        entries = tuple(
            _Entry(name, None if value.shape == parameter.shape else value.dtype)
            for name, value in probe.state[parameter].items()
            if isinstance(value, torch.Tensor)
        )
        object.__setattr__(self, "settings", settings)
        object.__setattr__(self, "_entries", entries)

    @classmethod
    def like(cls, optimizer: torch.optim.Optimizer) -> Self:
        """Return the rule of a torch optimizer, whose groups of parameters have the same settings.

        Raises:
            ConfigurationError: They have different ones; or as for the constructor.
        """
        first, *others = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        if any(other != first for other in others):
            raise ConfigurationError(
                "a server has one rule for all parameters, and the groups of this torch optimizer have different "
                "settings"
            )
        if type(optimizer) is not getattr(torch.optim, type(optimizer).__name__, None):
            raise ConfigurationError(f"a server can carry out optimizers of torch.optim, and this is {type(optimizer)}")
        accepted = inspect.signature(type(optimizer)).parameters
        known = {k: v for k, v in first.items() if k in accepted and k not in _HOW}
        if any(isinstance(value, torch.Tensor) for value in known.values()):
            raise ConfigurationError("a server needs numbers as settings of the torch optimizer, and one is a tensor")
        return cls(type(optimizer).__name__, known)

    def check_rate(self, lr: float) -> None:
        """Raise ``ConfigurationError`` unless a push may have this learning rate."""
        checks.real_number("lr", lr, minimum=0)

    def at_rate(self, lr: float) -> Self:
        """Return this optimizer with another learning rate."""
        return type(self)(self.kind, {**self.settings, "lr": lr})

    @property
    def states(self) -> tuple[StateKind, ...]:
        """How often each key was updated; then the state of the torch optimizer."""
        entries: tuple[_Entry, ...] = self._entries  # type: ignore[attr-defined]
        return StateKind(is_per_key=True, name="count"), *(
            StateKind(is_per_key=entry.dtype is not None, name=entry.name) for entry in entries
        )

    def update(self, values: Array, states: tuple[Array, ...], rows: Array, width: int, gradients: Array) -> None:
        """See ``Optimizer``. Keys that were updated equally often take the step together, if their numbers are equal.

        They can differ: the state of ASGD has numbers that depend on the learning rates of earlier pushes.
        """
        entries: tuple[_Entry, ...] = self._entries  # type: ignore[attr-defined]
        table, pushed = values.reshape(-1, width), gradients.reshape(-1, width)
        scalars = [state for state, entry in zip(states[1:], entries, strict=True) if entry.dtype is not None]
        # As they are before this update.
        counts, *others = (each[rows] if rows.size else each.copy() for each in (states[0], *scalars))
        # Most of them are the count again, and rows of several columns are slow to sort.
        numbers = np.stack([counts, *(each for each in others if not np.array_equal(each, counts))], axis=1)
        if (numbers == numbers[:1]).all():
            each, groups = numbers[:1], np.zeros(0, np.intp)
        else:
            each, groups = np.unique(numbers, axis=0, return_inverse=True)
        for place, (count, *_) in enumerate(each):
            chosen: Array | slice = slice(None) if len(each) == 1 else np.flatnonzero(groups.reshape(-1) == place)
            where = chosen if not rows.size else rows[chosen]
            arrays = [state.reshape(len(table), -1)[where] for state in states[1:]]
            part = table[where]
            self._step(part, arrays, pushed[chosen], is_first=count == 0)
            if not isinstance(where, slice):  # a slice is the memory of the table itself
                table[where] = part
                for state, array in zip(states[1:], arrays, strict=True):
                    state.reshape(len(table), -1)[where] = array
            states[0][where] += 1

    def _step(self, values: Array, arrays: list[Array], gradients: Array, *, is_first: bool) -> None:
        """Take a step of the torch optimizer; values and state are changed in place."""
        entries: tuple[_Entry, ...] = self._entries  # type: ignore[attr-defined]
        parameter = torch.nn.Parameter(torch.from_numpy(values))
        parameter.grad = torch.from_numpy(np.require(gradients, requirements=["C", "W"]))
        with torch.device("cpu"):
            optimizer = getattr(torch.optim, self.kind)([parameter], foreach=False, **self.settings)
            if not is_first:
                optimizer.state[parameter] = {
                    entry.name: torch.from_numpy(array)
                    if entry.dtype is None
                    else torch.tensor(array[0, 0].item(), dtype=entry.dtype, device="cpu")
                    for entry, array in zip(entries, arrays, strict=True)
                }
            optimizer.step()
        for entry, array in zip(entries, arrays, strict=True):
            found = optimizer.state[parameter][entry.name]
            if entry.dtype is not None:
                array[:] = found.item()
            elif found.data_ptr() != array.ctypes.data:
                array[:] = found.numpy()
