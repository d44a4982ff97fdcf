"""Sets a tensor to values that came from elsewhere, whatever kind of memory it has."""

from __future__ import annotations

import torch

from totalreduce.tensors.modes import write

__all__ = ["set_values"]


def set_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor, on any device, in any mode of torch (``modes.write``).

    ``Tensor.copy_`` refuses a tensor that is expanded, because several of its elements have one place in memory.
    """
    target = tensor
    if 0 in tensor.stride():
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                target, values = target.detach().narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    write(target, values)
