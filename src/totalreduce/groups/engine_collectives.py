"""The engine in a native library's place: groups of operations, and ranks that join, where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch

from totalreduce.foundation.errors import DeadlineExceededError
from totalreduce.foundation.types import ReduceOp
from totalreduce.native.collectives import NativeWork
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

if TYPE_CHECKING:
    from totalreduce.groups.group import Group

__all__ = ["EngineCollectives", "OrderFree"]


@final
class _EngineWork:
    """See ``native.collectives.NativeWork``."""

    def __init__(self, work: Work) -> None:
        """Watch an operation."""
        self._work = work

    def done(self) -> bool:
        """Whether the engine says so."""
        return self._work.done()

    def wait(self, timeout_s: float) -> bool:
        """Move messages until it is done."""
        try:
            self._work.wait(max(timeout_s, 1e-3))
        except DeadlineExceededError:
            return False
        return True


@final
class EngineCollectives:
    """See ``native.collectives.NativeCollectives``. CPU tensors; every reduction of the engine."""

    def __init__(self, group: Group) -> None:
        """Use a group that nobody else uses: its operations have no names, so their order counts.

        The coordinator has claimed the memory of the tensors already.
        """
        group.claim_apart()
        self._group = group
        self.world_size = group.world_size
        self.device = torch.device("cpu")

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> NativeWork:
        """Reduce in place."""
        return _EngineWork(self._group.allreduce(tensor, op=op))

    def broadcast(self, tensor: torch.Tensor, root: int) -> NativeWork:
        """Copy the root's tensor."""
        return _EngineWork(self._group.broadcast(tensor, root=root, async_op=True))

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> NativeWork:
        """Gather equal parts."""
        return _EngineWork(self._group.allgather(output.view(-1), tensor))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> NativeWork:
        """Reduce, and keep this rank's part."""
        return _EngineWork(self._group.reduce_scatter(output, tensor.view(-1), op=op))

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> NativeWork:
        """Exchange parts of any sizes."""
        outputs = torch.split_with_sizes(output.view(-1), list(received))
        inputs = torch.split_with_sizes(tensor.view(-1), list(sent))
        return _EngineWork(self._group.alltoall(outputs, inputs))

    def split(self, ranks: Sequence[int], timeout_s: float) -> EngineCollectives:  # noqa: ARG002  (nobody is asked)
        """A subgroup."""
        return EngineCollectives(self._group.subgroup(ranks))

    def close(self) -> None:
        """End the subgroup."""
        self._group.close()


@final
@never_compiled
class OrderFree:
    """``PlannedReductions`` by the engine, which needs no order."""

    def __init__(self, group: Group, names: Sequence[str]) -> None:
        """``names``: by place."""
        self._group, self._names = group, names

    def begin(self) -> None:
        """Nothing to prepare."""

    def submit(self, place: int, tensor: torch.Tensor, *, op: ReduceOp, priority: int) -> Work:
        """An operation like any other."""
        return self._group.allreduce(tensor, name=self._names[place], op=op, priority=priority)

    def close(self) -> None:
        """Nothing to give back."""
