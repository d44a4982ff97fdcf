"""Updates that happen in the next forward pass: what ``overlap="iterations"`` puts off at ``step()``.

Each bucket's parameters are updated once, by the real torch optimizer, shown only these parameters and the
hyper-parameters as they were at ``step()``. That is exact for every optimizer that treats each parameter by
itself, which is all of ``torch.optim`` except LBFGS.
"""

from __future__ import annotations

from typing import Any

import torch

from totalreduce.foundation.errors import UnsupportedError
from totalreduce.pytorch.reducer import Reducer

__all__ = ["DeferredUpdates"]


class DeferredUpdates:
    """The buckets of one closed round whose parameters have not been updated yet.

    Args:
        optimizer: The real torch optimizer.
        reducer: Its round is closed and stays so until every bucket was applied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
        self._optimizer, self._reducer = optimizer, reducer
        self._settings = [
            {key: _snapshot(value) for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        self._place = {
            id(parameter): (number, position)
            for number, group in enumerate(optimizer.param_groups)
            for position, parameter in enumerate(group["params"])
        }
        self.pending = set(range(len(reducer.buckets)))
        #: Whether a module of the model ran since ``step()``: from then on a pending bucket's weights are
        #: out of date.
        self.forward_seen = False

    def contributions(self) -> set[int]:
        """``id`` of each tensor that a pending bucket may need again, and that must not be overwritten."""
        buckets = (self._reducer.buckets[index] for index in self.pending)
        return {id(local) for bucket in buckets for local in bucket.local if local is not None}

    @torch.no_grad()
    def apply(self, index: int) -> None:
        """Wait for one bucket and update its parameters, unless that was done."""
        if index not in self.pending:
            return
        self._reducer.wait(index)
        self.pending.discard(index)
        bucket = self._reducer.buckets[index]
        reduced = bucket.reduced()
        kept = [
            gradient if bucket.same_local(position) else parameter.grad
            for position, (parameter, gradient) in enumerate(zip(bucket.parameters, reduced, strict=True))
        ]
        bucket.release()
        try:
            for parameter, gradient in zip(bucket.parameters, reduced, strict=True):
                parameter.grad = gradient
            self._step([p for p in bucket.parameters if p.grad is not None])
        finally:
            # What the user did to the gradients since step() stands: zeroed ones are not brought back.
            for parameter, gradient in zip(bucket.parameters, kept, strict=True):
                parameter.grad = gradient

    def _step(self, parameters: list[torch.nn.Parameter]) -> None:
        if not parameters:
            return
        members: list[list[tuple[int, torch.nn.Parameter]]] = [[] for _ in self._settings]
        for parameter in parameters:
            number, position = self._place[id(parameter)]
            members[number].append((position, parameter))
        shown: list[dict[str, Any]] = []
        given: list[dict[str, Any]] = []
        for settings, placed in zip(self._settings, members, strict=True):
            if placed:
                ordered = [parameter for _, parameter in sorted(placed, key=lambda item: item[0])]
                shown.append({**settings, "params": ordered})
                given.append(settings)
        whole = self._optimizer.param_groups
        self._optimizer.param_groups = shown
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = whole
        for settings, after in zip(given, shown, strict=True):
            changed = [key for key, value in after.items() if key != "params" and value is not settings.get(key)]
            if changed:
                raise UnsupportedError(
                    f"{type(self._optimizer).__name__}.step() changes {changed} of its parameter groups, so "
                    'its parameters cannot be updated one bucket at a time. Use overlap="backward".'
                )


def _snapshot(value: object) -> object:
    """Schedulers change a learning rate that is a tensor in place; everything else is replaced."""
    return value.clone() if isinstance(value, torch.Tensor) else value
