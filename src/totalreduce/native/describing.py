"""Names and descriptions of the operations that one rank submits to a coordinator."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, final

import torch

from totalreduce.coordination.requests import Request
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import OpKind, ReduceOp
from totalreduce.tensors import dtypes

__all__ = ["Describer", "Label", "Scaling"]

#: The name of an unnamed operation is its kind and number. Names of the program that begin like this, or with the
#: escape, are escaped, so that they differ from the names of unnamed operations.
_ESCAPE = "n:"
_RESERVED = (_ESCAPE, *(f"{kind.name.lower()}#" for kind in OpKind))
_REDUCTIONS = {op: op.name.lower() for op in ReduceOp}
#: Descriptions that are kept, because most names come again.
_KNOWN_MAX = 100_000


class Label(NamedTuple):
    """The name of an operation, and how the ranks treat it."""

    name: str  #: The name, equal on all ranks.
    cached: bool  #: Whether the name can come again, so that the ranks remember the agreement on it.
    priority: int = 0  #: Of operations that are ready at the same time, the one with the smaller number goes first.


class Scaling(NamedTuple):
    """The reduction of elements and their factors (see ``Coordinator.allreduce``)."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0

    def check(self) -> None:
        """Raise ``ConfigurationError`` if ``op`` is no reduction."""
        if checks.reduction(self.op) is ReduceOp.NONE:
            raise ConfigurationError("op NONE reduces nothing")


