"""The interface of a library that brings its own collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from totalreduce.foundation.types import ReduceOp

__all__ = ["NativeCollectives", "NativeWork"]


class NativeWork(Protocol):
    """A collective of the library that was started."""

    def done(self) -> bool:
        """Return whether the collective has ended, with or without an error."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds for the result; return whether it is there.

        NCCL makes the current stream of the accelerator wait, and not the caller.

        Raises:
            TotalReduceError: The library reports a failure.
        """


class NativeCollectives(Protocol):
    """Collectives of one library among the ranks of one group.

    All methods but ``split`` and ``close`` return at once. All ranks must call them in one agreed order, and each rank
    from one thread at a time. Results are as exact and as repeatable as the library makes them. Tensors are contiguous,
    and on a device that the library knows. Nobody writes to them until the collective has ended, which keeps them
    alive. Element types and counts are equal on all ranks.

    Raises:
        UnsupportedError: The library does not have this collective or element type. Every collective can raise it.
    """

    world_size: int
    device: torch.device  #: The device of this rank's tensors, if the library has one; else the CPU.

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> NativeWork:
        """Reduce in place over all ranks."""

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> NativeWork:
        """Reduce into the root's tensor, in place. The tensors of the other ranks are undefined afterwards."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> NativeWork:
        """Copy the root's tensor to all ranks, in place."""

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> NativeWork:
        """Gather equal parts, by rank, into ``output``, which is ``world_size`` times as long."""

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> NativeWork:
        """Reduce ``tensor``. This rank's part of the result goes into ``output`` (``world_size`` times shorter)."""

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> NativeWork:
        """Send ``sent[r]`` elements to each rank r and receive ``received[r]`` elements from it, in rank order."""

    def split(self, ranks: Sequence[int], timeout_s: float) -> NativeCollectives:
        """Return the same library among some ranks, independent of this one. Collective among these ranks.

        Raises:
            RendezvousError: Some rank did not come in time.
        """

    def close(self) -> None:
        """Release the library's resources. No collective is under way."""
