"""Calls of c10d's methods: their arguments, their deadlines, and their submission to a ``Group``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from totalreduce.c10d.callbacks import Callbacks
from totalreduce.c10d.names import BACKEND_NAME
from totalreduce.c10d.premultiplied import Factor, factor_of, multiplied
from totalreduce.c10d.sparse import allreduce_sparse
from totalreduce.c10d.work import OperationWork, as_torch_error, begin_record, seconds_of
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, TotalReduceError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.calling import call_here
from totalreduce.groups.group import Group
from totalreduce.tensors.work import Work

__all__ = [
    "Calls",
    "Tensors",
    "arithmetic_view",
    "one_list",
    "operator_event",
    "options_for",
    "place_of",
    "reduce_op_of",
    "reduction_of",
    "root_of",
    "rows_of",
    "single_tensor",
    "split_sizes",
]

#: The operators by which torch calls gloo's collectives, by the names of events; tools look for them in a profile.
_OPERATORS = {
    "all_reduce": "allreduce_",
    "reduce": "reduce_",
    "reduce_scatter": "reduce_scatter_",
    "broadcast": "broadcast_",
    "all_gather": "allgather_",
    "gather": "gather_",
    "scatter": "scatter_",
    "all_to_all": "alltoall_",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv_",
    "recvAnySource": "recv_any_source_",
}
#: Collectives after which autograd finds the outputs changed, as with gloo: these are other tensors than the inputs.
#: Results are written without torch, which would count the change.
_COUNTED = frozenset({"all_gather", "gather", "reduce_scatter", "all_to_all"})
#: One tensor or, as c10d has it, a list of one.
Tensors = torch.Tensor | Sequence[torch.Tensor]
#: By the number of torch's member, of which the hash and the comparison take longer.
_REDUCTIONS: dict[int, tuple[ReduceOp, None]] = {
    theirs.value: (ours, None)
    for theirs, ours in (
        (dist.ReduceOp.SUM, ReduceOp.SUM),
        (dist.ReduceOp.AVG, ReduceOp.AVG),
        (dist.ReduceOp.MIN, ReduceOp.MIN),
        (dist.ReduceOp.MAX, ReduceOp.MAX),
        (dist.ReduceOp.PRODUCT, ReduceOp.PRODUCT),
        (dist.ReduceOp.BAND, ReduceOp.BAND),
        (dist.ReduceOp.BOR, ReduceOp.BOR),
        (dist.ReduceOp.BXOR, ReduceOp.BXOR),
    )
}


#: Of larger groups, messages show only the number of ranks.
_RANKS_SHOWN = 8


@final
class Calls:
    """Submits the calls of one process group."""

    def __init__(self, group: Group, timeout: timedelta) -> None:
        self.count = 0  #: Number of calls so far.
        self.timeout = timeout  #: Deadline of calls that name none.
        self.place = "of a process group"  #: How messages call the process group behind the number of a call.
        self.callbacks = Callbacks(f"totalreduce-{group.rank}")  #: The threads in which futures are completed.
        self._group = group

    def seconds(self, opts: Any, timeout: timedelta | None = None) -> float:
        """Return the deadline: that of the call, else that of the options, else that of the process group."""
        given = timeout if timeout is not None else getattr(opts, "timeout", None)
        # Options without a deadline say minus one millisecond.
        return seconds_of(self.timeout if given is None or given < timedelta(0) else given)

    def start(
        self,
        title: str,
        opts: Any,
        submit: Callable[[], list[Work]],
        result: Any,
        shown: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        *,
        timeout: timedelta | None = None,
        operator: str = "",
        value: Callable[[], Any] | None = None,
    ) -> OperationWork:
        """Submit a collective.

        Args:
            title: Its name, as gloo has it, for the profiler and for messages.
            opts: Its options, of which the deadline counts here.
            submit: Submits the operations.
            result: Its outputs, nested as gloo nests them.
            shown: Tensors that the profiler shows.
            writes: Tensors that it writes on this rank.
            timeout: Its deadline, instead of that of the options.
            operator: The operator of c10d, for the profiler; by default the one that ``title`` has alone.
            value: Returns the value of its future; by default that is ``result``.
        """
        self.count += 1
        if title in _COUNTED or len(writes) > 1:
            increment_version(writes)
        operator = operator or _OPERATORS[title]
        called, title = title, f"{BACKEND_NAME}:{title}"
        record = begin_record(title, shown)
        token = call_here.set((called, self.place))
        try:
            if record is None:
                works = submit()
            else:
                with operator_event(operator):
                    works = submit()
        except TotalReduceError as error:
            if record is not None:
                record.end()
            if isinstance(error, ConfigurationError):
                raise
            raise as_torch_error(error, title) from error
        finally:
            call_here.reset(token)
        return OperationWork(
            works,
            result,
            title=title,
            timeout_s=self.seconds(opts, timeout),
            callbacks=self.callbacks,
            record=record,
            value=value,
        )

    def multiply(
        self, tensors: list[torch.Tensor], factor: Factor, timeout_s: float, *, in_place: bool = False
    ) -> list[torch.Tensor]:
        """Return the products that a PREMUL_SUM adds up (see ``premultiplied``)."""
        try:
            return multiplied(self._group, tensors, factor, timeout_s, in_place=in_place)
        except DeadlineExceededError as error:
            raise as_torch_error(error, f"{BACKEND_NAME}:PREMUL_SUM") from error

    def allreduce_sparse(
        self, tensor: torch.Tensor, op: ReduceOp, factor: Factor | None, timeout_s: float
    ) -> OperationWork:
        """Submit the sum of a sparse tensor, in place."""
        if op is not ReduceOp.SUM or factor is not None:
            raise ValueError("allreduce of sparse tensors is a sum; other reductions are not defined")
        begin = time.monotonic()
        title = f"{BACKEND_NAME}:sparse_all_reduce"
        token = call_here.set(("all_reduce", self.place))
        try:
            with operator_event("allreduce_"):
                works, finish = allreduce_sparse(self._group, tensor, timeout_s)
        except TotalReduceError as error:
            raise as_torch_error(error, title) from error
        finally:
            call_here.reset(token)
        left_s = timeout_s - (time.monotonic() - begin)
        return OperationWork(works, [tensor], title=title, timeout_s=left_s, callbacks=self.callbacks, finish=finish)

    def reduce_scatter_singles(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any, result: Any
    ) -> OperationWork:
        """Submit reduce-scatters of tensors, each of which holds the blocks of all ranks."""
        op, factor = reduction_of(reduce_op_of(opts))
        if factor is not None:
            inputs = self.multiply(inputs, factor, self.seconds(opts))
        for output, tensor in zip(outputs, inputs, strict=True):
            if tensor.numel() != self._group.world_size * output.numel():
                raise ValueError("input tensor must be the same size as output size times world size")

        def submit() -> list[Work]:
            return [
                self._group.reduce_scatter(arithmetic_view(output, op), arithmetic_view(tensor.contiguous(), op), op=op)
                for output, tensor in zip(outputs, inputs, strict=True)
            ]

        operator = "_reduce_scatter_base_" if result is not outputs else "reduce_scatter_tensor_coalesced_"
        return self.start("reduce_scatter", opts, submit, result, inputs, outputs, operator=operator)

    def all_gather_singles(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any, result: Any
    ) -> OperationWork:
        """Submit allgathers into tensors, each of which holds the blocks of all ranks."""
        for output, tensor in zip(outputs, inputs, strict=True):
            if output.dtype != tensor.dtype:
                raise TypeError("output tensor must have the same type as input tensor")
            if output.numel() != self._group.world_size * tensor.numel():
                raise ValueError("output tensor size must be equal to world_size times input tensor size")

        def submit() -> list[Work]:
            pairs = zip(outputs, inputs, strict=True)
            return [self._group.allgather(output, tensor) for output, tensor in pairs]

        operator = "_allgather_base_" if result is not outputs else "allgather_into_tensor_coalesced_"
        return self.start("all_gather", opts, submit, result, inputs, outputs, operator=operator)


def operator_event(operator: str) -> AbstractContextManager[object]:
    """Return a context that torch's profiler shows as an operator of c10d."""
    return torch._C._profiler._RecordFunctionFast(f"c10d::{operator}")


