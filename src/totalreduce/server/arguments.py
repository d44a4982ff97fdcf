"""Arrays and tensors of the program, as NumPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.kernels.arrays import Array

__all__ = ["Keys", "Values", "array_of", "keys_of", "readable"]

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
    """Return an array with the memory of a tensor or an array."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, torch.Tensor):
        raise ConfigurationError(f"{name} must be a NumPy array or a torch tensor, not {type(value).__name__}")
    with contextlib.suppress(TypeError, RuntimeError):
        found: Array = value.detach().numpy()
        return found
    raise ConfigurationError(f"{name} must be a dense tensor on the CPU, not {value.dtype} on {value.device}")


def readable(array: Array) -> Array:
    """Return a contiguous, writable array with these values, because torch warns about read-only memory.

    It is a copy if the given array is not like that.
    """
    array = np.ascontiguousarray(array)
    return array if array.flags.writeable else array.copy()
