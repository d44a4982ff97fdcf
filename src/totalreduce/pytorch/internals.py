"""Everything of PyTorch's that is not documented API but used here, in one place.

Tried with torch 2.11 to 2.13. When a new version breaks one of these, this is the only file to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import optimizer as _torch_optimizer
from torch.utils.hooks import RemovableHandle

__all__ = [
    "after_gradient",
    "around_state_dict",
    "copy_into",
    "fill_zero",
    "gradient_hooks",
    "has_step_hooks",
    "in_backward",
    "version_of",
]


def after_gradient(parameter: torch.Tensor, hook: Callable[..., None]) -> RemovableHandle:
    """Call ``hook(parameter)`` each time backward has added to its gradient. Not typed by torch."""
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return, no-untyped-call]


def around_state_dict(module: torch.nn.Module, hook: Callable[..., None]) -> list[RemovableHandle]:
    """Call ``hook(...)`` before a module's state is read or loaded. Not typed by torch."""
    return [
        module.register_state_dict_pre_hook(hook),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(hook),  # type: ignore[no-untyped-call]
    ]


def in_backward() -> bool:
    """Whether the calling thread is inside ``backward()``.

    ``_current_graph_task_id`` is what ``torch.utils.checkpoint`` uses for the same question; -1 means
    "outside".
    """
    return bool(torch._C._current_graph_task_id() != -1)


def copy_into(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy many tensors in one call; for small ones a loop in Python costs more than the bytes."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def fill_zero(tensors: Sequence[torch.Tensor]) -> None:
    """Zero many tensors in one call."""
    if tensors:
        torch._foreach_zero_(list(tensors))


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was changed in place. Shared with its views, not with ``.data``."""
    return int(tensor._version)


def gradient_hooks(parameter: torch.Tensor) -> list[Any]:
    """The post-accumulate hooks of a parameter; torch offers no way to list them."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return list(hooks.values()) if hooks else []


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody wants to be called before or after each ``step()`` of the optimizer."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _torch_optimizer._global_optimizer_pre_hooks
        or _torch_optimizer._global_optimizer_post_hooks
    )
