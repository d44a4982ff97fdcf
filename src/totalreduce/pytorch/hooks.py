"""Hooks on parameters and modules, and the undocumented functions of torch that they need.

Tried with torch 2.11 to 2.13. When a new version of torch breaks one of these functions, this file has to change.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch.optim import optimizer as _torch_optimizer
from torch.utils.hooks import RemovableHandle

from totalreduce.runner.meter import Figure
from totalreduce.tensors.compilation import never_compiled

__all__ = [
    "HookHandles",
    "StepCounter",
    "WeakFigures",
    "WeakHook",
    "backward_pass",
    "has_step_hooks",
    "has_weak_hook",
    "in_backward",
    "in_nested_backward",
    "when_backward_ends",
]

#: The frame in which autograd runs the backward function of a ``torch.autograd.Function``.
_FUNCTION_FRAME = torch.autograd.function.BackwardCFunction.apply.__code__


@never_compiled
class WeakHook:
    """Calls a bound method as long as its object lives; afterwards a call does nothing.

    A bound method as a hook would keep its object alive as long as the model. A deep copy of the model (an average of
    its weights, a teacher) has hooks that do nothing; so has a model that was saved by ``torch.save``.

    Args:
        method: The bound method.
        leading: Its first arguments, so that one method serves many parameters.
    """

    __slots__ = ("_leading", "_method")

    def __init__(self, method: Callable[..., None] | None = None, *leading: object) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._leading = leading

    @property
    def alive(self) -> bool:
        """Whether the hook still does something."""
        return self._method is not None and self._method() is not None

    def __call__(self, *arguments: Any) -> None:
        """Call the method, if its object still lives."""
        method = None if self._method is None else self._method()
        if method is not None:
            method(*self._leading, *arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakHook:
        return WeakHook()

    def __reduce__(self) -> tuple[type[WeakHook], tuple[()]]:
        return (WeakHook, ())


@final
class WeakFigures:
    """Returns the figures of a bound method as long as its object lives; afterwards none."""

    __slots__ = ("_method",)

    def __init__(self, method: Callable[[], Mapping[str, Figure]]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self) -> Mapping[str, Figure]:
        """Return the figures."""
        method = self._method()
        return {} if method is None else method()


@final
class HookHandles:
    """Registered hooks. They are removed by ``remove``, or when this object is collected."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles)

    def after_gradient(self, parameter: torch.Tensor, hook: WeakHook) -> None:
        """Have ``hook(parameter)`` called each time backward has added to the parameter's gradient."""
        self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def before_gradient(self, parameter: torch.Tensor, hook: WeakHook) -> None:
        """Have ``hook(gradient)`` called each time before backward adds a gradient to the parameter's."""
        self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def before_forward(self, modules: Iterable[torch.nn.Module], hook: WeakHook) -> None:
        """Have ``hook(module, inputs)`` called before the forward pass of each module."""
        self._handles += [module.register_forward_pre_hook(hook) for module in modules]

    def before_step(self, optimizer: torch.optim.Optimizer, hook: WeakHook) -> None:
        """Have ``hook(optimizer, arguments, options)`` called before each step of an optimizer."""
        self._handles.append(optimizer.register_step_pre_hook(hook))

    def after_any_step(self, hook: WeakHook) -> None:
        """Have ``hook(optimizer, arguments, options)`` called after each step of any torch optimizer of this process.

        ``DistributedOptimizer`` does not take it for a hook that needs the updates at once (``has_step_hooks``).
        """
        self._handles.append(_torch_optimizer.register_optimizer_step_post_hook(hook))

    def around_state_dict(self, model: torch.nn.Module, hook: WeakHook) -> None:
        """Have ``hook(...)`` called before the state of a module of the model is read or loaded."""
        for module in model.modules():
            self._handles.append(module.register_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
            self._handles.append(module.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove all hooks."""
        _remove(self._handles)


@final
@never_compiled
class StepCounter:
    """Has ``counted()`` called after each step of a torch optimizer of this process, until ``remove`` is called.

    If a program has several optimizers, the steps of the first one that steps are counted, as long as it lives.
    ``DistributedOptimizer`` does not take it for a hook that needs the updates at once (``has_step_hooks``).

    Args:
        counted: A bound method, whose object this keeps alive.
    """

    def __init__(self, counted: Callable[[], None]) -> None:
        self._counted = counted
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self.remove = _torch_optimizer.register_optimizer_step_post_hook(self).remove

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Count a step of an optimizer."""
        first = None if self._optimizer is None else self._optimizer()
        if first is None:
            self._optimizer = weakref.ref(optimizer)
        if first is None or first is optimizer:
            self._counted()


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def has_weak_hook(parameter: torch.nn.Parameter) -> bool:
    """Whether a ``WeakHook`` whose object lives is called after the parameter's gradient."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, WeakHook) and hook.alive for hook in hooks.values())


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer calls hooks before or after its ``step()``."""
    after_all = _torch_optimizer._global_optimizer_post_hooks.values()
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _torch_optimizer._global_optimizer_pre_hooks
        or any(not isinstance(hook, StepCounter | WeakHook) for hook in after_all)
    )


def backward_pass() -> int:
    """Return the number of the backward pass in which the calling thread is; -1 outside of ``backward()``."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Whether the calling thread is inside ``backward()``, as ``torch.utils.checkpoint`` finds it out."""
    return backward_pass() != -1


def in_nested_backward() -> bool:
    """Whether the present backward pass was called in another one, as checkpoints with ``use_reentrant=True`` do."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _FUNCTION_FRAME:
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return frame is not None


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Have the callback called when the present backward pass has ended; its errors are those of ``backward()``."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
