"""Reductions that a library does not have (averages, ``bool``, small types), made of reductions that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.foundation.types import DType, ReduceOp
from totalreduce.kernels import divide, supports
from totalreduce.tensors.modes import write, writing

__all__ = ["Reduction", "check_parts", "check_tensor", "reduction_for"]

#: By reduction of ``bool``: the reduction of bytes that are 0 or 1 with the same result.
_OF_BYTES = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.BOR: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.BAND: ReduceOp.MIN,
    ReduceOp.BXOR: ReduceOp.BXOR,
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction as a library can do it."""

    #: The tensor that the library reduces in place: the caller's memory, or a copy in a wider type.
    tensor: torch.Tensor
    op: ReduceOp  #: The reduction; neither ``AVG`` nor a reduction of ``bool``.
    finish: Callable[[], None]  #: A function that is called afterwards, and puts the result into the caller's tensor.


def check_tensor(tensor: torch.Tensor, *, on_cpu: bool) -> None:
    """Check that the library can use a tensor where it lies. Raises ``UnsupportedError``."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise UnsupportedError("native collectives take contiguous tensors: call .contiguous() first")
    if on_cpu and tensor.device.type != "cpu":
        raise UnsupportedError(f"this library reads CPU memory, and the tensor is on {tensor.device}")


def check_parts(gathered: torch.Tensor, part: torch.Tensor, world_size: int) -> None:
    """Check that ``gathered`` has as many elements as the parts of all ranks, and their type.

    Raises:
        ConfigurationError: It has another number of elements, or another type.
    """
    if gathered.dtype != part.dtype or gathered.numel() != world_size * part.numel():
        raise ConfigurationError(
            f"{gathered.numel()} elements of {gathered.dtype} are not {part.numel()} elements of {part.dtype} for each "
            f"of {world_size} ranks"
        )


def reduction_for(
    tensor: torch.Tensor, op: ReduceOp, world_size: int, *, wider: Mapping[torch.dtype, torch.dtype]
) -> Reduction:
    """Return how a library reduces ``tensor`` that has neither averages nor ``bool``. Raises ``UnsupportedError``.

    Args:
        tensor: A contiguous tensor.
        op: The reduction that the caller wants.
        world_size: The divisor of averages.
        wider: Element types that the library does not have, and the wider types in which it reduces them.
    """
    name = str(tensor.dtype).removeprefix("torch.").upper()
    dtype = DType.__members__.get(name)
    if dtype is None or op is ReduceOp.NONE or not supports(dtype, op):
        raise UnsupportedError(f"{op.name} of {tensor.dtype} is not defined")
    if dtype is DType.BOOL:
        return Reduction(tensor.view(torch.uint8), _OF_BYTES[op], lambda: None)
    work = tensor.to(wider.get(tensor.dtype, tensor.dtype))

    def finish() -> None:
        if op is ReduceOp.AVG:
            with writing(work):
                divide(work, world_size)
        if work is not tensor:
            write(tensor, work)

    return Reduction(work, ReduceOp.SUM if op is ReduceOp.AVG else op, finish)
