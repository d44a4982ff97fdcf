"""The collectives and messages of a group: the methods that ``Group`` and the library's own groups share."""

from __future__ import annotations

import torch

from totalreduce.foundation import checks
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.backends import Backend, EngineBackend, Options
from totalreduce.groups.checked import Blocks, CheckedOperation
from totalreduce.groups.operations import Operations
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["Collectives"]


@never_compiled
class Collectives:
    """Collectives and messages among some ranks. Any thread.

    Attributes:
        rank: This process's index in the group, from 0.
        world_size: Number of ranks of the group.
        ranks: Their numbers in the whole job; errors such as ``PeerLost`` speak of those.
        name: The group's name.
        operations: The operations that the engine carries out for the group.
    """

    def __init__(self, operations: Operations) -> None:
        """Have the engine carry the collectives out."""
        self.operations = operations
        self.rank, self.world_size = operations.rank, operations.world_size
        self.ranks, self.name = operations.ranks, operations.name
        self._backend: Backend = EngineBackend(operations)

    def allreduce(
        self,
        tensor: torch.Tensor,
        *,
        name: str | None = None,
        op: ReduceOp = ReduceOp.SUM,
        schedule: str = "auto",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce a tensor over all ranks, in place; returns at once.

        All ranks end with bit-identical results; so does another run that chooses the same schedule. float16 and
        bfloat16 are accumulated in float32, unless ``EngineConfig.half_accumulation`` says otherwise.

        Args:
            tensor: Any shape, from 0 elements; CPU, strided; need not be contiguous.
            name: Equal on all ranks. ``None``: the n-th unnamed operation meets the n-th unnamed one elsewhere.
            op: How to reduce.
            schedule: ``auto``, ``ring``, ``star``, ``tree``, ``halving_doubling``, ``direct`` or ``hierarchical``.
            priority: Smaller is more urgent; equal ones leave in the order of submission. 32 bits, signed. Where a
                native library carries operations out, it orders those that become ready on all ranks at the same time
                (see ``Coordinator.allreduce``).
            timeout_s: Deadline in seconds of a ``wait`` that names none.

        Raises:
            ValueError: The name is in flight already, or ``priority`` is no such number.
            UnsupportedError: The tensor's device, layout or dtype, or the reduction for this dtype.
            PeerLost: A rank is gone.
            GroupClosed: This rank closed the group.
        """
        return self._backend.allreduce(tensor, op, Options(name, schedule, priority, timeout_s))

    def reduce(
        self,
        tensor: torch.Tensor,
        *,
        root: int = 0,
        name: str | None = None,
        op: ReduceOp = ReduceOp.SUM,
        schedule: str = "auto",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce a tensor over all ranks into the root's, in place; the others' tensors stay as they are.

        Args and Raises as for ``allreduce``; ``schedule`` is ``auto``, ``chain`` or ``tree``.
        """
        options = Options(name, schedule, priority, timeout_s)
        return self._backend.reduce(tensor, self._root(root), op, options)

    def broadcast(
        self,
        tensor: torch.Tensor,
        *,
        root: int = 0,
        name: str | None = None,
        schedule: str = "auto",
        priority: int = 0,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> Work:
        """Copy the root's tensor to all ranks, in place; blocks unless ``async_op``.

        ``schedule`` is ``auto``, ``chain`` or ``tree``.

        Raises:
            ConfigurationError: ``root`` is no rank of the group.
            DeadlineExceededError: Not finished in time (when blocking).
            ValueError: As for ``allreduce``, like the other errors.
        """
        work = self._backend.broadcast(tensor, self._root(root), Options(name, schedule, priority, timeout_s))
        if not async_op:
            work.wait()
        return work

    def allgather(
        self,
        outputs: Blocks,
        tensor: torch.Tensor,
        *,
        name: str | None = None,
        schedule: str = "auto",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Collect every rank's tensor on every rank; returns at once.

        Args:
            outputs: One tensor per rank, of any sizes (allgatherv), or one contiguous tensor for equal blocks.
            tensor: This rank's block, as large as its place in ``outputs``.
            name: As for ``allreduce``, like the other arguments.
            schedule: ``auto``, ``ring`` or ``direct``.
            priority: Smaller is more urgent.
            timeout_s: Deadline in seconds of a ``wait`` that names none.

        Raises:
            ConfigurationError: Sizes, dtypes or the number of tensors do not fit together here.
            MismatchError: By ``wait``: ranks disagree about the sizes.
        """
        return self._backend.allgather(outputs, tensor, Options(name, schedule, priority, timeout_s))

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        inputs: Blocks,
        *,
        name: str | None = None,
        op: ReduceOp = ReduceOp.SUM,
        schedule: str = "auto",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce the r-th block of all ranks into rank r's tensor; returns at once.

        The inputs are only read. The tensor may be this rank's block of them, which takes the result then.

        Args:
            tensor: The result, as large as this rank's place in ``inputs``.
            inputs: One tensor per rank, of sizes equal on all ranks, or one contiguous tensor for equal blocks.
            name: As for ``allreduce``, like the other arguments and the errors.
            op: How to reduce.
            schedule: ``auto``, ``ring`` or ``direct``.
            priority: Smaller is more urgent.
            timeout_s: Deadline in seconds of a ``wait`` that names none.
        """
        return self._backend.reduce_scatter(tensor, inputs, op, Options(name, schedule, priority, timeout_s))

    def gather(
        self,
        outputs: Blocks | None,
        tensor: torch.Tensor,
        *,
        root: int = 0,
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Collect every rank's tensor on the root, in ``outputs`` (``None`` elsewhere); sizes may differ (gatherv)."""
        options = Options(name, "auto", priority, timeout_s)
        return self._backend.gather(outputs, tensor, self._root(root), options)

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Blocks | None,
        *,
        root: int = 0,
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Give every rank its block of the root's ``inputs`` (``None`` elsewhere); sizes may differ (scatterv)."""
        options = Options(name, "auto", priority, timeout_s)
        return self._backend.scatter(tensor, inputs, self._root(root), options)

    def alltoall(
        self,
        outputs: Blocks,
        inputs: Blocks,
        *,
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Give block r of ``inputs`` to rank r; ``outputs[r]`` gets rank r's block for this rank (alltoallv).

        ``outputs[i]`` on rank j is as large as ``inputs[j]`` on rank i; a difference is a ``MismatchError`` on both.
        """
        return self._backend.alltoall(outputs, inputs, Options(name, "auto", priority, timeout_s))

    # ------------------------------------------------------------------------------------------------------ messages

    def send(
        self, tensor: torch.Tensor, *, dst: int, tag: int = 0, priority: int = 0, timeout_s: float | None = None
    ) -> Work:
        """Send a tensor to a rank; returns at once. The n-th message with a tag meets the n-th receive with it.

        The work is done when the tensor's memory may be reused, which says nothing about the receiver.

        Raises:
            ConfigurationError: ``dst`` is no other rank of the group.
        """
        return self.operations.send(tensor, dst, tag, priority, timeout_s)

    def recv(
        self,
        tensor: torch.Tensor,
        *,
        src: int | None,
        tag: int = 0,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Receive a tensor from a rank, or with ``src=None`` from whoever sends first; returns at once.

        ``Work.source`` is the sender's rank when the work is done. Dtype and number of elements must be the sender's.

        Raises:
            ConfigurationError: ``src`` is no other rank of the group.
        """
        if src is None:
            return self.operations.receive_any(tensor, tag, priority, timeout_s)
        return self.operations.receive(tensor, src, tag, priority, timeout_s)

    def submit(
        self, operation: CheckedOperation, name: str | None, priority: int, timeout_s: float | None = None
    ) -> Work:
        """Have the engine carry out an operation of ``groups.checked``: for callers that have bytes and no tensors.

        Args and Raises as for ``allreduce``.
        """
        return self.operations.submit(operation, name, priority, timeout_s)

    def _root(self, root: int) -> int:
        return checks.rank_in("root", root, self.world_size)