def place_of(name: str, description: str, ranks: Sequence[int]) -> str:
    """Return how messages call a process group behind the number of a collective, from torch's names for it."""
    if description == "default_pg":
        return "of the default group"
    shown = f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= _RANKS_SHOWN else f"{len(ranks)} ranks"
    return f"of group {name if description == 'undefined' else description!r} ({shown})"


def options_for(opts: Any, kind: Any, *, op: Any = None, root: int | None = None) -> Any:
    """Return options for a group written in C++: the given ones, or options of ``kind`` made from bare values.

    Args:
        opts: The options, or a reduction or a root in their place.
        kind: The class of the options.
        op: The reduction, if it was named.
        root: The root's rank in the group.
    """
    if hasattr(opts, "timeout"):
        return opts
    made = kind()
    if hasattr(made, "reduceOp"):
        made.reduceOp = reduce_op_of(opts) if op is None else op
    if root is not None:
        made.rootRank = root
    return made


def reduce_op_of(opts: Any) -> Any:
    """Return torch's reduction: that of the options, or the one given in their place; SUM by default."""
    return dist.ReduceOp.SUM if opts is None or isinstance(opts, int) else getattr(opts, "reduceOp", opts)


def root_of(opts: Any, named: Mapping[str, int]) -> int:
    """Return the root's rank in the group: ``root=``, or that of the options, or given in their place; default 0."""
    if "root" in named:
        return named["root"]
    return 0 if opts is None else int(getattr(opts, "rootRank", opts))


