"""Arrays and tensors of the program, as NumPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.kernels.arrays import Array
from totalreduce.tensors.flats import pinned
from totalreduce.tensors.modes import unseen, writing
from totalreduce.tensors.streams import is_on_accelerator

__all__ = ["Keys", "Values", "array_of", "destination_of", "keys_of", "readable", "share_memory"]

#: Keys: ascending integers, or ``slice(a, b)`` for all keys from a to b - 1.
Keys = Array | torch.Tensor | Sequence[int] | slice
#: What is pushed or pulled.
Values = Array | torch.Tensor


def keys_of(keys: Array | torch.Tensor | Sequence[int]) -> Array:
    """Return listed keys as an array."""
    if isinstance(keys, torch.Tensor):
        return array_of("keys", keys)
    array = np.asarray(keys)
    is_empty_list = not array.size and not isinstance(keys, np.ndarray)
    return array.astype(np.int64) if is_empty_list else array  # NumPy takes an empty list for one of float64


def array_of(name: str, value: Any) -> Array:
    """Return an array with the memory of a tensor or an array, or with a copy of a tensor of an accelerator."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, torch.Tensor):
        raise ConfigurationError(f"{name} must be a NumPy array or a torch tensor, not {type(value).__name__}")
    with contextlib.suppress(TypeError, RuntimeError):
        found: Array = value.detach().cpu().numpy()
        return found
    raise ConfigurationError(
        f"{name} must be a dense tensor of a type that NumPy has, not {value.dtype} on {value.device}"
    )


def destination_of(out: Any) -> tuple[Array, Callable[[], object] | None]:
    """Return the array into which values are received, and what brings them to ``out`` when all have come.

    Without an accelerator the array has the memory of ``out``, and nothing is left to do.
    """
    if not isinstance(out, torch.Tensor) or not is_on_accelerator(out):
        return array_of("out", out), None
    if not out.is_contiguous():
        raise ConfigurationError("out must be contiguous")
    host = pinned(out.shape, out.dtype)
    return array_of("out", host), lambda: _enqueue(out, host)


def _enqueue(out: torch.Tensor, host: torch.Tensor) -> None:
    with unseen(), writing(out):
        out.detach().copy_(host, non_blocking=True)


def share_memory(values: Any, out: Any) -> bool:
    """Return whether two arrays or tensors may have memory in common."""
    tensors = [each for each in (values, out) if isinstance(each, torch.Tensor) and is_on_accelerator(each)]
    if not tensors:
        return np.may_share_memory(array_of("values", values), array_of("out", out))
    return len(tensors) == 2 and values.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()


def readable(array: Array) -> Array:
    """Return a contiguous, writable array with these values, because torch warns about read-only memory.

    It is a copy if the given array is not like that.
    """
    array = np.ascontiguousarray(array)
    return array if array.flags.writeable else array.copy()
