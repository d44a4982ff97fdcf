"""Modes of torch in the program: what the library does with tensors must work in all of them.

Torch lets a tensor that was made in ``torch.inference_mode()`` be changed only in this mode, which belongs to a thread.
The library writes results later than the call that has begun the operation, and in other threads. It also makes tensors
of its own in a call of the program, which it changes in a later call.

A ``TorchDispatchMode`` (``DebugMode``, selective checkpointing) sees the operators that its thread calls. It must not
see how the library handles its memory: some threads of the library carry the same out, so that it would see it once
and not again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["outside_inference_mode", "unseen", "version_of", "write", "writing"]

P = ParamSpec("P")
T = TypeVar("T")


def writing(*tensors: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context, without autograd, in which these tensors can be changed in place.

    Other tensors that are changed in the mode count the change, as outside of it: autograd finds out that a tensor that
    it has saved was changed. A tensor that is made in this context may be one of the mode, which cannot be used in a
    forward pass with gradients; so the context is for changes alone.
    """
    return torch.inference_mode() if any(tensor.is_inference() for tensor in tensors) else torch.no_grad()


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a result, which has no gradient, into a tensor of the program, in whatever thread and mode this is."""
    if target.requires_grad or target.is_inference() or torch._C._len_torch_dispatch_stack():
        # A tensor that consists of others (DTensor) has no memory of its own: without the dispatch torch would crash.
        consists_of_others = hasattr(target, "__tensor_flatten__")
        with contextlib.nullcontext() if consists_of_others else unseen(), writing(target):
            target.copy_(source)
    else:
        target.copy_(source)


def unseen() -> contextlib.AbstractContextManager[object]:
    """Return a context in which no ``TorchDispatchMode`` sees the operators that are called."""
    return torch._C._DisableTorchDispatch()


def outside_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Carry a function out without autograd and outside of inference mode, if the program calls it in the mode.

    For functions that make tensors which a later call of the program changes.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(mode=False), torch.no_grad():
            return function(*args, **kwargs)

    return call


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; of a tensor of inference mode torch counts nothing: 0."""
    try:
        return tensor._version
    except RuntimeError:
        return 0
