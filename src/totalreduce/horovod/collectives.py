"""Operations on tensors.

All operations have these properties in common:

* They may be submitted in any order on different ranks, under names that are equal on all of them. Without a name, the
  n-th unnamed operation of a kind meets the n-th one on the other ranks.
* ``process_set`` restricts them to some ranks; only these ranks call them.
* Functions without a trailing underscore do not change their argument, and are differentiable if they block.
* Functions with ``async`` return at once, with a handle for ``poll`` and ``synchronize``.
* If an operation fails, every rank raises the same error: ``MismatchError`` (the ranks submitted different operations
  under one name), ``StallError`` (some rank submitted none), ``PeerLost``, ``UnsupportedError``. Before anything is
  sent, a rank raises ``ConfigurationError``, which is a ``ValueError``: ``init`` was not called, the process set is not
  registered, this rank is no member, the name is in flight already.
"""

from __future__ import annotations

import contextlib
import enum
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from totalreduce.foundation.checks import did_you_mean
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import ReduceOp
from totalreduce.horovod.arguments import (
    checked_compression,
    checked_factor,
    checked_splits,
    checked_tensor,
    checked_tensors,
)
from totalreduce.horovod.compression import Compression, Compressor
from totalreduce.horovod.context import context
from totalreduce.horovod.handles import Handle
from totalreduce.horovod.process_sets import ProcessSet, global_process_set
from totalreduce.tensors.modes import writing
from totalreduce.tensors.work import Work


