"""Checks that tensors can be synchronised, and returns the element types in which they travel."""

from __future__ import annotations

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from totalreduce.foundation.errors import UnsupportedError
from totalreduce.foundation.types import DType

__all__ = ["check_dense", "dtype_of", "moved_dtype_of", "problem_of_layout", "problem_of_values"]

_DTYPES = {
    torch.uint8: DType.UINT8,
    torch.int8: DType.INT8,
    torch.int16: DType.INT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.bool: DType.BOOL,
}


def dtype_of(tensor: torch.Tensor, name: str) -> DType:
    """Return the wire dtype of a tensor that is reduced. Raises ``UnsupportedError``."""
    _check_memory(tensor, name)
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        known = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise UnsupportedError(f"tensor {name!r} has dtype {tensor.dtype}; it must be one of {known}")
    return dtype


def moved_dtype_of(tensor: torch.Tensor, name: str) -> DType:
    """Return the wire dtype of a tensor that is moved and not reduced: types without arithmetic travel as bytes.

    Raises:
        UnsupportedError: Its device or layout cannot be moved.
    """
    _check_memory(tensor, name)
    return _DTYPES.get(tensor.dtype, DType.UINT8)


def _check_memory(tensor: torch.Tensor, name: str) -> None:
    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
        raise UnsupportedError(f"tensor {name!r} is on meta and has no values; use .to_empty(device='cpu') first")
    check_dense(tensor, name)


def check_dense(tensor: torch.Tensor, name: str) -> None:
    """Check that a tensor, on any device, is one whose elements can be moved and reduced.

    Raises:
        UnsupportedError: It is not a tensor, or it is sparse, nested or quantised; the message says what to do.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"{name!r} is a {type(tensor).__name__}, not a torch.Tensor: {_advice(tensor)}")
    problem = problem_of_layout(tensor)
    if problem is not None:
        raise UnsupportedError(f"tensor {name!r} {problem}")


def _advice(value: object) -> str:
    """Say what to write instead of a value that is no tensor."""
    if isinstance(value, list | tuple) and value and all(isinstance(each, torch.Tensor) for each in value):
        return "call allreduce for each tensor, and wait for all afterwards; they travel together"
    if hasattr(value, "__array_interface__"):
        return "write torch.from_numpy(array), which shares the array's memory"
    if isinstance(value, float | int | list | tuple):
        return "write torch.tensor(value), and read the result of wait()"
    return "objects of other types travel with group.allgather_object or group.broadcast_object"


def problem_of_layout(tensor: torch.Tensor) -> str | None:
    """Say why the bytes of a tensor, on any device, are not its values, and what to do; ``None`` if they are."""
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}; use .to_dense() (embedding: sparse=False)"
    if tensor.is_nested:
        return "is nested; pass its parts (.unbind()), or .to_padded_tensor(…)"
    if tensor.is_quantized:
        return (
            f"is quantised ({tensor.dtype}): its bytes mean nothing without its scale and zero point. "
            "Pass .int_repr() and the quantiser's numbers, or .dequantize()"
        )
    return None


def problem_of_values(tensor: torch.Tensor) -> str | None:
    """Say why a tensor, on any device, has no values that can be copied byte by byte, and what to do; ``None``: it has.

    A ``DTensor`` has its values in another tensor, too.
    """
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "is not initialised yet: run a forward pass first"
    problem = problem_of_layout(tensor)
    if problem is None and tensor.is_meta:
        problem = "is on meta and has no values; use .to_empty(device='cpu') first"
    if problem is None and hasattr(tensor, "__tensor_flatten__"):
        problem = f"is a {type(tensor).__name__}, whose values are in other tensors: use a plain tensor"
    return problem