def rows_of(tensors: list[torch.Tensor]) -> list[Any]:
    """Return the value of the future of an all_gather: tensors of one shape as the rows of one tensor, as NCCL's.

    The quantisation hooks of DistributedDataParallel index it so.
    """
    is_even = all(tensor.shape == tensors[0].shape for tensor in tensors)
    return [torch.stack(tensors)] if is_even else [tensors]


def single_tensor(tensors: Tensors, what: str) -> torch.Tensor:
    """Return the tensor, which may be in a list of one."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"totalreduce: {what} takes one tensor per rank, not {len(tensors)}")
    return tensors[0]


def one_list(tensors: Any) -> list[torch.Tensor]:
    """Return the list in ``[[...]]``, or the one given without the outer list."""
    listed: Iterable[torch.Tensor] = tensors
    if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor):
        listed = tensors[0]
    return list(listed)


def split_sizes(tensor: torch.Tensor, sizes: Sequence[int] | None, world_size: int, what: str) -> list[int]:
    """Return the lengths of the slices along the first dimension, one per rank."""
    if not tensor.is_contiguous():
        raise ValueError(f"the {what} of all_to_all_single must be contiguous")
    rows = tensor.size(0) if tensor.dim() else 0
    if not sizes:
        if rows % world_size:
            raise ValueError(f"the {what}'s dim 0 ({rows}) does not divide equally across group size {world_size}")
        sizes = [rows // world_size] * world_size
    if len(sizes) != world_size or sum(sizes) != rows:
        raise ValueError(f"{what} splits {list(sizes)} must be {world_size} numbers whose sum is dim 0, {rows}")
    return list(sizes)


def reduction_of(op: Any) -> tuple[ReduceOp, Factor | None]:
    """Return the reduction for torch's ``ReduceOp`` (or its ``RedOpType``), and the factor of a ``PREMUL_SUM``.

    Raises:
        ValueError: A reduction that this library does not know, or a ``PREMUL_SUM`` without a factor.
    """
    kind = getattr(op, "op", op)
    known = _REDUCTIONS.get(getattr(kind, "value", -1))
    if known is not None:
        return known
    if kind == dist.ReduceOp.PREMUL_SUM:
        return ReduceOp.SUM, factor_of(op)
    raise ValueError(f"Cannot use ReduceOp.{getattr(kind, 'name', kind)} with totalreduce")


def arithmetic_view(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return the tensor as numbers that can be reduced: a complex tensor as pairs of real numbers, for sums only.

    Raises:
        ValueError: Complex numbers have no order, and their product is not that of their parts.
    """
    if not tensor.is_complex():
        return tensor
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"{op.name} is not defined for complex tensors")
    return torch.view_as_real(tensor)
