"""Updates that ``step()`` puts off with ``overlap="iterations"``: each happens when the next forward pass needs it.

What is updated comes in buckets (``DeferredBuckets``): from the other ranks (``reducer.Reducer``) or from servers of
parameters (``stepping.StrategySteps``). Where gradients come, the parameters of each bucket are updated once, by the
torch optimizer itself: for this call its parameter groups hold only these parameters, and the hyper-parameters as they
were at ``step()``. That is exact for every optimizer that updates each parameter by itself, which is all of
``torch.optim`` except LBFGS.

A module may read parameters of another module without calling that one. If their update is then applied between the
forward pass and the backward pass, their gradients are those of old weights. So an update that is applied for another
reason than that a module reads the parameter makes the parameter *doubtful* until a module runs that reads it, or the
program calls ``flush()``. A gradient of a doubtful parameter is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, final

import torch

from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.groups.group import Group
from totalreduce.pytorch.hooks import HookHandles, WeakHook, has_step_hooks
from totalreduce.pytorch.order import ForwardOrder
from totalreduce.tensors.modes import outside_inference_mode

__all__ = ["DeferredBuckets", "DeferredUpdates", "Update"]


@dataclass(frozen=True, slots=True)
class Update:
    """A step that the torch optimizer takes with one parameter."""

    parameter: torch.nn.Parameter
    gradient: torch.Tensor | None  #: The gradient of all ranks; ``None``: the parameter stays.
    kept: torch.Tensor | None  #: What ``parameter.grad`` is afterwards.


@final
class _SettingsOfStep:
    """The parameter groups of a torch optimizer as they were at ``step()``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._settings = [
            {key: _snapshot(value) for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        self._places = {
            parameter: (number, position)
            for number, group in enumerate(optimizer.param_groups)
            for position, parameter in enumerate(group["params"])
        }

    def update(self, parameters: list[torch.nn.Parameter]) -> None:
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


class DeferredBuckets(Protocol):
    """Groups of parameters; what other ranks or servers have of one group arrives together."""

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """All parameters."""

    @property
    def buckets_members(self) -> Sequence[Sequence[int]]:
        """The parameters of each bucket, by number."""

    @property
    def by_urgency(self) -> Sequence[int]:
        """Indices of the buckets, the one that forward needs first first."""

    def take(self, index: int) -> Sequence[Update]:
        """Wait for one bucket, and return the updates of its parameters that are left to make. May be repeated."""

    def once(self) -> AbstractContextManager[None]:
        """Return a context for these updates, which may refuse to go on after one that was interrupted."""

    def release(self, index: int) -> None:
        """Note that these updates were made, or have failed: ``take`` is not called again in this step."""

    def gradients_needed(self, index: int) -> Sequence[torch.Tensor]:
        """Return the gradients of this rank that the bucket may still read."""


@final
class DeferredUpdates:
    """The buckets of the last step whose parameters have not been updated yet."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: DeferredBuckets,
        names: Sequence[str],
        order: ForwardOrder,
        group: Group,
    ) -> None:
        """``names``: those of the parameters, by number, for errors."""
        self._optimizer, self._buckets, self._names, self._order, self._group = optimizer, buckets, names, order, group
        self._model: torch.nn.Module | None = None
        #: The buckets for which each module waits, and the parameters that it may read, by ``id(module)``.
        self._needs: dict[int, tuple[list[int], set[torch.Tensor]]] = {}
        self._hooks = HookHandles()
        self.pending: set[int] = set()  #: The indices of the buckets whose updates are deferred.
        self.guards_hooks = False  #: Whether the hook of a gradient must call ``before_gradient`` first.
        self._doubtful: set[torch.Tensor] = set()
        #: Held while updates are applied: hooks of parameters on the CPU and on a GPU run in two threads.
        self._applying = threading.RLock()
        #: Whether a module of the model ran since ``step()``: from then on the weights of pending buckets are outdated.
        self._forward_seen = False
        self._settings = _SettingsOfStep(optimizer)
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

    @cached_property
    def priorities(self) -> dict[int, int]:
        """The rank of each bucket in the order in which forward needs them, as far as it was watched before."""
        return self._order.bucket_priorities(self._buckets.buckets_members)

    def begin(self, flush: Callable[[], None]) -> None:
        """Defer the updates of all buckets, which are on the way. May be repeated.

        Args:
            flush: Called before barriers and before the group ends; it calls ``flush`` of this object. The group holds
                it until the updates are applied, and with it an optimizer that the program holds no more.
        """
        self._settings = _SettingsOfStep(self._optimizer)
        self._release()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch's schedulers warn of a missing step
        self.pending = set(range(len(self._buckets.buckets_members)))
        self.guards_hooks, self._forward_seen = True, False
        self._doubtful.clear()
        self._forget = self._group.on_quiesce(flush)

    def flush(self, *_: object) -> None:
        """Apply all updates. Gradients that come afterwards count as those of a forward pass after this call."""
        if self.guards_hooks:
            with self._applying:
                self._apply(self._buckets.by_urgency)
                self._doubtful.clear()
                self._guard()

    def end(self) -> None:
        """Remove the hooks, and drop the updates whose gradients have not arrived."""
        self._hooks.remove()
        self.pending.clear()
        self._doubtful.clear()
        self.guards_hooks = False
        self._release()

    def before_gradient(self, parameter: torch.Tensor) -> None:
        """Apply all updates before the first gradient of another round. Called by the parameter's hook.

        Raises:
            ConfigurationError: The gradient was computed with an outdated parameter: the forward pass used it before
                its deferred update was applied.
        """
        with self._applying:
            if self._forward_seen:
                self._doubt(self.pending)
            if parameter in self._doubtful:
                name = next(
                    name
                    for name, member in zip(self._names, self._buckets.parameters, strict=True)
                    if member is parameter
                )
                raise ConfigurationError(
                    f"parameter {name!r} was used before its deferred update was applied, because its module was not "
                    "called as in the first step. Call optimizer.flush() before such a forward pass, or use "
                    'overlap="backward".'
                )
            self._apply(self._buckets.by_urgency)
            self._guard()

    def keep_contributions(self) -> None:
        """Give parameters other gradients, of zeros, where a pending bucket may need the present ones again."""
        if not self.pending:
            return
        needed = {id(gradient) for index in self.pending for gradient in self._buckets.gradients_needed(index)}
        for parameter in self._buckets.parameters:
            if parameter.grad is not None and id(parameter.grad) in needed:
                parameter.grad = torch.zeros_like(parameter.grad)

    def _before_forward(self, module: torch.nn.Module, *_: object) -> None:
        self._order.record(module)
        if not self.guards_hooks:
            return
        with self._applying:
            if not torch.is_grad_enabled() or (module is self._model and not module.training):
                applied = self._apply(self._buckets.by_urgency)
            else:
                self._forward_seen = True
                if not self._needs:
                    self._note_needs()
                applied = self._apply(self._needs[id(module)][0])
            if self._forward_seen:
                self._doubt(applied)
                self._doubtful -= self._needs[id(module)][1]
            self._guard()

    def _note_needs(self) -> None:
        """Remember which modules read which parameters, as far as the forward passes until now tell."""
        parameters, reads = self._buckets.parameters, self._order.reads()
        for module, buckets in self._order.waits(self._buckets.buckets_members).items():
            self._needs[module] = buckets, {parameters[index] for index in reads[module]}

    def _doubt(self, buckets: Iterable[int]) -> None:
        """Note that weights of these buckets may have been used before their update."""
        parameters, members = self._buckets.parameters, self._buckets.buckets_members
        self._doubtful.update(parameters[member] for index in buckets for member in members[index])

    def _guard(self) -> None:
        """Have hooks call ``before_gradient`` as long as an update is pending or a parameter is doubtful."""
        self.guards_hooks = bool(self.pending or self._doubtful)

    def _apply(self, buckets: Iterable[int]) -> list[int]:
        """Apply those updates that are pending, and return their buckets."""
        applied = []
        try:
            for index in buckets:
                if index in self.pending:
                    self._apply_bucket(index)
                    applied.append(index)
        except ConfigurationError:
            self.pending.clear()  # every later flush would raise the error again, and hide what comes after
            raise
        finally:
            if not self.pending:
                self._release()
        return applied

    def _release(self) -> None:
        """Have the group forget this object."""
        if self._forget is not None:
            self._forget()
            self._forget = None

    @torch.no_grad()
    @outside_inference_mode
    def _apply_bucket(self, index: int) -> None:
        """Wait for one bucket and update its parameters."""
        updates = self._buckets.take(index)
        with self._buckets.once():
            try:
                for update in updates:
                    update.parameter.grad = update.gradient
                self._settings.update([update.parameter for update in updates if update.gradient is not None])
            finally:
                # Gradients that the program has changed since step() stay so: zeroed ones do not become reduced ones.
                for update in updates:
                    update.parameter.grad = update.kept
                self.pending.discard(index)
                self._buckets.release(index)


def _snapshot(value: object) -> object:
    """Copy a tensor: schedulers change a learning rate that is a tensor in place, and replace all other values."""
    return value.clone() if isinstance(value, torch.Tensor) else value
