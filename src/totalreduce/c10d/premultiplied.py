"""``ReduceOp.PREMUL_SUM``: each rank multiplies its elements with a factor, and the products are added up.

NCCL multiplies in its kernels. Here the tensors are multiplied before they are submitted to a SUM: in place if the
operation writes them, and otherwise in a copy. torch makes such a reduction with ``ReduceOp.PREMUL_SUM(factor)``, as
FSDP2's ``set_gradient_divide_factor`` does, and shows its factor only when it is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from totalreduce.groups.group import Group
from totalreduce.tensors.memory import Operands

__all__ = ["Factor", "factor_of", "multiplied"]

#: A number, or a tensor of one element.
Factor = float | torch.Tensor


def factor_of(op: Any) -> Factor:
    """Return the factor of a PREMUL_SUM. Raises ``ValueError``."""
    if not hasattr(op, "op"):  # the member of the enumeration
        raise ValueError("ReduceOp.PREMUL_SUM has no factor: use ReduceOp.PREMUL_SUM(factor)")
    factor: Factor = op.__getstate__()[1]
    return factor.detach().reshape(()) if isinstance(factor, torch.Tensor) else factor


def multiplied(
    group: Group, tensors: Sequence[torch.Tensor], factor: Factor, timeout_s: float, *, in_place: bool
) -> list[torch.Tensor]:
    """Return the products of tensors and a factor, each rounded once to the element type.

    Args:
        group: Its operations in flight that use the tensors end first.
        tensors: The tensors.
        factor: The factor.
        timeout_s: Seconds to wait for operations in flight.
        in_place: Multiply the tensors themselves, which take the results of the reduction anyway.

    Raises:
        ValueError: Tensors of integers.
        DeadlineExceededError: An operation in flight has not ended in time.
    """
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"ReduceOp.PREMUL_SUM multiplies floating-point numbers, not {tensor.dtype}")
    operands = Operands("the tensors of PREMUL_SUM")
    for tensor in tensors:
        operands.hold(tensor, writes=in_place)
    group.operations.claim(operands, timeout_s)
    group.operations.staging.let_streams_wait(tensors)
    try:
        with torch.no_grad():
            by = [factor.to(tensor.device) if isinstance(factor, torch.Tensor) else factor for tensor in tensors]
            if in_place:
                return [tensor.mul_(number) for tensor, number in zip(tensors, by, strict=True)]
            return [tensor.mul(number) for tensor, number in zip(tensors, by, strict=True)]
    finally:
        operands.end(well=False)
