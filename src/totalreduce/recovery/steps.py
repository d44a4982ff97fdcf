"""``StepsSinceCommit``: what the torch optimizers of a state have done since the last commit of ``tr.attempts``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import final

import torch

from totalreduce.pytorch.wrapper import OptimizerWrapper
from totalreduce.recovery.state import State
from totalreduce.tensors.compilation import never_compiled

__all__ = ["StepsSinceCommit", "has_elements"]

#: The attribute of a gradient that was there at a commit: the count of its changes then. A reference to the gradient
#: would keep its memory.
_SEEN = "_totalreduce_seen"


@final
@never_compiled
class StepsSinceCommit:
    """Counts the steps of the optimizers of a state, until ``remove`` is called."""

    def __init__(self, state: State, count_operations: Callable[[], int] | None) -> None:
        """Begin to count."""
        self._parameters = list(state.model.parameters())
        self._count_operations = count_operations
        self.number = 0  #: The number of steps since the last commit.
        self._operations = 0  #: The number of collectives at the first of the steps.
        self._handles = [each.register_step_post_hook(self._stepped) for each in _optimizers_of(state)]

    def remove(self) -> None:
        """Count no steps any more."""
        while self._handles:
            self._handles.pop().remove()

    def _stepped(self, *_: object) -> None:
        if self.number == 0 and self._count_operations is not None:
            self._operations = self._count_operations()
        self.number += 1

    @property
    def are_interrupted(self) -> bool:
        """Whether a collective was called after one of the steps."""
        count = self._count_operations
        return self.number > 0 and count is not None and count() != self._operations

    def begin(self) -> None:
        """Note a commit."""
        self.number = 0
        for gradient in _gradients(self._parameters):
            setattr(gradient, _SEEN, gradient._version)

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass has computed gradients since the last commit. They may be zeros by now."""
        return any(getattr(gradient, _SEEN, None) != gradient._version for gradient in _gradients(self._parameters))


def _optimizers_of(state: State) -> list[torch.optim.Optimizer]:
    """Return the optimizers, and those that they have as attributes: a wrapper such as SAM steps the one within."""
    found: dict[int, torch.optim.Optimizer] = {}
    rest = list(state.optimizers.values())
    while rest:
        optimizer = rest.pop()
        inner = optimizer.wrapped if isinstance(optimizer, OptimizerWrapper) else optimizer
        if id(inner) not in found:
            found[id(inner)] = inner
            rest += [value for value in vars(inner).values() if isinstance(value, torch.optim.Optimizer)]
    return list(found.values())


def _gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            yield gradient


def has_elements(model: torch.nn.Module) -> bool:
    """Whether some gradient of a model has another element than zero, among the rank's own if they are sharded."""
    for gradient in _gradients(model.parameters()):
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        values = local.detach().coalesce().values() if local.is_sparse else local.detach()
        if values.count_nonzero():
            return True
    return False
