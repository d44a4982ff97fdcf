"""Collectives of a group that another library carries out, in an order on which the ranks agree."""

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
from totalreduce.native.agreement import Agreement
from totalreduce.native.collectives import NativeCollectives
from totalreduce.native.describing import Describer, Scaling
from totalreduce.native.members import Members
from totalreduce.native.operation import NativeOperation, prepare
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
    """Collectives of a group that a native library carries out. Any thread. Making one is collective.

    Tensors may be submitted in any order on different ranks, under names that are equal on all of them. Operations
    that are ready on all ranks are fused and handed to the library in one order. ``Group.use`` and
    ``Group.coordinate`` make coordinators, after the ranks have compared their settings.

    Args:
        members: The group; its engine carries the messages of the agreement.
        natives: The library, with the same members.
        config: Settings, equal on all ranks.
        scope: Tells the coordinators of one job apart.
    """

    def __init__(self, members: Members, natives: NativeCollectives, config: CoordinationConfig, *, scope: str) -> None:
        self.config, self.natives = config, natives
        self._members, self._describer = members, Describer(members.world_size)
        self._reports = Reports(members.runner)
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
        """Reduce a tensor over all ranks, in place; returns at once.

        Args:
            tensor: Any shape; of a device that the library knows; need not be contiguous.
            name: Equal on all ranks. ``None``: the n-th unnamed operation meets the n-th unnamed one elsewhere, and
                never one with a name; such operations are not remembered, so that each costs a slow agreement.
            op: How to reduce.
            prescale: Factor before the reduction; integers are multiplied as float64 and cut off.
            postscale: Factor after it.
            priority: Of operations that become ready on all ranks at the same time, the smaller one goes first; 32
                bits, signed. The priority of the first rank that has data counts. A name keeps it as long as the ranks
                remember the agreement on that name.
            timeout_s: Deadline in seconds of a ``wait`` that names none.

        Raises:
            ValueError: ``priority`` is no such number.
            ConfigurationError: The name is no name of an operation, or it is in flight; the reduction is none; more
                than 32,768 operations of this rank wait for the others; or the memory is in flight.
            UnsupportedError: A tensor that is sparse, nested or quantised.
            PeerLost: A rank is gone.
            StallError: The agreement has ended.
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
        """Reduce several tensors, all or none of them: an error of one tensor fails all of them, on every rank.

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
        """Copy the root's tensor to all ranks, in place; returns at once.

        Raises:
            ConfigurationError: ``root`` is no rank of the group.
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
        """Reduce a tensor over all ranks into the root's tensor, in place; the others' tensors stay as they are."""
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
        """Copy every rank's tensor into the root's ``outputs``, one for each rank; the other ranks pass ``None``."""
        with self._describer.label(name, OpKind.GATHER, priority) as label:
            request = self._describer.blocks(OpKind.GATHER, tensor, outputs, root, label)
            return self._submit([prepare(request, tensor.reshape(-1), outputs, [tensor])], timeout_s)[0]

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
        """Copy the root's ``inputs``, one for each rank, into the ranks' tensors; the other ranks pass ``None``."""
        with self._describer.label(name, OpKind.SCATTER, priority) as label:
            request = self._describer.blocks(OpKind.SCATTER, tensor, inputs, root, label)
            joined = torch.cat([block.reshape(-1) for block in inputs]) if inputs else tensor.new_empty(0)
            return self._submit([prepare(request, joined, [tensor], inputs or ())], timeout_s)[0]

    def allgather(
        self,
        tensor: torch.Tensor,
        *,
        outputs: Sequence[torch.Tensor] | None = None,
        copied: Sequence[torch.Tensor] = (),
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Collect every rank's tensor, one behind the other along the first dimension; the others are equal.

        ``Work.wait`` returns the whole, unless ``outputs`` has a place for every rank's part. ``copied``: the
        tensors that ``tensor`` was copied from, which no operation in flight may write.
        """
        with self._describer.label(name, OpKind.ALLGATHER, priority) as label:
            dtypes.check_dense(tensor, label.name)
            rows = tensor if tensor.dim() else tensor.view(1)
            request = self._describer.allgather(rows, label)
            return self._submit([prepare(request, rows, outputs, copied)], timeout_s)[0]

    def alltoall(
        self,
        tensor: torch.Tensor,
        splits: Sequence[int] | None = None,
        *,
        outputs: Sequence[torch.Tensor] | None = None,
        copied: Sequence[torch.Tensor] = (),
        received: list[int] | None = None,
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Send ``splits[r]`` rows of the tensor to each rank r, one after the other; without splits equally many.

        ``Work.wait`` returns the received rows, by rank, unless ``outputs`` has a place for each part; ``received`` is
        then filled with the rows from each rank. ``copied`` as for ``allgather``.

        Raises:
            ConfigurationError: The splits are not one for each rank, or do not add up to the rows.
        """
        with self._describer.label(name, OpKind.ALLTOALL, priority) as label:
            request = self._describer.alltoall(tensor, splits, label)
            operation = prepare(request, tensor, outputs, copied)
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
        copied: Sequence[torch.Tensor] = (),
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce over all ranks and return this rank's rows by ``Work.wait``; first ranks get one more if uneven.

        ``outputs`` and ``copied`` as for ``allgather``, with one place.
        """
        with self._describer.label(name, OpKind.REDUCE_SCATTER, priority) as label:
            request = self._describer.reduce_scatter(tensor, Scaling(op, prescale, postscale), label)
            return self._submit([prepare(request, tensor, outputs, copied)], timeout_s)[0]

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it, or joined.

        Raises:
            DeadlineExceededError: Some rank did not come in time; the message names it.
        """
        with self._describer.label(None, OpKind.BARRIER) as label:
            request = Request(label.name, OpKind.BARRIER, cached=label.cached)
            work = self._submit([prepare(request, torch.empty(0))], timeout_s)[0]
        work.wait()

    def join(self, *, timeout_s: float | None = None) -> int:
        """Say that this rank has no more data; take part in the others' reductions until all have joined.

        It contributes neutral elements: zeros to sums. Averages are divided as ``config.join_divisor`` says.

        Returns:
            The rank that joined last, equal on all ranks.

        Raises:
            DeadlineExceededError: It takes longer; the others go on, and ``join`` may be called again.
        """
        last = self._agreement.join(self._members.patience(timeout_s))
        self._describer.unnamed.clear()  # a rank that joined early has counted fewer of them
        return last

    def planned(self, names: Sequence[str]) -> NativeStream:
        """Reductions in a planned order, apart from everything else. Collective."""
        patience_s = self._members.patience(None)
        return NativeStream(
            self.natives.split(range(self._members.world_size), patience_s),
            names,
            lost=lambda: self.ended,
            patience_s=patience_s,
            reported=self._reports.planned if self._members.runner.engine.observers else None,
        )

    # -------------------------------------------------------------------------------------------------- observation

    @property
    def joined(self) -> tuple[int, ...]:
        """Ranks that have no more data, as far as this rank has heard."""
        return self._agreement.negotiator.membership.joined

    @property
    def ended(self) -> TotalReduceError | None:
        """The reason why submissions are refused: a rank is lost, ranks stalled, or it was closed; ``None`` before."""
        return self._agreement.negotiator.ended

    @property
    def counters(self) -> NegotiationCounters:
        """The costs of the agreement so far."""
        return self._agreement.negotiator.counters

    def store(self, path: str | Path) -> None:
        """Write the settings to a file, for ``tr.init(coordination=path)`` in later runs.

        Raises:
            OSError: It cannot be written.
        """
        tuning.write_settings(self.config, path)

    def cache_snapshot(self) -> list[tuple[str, int]]:
        """Names and bits of the response cache, least recently used first; equal on all ranks."""
        with self._members.runner.locked():
            return self._agreement.negotiator.cache.snapshot()

    def close(self, timeout_s: float = 5.0, *, reason: str = "") -> None:
        """End the coordinator on this rank; pending operations fail. Harmless when called twice, and in a forked child.

        Not collective. The other ranks are told: their operations that need this rank, and later ones, fail with
        ``PeerLost``, which names this rank and says the ``reason``, if there is one.
        """
        if not self._members.runner.home.is_here:
            return
        self._agreement.close(timeout_s, reason)
        self.natives.close()

    def _submit(self, operations: Sequence[NativeOperation], timeout_s: float | None) -> list[Work]:
        patience_s = self._members.patience(timeout_s)
        self._agreement.submit(operations, patience_s)
        return [
            Work(self._agreement, operation.handle, operation.returned, operation.request.name, patience_s)
            for operation in operations
        ]
