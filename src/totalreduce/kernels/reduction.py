"""Element-wise reduction of byte ranges.

NumPy reduces the native types: one vectorised pass in one thread, with the GIL released. Torch reduces the half types,
in blocks so small that it does not start threads of its own (its grain is 32,768 elements), because training needs the
cores.

Half types are widened: ``destination`` may be float32 while ``local`` is of a half type (see ``combine``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from totalreduce.foundation.types import DType, ReduceOp
from totalreduce.kernels.arrays import Array, address_of

__all__ = ["combine", "divide", "supports"]

_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.UINT8: np.dtype(np.uint8),
    DType.INT8: np.dtype(np.int8),
    DType.INT16: np.dtype(np.int16),
    DType.INT32: np.dtype(np.int32),
    DType.INT64: np.dtype(np.int64),
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT64: np.dtype(np.float64),
    DType.BOOL: np.dtype(np.bool_),
}
_TORCH = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16, DType.FLOAT32: torch.float32}

_UFUNC: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_TORCH_OP: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}

#: Elements per torch call. Below torch's grain of 32,768 it stays in the calling thread.
_BLOCK = 32 * 1024


def supports(dtype: DType, op: ReduceOp) -> bool:
    """Whether the pair can be reduced: all pairs except averages of booleans and bitwise operations of floats."""
    if op.is_bitwise:
        return not dtype.is_floating_point
    return not (dtype is DType.BOOL and op is ReduceOp.AVG)


def combine(
    op: ReduceOp,
    local: memoryview,
    incoming: memoryview,
    destination: memoryview,
    *,
    local_dtype: DType,
    incoming_dtype: DType,
    destination_dtype: DType,
    divisor: int = 1,
) -> None:
    """Compute ``destination = (local op incoming) / divisor``, element by element.

    For native types all three dtypes are equal and ``destination`` may be ``local``. For half types each of the
    three may be float32 instead; the arithmetic is float32 and the result is rounded once.

    Args:
        op: How to combine; ``AVG`` adds, and divides where ``divisor`` is not 1.
        local: This rank's contribution, or the partial sum that it holds.
        incoming: The peer's bytes.
        destination: The memory of the result.
        local_dtype: Element type of ``local``.
        incoming_dtype: Element type of ``incoming``.
        destination_dtype: Element type of ``destination``.
        divisor: World size where this was the last contribution to an average, else 1.
    """
    if destination_dtype.is_half or incoming_dtype.is_half or local_dtype.is_half:
        if not len(local):
            return  # torch.frombuffer refuses empty buffers
        mine = torch.frombuffer(local, dtype=_TORCH[local_dtype])
        theirs = torch.frombuffer(_without_warning(incoming), dtype=_TORCH[incoming_dtype])
        result = torch.frombuffer(destination, dtype=_TORCH[destination_dtype])
        for a, b, c in zip(*(torch.split(each, _BLOCK) for each in (mine, theirs, result)), strict=True):
            total = _TORCH_OP[op](a.float(), b.float())
            if divisor != 1:
                total.div_(divisor)
            c.copy_(total)
        return
    numpy_dtype = _NUMPY[local_dtype]
    out = np.frombuffer(destination, numpy_dtype)
    with np.errstate(all="ignore"):  # overflow to infinity is the value of a sum, and no reason for a warning
        _UFUNC[op](np.frombuffer(local, numpy_dtype), np.frombuffer(incoming, numpy_dtype), out=out)
        if divisor != 1:
            _divide_native(out, divisor)


def _divide_native(values: Array, divisor: int) -> None:
    if values.dtype.kind == "f":
        np.divide(values, divisor, out=values)
    else:
        # Floor division rounds down; NCCL and C round towards zero.
        # The divisor need not fit into the element type: 200 ranks average int8 too.
        wide = values if divisor <= np.iinfo(values.dtype).max else values.astype(np.int64)
        quotient = wide // divisor
        quotient += (wide < 0) & (wide % divisor != 0)
        values[...] = quotient


def divide(tensor: torch.Tensor, divisor: int) -> None:
    """Divide a sum over ranks, in place, to the average, for libraries that have sums only.

    Torch would convert the divisor to the dtype of an integer tensor: 200 ranks would be -56 in int8.

    Args:
        tensor: Of any shape and device; integers are rounded towards zero, as in ``combine``.
        divisor: Number of ranks.
    """
    if tensor.is_floating_point():
        tensor.div_(divisor)
    elif divisor <= torch.iinfo(tensor.dtype).max:
        tensor.div_(divisor, rounding_mode="trunc")
    else:
        tensor.copy_(tensor.long().div_(divisor, rounding_mode="trunc"))


def _without_warning(body: memoryview) -> memoryview | ctypes.Array[ctypes.c_char]:
    """Return writable memory, because torch warns of read-only memory, such as a peer's; it is only read."""
    if not body.readonly:
        return body
    return (ctypes.c_char * len(body)).from_address(address_of(body))
