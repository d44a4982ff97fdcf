"""Collectives that a native library carries out, in an order on which the ranks agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.coordination.requests import Request
from totalreduce.coordination.sender import NegotiationCounters
from totalreduce.foundation.errors import TotalReduceError
from totalreduce.foundation.types import OpKind, ReduceOp
from totalreduce.native import tuning
from totalreduce.native.agreement import Agreement, Members
from totalreduce.native.collectives import NativeCollectives
from totalreduce.native.describing import Describer, Scaling
from totalreduce.native.operation import NativeOperation, flattened, prepare
from totalreduce.native.packing import Packer
from totalreduce.native.planned import NativeStream
from totalreduce.native.reports import Reports
from totalreduce.tensors import dtypes
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["Coordinator"]


@final
@never_compiled
class Coordinator:
    """The collectives of a group, carried out by a native library. Any thread may call its methods.

    Making a coordinator is collective.

    Each rank submits operations in any order, under names that are equal on all ranks. Once all ranks have submitted an
    operation, it is ready. The ranks agree on one order of the operations that are ready, fuse small ones, and call the
    library in this order. ``Group.use`` and ``Group.coordinate`` make coordinators.

    To agree, each rank describes its operations to rank 0. The *response cache*, which is equal on all ranks, keeps the
    descriptions of named operations: a rank announces a repeated operation by one bit instead of a description.

    Args:
        members: The ranks of the group, and the resources (runner, record of memory in use, time-outs) that the
            group's operations share. The group's engine carries the messages by which the ranks agree.
        natives: The library's communicator over the ranks of the group.
        config: The settings. All except ``stall_warning_s`` and ``stall_abort_s`` must be equal on all ranks.
        scope: A name that is equal on all ranks of the group, and different for every other coordinator of the job.

    Attributes:
        config: The settings.
        natives: The library's communicator.
    """

    def __init__(self, members: Members, natives: NativeCollectives, config: CoordinationConfig, *, scope: str) -> None:
        self.config, self.natives = config, natives
        self._members, self._describer = members, Describer(members.rank, members.world_size)
        self._reports = Reports(members.runner)
        self._is_closed = False
        packer = Packer(
            members.rank,
            natives,
            divide_by_active=config.join_divisor == "active",
            empty=lambda count, dtype: members.empty(count, dtype=dtype),
        )
        self._agreement = Agreement(members, config, packer, self._reports.batch, scope)

    # -------------------------------------------------------------------------------------------------- collectives

    def allreduce(
        self,
        tensor: torch.Tensor,
        *,
        name: str | None = None,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce a tensor over all ranks, in place; return at once.

        Args:
            tensor: A tensor of any shape on a device that the library knows; it need not be contiguous.
            name: The name of the operation, equal on all ranks. ``None``: the n-th unnamed allreduce of a rank is
                matched with the n-th unnamed allreduce of every other rank; each kind of collective counts its own.
                Unnamed operations are not kept in the response cache, so each of them costs more messages.
            op: The reduction.
            prescale: Factor before the reduction. Integers are multiplied in float64, and truncated towards zero.
            postscale: Factor after the reduction.
            priority: A signed number of 32 bits. Of operations that become ready at the same time, the one with the
                smaller number goes first; a less urgent one may be fused with it and so go before others. If ranks pass
                different priorities, that of the lowest rank that has not joined is used. While a name is in the
                response cache, it keeps the priority that was agreed first.
            timeout_s: Default time-out in seconds of ``Work.wait`` for this operation.

        Raises:
            ValueError: ``priority`` is not a signed number of 32 bits.
            ConfigurationError: ``name`` is not a valid name, or an operation in flight has it; ``op`` is not a
                reduction; more than 32,768 operations of this rank wait for the other ranks; or another
                operation in flight uses the tensor's memory.
            UnsupportedError: The tensor is sparse, nested or quantised.
            PeerLost: A rank is lost, or has closed its coordinator.
            StallError: The coordinator has ended, because some ranks did not submit an operation that others had
                submitted.
        """
        return self.grouped_allreduce(
            [tensor], name=name, op=op, prescale=prescale, postscale=postscale, priority=priority, timeout_s=timeout_s
        )[0]

    def grouped_allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        name: str | None = None,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[Work]:
        """Reduce several tensors: none is reduced before all ranks have submitted all of them.

        If the ranks disagree about one of them, all of them fail on every rank.

        Args and Raises as for ``allreduce``.
        """
        with self._describer.label(name, OpKind.ALLREDUCE, priority) as label:
            requests = self._describer.allreduces(tensors, Scaling(op, prescale, postscale), label)
            operations = [
                prepare(request, tensor, writes=True) for request, tensor in zip(requests, tensors, strict=True)
            ]
            return self._submit(operations, timeout_s)

    def broadcast(
        self,
        tensor: torch.Tensor,
        *,
        root: int = 0,
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Copy the root's tensor into the tensors of all ranks; return at once.

        Raises:
            ConfigurationError: ``root`` is not a rank of the group.
        """
        with self._describer.label(name, OpKind.BROADCAST, priority) as label:
            request = self._describer.broadcast(tensor, root, label)
            return self._submit([prepare(request, tensor, writes=self._members.rank != root)], timeout_s)[0]

    def reduce(
        self,
        tensor: torch.Tensor,
        *,
        root: int = 0,
        op: ReduceOp = ReduceOp.SUM,
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce a tensor over all ranks into the root's tensor. The tensors of the other ranks do not change."""
        with self._describer.label(name, OpKind.REDUCE, priority) as label:
            request = self._describer.reduce(tensor, root, op, label)
            return self._submit([prepare(request, tensor, writes=self._members.rank == root)], timeout_s)[0]

    def gather(
        self,
        tensor: torch.Tensor,
        *,
        outputs: Sequence[torch.Tensor] | None = None,
        root: int = 0,
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Copy every rank's tensor into the root's ``outputs``, one per rank. The other ranks pass ``None``.

        Raises:
            ConfigurationError: This rank passes more outputs than there are ranks, or passes outputs and is not the
                root; or an output has another dtype or device than the tensor.
        """
        with self._describer.label(name, OpKind.GATHER, priority) as label:
            request = self._describer.blocks(OpKind.GATHER, tensor, outputs, root, label)
            flat, parts = flattened(tensor)
            return self._submit([prepare(request, flat, outputs, parts)], timeout_s)[0]

    def scatter(
        self,
        tensor: torch.Tensor,
        *,
        inputs: Sequence[torch.Tensor] | None = None,
        root: int = 0,
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Copy the root's ``inputs``, one per rank, into the ranks' tensors. The other ranks pass ``None``.

        Raises:
            ConfigurationError: This rank passes more inputs than there are ranks, or passes inputs and is not the root;
                or an input has another dtype or device than the tensor.
        """
        with self._describer.label(name, OpKind.SCATTER, priority) as label:
            request = self._describer.blocks(OpKind.SCATTER, tensor, inputs, root, label)
            blocks = inputs or ()
            row = tensor.new_empty(sum(block.numel() for block in blocks))
            return self._submit([prepare(request, row, [tensor], blocks)], timeout_s)[0]

    def allgather(
        self,
        tensor: torch.Tensor,
        *,
        outputs: Sequence[torch.Tensor] | None = None,
        parts: Sequence[torch.Tensor] = (),
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Collect the tensors of all ranks on every rank. Only the first dimension may differ between ranks.

        Without ``outputs``, ``Work.wait`` returns one tensor with the rows of all ranks. ``outputs`` has one
        tensor per rank: if it is given, the rows of rank r are written to ``outputs[r]``. If ``parts`` are given, the
        call copies them into ``tensor``, one after the other, before the operation begins. If an operation in flight
        writes to one of them, the call raises ``ConfigurationError``; in a group on which ``keep_order`` was called, it
        waits for that operation first.
        """
        with self._describer.label(name, OpKind.ALLGATHER, priority) as label:
            dtypes.check_dense(tensor, label.name)
            rows = tensor if tensor.dim() else tensor.view(1)
            request = self._describer.allgather(rows, label)
            return self._submit([prepare(request, rows, outputs, parts)], timeout_s)[0]

    def alltoall(
        self,
        tensor: torch.Tensor,
        splits: Sequence[int] | None = None,
        *,
        outputs: Sequence[torch.Tensor] | None = None,
        parts: Sequence[torch.Tensor] = (),
        received: list[int] | None = None,
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Send rows of the tensor to each rank: the first ``splits[0]`` rows to rank 0, the next ones to rank 1.

        Without ``splits`` each rank gets the same number of rows. ``outputs``, ``parts`` and the result as for
        ``allgather``. If the caller passes a list as ``received``, it holds the number of rows from each rank once the
        operation has ended.

        Raises:
            ConfigurationError: ``splits`` does not have exactly one number per rank, or its sum differs from the number
                of rows.
        """
        with self._describer.label(name, OpKind.ALLTOALL, priority) as label:
            request = self._describer.alltoall(tensor, splits, label)
            operation = prepare(request, tensor, outputs, parts)
            if received is not None:
                operation.rows = received
            return self._submit([operation], timeout_s)[0]

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        outputs: Sequence[torch.Tensor] | None = None,
        parts: Sequence[torch.Tensor] = (),
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce a tensor over all ranks; each rank gets its share of the rows.

        If the rows do not divide evenly, the first ranks get one row more. If ``outputs`` is given, it has one tensor,
        to which the rows of this rank are written; otherwise ``Work.wait`` returns them. ``parts`` as for
        ``allgather``.
        """
        with self._describer.label(name, OpKind.REDUCE_SCATTER, priority) as label:
            request = self._describer.reduce_scatter(tensor, Scaling(op, prescale, postscale), label)
            return self._submit([prepare(request, tensor, outputs, parts)], timeout_s)[0]

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called ``barrier`` or ``join``.

        Raises:
            DeadlineExceededError: A rank is late. The message names the late ranks as far as this rank knows them.
        """
        with self._describer.label(None, OpKind.BARRIER) as label:
            request = Request(label.name, OpKind.BARRIER, cached=label.cached)
            work = self._submit([prepare(request, torch.empty(0))], timeout_s)[0]
        work.wait()

    def join(self, *, timeout_s: float | None = None) -> int:
        """Announce that this rank has no more data, and wait until all ranks have joined.

        Meanwhile this rank contributes neutral elements to the allreduces of the other ranks: zeros to sums.
        ``config.join_divisor`` says by how many ranks averages are divided. Barriers also go on. Every other collective
        that the remaining ranks submit fails with ``UnsupportedError``. Operations that this rank has submitted are
        waited for first, each for at most ``timeout_s``.

        Returns:
            The rank that joined last, equal on all ranks.

        Raises:
            DeadlineExceededError: An operation of this rank has not ended in time; then this rank has not joined. Or
                some rank has not joined in time; then this rank has, the other ranks go on, and this rank must call
                ``join`` again before it submits other operations.
        """
        last = self._agreement.join(self._members.patience(timeout_s))
        # A rank that joined early has counted fewer unnamed operations than the others, so all ranks reset their
        # counters.
        self._describer.count_from_zero()
        return last

    def planned(self, names: Sequence[str]) -> NativeStream:
        """Return an object that runs reductions in the fixed order of ``names``. Collective.

        All ranks pass the same ``names`` in the same order. The object has a communicator of its own, and the ranks
        exchange no messages to agree on an order. ``NativeStream`` is not a CUDA stream.
        """
        patience_s = self._members.patience(None)
        return NativeStream(
            self.natives.split(range(self._members.world_size), patience_s),
            names,
            lost=lambda: self.ended,
            patience_s=patience_s,
            reported=self._reports.planned,
        )

    # -------------------------------------------------------------------------------------------------- observation

    @property
    def joined(self) -> tuple[int, ...]:
        """The ranks that have joined, as far as this rank knows."""
        return self._agreement.negotiator.membership.joined

    @property
    def ended(self) -> TotalReduceError | None:
        """The error that later submissions raise (a lost rank, a stall, a closed coordinator), or ``None``."""
        return self._agreement.negotiator.ended

    @property
    def counters(self) -> NegotiationCounters:
        """The number of cycles and messages so far, and of hits and misses of the response cache."""
        return self._agreement.negotiator.counters

    def store(self, path: str | Path) -> None:
        """Write the settings to a file, for ``tr.init(coordination=path)`` in later runs.

        ``stall_warning_s`` and ``stall_abort_s`` are not written: ranks may set them differently.

        Raises:
            OSError: The file cannot be written.
        """
        tuning.write_settings(self.config, path)

    def cache_snapshot(self) -> list[tuple[str, int]]:
        """Return the names in the response cache with their bit positions, least recently used first.

        The result is equal on all ranks while no rank submits operations and none is being agreed on.
        """
        with self._members.runner.locked():
            return self._agreement.negotiator.cache.snapshot()

    def close(self, timeout_s: float = 5.0, *, reason: str = "") -> None:
        """End the coordinator on this rank. Its pending operations fail, unless the library is about to finish them.

        The call is not collective: this rank tells the other ranks. On the other ranks, operations submitted later fail
        with ``PeerLost``. Pending ones fail too, unless all ranks had already agreed on them and the library can finish
        them. The error names this rank and the ``reason``. ``timeout_s`` limits the wait for the end of the thread in
        which totalreduce calls the library. A second call does nothing; the same holds for a call in a
        forked child process.
        """
        if self._is_closed or not self._members.runner.home.is_here:
            return
        self._is_closed = True
        self._agreement.close(timeout_s, reason)
        self.natives.close()

    def _submit(self, operations: Sequence[NativeOperation], timeout_s: float | None) -> list[Work]:
        patience_s = self._members.patience(timeout_s)
        self._agreement.submit(operations, patience_s)
        return [
            Work(self._agreement, operation.handle, operation.returned, operation.request.name, patience_s)
            for operation in operations
        ]
