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
        """Whether it has ended, with or without an error."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds until it has ended; return whether it has. The result is there then.

        On an accelerator this makes the current stream wait instead of the caller, where the library does so.

        Raises:
            TotalReduceError: The library reports a failure.
        """


class NativeCollectives(Protocol):
    """Collectives of one library among the ranks of one group.

    All methods but ``split`` and ``close`` return at once. All ranks must call them in one agreed order, and each rank
    from one thread at a time. Results are as exact and as repeatable as the library makes them. Tensors are contiguous
    and on a device that the library knows. They must stay untouched until the work is done; the work keeps them alive.
    Dtypes and counts are equal on all ranks.

    Attributes:
        world_size: Number of ranks.
        device: The device of this rank's tensors, as far as the library knows it when it is made: an accelerator for
            NCCL.

    Raises:
        UnsupportedError: By every collective: the library does not have this operation or element type.
    """

    world_size: int
    device: torch.device

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> NativeWork:
        """Reduce in place over all ranks."""

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> NativeWork:
        """Reduce into the root's tensor, in place. The tensors of the other ranks are undefined afterwards."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> NativeWork:
        """Copy the root's tensor to all ranks, in place."""

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> NativeWork:
        """Gather equal parts, by rank, into ``output`` (``world_size`` times as long)."""

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> NativeWork:
        """Reduce ``tensor`` and keep this rank's part of it (``world_size`` times shorter) in ``output``."""

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> NativeWork:
        """Exchange parts: ``sent`` elements for each rank, ``received`` ones from each, one after the other."""

    def split(self, ranks: Sequence[int], timeout_s: float) -> NativeCollectives:
        """The same library among some ranks, this one included, apart from everything else. Collective among them.

        Raises:
            RendezvousError: Some rank did not come in time.
        """

    def close(self) -> None:
        """Release the library's resources; no operation is under way."""
