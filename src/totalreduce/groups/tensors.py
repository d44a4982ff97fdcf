"""Tensors as bytes: which ones can be synchronised, and where their memory is."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import torch

from totalreduce.foundation.errors import UnsupportedError
from totalreduce.foundation.types import DType

__all__ = ["as_bytes", "dtype_of", "moved_dtype_of"]

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


#: One type for all tensors, of which only the beginning is looked at: ctypes takes 70 µs and more to make one for each
#: size, and the messages of sparse methods have another one each time.
_MEMORY = ctypes.c_char * sys.maxsize


def dtype_of(tensor: torch.Tensor, name: str) -> DType:
    """The wire dtype of a tensor.

    Raises:
        UnsupportedError: Its device, layout or dtype cannot be synchronised; the message says what to do.
    """
    _check_memory(tensor, name)
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        known = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise UnsupportedError(f"tensor {name!r} has dtype {tensor.dtype}; it must be one of {known}")
    return dtype


def moved_dtype_of(tensor: torch.Tensor, name: str) -> DType:
    """The wire dtype of a tensor that is moved and not reduced: types without arithmetic here travel as bytes.

    Raises:
        UnsupportedError: Its device or layout.
    """
    _check_memory(tensor, name)
    return _DTYPES.get(tensor.dtype, DType.UINT8)


def _check_memory(tensor: torch.Tensor, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"{name!r} is a {type(tensor).__name__}, not a torch.Tensor")
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"tensor {name!r} is on {tensor.device}; this transport moves CPU memory. Copy it with .cpu() first"
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"tensor {name!r} has layout {tensor.layout}; use .to_dense() (embedding: sparse=False)")


def as_bytes(tensor: torch.Tensor, name: str, *, writes: bool) -> tuple[memoryview, Callable[[], None] | None]:
    """The memory of a tensor, and what to do when the operation is done.

    A contiguous tensor is used in place. Another one is copied into contiguous memory now and back at the end.

    Args:
        tensor: Checked by ``dtype_of``.
        name: For messages.
        writes: Whether the result is written back.

    Raises:
        UnsupportedError: Elements of the tensor share memory, so that it has no place for a result, or it has none.
    """
    if tensor.is_contiguous() and not tensor.is_neg():
        return _view(tensor, name), None
    plain = tensor.detach()
    if writes and any(stride == 0 and extent > 1 for stride, extent in zip(plain.stride(), plain.shape, strict=True)):
        raise UnsupportedError(f"tensor {name!r} is expanded: several elements share memory. Use .contiguous()")
    dense = plain.resolve_neg().contiguous()

    def copy_back() -> None:
        plain.copy_(dense)

    return _view(dense, name), copy_back if writes else None


def _view(tensor: torch.Tensor, name: str) -> memoryview:
    """The bytes of a contiguous tensor, without a detour through NumPy: that costs an operation some 10 µs."""
    num_bytes = tensor.nbytes
    if num_bytes == 0:
        return memoryview(bytearray(0))
    address = tensor.data_ptr()
    if not address:
        raise UnsupportedError(f"tensor {name!r} has no memory (it is fake, or known to be zero); use .clone() first")
    memory = _MEMORY.from_address(address)
    memory.tensor = tensor  # type: ignore[attr-defined]  # it lives as long as somebody has its bytes
    return memoryview(memory).cast("B")[:num_bytes]
