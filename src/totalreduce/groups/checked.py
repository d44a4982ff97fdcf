"""Checks the tensors of a collective and turns them into the engine's arguments: a signature and the blocks' bytes.

There is one function for each collective. It makes all checks that need one rank only, so that a mistake is an error on
the rank that made it and not a mismatch on other ranks. ``staging`` copies tensors of accelerators to host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import Algorithm, DType, OpKind, ReduceOp, Signature
from totalreduce.kernels import supports
from totalreduce.tensors import dtypes
from totalreduce.tensors.memory import Operands
from totalreduce.tensors.staging import Staging

__all__ = [
    "Blocks",
    "CheckedOperation",
    "Member",
    "allgather",
    "allgather_bytes",
    "alltoall",
    "alltoall_bytes",
    "barrier",
    "broadcast",
    "gather",
    "in_place",
    "list_blocks",
    "message",
    "reduce_scatter",
    "reduction",
    "reduction_signature",
    "root_blocks",
    "scatter",
]

#: To make a signature takes longer than to find one, and operations come again.
_SIGNATURES_MAX = 1024
#: The result of ``Work.wait`` for bytes. Made once, because every exchange of a sparse step waits for bytes.
_NO_TENSOR = torch.empty(0, dtype=torch.float32, device="cpu")
#: World-size many tensors, or one contiguous tensor that holds them one after the other.
Blocks = torch.Tensor | Sequence[torch.Tensor]


class Member(NamedTuple):
    """The rank that calls a collective.

    Attributes:
        rank: Its number in the group.
        size: The number of ranks of the group.
        staging: What copies tensors of accelerators to host memory; ``None``: there are none.
    """

    rank: int
    size: int
    staging: Staging | None = None


class CheckedOperation(NamedTuple):
    """An operation that can be submitted to the engine.

    Attributes:
        signature: Kind, element type, reduction, root and sizes.
        buffers: Bytes of the tensor, or of every block.
        operands: The tensors; ``None`` for bytes that belong to no tensor, which the caller leaves alone.
        results: The tensor that ``Work.wait`` returns.
    """

    signature: Signature
    buffers: Sequence[memoryview | None]
    operands: Operands | None
    results: torch.Tensor | None


def reduction(
    kind: OpKind,
    tensor: torch.Tensor,
    name: str,
    *,
    op: ReduceOp,
    root: int,
    algorithm: str,
    writes: bool,
    staging: Staging | None = None,
) -> CheckedOperation:
    """Check an allreduce or a reduce."""
    signature = reduction_signature(kind, tensor, name, op=op, root=root, algorithm=algorithm)
    return in_place(signature, tensor, Operands(name, staging=staging), writes=writes)


def reduction_signature(
    kind: OpKind, tensor: torch.Tensor, name: str, *, op: ReduceOp, root: int = 0, algorithm: str = Algorithm.AUTO
) -> Signature:
    """Check the tensor of an allreduce or a reduce, and return the operation's signature."""
    dtype, shape = dtypes.dtype_of(tensor, name), tensor.shape
    known = _known_signature(kind, dtype, op, root, shape, algorithm) if type(op) is ReduceOp else None
    return known or Signature(kind, dtype, _checked_op(op, dtype, name), root, tuple(shape), algorithm=algorithm)


@functools.lru_cache(_SIGNATURES_MAX)
def _known_signature(
    kind: OpKind, dtype: DType, op: ReduceOp, root: int, shape: torch.Size, algorithm: str
) -> Signature | None:
    """Return the signature of a reduction, made once for all operations; ``None`` if it is not defined."""
    if op is ReduceOp.NONE or not supports(dtype, op):
        return None
    return Signature(kind, dtype, op, root, tuple(shape), algorithm=algorithm)


def in_place(
    signature: Signature, tensor: torch.Tensor, operands: Operands, *, writes: bool = True, reads: bool = True
) -> CheckedOperation:
    """Return an operation on one tensor, which was checked when the signature was made."""
    return CheckedOperation(signature, [operands.add(tensor, writes=writes, reads=reads)], operands, tensor)


def broadcast(
    tensor: torch.Tensor, name: str, *, root: int, algorithm: str, writes: bool, staging: Staging | None = None
) -> CheckedOperation:
    """Check a broadcast."""
    dtype = dtypes.moved_dtype_of(tensor, name)
    shape = tuple(tensor.shape)
    if dtype.itemsize != tensor.element_size():
        shape = (*shape, tensor.element_size())  # it travels as bytes
    signature = Signature(OpKind.BROADCAST, dtype, ReduceOp.NONE, root, shape, algorithm=algorithm)
    return in_place(signature, tensor, Operands(name, staging=staging), writes=writes, reads=not writes)


def barrier() -> CheckedOperation:
    """Return a barrier."""
    signature = Signature(OpKind.BARRIER, DType.UINT8, ReduceOp.NONE, 0, (0,))
    return CheckedOperation(signature, [memoryview(bytearray(0))], None, None)


