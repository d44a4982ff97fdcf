"""Collectives that a native library carries out, in an order on which the ranks agree."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

import torch

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.coordination.requests import Request
from totalreduce.coordination.sender import NegotiationCounters
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError, TotalReduceError
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
from totalreduce.tensors.barriers import Barriers
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

    Submitting an operation raises ``ConfigurationError`` if an operation in flight uses the same memory and at least
    one of the two writes it. In a group on which ``keep_order`` was called, the submission waits for the other
    operation instead, for at most ``timeout_s``, and then raises ``DeadlineExceededError``. Within one call, a tensor
    that is written may not share memory with another tensor that is written.

    Every method that submits operations raises the errors listed under ``allreduce``, and those in its own list. If
    ranks submit different operations under one name, ``Work.wait`` raises ``MismatchError`` on every rank.

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
        self._closing = threading.Lock()  #: Held from the first call of ``close`` on.
        self._barriers = Barriers()
        packer = Packer(
            members.rank,
            natives,
            divide_by_active=config.join_divisor == "active",
            empty=lambda count, dtype: members.empty(count, dtype=dtype),
        )
        self._agreement = Agreement(members, config, packer, self._reports.batch, self._start_over, scope)

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
            name: The name of the operation, equal on all ranks. ``None``: the operation gets a number. Each rank counts
                its unnamed operations of each kind (``allreduce`` and ``grouped_allreduce`` are one kind), from the
                beginning or from the last ``join`` of all ranks. Calls that raise an error do not count, unless another
                thread has submitted an unnamed operation of the kind meanwhile: use names if several threads submit.
                Operations of one kind with equal numbers belong together. Unnamed operations are not kept in the
                response cache, so each of them costs more messages.
            op: The reduction.
            prescale: Factor before the reduction. Integers are multiplied in float64, and truncated towards zero.
            postscale: Factor after the reduction.
            priority: A signed number of 32 bits. Of operations that become ready at the same time, the one with the
                smaller number goes first. A less urgent operation may be fused into the batch of a more urgent one, and
                then runs before operations that are more urgent than itself. If the ranks pass different priorities,
                the priority of the lowest rank that has not joined applies. The response cache stores this priority
                with the name. As long as the cache has the name, the priorities of later calls have no effect.
            timeout_s: Default time-out in seconds of ``Work.wait`` for this operation.

        Raises:
            ConfigurationError: ``name`` is not a valid name, or an operation in flight has it; ``op`` is not a
                reduction; ``priority`` is not a signed number of 32 bits; 32,768 operations of this rank, or 40 MiB of
                their descriptions, wait for the other ranks already; or an operation in flight uses the memory (see
                the class). If the library lacks the reduction or the element type, the submission succeeds,
                ``Work.wait`` raises ``ConfigurationError``, and the tensor is unchanged.
            UnsupportedError: The tensor is sparse, nested, quantised or expanded, or has no memory.
            DeadlineExceededError: After ``keep_order``: an operation in flight has not released the memory in time.
            GroupClosed: This rank has closed the coordinator or the group.
            PeerLost: A rank is lost or could not carry an operation out; or a rank has closed its coordinator, and an
                operation needed it.
            StallError: The coordinator has ended, because some ranks did not submit an operation that others had
                submitted.
            TotalReduceError: The coordinator has ended, because this rank could not carry an operation out.
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

        All ranks pass the same number of tensors; otherwise the operations are never ready, and the coordinator ends
        with ``StallError`` after ``config.stall_abort_s`` seconds (never, if that is 0). If the ranks disagree about
        one of the tensors, all operations of this call fail, on every rank. ``prescale``, ``priority`` and the other
        arguments are those of ``allreduce``.

        Returns:
            One handle for each tensor, in their order.

        Raises:
            ConfigurationError: Two of the tensors share memory.
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
        """Copy the root's tensor into the tensors of all ranks, which have its shape and dtype; return at once.

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
        """Reduce a tensor over all ranks into the root's tensor. The tensors of the other ranks do not change.

        Raises:
            ConfigurationError: ``root`` is not a rank of the group.
        """
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

        The tensors of the ranks may differ in size. If the root passes too few outputs, or an output of another size
        than the tensor of its rank, ``Work.wait`` raises ``MismatchError`` on every rank. Otherwise it returns an empty
        tensor, on the root too.

        Raises:
            ConfigurationError: ``root`` is not a rank of the group; this rank passes more outputs than there are ranks,
                or passes outputs and is not the root; or an output has another dtype or device than the tensor.
        """
        with self._describer.label(name, OpKind.GATHER, priority) as label:
            request = self._describer.blocks(OpKind.GATHER, tensor, outputs, root, label)
            flat, parts = flattened(tensor)
            # An empty list is treated like ``None``. On the root this is an error, but it is not raised here: rank 0
            # finds it when it compares the requests, so that every rank gets a ``MismatchError``.
            return self._submit([prepare(request, flat, outputs or None, parts)], timeout_s)[0]

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

        The tensors of the ranks may differ in size. If the root passes too few inputs, or an input of another size than
        the tensor of its rank, ``Work.wait`` raises ``MismatchError`` on every rank. Otherwise it returns ``tensor``.

        Raises:
            ConfigurationError: ``root`` is not a rank of the group; this rank passes more inputs than there are ranks,
                or passes inputs and is not the root; or an input has another dtype or device than the tensor.
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

        Args:
            tensor: The rows of this rank. A scalar counts as one row.
            outputs: One tensor per rank: the rows of rank r are written to ``outputs[r]``, which has as many elements,
                and ``Work.wait`` returns an empty tensor. If an output has another size, ``Work.wait`` raises
                ``MismatchError`` on this rank. ``None``: ``Work.wait`` returns one tensor with the rows of all ranks.
            parts: Tensors that the call copies into ``tensor``, one after the other, before it returns. They may be
                changed as soon as it has returned. With ``parts``, ``tensor`` is a staging buffer: it must be
                contiguous and have as many elements as all parts together. For the check of shared memory (see the
                class), the operation writes ``tensor``.
            name: As for ``allreduce``.
            priority: As for ``allreduce``.
            timeout_s: As for ``allreduce``.

        Raises:
            ConfigurationError: ``outputs`` does not have one tensor per rank; the parts have another dtype than
                ``tensor``, or another number of elements; or there are parts, and ``tensor`` is not contiguous.
        """
        with self._describer.label(name, OpKind.ALLGATHER, priority) as label:
            dtypes.check_dense(tensor, label.name)
            rows = tensor if tensor.dim() else tensor.view(1)
            request = self._describer.allgather(rows, outputs, label)
            return self._submit([_prepare_staged(request, rows, outputs, parts)], timeout_s)[0]

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

        Without ``splits`` each rank gets the same number of rows, so the number of rows is a multiple of the number of
        ranks. The rows that rank r sends to this rank are written to ``outputs[r]``; ``outputs`` and ``parts``
        otherwise have the meaning that they have in ``allgather``, and ``Work.wait`` returns the same kind of result.
        If the caller passes a list as ``received``, it holds the number of rows from each rank once the operation has
        ended.

        Raises:
            ConfigurationError: ``splits`` does not have exactly one number per rank, has a negative number, or its sum
                differs from the number of rows; without ``splits``: the rows do not divide evenly among the ranks; or
                the tensor is a scalar; or ``outputs`` or ``parts`` violate a condition that ``allgather`` lists.
        """
        with self._describer.label(name, OpKind.ALLTOALL, priority) as label:
            request = self._describer.alltoall(tensor, splits, outputs, label)
            operation = _prepare_staged(request, tensor, outputs, parts)
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
        """Reduce a tensor over all ranks; each rank gets its share of the rows. ``Work.wait`` returns these rows.

        If the rows do not divide evenly, the first ranks get one row more. If ``outputs`` is given, it has one tensor,
        to which this rank's share of the reduced rows is written, and which ``Work.wait`` returns. If this tensor has
        another number of elements than the share, ``Work.wait`` raises ``MismatchError`` on this rank. ``parts`` has
        the meaning that it has in ``allgather``.

        Raises:
            ConfigurationError: The tensor is a scalar; ``outputs`` does not have exactly one tensor; or ``parts``
                violates a condition that ``allgather`` lists.
        """
        with self._describer.label(name, OpKind.REDUCE_SCATTER, priority) as label:
            request = self._describer.reduce_scatter(tensor, Scaling(op, prescale, postscale), outputs, label)
            return self._submit([_prepare_staged(request, tensor, outputs, parts)], timeout_s)[0]

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called ``barrier`` or ``join``.

        If a call has exceeded its time-out, the next call waits for the same barrier. The same holds after Ctrl-C,
        unless the thread was moving messages and Ctrl-C has ended the group.

        Raises:
            DeadlineExceededError: The barrier has not ended in time. Once a barrier has waited for
                ``config.stall_warning_s`` seconds (never, if that is 0), this rank asks the other ranks whether they
                have submitted it, and the message then names the ranks that have not, and those that have not answered.
                Before the answers arrive, it names all other ranks that have not joined. If all ranks have called
                ``barrier`` and earlier operations are still being carried out, the message says so.
            TotalReduceError: The coordinator has ended or ends during the call. The error raised is the value of the
                attribute ``ended``.
            Exception: This rank could not carry an operation out: the original error (``ended.__cause__``).
        """
        patience_s = self._members.patience(timeout_s)

        def submit() -> Work:
            with self._describer.label(None, OpKind.BARRIER) as label:
                request = Request(label.name, OpKind.BARRIER, cached=label.cached)
                return self._submit([prepare(request, torch.empty(0, dtype=torch.float32, device="cpu"))], patience_s)[
                    0
                ]

        self._barriers.wait(submit, patience_s)

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
                another rank has not joined in time. In this case this rank has joined nevertheless, and the other ranks
                go on. Before this rank submits other operations, it must call ``join`` again, which waits for the same
                join.
            TotalReduceError: The coordinator has ended or ends during the call. The error raised is the value of the
                attribute ``ended``.
        """
        return self._agreement.join(self._members.patience(timeout_s))

    def planned(self, names: Sequence[str]) -> NativeStream:
        """Return an object that runs reductions in the fixed order of ``names``. Collective.

        All ranks pass the same ``names`` in the same order. The object has a communicator of its own, and the ranks
        exchange no messages to agree on an order. The caller closes the object; ``close`` of the coordinator does not.
        When a rank has closed its coordinator, reductions of the object that have not ended fail: on that rank with
        ``GroupClosed``, as soon as the coordinator has ended; on the other ranks with ``PeerLost``, at the latest about
        three seconds after they learn of it. ``NativeStream`` is not a CUDA stream.

        Raises:
            DeadlineExceededError: Some rank has not called ``planned`` in time.
            RendezvousError: Some rank has not made its communicator in time.
            GroupClosed: This rank has closed the coordinator or the group.
            TotalReduceError: The coordinator has ended. The error raised is the value of the attribute ``ended``.
        """
        patience_s = self._members.patience(None)
        self._agreement.check_alive()
        # While MPI creates a communicator, the engine's messages do not move on this rank. The other ranks may need
        # such messages before they call ``planned``. So all ranks meet in a barrier of the engine before any of them
        # creates the communicator.
        self._members.barrier(patience_s)
        return NativeStream(
            self.natives.split(range(self._members.world_size), patience_s),
            names,
            lost=self._agreement.lost,
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
        """The error with which the coordinator has ended, and which later submissions raise; ``None`` before.

        It is one of: ``PeerLost``; ``StallError``; ``GroupClosed``, if this rank has closed the coordinator or the
        group, or cannot move messages any more; another ``TotalReduceError``, if this rank could not carry an operation
        out. If another rank has closed its coordinator, the coordinator of this rank ends when an operation needs that
        rank (see ``close``), and not before.
        """
        return self._agreement.negotiator.ended

    @property
    def counters(self) -> NegotiationCounters:
        """A copy of the counters: cycles and messages so far, hits and misses of the response cache."""
        with self._members.runner.locked():
            return replace(self._agreement.negotiator.counters)

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
        """Carry out the operations on which the ranks have agreed, and end the coordinator on this rank.

        On this rank, submissions raise ``GroupClosed`` from the beginning of the call, or the error of ``ended`` if the
        coordinator had ended before. This method distinguishes three kinds of operations. (1) The ranks had agreed on
        the operation when the call began: it is carried out, and fails with ``GroupClosed`` if it has not ended after
        ``timeout_s`` seconds. (2) The ranks agree on it during the call: it may be carried out, or fail with
        ``GroupClosed`` when the coordinator ends. (3) The ranks have not agreed on it when the coordinator ends: it
        fails with ``GroupClosed``. If this method is called in the thread that carries out the coordinator's operations
        (by a callback of ``Work.on_done`` that runs there), the method does not wait. Operations that the library has
        not finished by then fail.

        The call is not collective: this rank tells the other ranks at the end. Their coordinators end with
        ``PeerLost``, which names this rank and the ``reason``, when an operation needs this rank. An operation needs
        this rank if the ranks have not agreed on it, if it is submitted later, or if the ranks have agreed on it and
        this rank has not carried it out. A ``join`` that has not ended needs this rank, too. When the coordinator of
        another rank ends, all its pending operations fail.

        This method releases the library before it returns. But if the thread that carries out the operations has not
        ended after ``timeout_s`` (a call of the library is still under way), or calls this method itself, this thread
        releases the library later. A second call of this method does nothing; the same holds for a call in a forked
        child process.

        Raises:
            ConfigurationError: ``timeout_s`` is negative, not finite, or no number. Nothing has changed.
        """
        timeout_s = checks.seconds("timeout_s", timeout_s, or_zero=True)
        if not self._members.runner.home.is_here or not self._closing.acquire(blocking=False):
            return
        self._agreement.close(timeout_s, reason, self.natives.close)

    def _start_over(self) -> None:
        """Note that all ranks have joined."""
        # A rank that joined early has counted fewer unnamed operations than the others, so all ranks reset their
        # counters.
        self._describer.count_from_zero()
        self._barriers.clear()  # all of them have ended: a rank waits for its operations before it joins

    def _submit(self, operations: Sequence[NativeOperation], timeout_s: float | None) -> list[Work]:
        patience_s = self._members.patience(timeout_s)
        self._agreement.submit(operations, patience_s)
        return [
            Work(self._agreement, operation.handle, operation.returned, operation.request.name, patience_s)
            for operation in operations
        ]


def _prepare_staged(
    request: Request, tensor: torch.Tensor, outputs: Sequence[torch.Tensor] | None, parts: Sequence[torch.Tensor]
) -> NativeOperation:
    """Make an operation; check that its tensor can be filled with ``parts``, if there are any (see ``prepare``)."""
    if parts and not tensor.is_contiguous():
        raise ConfigurationError(
            f"{request.name!r}: parts are copied into the tensor, which must be contiguous, and is not contiguous "
            f"(shape {tuple(tensor.shape)}, strides {tensor.stride()}). Pass a new one, made by torch.empty"
        )
    return prepare(request, tensor, outputs, parts)
