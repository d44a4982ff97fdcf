"""The collectives and messages of a group."""

from __future__ import annotations

import torch

from totalreduce.foundation import checks
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.backends import Backend, EngineBackend
from totalreduce.groups.checked import Blocks, CheckedOperation
from totalreduce.groups.operations import Operations, PreparedOperation
from totalreduce.groups.options import Options
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["Collectives"]


@never_compiled
class Collectives:
    """Collectives and messages among some ranks. Any thread may call them.

    Attributes:
        rank: Index of this process in the group, from 0.
        world_size: Number of ranks of the group.
        ranks: The numbers of these ranks in the job, which errors such as ``PeerLost`` name.
        name: The name of the group.
        operations: The operations that the engine carries out for the group.
    """

    def __init__(self, operations: Operations) -> None:
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
        """Reduce a tensor over all ranks, in place; return at once.

        The results have the same bits on all ranks, and in all runs that choose the same schedule. float16 and bfloat16
        are accumulated in float32, unless ``EngineConfig.half_accumulation`` says otherwise.

        Args:
            tensor: A strided tensor of any shape on the CPU; it need not be contiguous.
            name: The name of the operation, equal on all ranks. ``None``: the n-th unnamed operation of a rank belongs
                to the n-th unnamed operations of the others.
            op: The reduction.
            schedule: ``auto``, ``ring``, ``star``, ``tree``, ``halving_doubling``, ``direct`` or ``hierarchical``.
            priority: A signed number of 32 bits. Operations with a smaller number are more urgent. Equally urgent ones
                leave in the order of submission. See ``Coordinator.allreduce`` for native libraries.
            timeout_s: Deadline in seconds of a ``wait`` that names none.

        Raises:
            ValueError: An operation in flight has this name, or ``priority`` is not such a number.
            UnsupportedError: The tensor's device, layout or dtype, or the reduction for this dtype, is not supported.
            PeerLost: A rank is lost.
            GroupClosed: This rank has closed the group.
        """
        return self._backend.allreduce(tensor, op, Options(name, schedule, priority, timeout_s))

    def prepare_allreduce(
        self,
        tensor: torch.Tensor,
        *,
        name: str | None = None,
        op: ReduceOp = ReduceOp.SUM,
        schedule: str = "auto",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> PreparedOperation:
        """Return an allreduce of a tensor that can be started again and again: ``operation.start().wait()``.

        What ``allreduce`` checks and computes for every call is done once. Arguments and errors are those of
        ``allreduce``; the other ranks may call either. The tensor may be written between two starts, but not resized.

        Raises:
            ConfigurationError: A native library carries out the group's collectives.
        """
        return self._backend.prepare_allreduce(tensor, op, Options(name, schedule, priority, timeout_s))

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
        """Reduce a tensor over all ranks into the root's tensor. The tensors of the other ranks do not change.

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
        """Copy the root's tensor into the tensors of all ranks; block unless ``async_op``.

        Args and Raises as for ``allreduce``; ``schedule`` is ``auto``, ``chain`` or ``tree``.

        Raises:
            ConfigurationError: ``root`` is not a rank of the group.
            DeadlineExceededError: The broadcast has not ended in time (when blocking).
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
        """Collect the tensors of all ranks on every rank; return at once.

        ``outputs`` is one tensor per rank, of any sizes (allgatherv), or one contiguous tensor for equal blocks. The
        other arguments are as for ``allreduce``; ``schedule`` is ``auto``, ``ring`` or ``direct``.

        Raises:
            ConfigurationError: On this rank, sizes, dtypes or the number of tensors do not fit together.
            MismatchError: Raised by ``wait``: ranks disagree about the sizes.
        """
        return self._backend.allgather(outputs, tensor, Options(name, schedule, priority, timeout_s))

    def prepare_allgather(
        self,
        outputs: Blocks,
        tensor: torch.Tensor,
        *,
        name: str | None = None,
        schedule: str = "auto",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> PreparedOperation:
        """Return an allgather that can be started again and again, as ``prepare_allreduce`` returns an allreduce.

        Arguments and errors are those of ``allgather``; the other ranks may call either.

        Raises:
            ConfigurationError: A native library carries out the group's collectives.
        """
        return self._backend.prepare_allgather(outputs, tensor, Options(name, schedule, priority, timeout_s))

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
        """Reduce block r of all ranks into the tensor of rank r; return at once.

        ``inputs`` is one tensor per rank, of sizes that are equal on all ranks, or one contiguous tensor for equal
        blocks. It is only read, but ``tensor`` may be this rank's block, which takes the result then. Other arguments
        and errors are as for ``allreduce``; ``schedule`` is ``auto``, ``ring`` or ``direct``.
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
        """Copy every rank's tensor into the root's ``outputs`` (``None`` elsewhere); sizes may differ (gatherv)."""
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
        """Copy the root's ``inputs`` (``None`` elsewhere) into the ranks' tensors; sizes may differ (scatterv)."""
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
        """Send block r of ``inputs`` to rank r, and receive rank r's block for this rank in ``outputs[r]`` (alltoallv).

        If ``outputs[i]`` on rank j and ``inputs[j]`` on rank i differ in size, rank j gets a ``MismatchError``; so does
        rank i, unless it has sent and received everything before rank j finds the difference.
        """
        return self._backend.alltoall(outputs, inputs, Options(name, "auto", priority, timeout_s))

    # ------------------------------------------------------------------------------------------------------ messages

    def send(
        self, tensor: torch.Tensor, *, dst: int, tag: int = 0, priority: int = 0, timeout_s: float | None = None
    ) -> Work:
        """Send a tensor to a rank; return at once.

        The n-th ``send`` with a tag goes to the n-th ``recv`` with this tag. The work is done when the program may use
        the tensor's memory again. The receiver may not have the message then.

        Raises:
            ConfigurationError: ``dst`` is not another rank of the group.
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
        """Receive a tensor from rank ``src``, or with ``src=None`` from the rank that sends first; return at once.

        ``Work.source`` is the sender's rank when the work is done. Dtype and number of elements must be the sender's.

        Raises:
            ConfigurationError: ``src`` is not another rank of the group.
        """
        if src is None:
            return self.operations.receive_any(tensor, tag, priority, timeout_s)
        return self.operations.receive(tensor, src, tag, priority, timeout_s)

    def submit(
        self, operation: CheckedOperation, name: str | None, priority: int, timeout_s: float | None = None
    ) -> Work:
        """Have the engine carry out an operation of ``groups.checked``, for callers that have bytes and no tensors.

        Args and Raises as for ``allreduce``.
        """
        return self.operations.submit(operation, name, priority, timeout_s)

    def _root(self, root: int) -> int:
        return checks.rank_in("root", root, self.world_size)
