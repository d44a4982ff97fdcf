"""Allreduce of sparse COO tensors: an allgather of all indices and values, then a local sum on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

import torch

from totalreduce.groups.group import Group
from totalreduce.tensors.modes import unseen, write
from totalreduce.tensors.work import Work

__all__ = ["allreduce_sparse"]


def allreduce_sparse(group: Group, tensor: torch.Tensor, timeout_s: float) -> tuple[list[Work], Callable[[], None]]:
    """Submit the sum of a sparse tensor over all ranks; blocks only until the numbers of values are known.

    The shape is equal on all ranks, the number of values need not be. The tensor gets the result, coalesced.

    Returns:
        The operations, and the local sum that follows them.
    """
    own = tensor.detach().coalesce().cpu()
    counts = torch.zeros(group.world_size, dtype=torch.int64, device="cpu")
    group.allgather(counts, torch.tensor([own._nnz()], dtype=torch.int64, device="cpu")).wait(timeout_s)
    indices = [torch.empty(own.sparse_dim(), int(count), dtype=torch.int64, device="cpu") for count in counts]
    values = [own.values().new_empty(int(count), *own.values().shape[1:]) for count in counts]
    works = [group.allgather(indices, own.indices().contiguous()), group.allgather(values, own.values().contiguous())]
    return works, _SparseSum(tensor, indices, values).finish


@final
class _SparseSum:
    """The local sum that ends an allreduce of sparse tensors."""

    def __init__(self, tensor: torch.Tensor, indices: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        self._tensor, self._indices, self._values = tensor, indices, values
        self._lock = threading.Lock()
        self._finished = False

    def finish(self) -> None:
        """Add up the values, once."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            with unseen():
                indices, values = torch.cat(self._indices, 1), torch.cat(self._values)
                total = torch.sparse_coo_tensor(
                    indices, values, self._tensor.shape, check_invariants=False, device=values.device
                )
                write(self._tensor, total.coalesce())
