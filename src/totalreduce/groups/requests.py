"""Turns the tensors of a collective into the engine's arguments: a signature, and the bytes of every block.

One function per collective. Each makes all checks that need one rank only, so that a mistake is an error on the rank
that made it and not a mismatch on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature
from totalreduce.kernels import supports
from totalreduce.tensors import dtypes
from totalreduce.tensors.memory import Operands

__all__ = [
    "Blocks",
    "Request",
    "allgather",
    "allgather_bytes",
    "alltoall",
    "alltoall_bytes",
    "barrier",
    "broadcast",
    "gather",
    "message",
    "reduce_scatter",
    "reduction",
    "scatter",
]

#: The result of ``Work.wait`` for bytes. Made once, because every exchange of a sparse step waits for bytes.
_NO_TENSOR = torch.empty(0)
#: World-size many tensors, or one contiguous tensor that holds them one after the other.
Blocks = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Request:
    """One operation, as it is submitted to the engine.

    Attributes:
        signature: Kind, element type, reduction, root and sizes.
        buffers: Bytes of the tensor, or of every block.
        operands: The tensors; ``None`` for memory that is no tensor's, which the caller leaves alone.
        results: The tensor that ``Work.wait`` returns.
    """

    signature: Signature
    buffers: Sequence[memoryview | None]
    operands: Operands | None
    results: torch.Tensor | None


def _checked_op(op: ReduceOp, dtype: DType, name: str) -> ReduceOp:
    try:
        op = ReduceOp(op)
    except ValueError:
        known = ", ".join(known.name for known in ReduceOp if known is not ReduceOp.NONE)
        raise ConfigurationError(f"tensor {name!r}: {op!r} is no reduction; there are ReduceOp's {known}") from None
    if op is ReduceOp.NONE or not supports(dtype, op):
        raise ConfigurationError(f"tensor {name!r}: {op.name} of {dtype.name.lower()} is not defined")
    return op


def listed(blocks: Blocks, size: int, name: str, what: str) -> list[torch.Tensor]:
    """World-size many tensors."""
    if isinstance(blocks, torch.Tensor):
        if blocks.numel() % size:
            raise ConfigurationError(
                f"{name!r}: {what} has {blocks.numel()} elements, which do not divide into {size} equal blocks"
            )
        if not blocks.is_contiguous():
            raise ConfigurationError(f"{name!r}: {what} must be contiguous; or pass a list of {size} tensors")
        flat = blocks.detach().view(-1)
        length = flat.numel() // size
        return [flat[length * index : length * (index + 1)] for index in range(size)]
    listed = list(blocks)
    if len(listed) != size:
        raise ConfigurationError(f"{name!r}: {what} must be {size} tensors, one per rank, not {len(listed)}")
    return listed


def _one_dtype(blocks: Sequence[torch.Tensor], tensor: torch.Tensor, name: str) -> None:
    check = dtypes.moved_dtype_of if tensor.device.type == "cpu" else dtypes.check_dense
    for index, block in enumerate(blocks):
        check(block, f"{name}, block {index}")
        if block.dtype is not tensor.dtype:
            raise ConfigurationError(f"{name!r}: block {index} is {block.dtype}, but the tensor is {tensor.dtype}")


def _same_count(a: torch.Tensor, b: torch.Tensor, name: str, what: str) -> None:
    if a.numel() != b.numel():
        raise ConfigurationError(f"{name!r}: {what}: {a.numel()} elements and {b.numel()} elements")


def _watched(outputs: Blocks, operands: Operands) -> torch.Tensor | None:
    """The tensor that ``Work.wait`` returns: ``outputs`` if it is one tensor that holds all blocks."""
    if not isinstance(outputs, torch.Tensor):
        return None
    operands.watch(outputs)
    return outputs


def reduction(
    kind: OpKind, tensor: torch.Tensor, name: str, *, op: ReduceOp, root: int, algorithm: str, writes: bool
) -> Request:
    """Allreduce and reduce."""
    dtype = dtypes.dtype_of(tensor, name)
    signature = Signature(kind, dtype, _checked_op(op, dtype, name), root, tuple(tensor.shape), algorithm=algorithm)
    operands = Operands(name)
    return Request(signature, [operands.add(tensor, writes=writes)], operands, tensor)


def broadcast(tensor: torch.Tensor, name: str, *, root: int, algorithm: str, writes: bool) -> Request:
    """Broadcast."""
    dtype = dtypes.moved_dtype_of(tensor, name)
    shape = tuple(tensor.shape)
    if dtype.itemsize != tensor.element_size():
        shape = (*shape, tensor.element_size())  # it travels as bytes
    signature = Signature(OpKind.BROADCAST, dtype, ReduceOp.NONE, root, shape, algorithm=algorithm)
    operands = Operands(name)
    return Request(signature, [operands.add(tensor, writes=writes)], operands, tensor)


def barrier() -> Request:
    """Barrier."""
    return Request(
        Signature(OpKind.BARRIER, DType.UINT8, ReduceOp.NONE, 0, (0,)), [memoryview(bytearray(0))], None, None
    )


def allgather(outputs: Blocks, tensor: torch.Tensor, name: str, *, rank: int, size: int, algorithm: str) -> Request:
    """Allgather, with blocks of any sizes that all ranks know."""
    dtype = dtypes.moved_dtype_of(tensor, name)
    blocks = listed(outputs, size, name, "outputs")
    _one_dtype(blocks, tensor, name)
    _same_count(blocks[rank], tensor, name, f"outputs[{rank}] and the tensor must be equally large")
    operands = Operands(name)
    buffers = [operands.add(block, writes=True) for block in blocks]
    operands.copy(tensor, buffers[rank])
    sizes = tuple(len(buffer) // dtype.itemsize for buffer in buffers)
    signature = Signature(OpKind.ALLGATHER, dtype, ReduceOp.NONE, 0, (), sizes, algorithm)
    return Request(signature, buffers, operands, _watched(outputs, operands))


def reduce_scatter(
    tensor: torch.Tensor, inputs: Blocks, name: str, *, op: ReduceOp, rank: int, size: int, algorithm: str
) -> Request:
    """Reduce-scatter, with blocks of any sizes that all ranks know.

    The inputs are only read; the tensor may be this rank's block of them, and takes the result then.
    """
    dtype = dtypes.dtype_of(tensor, name)
    blocks = listed(inputs, size, name, "inputs")
    _one_dtype(blocks, tensor, name)
    _same_count(blocks[rank], tensor, name, f"inputs[{rank}] and the tensor must be equally large")
    operands = Operands(name)
    own = operands.add(tensor, writes=True)
    in_place = tensor.data_ptr() == blocks[rank].data_ptr() and tensor.is_contiguous() and blocks[rank].is_contiguous()
    buffers = [own if in_place and index == rank else operands.add(block) for index, block in enumerate(blocks)]
    buffers.append(own)
    if size == 1:
        operands.copy(blocks[0], own)
    sizes = tuple(len(buffer) // dtype.itemsize for buffer in buffers[:size])
    kind, op = OpKind.REDUCE_SCATTER, _checked_op(op, dtype, name)
    return Request(Signature(kind, dtype, op, 0, (), sizes, algorithm), buffers, operands, tensor)


def root_blocks(
    blocks: Blocks | None, tensor: torch.Tensor, name: str, *, what: str, rank: int, size: int, root: int
) -> list[torch.Tensor] | None:
    """Check the blocks that the root of a gather or scatter passes, one for each rank; the other ranks pass ``None``.

    Raises:
        ConfigurationError: A rank passes ``None`` and is the root, or passes blocks and is not; or the blocks are not
            one for each rank, have another element type than the tensor, or another size than the root's tensor.
    """
    if rank != root:
        if blocks is not None and len(blocks):
            raise ConfigurationError(f"{name!r}: {what} are for the root (rank {root}) only; rank {rank} passes None")
        return None
    if blocks is None:
        raise ConfigurationError(f"{name!r}: the root (rank {root}) must pass {what}: {size} tensors")
    parts = listed(blocks, size, name, what)
    _one_dtype(parts, tensor, name)
    _same_count(parts[rank], tensor, name, f"{what}[{rank}] and the tensor must be equally large")
    return parts


def gather(outputs: Blocks | None, tensor: torch.Tensor, name: str, *, rank: int, size: int, root: int) -> Request:
    """Gather; only the root has outputs, of any sizes."""
    signature = Signature(OpKind.GATHER, dtypes.moved_dtype_of(tensor, name), ReduceOp.NONE, root, ())
    operands = Operands(name)
    blocks = root_blocks(outputs, tensor, name, what="outputs", rank=rank, size=size, root=root)
    if outputs is None or blocks is None:
        buffers: list[memoryview | None] = [None] * size
        buffers[rank] = operands.add(tensor)
        return Request(signature, buffers, operands, None)
    filled = [operands.add(block, writes=True) for block in blocks]
    operands.copy(tensor, filled[rank])
    return Request(signature, filled, operands, _watched(outputs, operands))


def scatter(tensor: torch.Tensor, inputs: Blocks | None, name: str, *, rank: int, size: int, root: int) -> Request:
    """Scatter; only the root has inputs, of any sizes."""
    signature = Signature(OpKind.SCATTER, dtypes.moved_dtype_of(tensor, name), ReduceOp.NONE, root, ())
    operands = Operands(name)
    blocks = root_blocks(inputs, tensor, name, what="inputs", rank=rank, size=size, root=root)
    own = operands.add(tensor, writes=True)
    if blocks is None:
        buffers: list[memoryview | None] = [None] * size
        buffers[rank] = own
        return Request(signature, buffers, operands, tensor)
    operands.copy(blocks[rank], own)
    filled = [own if index == rank else operands.add(block) for index, block in enumerate(blocks)]
    return Request(signature, filled, operands, tensor)


def alltoall(outputs: Blocks, inputs: Blocks, name: str, *, rank: int, size: int) -> Request:
    """Alltoall, with blocks of any sizes that sender and receiver know."""
    sent, received = listed(inputs, size, name, "inputs"), listed(outputs, size, name, "outputs")
    dtype = dtypes.moved_dtype_of(sent[0], name)
    _one_dtype([*sent, *received], sent[0], name)
    _same_count(received[rank], sent[rank], name, f"inputs[{rank}] and outputs[{rank}] must be equally large")
    operands = Operands(name)
    taken = [operands.add(block, writes=True) for block in received]
    operands.copy(sent[rank], taken[rank])
    given = [taken[rank] if index == rank else operands.add(block) for index, block in enumerate(sent)]
    signature = Signature(OpKind.ALLTOALL, dtype, ReduceOp.NONE, 0, ())
    return Request(signature, [*given, *taken], operands, _watched(outputs, operands))


def allgather_bytes(blocks: Sequence[memoryview]) -> Request:
    """Allgather of memory that is no tensor's: every rank's block, this rank's among them. Nothing is copied."""
    sizes = tuple(map(len, blocks))
    return Request(Signature(OpKind.ALLGATHER, DType.UINT8, ReduceOp.NONE, 0, (), sizes), blocks, None, _NO_TENSOR)


def alltoall_bytes(sent: Sequence[memoryview], received: Sequence[memoryview]) -> Request:
    """Alltoall of memory that is no tensor's, by rank. This rank's block for itself is not copied."""
    signature = Signature(OpKind.ALLTOALL, DType.UINT8, ReduceOp.NONE, 0, ())
    return Request(signature, [*sent, *received], None, _NO_TENSOR)


def message(tensor: torch.Tensor, name: str, *, writes: bool) -> Request:
    """A message from one rank to another: ``writes`` on the receiver."""
    dtype = dtypes.moved_dtype_of(tensor, name)
    signature, operands = Signature(OpKind.SEND_RECV, dtype, ReduceOp.NONE, 0, ()), Operands(name)
    return Request(signature, [operands.add(tensor, writes=writes)], operands, tensor)
