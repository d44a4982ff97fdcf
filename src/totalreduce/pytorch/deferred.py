"""Updates that ``step()`` puts off with ``overlap="iterations"``: each happens when the next forward pass needs it.

The parameters of each bucket are updated once, by the torch optimizer itself: for this call its parameter groups hold
only these parameters, and the hyper-parameters as they were at ``step()``. That is exact for every optimizer that
updates each parameter by itself, which is all of ``torch.optim`` except LBFGS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch

from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.groups.group import Group
from totalreduce.pytorch.hooks import HookHandles, WeakHook, has_step_hooks
from totalreduce.pytorch.order import ForwardOrder
from totalreduce.pytorch.reducer import Reducer

__all__ = ["DeferredUpdates"]


@final
class DeferredUpdates:
    """The buckets of the last closed round whose parameters have not been updated yet.

    The reducer's round is closed when ``begin`` is called, and stays so until every bucket was applied.

    Attributes:
        pending: The indices of the buckets whose updates are deferred.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: Reducer, order: ForwardOrder, group: Group) -> None:
        self._optimizer, self._reducer, self._order, self._group = optimizer, reducer, order, group
        self._model: torch.nn.Module | None = None
        self._waits: dict[int, list[int]] | None = None
        self._hooks = HookHandles()
        self.pending: set[int] = set()
        #: Whether a module of the model ran since ``step()``: from then on the weights of pending buckets are outdated.
        self._forward_seen = False
        self._settings: list[dict[str, Any]] = []
        self._places: dict[torch.nn.Parameter, tuple[int, int]] = {}
        self._forget: Callable[[], None] | None = None

    @property
    def possible(self) -> bool:
        """Whether ``step()`` may defer its updates: the model is watched, and no step hook expects them at once."""
        return self._model is not None and self._order.seen and not has_step_hooks(self._optimizer)

    def watch(self, model: torch.nn.Module) -> None:
        """Apply the updates that a module needs before its forward pass, and all before the model's state is read."""
        self._model = model
        self._hooks.before_forward(self._order.relevant, WeakHook(self._before_forward))
        self._hooks.around_state_dict(model, WeakHook(self.flush))

    def begin(self, flush: Callable[[], None]) -> None:
        """Defer the updates of all buckets.

        Args:
            flush: Called before barriers and before the group ends; it calls ``flush`` of this object. The group holds
                it until the updates are applied, and with it an optimizer that the program holds no more.
        """
        self._settings = [
            {key: _snapshot(value) for key, value in group.items() if key not in ("params", "param_names")}
            for group in self._optimizer.param_groups
        ]
        self._places = {
            parameter: (number, position)
            for number, group in enumerate(self._optimizer.param_groups)
            for position, parameter in enumerate(group["params"])
        }
        self.pending = set(range(len(self._reducer.buckets)))
        self._forward_seen = False
        self._forget = self._group.on_quiesce(flush)

    def flush(self, *_: object) -> None:
        """Apply all updates."""
        if self.pending:
            self._apply_all(self._reducer.by_urgency)

    def end(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()

    def check_fresh(self, parameter: torch.Tensor) -> None:
        """Refuse a gradient that was computed with an outdated parameter.

        Raises:
            ConfigurationError: The forward pass used the parameter before its deferred update was applied.
        """
        if not self._forward_seen:
            return
        for index in self.pending:
            bucket = self._reducer.buckets[index]
            for position, member in enumerate(bucket.parameters):
                if member is parameter:
                    raise ConfigurationError(
                        f"parameter {bucket.specs[position].name!r} was used before its deferred update was applied, "
                        "because its module was not called as in the first step. Call optimizer.flush() before such a "
                        'forward pass, or use overlap="backward".'
                    )

    def keep_contributions(self) -> None:
        """Give parameters other gradients, of zeros, where a pending bucket may need the present ones again."""
        if not self.pending:
            return
        buckets = (self._reducer.buckets[index] for index in self.pending)
        needed = {id(local) for bucket in buckets for local in bucket.local if local is not None}
        for parameter in self._reducer.parameters:
            if parameter.grad is not None and id(parameter.grad) in needed:
                parameter.grad = torch.zeros_like(parameter.grad)

    def _before_forward(self, module: torch.nn.Module, *_: object) -> None:
        self._order.record(module)
        if not self.pending:
            return
        if not torch.is_grad_enabled() or (module is self._model and not module.training):
            self.flush()
            return
        self._forward_seen = True
        if self._waits is None:
            self._waits = self._order.waits(self._reducer.buckets_members)
        self._apply_all(self._waits[id(module)])

    def _apply_all(self, buckets: Iterable[int]) -> None:
        try:
            for index in buckets:
                if index in self.pending:
                    self._apply(index)
        except ConfigurationError:
            self.pending.clear()  # every later flush would raise the error again, and hide what comes after
            raise
        finally:
            if not self.pending and self._forget is not None:
                self._forget()
                self._forget = None

    @torch.no_grad()
    def _apply(self, index: int) -> None:
        """Wait for one bucket and update its parameters."""
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
            self._step([parameter for parameter in bucket.parameters if parameter.grad is not None])
        finally:
            # Gradients that the program has changed since step() stay so: zeroed ones do not become the reduced ones.
            for parameter, gradient in zip(bucket.parameters, kept, strict=True):
                parameter.grad = gradient

    def _step(self, parameters: list[torch.nn.Parameter]) -> None:
        """Have the torch optimizer update these parameters and no others."""
        if not parameters:
            return
        members: list[list[tuple[int, torch.nn.Parameter]]] = [[] for _ in self._settings]
        for parameter in parameters:
            number, position = self._places[parameter]
            members[number].append((position, parameter))
        shown: list[dict[str, Any]] = []
        given: list[dict[str, Any]] = []
        for settings, placed in zip(self._settings, members, strict=True):
            if placed:
                ordered = [parameter for _, parameter in sorted(placed, key=lambda item: item[0])]
                shown.append({**settings, "params": ordered})
                given.append(settings)
        all_groups = self._optimizer.param_groups
        self._optimizer.param_groups = shown
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = all_groups
        for settings, after in zip(given, shown, strict=True):
            changed = [key for key, value in after.items() if key != "params" and value is not settings.get(key)]
            if changed:
                raise UnsupportedError(
                    f"{type(self._optimizer).__name__}.step() changes {changed} of its parameter groups, so "
                    'its parameters cannot be updated one bucket at a time. Use overlap="backward".'
                )


def _snapshot(value: object) -> object:
    """Copy a tensor: schedulers change a learning rate that is a tensor in place, and replace all other values."""
    return value.clone() if isinstance(value, torch.Tensor) else value
