"""The library's reductions and element types for those of torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from totalreduce.foundation.types import ReduceOp

__all__ = ["arithmetic_view", "reduction_of"]

_REDUCTIONS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVG,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.BAND: ReduceOp.BAND,
    dist.ReduceOp.BOR: ReduceOp.BOR,
    dist.ReduceOp.BXOR: ReduceOp.BXOR,
}


def reduction_of(op: Any) -> ReduceOp:
    """Return the reduction for torch's ``ReduceOp`` (or its ``RedOpType``).

    Raises:
        ValueError: ``PREMUL_SUM``, which only NCCL has.
    """
    kind = getattr(op, "op", op)
    if kind not in _REDUCTIONS:
        raise ValueError(f"Cannot use ReduceOp.{getattr(kind, 'name', kind)} with totalreduce; scale the tensor first")
    return _REDUCTIONS[kind]


def arithmetic_view(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return the tensor as numbers that can be reduced: a complex tensor as pairs of real numbers, for sums only.

    Raises:
        ValueError: Complex numbers have no order, and their product is not that of their parts.
    """
    if not tensor.is_complex():
        return tensor
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"{op.name} is not defined for complex tensors")
    return torch.view_as_real(tensor)