def allgather(
    outputs: Blocks,
    tensor: torch.Tensor,
    name: str,
    member: Member,
    *,
    algorithm: str,
    repeats: bool = False,
) -> CheckedOperation:
    """Check an allgather with blocks of any sizes that all ranks know.

    ``repeats``: it is carried out again and again.
    """
    rank, size, staging = member
    dtype = dtypes.moved_dtype_of(tensor, name)
    blocks = _blocks_like(tensor, outputs, name, "outputs", rank, size)
    operands = Operands(name, repeats=repeats, staging=staging)
    buffers = [operands.add(block, writes=True, reads=False) for block in blocks]
    operands.copy(tensor, buffers[rank])
    sizes = tuple(len(buffer) // dtype.itemsize for buffer in buffers)
    signature = Signature(OpKind.ALLGATHER, dtype, ReduceOp.NONE, 0, (), sizes, algorithm)
    return CheckedOperation(signature, buffers, operands, _watched(outputs, operands))


def reduce_scatter(
    tensor: torch.Tensor,
    inputs: Blocks,
    name: str,
    member: Member,
    *,
    op: ReduceOp,
    algorithm: str,
) -> CheckedOperation:
    """Check a reduce-scatter with blocks of any sizes that all ranks know.

    The inputs are only read. The tensor may be this rank's block of them, and takes the result then.
    """
    rank, size, staging = member
    dtype = dtypes.dtype_of(tensor, name)
    blocks = _blocks_like(tensor, inputs, name, "inputs", rank, size)
    operands = Operands(name, staging=staging)
    in_place = tensor.data_ptr() == blocks[rank].data_ptr() and tensor.is_contiguous() and blocks[rank].is_contiguous()
    own = operands.add(tensor, writes=True, reads=in_place)
    buffers = [own if in_place and index == rank else operands.add(block) for index, block in enumerate(blocks)]
    buffers.append(own)
    if size == 1:
        operands.copy(blocks[0], own)
    sizes = tuple(len(buffer) // dtype.itemsize for buffer in buffers[:size])
    op = _checked_op(op, dtype, name)
    signature = Signature(OpKind.REDUCE_SCATTER, dtype, op, 0, (), sizes, algorithm)
    return CheckedOperation(signature, buffers, operands, tensor)


def gather(
    outputs: Blocks | None,
    tensor: torch.Tensor,
    name: str,
    member: Member,
    *,
    root: int,
) -> CheckedOperation:
    """Check a gather. Only the root has outputs, of any sizes."""
    rank, size, staging = member
    signature = Signature(OpKind.GATHER, dtypes.moved_dtype_of(tensor, name), ReduceOp.NONE, root, ())
    operands = Operands(name, staging=staging)
    blocks = root_blocks(outputs, tensor, name, what="outputs", rank=rank, size=size, root=root)
    if outputs is None or blocks is None:
        return CheckedOperation(signature, _only(operands.add(tensor), rank, size), operands, None)
    filled = [operands.add(block, writes=True, reads=False) for block in blocks]
    operands.copy(tensor, filled[rank])
    return CheckedOperation(signature, filled, operands, _watched(outputs, operands))


def scatter(
    tensor: torch.Tensor,
    inputs: Blocks | None,
    name: str,
    member: Member,
    *,
    root: int,
) -> CheckedOperation:
    """Check a scatter. Only the root has inputs, of any sizes."""
    rank, size, staging = member
    signature = Signature(OpKind.SCATTER, dtypes.moved_dtype_of(tensor, name), ReduceOp.NONE, root, ())
    operands = Operands(name, staging=staging)
    blocks = root_blocks(inputs, tensor, name, what="inputs", rank=rank, size=size, root=root)
    own = operands.add(tensor, writes=True, reads=False)
    if blocks is None:
        return CheckedOperation(signature, _only(own, rank, size), operands, tensor)
    operands.copy(blocks[rank], own)
    filled = [own if index == rank else operands.add(block) for index, block in enumerate(blocks)]
    return CheckedOperation(signature, filled, operands, tensor)


def alltoall(outputs: Blocks, inputs: Blocks, name: str, member: Member) -> CheckedOperation:
    """Check an alltoall with blocks of any sizes that sender and receiver know."""
    rank, size, staging = member
    sent, received = list_blocks(inputs, size, name, "inputs"), list_blocks(outputs, size, name, "outputs")
    dtype = dtypes.moved_dtype_of(sent[0], name)
    _check_dtypes([*sent, *received], sent[0], name)
    _check_counts(received[rank], sent[rank], name, f"inputs[{rank}] and outputs[{rank}] must be equally large")
    operands = Operands(name, staging=staging)
    taken = [operands.add(block, writes=True, reads=False) for block in received]
    operands.copy(sent[rank], taken[rank])
    given = [taken[rank] if index == rank else operands.add(block) for index, block in enumerate(sent)]
    signature = Signature(OpKind.ALLTOALL, dtype, ReduceOp.NONE, 0, ())
    return CheckedOperation(signature, [*given, *taken], operands, _watched(outputs, operands))


def allgather_bytes(blocks: Sequence[memoryview]) -> CheckedOperation:
    """Return an allgather of bytes: the blocks of all ranks, this rank's among them. Nothing is copied."""
    signature = Signature(OpKind.ALLGATHER, DType.UINT8, ReduceOp.NONE, 0, (), tuple(map(len, blocks)))
    return CheckedOperation(signature, blocks, None, _NO_TENSOR)


def alltoall_bytes(sent: Sequence[memoryview], received: Sequence[memoryview]) -> CheckedOperation:
    """Return an alltoall of bytes, by rank. This rank's block for itself is not copied."""
    signature = Signature(OpKind.ALLTOALL, DType.UINT8, ReduceOp.NONE, 0, ())
    return CheckedOperation(signature, [*sent, *received], None, _NO_TENSOR)


def message(tensor: torch.Tensor, name: str, *, writes: bool, staging: Staging | None = None) -> CheckedOperation:
    """Check a message from one rank to another; ``writes`` on the receiver."""
    signature = Signature(OpKind.SEND_RECV, dtypes.moved_dtype_of(tensor, name), ReduceOp.NONE, 0, ())
    operands = Operands(name, staging=staging)
    return CheckedOperation(signature, [operands.add(tensor, writes=writes, reads=not writes)], operands, tensor)


# -------------------------------------------------------------------------------------------------------------- blocks


def list_blocks(blocks: Blocks, size: int, name: str, what: str) -> list[torch.Tensor]:
    """Return the blocks as a list of ``size`` tensors.

    Raises:
        ConfigurationError: There is another number of tensors, or one tensor that does not divide into equal blocks.
    """
    if isinstance(blocks, torch.Tensor):
        if blocks.numel() % size:
            raise ConfigurationError(
                f"{name!r}: {what} has {blocks.numel()} elements, which do not divide into {size} equal blocks"
            )
        if not blocks.is_contiguous():
            raise ConfigurationError(f"{name!r}: {what} must be contiguous; or pass a list of {size} tensors")
        return list(blocks.detach().view(size, -1).unbind()) if blocks.numel() else [blocks.detach().view(-1)] * size
    listed = list(blocks)
    if len(listed) != size:
        raise ConfigurationError(f"{name!r}: {what} must be {size} tensors, one per rank, not {len(listed)}")
    return listed


def root_blocks(
    blocks: Blocks | None, tensor: torch.Tensor, name: str, *, what: str, rank: int, size: int, root: int
) -> list[torch.Tensor] | None:
    """Return the blocks of a gather or scatter as a list on the root, and ``None`` on the other ranks.

    Raises:
        ConfigurationError: The root passes ``None``, or another rank passes blocks; or the blocks are not one for each
            rank, have another element type than the tensor, or the root's block has another size than its tensor.
    """
    if rank != root:
        if blocks is not None and len(blocks):
            raise ConfigurationError(f"{name!r}: {what} are for the root (rank {root}) only; rank {rank} passes None")
        return None
    if blocks is None:
        raise ConfigurationError(f"{name!r}: the root (rank {root}) must pass {what}: {size} tensors")
    return _blocks_like(tensor, blocks, name, what, rank, size)


def _blocks_like(
    tensor: torch.Tensor, blocks: Blocks, name: str, what: str, rank: int, size: int
) -> list[torch.Tensor]:
    """Return the blocks as a list; check that they are of the tensor's type and that this rank's has its size."""
    listed = list_blocks(blocks, size, name, what)
    _check_dtypes(listed, tensor, name)
    _check_counts(listed[rank], tensor, name, f"{what}[{rank}] and the tensor must be equally large")
    return listed


def _check_dtypes(blocks: Sequence[torch.Tensor], tensor: torch.Tensor, name: str) -> None:
    check = dtypes.moved_dtype_of if tensor.device.type == "cpu" else dtypes.check_dense
    for index, block in enumerate(blocks):
        check(block, f"{name}, block {index}")
        if block.dtype is not tensor.dtype:
            raise ConfigurationError(f"{name!r}: block {index} is {block.dtype}, but the tensor is {tensor.dtype}")


def _check_counts(a: torch.Tensor, b: torch.Tensor, name: str, what: str) -> None:
    if a.numel() != b.numel():
        raise ConfigurationError(f"{name!r}: {what}: {a.numel()} elements and {b.numel()} elements")


def _checked_op(op: ReduceOp, dtype: DType, name: str) -> ReduceOp:
    try:
        op = checks.reduction(op)
    except ConfigurationError as error:
        raise ConfigurationError(f"tensor {name!r}: {error}") from None
    if op is ReduceOp.NONE or not supports(dtype, op):
        raise ConfigurationError(f"tensor {name!r}: {op.name} of {dtype.name.lower()} is not defined")
    return op


def _only(buffer: memoryview, rank: int, size: int) -> list[memoryview | None]:
    """Return the buffers of a rank that has its own block only."""
    return [buffer if index == rank else None for index in range(size)]


def _watched(outputs: Blocks, operands: Operands) -> torch.Tensor | None:
    """Return the result of ``Work.wait``: ``outputs`` if it is one tensor that holds all blocks."""
    if not isinstance(outputs, torch.Tensor):
        return None
    operands.watch(outputs)
    return outputs
