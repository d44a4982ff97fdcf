"""The engine in the role of a native library, for coordinators of groups that have no library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from totalreduce.foundation.errors import DeadlineExceededError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.backends import EngineBackend
from totalreduce.groups.operations import Operations
from totalreduce.groups.options import Options
from totalreduce.native.collectives import NativeWork
from totalreduce.tensors.work import Work

__all__ = ["EngineCollectives"]

_UNNAMED = Options()


@final
class _EngineWork:
    """``NativeWork`` of an operation of the engine."""

    def __init__(self, work: Work) -> None:
        self.done = work.done
        self._work = work

    def wait(self, timeout_s: float) -> bool:
        try:
            self._work.wait(max(timeout_s, 1e-3))
        except DeadlineExceededError:
            return False
        return True


@final
class EngineCollectives:
    """``NativeCollectives`` by the engine. Every reduction of the engine."""

    def __init__(self, operations: Operations) -> None:
        """Use the operations of a group of its own: they have no names, so ranks match them by their order."""
        self._operations = operations.apart()  # the coordinator has claimed the memory of the tensors
        self._backend = EngineBackend(self._operations)
        self.rank, self.ranks, self.world_size = operations.rank, operations.ranks, operations.world_size
        self.device = torch.device("cpu")

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> NativeWork:
        return _EngineWork(self._backend.allreduce(tensor, op, _UNNAMED))

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> NativeWork:
        return _EngineWork(self._backend.reduce(tensor, root, op, _UNNAMED))

    def broadcast(self, tensor: torch.Tensor, root: int) -> NativeWork:
        return _EngineWork(self._backend.broadcast(tensor, root, _UNNAMED))

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> NativeWork:
        return _EngineWork(self._backend.allgather(output.view(-1), tensor, _UNNAMED))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> NativeWork:
        return _EngineWork(self._backend.reduce_scatter(output, tensor.view(-1), op, _UNNAMED))

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> NativeWork:
        outputs = torch.split_with_sizes(output.view(-1), list(received))
        inputs = torch.split_with_sizes(tensor.view(-1), list(sent))
        return _EngineWork(self._backend.alltoall(outputs, inputs, _UNNAMED))

    def split(self, ranks: Sequence[int], timeout_s: float) -> EngineCollectives:
        return EngineCollectives(self._operations.subgroup(ranks, None))

    def close(self) -> None:
        self._operations.close()