@final
class Describer:
    """Makes the requests of one rank. Any thread may call its methods."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._lock = threading.Lock()
        self._unnamed: Counter[OpKind] = Counter()  #: The number of unnamed operations so far, by kind.
        #: The last allreduce of each name, and what it was made from.
        self._known: dict[str, tuple[tuple[object, ...], Request]] = {}

    def label(self, name: str | None, kind: OpKind, priority: int = 0) -> AbstractContextManager[Label]:
        """Return the label of an operation that is submitted within the context.

        An unnamed operation that is refused gives its number back. Otherwise this rank would count unnamed operations
        differently from the other ranks from then on.
        """
        priority = checks.priority(priority)
        if name is None:
            return self._unnamed_label(kind, priority)
        name = checks.operation_name(name)
        return nullcontext(Label(_ESCAPE + name if name.startswith(_RESERVED) else name, True, priority))

    @contextmanager
    def _unnamed_label(self, kind: OpKind, priority: int) -> Iterator[Label]:
        with self._lock:
            self._unnamed[kind] = number = self._unnamed[kind] + 1
        try:
            yield Label(f"{kind.name.lower()}#{number}", False, priority)
        except BaseException:
            with self._lock:
                if self._unnamed[kind] == number:  # another thread may have taken the next one
                    self._unnamed[kind] -= 1
            raise

    def count_from_zero(self) -> None:
        """Have the next unnamed operation of each kind be the first one."""
        with self._lock:
            self._unnamed.clear()

    def allreduces(self, tensors: Sequence[torch.Tensor], scaling: Scaling, label: Label) -> list[Request]:
        """Describe allreduces of which all or none are carried out."""
        scaling.check()
        count = len(tensors)
        batch = (label.name, count) if count > 1 else None
        requests = []
        for index, tensor in enumerate(tensors):
            name = label.name if batch is None else f"{label.name}.{index}of{count}"
            dtypes.check_dense(tensor, name)
            # Most names come again with equal requests, and making one is a third of the cost of a submission.
            made_from = (tensor.shape, tensor.dtype, tensor.device, scaling, batch, label.priority)
            known = self._known.get(name)
            if known is None or known[0] != made_from:
                request = _reduction(OpKind.ALLREDUCE, tensor, scaling, label._replace(name=name), batch=batch)
                known = made_from, request
                if label.cached:
                    if len(self._known) >= _KNOWN_MAX:
                        self._known.clear()
                    self._known[name] = known
            requests.append(known[1])
        return requests

    def reduce_scatter(
        self, tensor: torch.Tensor, scaling: Scaling, outputs: Sequence[torch.Tensor] | None, label: Label
    ) -> Request:
        """Describe a reduce-scatter of rows."""
        scaling.check()
        _check_outputs(outputs, 1, label)
        dtypes.check_dense(tensor, label.name)
        if not tensor.dim():
            raise ConfigurationError(f"{label.name!r}: a scalar has no rows to scatter")
        return _reduction(OpKind.REDUCE_SCATTER, tensor, scaling, label)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp, label: Label) -> Request:
        """Describe a reduce."""
        scaling = Scaling(op)
        scaling.check()
        return _reduction(OpKind.REDUCE, tensor, scaling, label, root=self._root(root))

    def broadcast(self, tensor: torch.Tensor, root: int, label: Label) -> Request:
        """Describe a broadcast."""
        return _request(OpKind.BROADCAST, tensor, label, root=self._root(root))

    def blocks(
        self, kind: OpKind, tensor: torch.Tensor, blocks: Sequence[torch.Tensor] | None, root: int, label: Label
    ) -> Request:
        """Describe a gather or scatter of this rank's tensor; the root has a block for every rank.

        Raises:
            ConfigurationError: This rank passes more blocks than there are ranks, or passes blocks and is not the root;
                or a block has another dtype or device than the tensor. If the root passes too few blocks, the agreement
                finds a mismatch, which is an error on all ranks.
        """
        root, given = self._root(root), len(blocks or ())
        if given > (self._world_size if self._rank == root else 0):
            raise ConfigurationError(
                f"{label.name!r}: rank {self._rank} passes {given} blocks, but only the root (rank {root}) passes "
                f"blocks, one for each of the {self._world_size} ranks"
            )
        for index, block in enumerate(blocks or ()):
            dtypes.check_dense(block, f"{label.name}, block {index}")
            if block.dtype is not tensor.dtype or block.device != tensor.device:
                raise ConfigurationError(
                    f"{label.name!r}: block {index} is {block.dtype} on {block.device}, but the tensor is "
                    f"{tensor.dtype} on {tensor.device}"
                )
        sizes = tuple(block.numel() for block in blocks or ())
        return _request(kind, tensor, label, root=root, shape=(tensor.numel(),), splits=sizes)

    def allgather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor] | None, label: Label) -> Request:
        """Describe an allgather of rows."""
        _check_outputs(outputs, self._world_size, label)
        return _request(OpKind.ALLGATHER, tensor, label)

    def alltoall(
        self,
        tensor: torch.Tensor,
        splits: Sequence[int] | None,
        outputs: Sequence[torch.Tensor] | None,
        label: Label,
    ) -> Request:
        """Describe an alltoall that sends ``splits[r]`` rows to rank r; without splits equally many to each rank."""
        _check_outputs(outputs, self._world_size, label)
        size, name = self._world_size, label.name
        dtypes.check_dense(tensor, name)
        if not tensor.dim():
            raise ConfigurationError(f"{name!r}: a scalar has no rows to send to {size} ranks; pass a tensor of rows")
        rows = len(tensor)
        if splits is None:
            if rows % size:
                raise ConfigurationError(f"{name!r}: {rows} rows do not divide among {size} ranks; pass splits")
            splits = [rows // size] * size
        splits = tuple(int(split) for split in splits)
        if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
            raise ConfigurationError(
                f"{name!r}: splits must be {size} numbers from 0 that add up to {rows} rows, not {list(splits)}"
            )
        return _request(OpKind.ALLTOALL, tensor, label, splits=splits)

    def _root(self, root: int) -> int:
        return checks.rank_in("root", root, self._world_size)


def _check_outputs(outputs: Sequence[torch.Tensor] | None, count: int, label: Label) -> None:
    if outputs is not None and len(outputs) != count:
        wanted = "one tensor, for the rows of this rank" if count == 1 else f"{count} tensors, one for each rank"
        raise ConfigurationError(
            f"{label.name!r}: outputs has {len(outputs)} tensors, but the results need {wanted}; or pass None"
        )


def _reduction(kind: OpKind, tensor: torch.Tensor, scaling: Scaling, label: Label, **fields: Any) -> Request:
    return _request(
        kind,
        tensor,
        label,
        reduction=_REDUCTIONS[scaling.op],
        prescale=float(scaling.prescale),
        postscale=float(scaling.postscale),
        **fields,
    )


def _request(
    kind: OpKind, tensor: torch.Tensor, label: Label, *, shape: tuple[int, ...] | None = None, **fields: Any
) -> Request:
    dtypes.check_dense(tensor, label.name)
    return Request(
        label.name,
        kind,
        _dtype_name(tensor.dtype),
        tensor.element_size(),
        tuple(tensor.shape) if shape is None else shape,
        tensor.device.type,
        cached=label.cached,
        priority=label.priority,
        **fields,
    )


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
