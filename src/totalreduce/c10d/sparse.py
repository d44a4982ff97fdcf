"""Allreduce of sparse COO tensors: everybody's indices and values on every rank, then one local sum."""

from __future__ import annotations

from collections.abc import Callable

import torch

from totalreduce.groups.group import Group
from totalreduce.groups.work import Work

__all__ = ["allreduce_sparse"]


def allreduce_sparse(group: Group, tensor: torch.Tensor, timeout_s: float) -> tuple[list[Work], Callable[[], None]]:
    """Submit the sum of a sparse tensor over all ranks; blocks only until the numbers of values are known.

    Args:
        group: Whose ranks; the tensor's shape is equal on all, the number of values need not be.
        tensor: Sparse COO. Gets the result, coalesced.
        timeout_s: Deadline of the exchange of numbers.

    Returns:
        The operations, and what turns their outcome into the result, to be called once they are done.
    """
    own = tensor.detach().coalesce()
    counts = torch.zeros(group.world_size, dtype=torch.int64)
    group.allgather(counts, torch.tensor([own._nnz()])).wait(timeout_s)
    indices = [torch.empty(own.sparse_dim(), int(count), dtype=torch.int64) for count in counts]
    values = [own.values().new_empty(int(count), *own.values().shape[1:]) for count in counts]
    works = [group.allgather(indices, own.indices().contiguous()), group.allgather(values, own.values().contiguous())]

    def finish() -> None:
        if not indices:
            return  # somebody waited before
        total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), tensor.shape, check_invariants=False)
        with torch.no_grad():
            tensor.copy_(total.coalesce())
        indices.clear()

    return works, finish
