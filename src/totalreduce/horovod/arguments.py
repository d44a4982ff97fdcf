"""Checks of the arguments of collectives before anything is sent.

Wrong types raise ``ConfigurationError``, and sparse tensors ``UnsupportedError``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.horovod.compression import Compressor

__all__ = ["checked_compression", "checked_factor", "checked_splits", "checked_tensor", "checked_tensors"]


def checked_tensor(value: Any, what: str) -> torch.Tensor:
    """Return the value, which must be a dense tensor; ``what`` names the operation in messages."""
    if value is None:
        raise ConfigurationError(
            f"{what} needs a tensor, not None. The gradient of a parameter is None until a backward pass has used the "
            "parameter, and after zero_grad(): pass zeros where a rank has no gradient"
        )
    if not isinstance(value, torch.Tensor):
        raise ConfigurationError(
            f"{what} needs a torch.Tensor, not a {type(value).__name__}: broadcast_object and allgather_object send "
            "other values"
        )
    if value.layout is not torch.strided:
        raise UnsupportedError(
            f"{what} needs a dense tensor, not one of layout {value.layout}: use sparse_allreduce_async, or to_dense()"
        )
    return value


def checked_tensors(values: Any, what: str) -> list[torch.Tensor]:
    """Return the values of an iterable, which must be dense tensors."""
    if isinstance(values, torch.Tensor) or not isinstance(values, Iterable):
        raise ConfigurationError(f"{what} needs a list of tensors, not a {type(values).__name__}")
    listed = list(values)
    return [
        checked_tensor(value, what if len(listed) == 1 else f"tensor {index} of {what}")
        for index, value in enumerate(listed)
    ]


def checked_factor(name: str, value: Any) -> float:
    """Return the value as a float; infinity and NaN are allowed."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor with several elements
        raise ConfigurationError(f"{name} must be a number, not {value!r:.60}") from None


def checked_splits(splits: Sequence[int] | torch.Tensor | None) -> list[int] | None:
    """Return the number of rows for each rank."""
    if splits is None:
        return None
    rows = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    try:
        return [operator.index(row) for row in rows]
    except TypeError:
        raise ConfigurationError(
            f"splits must be whole numbers, one for each rank: a list of int, or a tensor of an integer dtype and one "
            f"dimension; not {splits!r:.120}"
        ) from None


def checked_compression(compression: Any) -> type[Compressor]:
    """Return the value, which must be a compressor."""
    if not all(callable(getattr(compression, method, None)) for method in ("compress", "decompress")):
        raise ConfigurationError(
            "compression must be Compression.none, Compression.fp16, Compression.bf16 or a class with compress and "
            f"decompress, not {compression!r:.60}"
        )
    return compression  # type: ignore[no-any-return]