class Reduction(enum.IntEnum):
    """The operation that combines the elements of all ranks."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average = Reduction.AVERAGE
Sum = Reduction.SUM
Adasum = Reduction.ADASUM
Min = Reduction.MIN
Max = Reduction.MAX
Product = Reduction.PRODUCT

_REDUCE_OPS = {
    Reduction.AVERAGE: ReduceOp.AVG,
    Reduction.SUM: ReduceOp.SUM,
    Reduction.MIN: ReduceOp.MIN,
    Reduction.MAX: ReduceOp.MAX,
    Reduction.PRODUCT: ReduceOp.PRODUCT,
}


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of an operation, except its tensors."""

    name: str | None
    process_set: ProcessSet
    op: Reduction = Reduction.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str | None):
            raise ConfigurationError(f"the name of an operation is a string, not {self.name!r:.60}")

    def label(self, kind: str) -> str:
        """Return the operation's kind and name, for messages."""
        return kind if self.name is None else f"{kind} {self.name!r}"

    def backward(self, **changes: Any) -> _Call:
        """Return the arguments of the operation that computes gradients. Its own name allows any order there, too."""
        name = None if self.name is None else f"{self.name}.gradient"
        return replace(self, name=name, **changes)

    def member(self, index: int, count: int) -> _Call:
        """Return the arguments for one tensor of several."""
        return self if self.name is None or count == 1 else replace(self, name=f"{self.name}.{index}of{count}")


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks. Its gradient is reduced in the same way.

    Args:
        tensor: Shape and dtype are equal on all ranks; the result has the same.
        average: Deprecated in favour of ``op``.
        name: See the module docstring.
        compression: Encodes the tensor to be sent.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max``, ``Product``; or ``Adasum``, for floating-point tensors.
            ``Adasum`` blocks in every function, so all ranks must call it in the same order. Averages of integers are
            rounded towards zero, and sums of half types are accumulated in float32.
        prescale_factor: Factor before the reduction; integers are multiplied as float64 and truncated.
        postscale_factor: Factor after the reduction.
        process_set: The ranks.
    """
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)[
        0
    ]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """``allreduce`` in place."""
    call = _reduction(average, name, op, prescale_factor, postscale_factor, process_set)
    return _reduce(call, [tensor], in_place=True).wait()[0]  # type: ignore[no-any-return]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """``allreduce``, without gradients."""
    call = _reduction(average, name, op, prescale_factor, postscale_factor, process_set)
    return _first(_reduce(call, [tensor], in_place=False))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """``allreduce`` in place; the tensor must not be used until ``synchronize``."""
    call = _reduction(average, name, op, prescale_factor, postscale_factor, process_set)
    return _first(_reduce(call, [tensor], in_place=True))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """``allreduce`` of several tensors, all or none: an error of one tensor is the error of all, on every rank."""
    call = _reduction(average, name, op, prescale_factor, postscale_factor, process_set)
    compressor = checked_compression(compression)
    compressed = [compressor.compress(tensor) for tensor in checked_tensors(tensors, call.label("allreduce"))]
    reduced = _Allreduce.apply(call, *(tensor for tensor, _ in compressed))  # type: ignore[no-untyped-call]
    return [compressor.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, compressed, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """``grouped_allreduce`` in place."""
    call = _reduction(average, name, op, prescale_factor, postscale_factor, process_set)
    return _reduce(call, tensors, in_place=True).wait()  # type: ignore[no-any-return]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """``grouped_allreduce``, without gradients."""
    call = _reduction(average, name, op, prescale_factor, postscale_factor, process_set)
    return _reduce(call, tensors, in_place=False)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """``grouped_allreduce`` in place; the tensors must not be used until ``synchronize``."""
    call = _reduction(average, name, op, prescale_factor, postscale_factor, process_set)
    return _reduce(call, tensors, in_place=True)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Reduction | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Add up sparse tensors (COO), by gathering the indices and values of all ranks.

    Args:
        tensor: Shape and dtype are equal on all ranks; the number of entries may differ.
        name: See the module docstring.
        op: ``Average`` (default) or ``Sum``.
        process_set: The ranks.

    Returns:
        A handle of the sum, which is sparse and not coalesced.
    """
    call = _Call(name, process_set, checked_op(op))
    what = call.label("sparse_allreduce_async")
    if call.op not in (Average, Sum):
        raise ConfigurationError(f"{what}: op is Average or Sum, not {call.op.name}")
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ConfigurationError(f"{what} needs a sparse COO tensor, not {kind}")
    # The entries of the ranks are concatenated: indices as rows, like values.
    parts = [tensor._indices().t().contiguous(), tensor._values()]
    divisor = len(context.members(process_set).ranks) if call.op is Average else 1

    def finish(gathered: list[torch.Tensor]) -> torch.Tensor:
        indices, values = gathered
        values = values / divisor if divisor > 1 else values
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, device=values.device)

    return _then(_gather(call, parts), finish)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, in which they may differ.

    The gradient is this rank's rows of the average of the ranks' gradients.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``allgather``, without gradients."""
    return _first(_gather(_Call(name, process_set), [tensor]))


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """``allgather`` of several tensors."""
    call = _Call(name, process_set)
    return list(_Allgather.apply(call, *checked_tensors(tensors, call.label("allgather"))))  # type: ignore[no-untyped-call]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``grouped_allgather``, without gradients."""
    return _gather(_Call(name, process_set), tensors)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the root's tensor on every rank. The root's gradient is the average of all; other gradients are zero.

    Args:
        tensor: Shape and dtype are equal on all ranks.
        root_rank: The rank of the root in the job, not in the process set.
        name: See the module docstring.
        process_set: The ranks.

    Raises:
        ConfigurationError: ``root_rank`` is not among the ranks.
    """
    return _Broadcast.apply(_Call(name, process_set, root=root_rank), tensor)  # type: ignore[no-any-return, no-untyped-call]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """``broadcast`` in place."""
    return _send(_Call(name, process_set, root=root_rank), tensor, in_place=True).wait()  # type: ignore[no-any-return]


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``broadcast``, without gradients."""
    return _send(_Call(name, process_set, root=root_rank), tensor, in_place=False)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``broadcast`` in place; the tensor must not be used until ``synchronize``."""
    return _send(_Call(name, process_set, root=root_rank), tensor, in_place=True)


def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows to every rank. Gradients are sent back to the ranks from which the rows came.

    Args:
        tensor: Rows for rank 0, then those for rank 1, and so on.
        splits: The number of rows for each rank; by default equally many.
        name: See the module docstring.
        process_set: The ranks.

    Returns:
        The received rows, by rank; with ``splits`` also the number of rows from each rank, int32 or as ``splits``.

    Raises:
        ConfigurationError: The splits are not one for each rank, or do not add up to the rows.
    """
    output, received = _Alltoall.apply(_Call(name, process_set), tensor, splits)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """``alltoall``, without gradients; ``synchronize`` returns both results, with and without ``splits``."""
    return _exchange(_Call(name, process_set), tensor, splits)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over the ranks, and keep a block of rows on each; the first blocks have one more row if uneven.

    The gradient is the concatenation of the ranks' gradients; with ``Sum`` times the number of ranks.

    Args:
        tensor: At least one dimension; shape and dtype are equal on all ranks.
        name: See the module docstring.
        compression: Encodes the tensor to be sent.
        op: As for ``allreduce``, without ``Adasum``.
        process_set: The ranks.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after the reduction.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """``reducescatter``, without gradients."""
    return _first(grouped_reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """``reducescatter`` of several tensors."""
    call = _reduction(None, name, op, prescale_factor, postscale_factor, process_set)
    compressor = checked_compression(compression)
    compressed = [compressor.compress(tensor) for tensor in checked_tensors(tensors, call.label("reducescatter"))]
    reduced = _Reducescatter.apply(call, *(tensor for tensor, _ in compressed))  # type: ignore[no-untyped-call]
    return [compressor.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, compressed, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """``grouped_reducescatter``, without gradients."""
    return _scatter(_reduction(None, name, op, prescale_factor, postscale_factor, process_set), tensors)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it, or joined."""
    context.members(process_set).coordinator.barrier()


def _reduction(
    average: object,
    name: str | None,
    op: Reduction | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> _Call:
    if average is not None:
        if isinstance(average, Reduction):
            # Each of them except Average is true, and would be taken for an average.
            raise ConfigurationError(
                f"{average.name} was passed as average=: pass op={average.name.title()} by keyword"
            )
        warnings.warn("average= is deprecated: pass op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3)
        if op is not None:
            raise ConfigurationError("op takes the place of average: pass one of them")
        op = Average if average else Sum
    prescale, postscale = checked_factor("prescale_factor", prescale), checked_factor("postscale_factor", postscale)
    return _Call(name, process_set, checked_op(op), prescale, postscale)


def checked_op(op: Any) -> Reduction:
    """Return the reduction; ``None`` is ``Average``. Raises ``ConfigurationError``: it is no reduction."""
    if op is None:
        return Average
    if isinstance(op, int):  # those of torch are none, but equal their numbers, which mean other reductions here
        with contextlib.suppress(ValueError):
            return Reduction(op)
    names = [each.name.title() for each in Reduction]
    raise ConfigurationError(f"op is one of {', '.join(names)}, not {op!r:.60}{did_you_mean(op, names)}")


def _reduce(call: _Call, tensors: Sequence[torch.Tensor], *, in_place: bool) -> Handle:
    """Start an allreduce; the handle's result is a list."""
    members = context.members(call.process_set)
    targets = checked_tensors(tensors, call.label("allreduce"))
    if not in_place:
        targets = [_copy(tensor) for tensor in targets]
    if call.op is Adasum:
        adasum = members.adasum(call.name)
        adasum.agree(targets)
        with torch.no_grad():
            _scale(targets, call.prescale)
            adasum.combine_(targets)
            _scale(targets, call.postscale)
        return Handle((), lambda _: targets)
    works = members.coordinator.grouped_allreduce(
        targets, name=call.name, op=_REDUCE_OPS[call.op], prescale=call.prescale, postscale=call.postscale
    )
    return Handle(works, lambda _: targets)


def _send(call: _Call, tensor: torch.Tensor, *, in_place: bool) -> Handle:
    """Start a broadcast."""
    members = context.members(call.process_set)
    checked_tensor(tensor, call.label("broadcast"))
    target = tensor if in_place else _copy(tensor)
    work = members.coordinator.broadcast(target, root=members.root(call.root), name=call.name)
    return Handle([work], lambda _: target)


def _gather(call: _Call, tensors: Sequence[torch.Tensor]) -> Handle:
    """Start allgathers; the handle's result is a list."""
    start = context.members(call.process_set).coordinator.allgather
    return _each(
        call, checked_tensors(tensors, call.label("allgather")), lambda member, host: start(host, name=member.name)
    )


def _scatter(call: _Call, tensors: Sequence[torch.Tensor]) -> Handle:
    """Start reducescatters; the handle's result is a list."""
    start = context.members(call.process_set).coordinator.reduce_scatter
    if call.op is Adasum:
        raise ConfigurationError("reducescatter has no Adasum: use allreduce")
    op = _REDUCE_OPS[call.op]
    return _each(
        call,
        checked_tensors(tensors, call.label("reducescatter")),
        lambda member, host: start(host, name=member.name, op=op, prescale=call.prescale, postscale=call.postscale),
    )


def _each(call: _Call, tensors: Sequence[torch.Tensor], start: Callable[[_Call, torch.Tensor], Work]) -> Handle:
    """Start an operation for every tensor, which is only read."""
    works = [start(call.member(index, len(tensors)), tensor) for index, tensor in enumerate(tensors)]
    return Handle(works, lambda results: results)


def _exchange(call: _Call, tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None) -> Handle:
    """Start an alltoall; the handle's result is the rows, and the number of rows from each rank."""
    members = context.members(call.process_set)
    checked_tensor(tensor, call.label("alltoall"))
    rows = checked_splits(splits)
    received: list[int] = []
    work = members.coordinator.alltoall(tensor, rows, received=received, name=call.name)
    counts = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")
    return Handle([work], lambda results: (results[0], counts.new_tensor(received)))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _scale(tensors: Sequence[torch.Tensor], factor: float) -> None:
    for tensor in tensors if factor != 1.0 else ():
        with writing(tensor):
            tensor.mul_(factor)


def _then(handle: Handle, finish: Callable[[Any], Any]) -> Handle:
    """Return a handle whose result is computed from another handle's result."""
    return Handle(handle.works, lambda results: finish(handle.finish(results)))


def _first(handle: Handle) -> Handle:
    return _then(handle, lambda results: results[0])


class _Allreduce(torch.autograd.Function):
    """Allreduce; by Horovod's rule gradients are reduced like the tensors."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return tuple(_reduce(call, tensors, in_place=False).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_Allreduce.apply(ctx.call.backward(), *gradients)  # type: ignore[no-untyped-call]


class _Allgather(torch.autograd.Function):
    """Allgather; by Horovod's rule the gradient is this rank's rows of the average of the gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call, ctx.shapes = call, [tensor.shape for tensor in tensors]
        return tuple(_gather(call, tensors).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call = ctx.call.backward(op=Average)
        averages = _Allreduce.apply(call, *gradients)  # type: ignore[no-untyped-call]
        mine = torch.tensor([shape[0] if shape else 1 for shape in ctx.shapes], dtype=torch.int64, device="cpu")
        rows = _gather(replace(call, name=None if call.name is None else f"{call.name}.rows"), [mine[None]]).wait()[0]
        before = rows[: ctx.call.process_set.rank()].sum(0).tolist()
        parts = zip(averages, before, ctx.shapes, strict=True)
        return None, *(each[first:][: shape[0] if shape else 1].view(shape) for each, first, shape in parts)


class _Broadcast(torch.autograd.Function):
    """Broadcast; by Horovod's rule the gradient is the average of the gradients on the root, and zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, call: _Call, tensor: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return _send(call, tensor, in_place=False).wait()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (average,) = _Allreduce.apply(ctx.call.backward(op=Average), *gradients)  # type: ignore[no-untyped-call]
        is_root = context.group.rank == ctx.call.root
        return None, average if is_root else torch.zeros_like(average)


class _Alltoall(torch.autograd.Function):
    """All-to-all; gradients are sent back to the ranks from which the rows came."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = _exchange(call, tensor, splits).wait()
        ctx.call, ctx.received = call, received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        returned, _ = _Alltoall.apply(ctx.call.backward(), gradients[0], ctx.received)  # type: ignore[no-untyped-call]
        return None, returned, None


class _Reducescatter(torch.autograd.Function):
    """Reduce-scatter; by Horovod's rule gradients are gathered, times the number of ranks if the tensors were added."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return tuple(_scatter(call, tensors).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call = ctx.call
        factor = call.prescale * call.postscale * (call.process_set.size() if call.op is Sum else 1)
        scaled = [gradient * factor for gradient in gradients]
        return None, *_Allgather.apply(call.backward(), *scaled)  # type: ignore[no-untyped-call]
