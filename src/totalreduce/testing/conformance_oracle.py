"""The collectives that the conformance suite submits, and their expected results, computed by plain torch.

The *position* of a rank is its number among the ranks that take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from totalreduce.foundation.types import Algorithm, DType, OpKind, ReduceOp

__all__ = ["Collective", "Tensors", "expected", "make_tensors"]

_REDUCING = frozenset({OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER})
_BITWISE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One operation, submitted by every rank that takes part.

    Attributes:
        name: Unique in its case.
        kind: Which collective.
        dtype: Element type.
        reduction: The reduction, if the collective has one.
        num_elements: Number of elements of the tensor, or of the largest block.
        uneven: Whether blocks differ in size, and some are empty (allgatherv and so on; see ``block_elements``).
        root: Position of the root.
        priority: Smaller is more urgent.
        rough: Whether elements are normal floats, whose sums depend on the order of the addends, and not integers.
        schedule: The explicit schedule, or ``AUTO``.
        members: The ranks that take part, in their order; by default all. For a message its sender and its receiver.
        any_source: Whether the receiver of a message does not name the sender.
    """

    name: str
    kind: OpKind = OpKind.ALLREDUCE
    dtype: DType = DType.FLOAT64
    reduction: ReduceOp = ReduceOp.SUM
    num_elements: int = 1
    uneven: bool = False
    root: int = 0
    priority: int = 0
    rough: bool = False
    schedule: str = Algorithm.AUTO
    members: tuple[int, ...] = ()
    any_source: bool = False

    def block_elements(self, source: int, target: int) -> int:
        """Return the size of the block of ``source`` for ``target``: 0, half or all of ``num_elements``."""
        if not self.uneven:
            return self.num_elements
        match self.kind:
            case OpKind.ALLTOALL:
                which = source + 2 * target
            case OpKind.ALLGATHER | OpKind.GATHER:
                which = source
            case _:
                which = target
        return self.num_elements * ((which + 1) % 3) // 2

    def sources(self, position: int, size: int) -> range:
        """Return the positions from which ``position`` gets data, itself included."""
        match self.kind:
            case OpKind.REDUCE | OpKind.GATHER if position != self.root:
                return range(position, position + 1)
            case OpKind.SCATTER | OpKind.BROADCAST if position != self.root:
                return range(self.root, self.root + 1)
            case OpKind.SCATTER:
                return range(position, position + 1)
            case OpKind.SEND_RECV:
                return range(position + 1)
            case _:
                return range(size)


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of one rank."""

    inputs: list[torch.Tensor]  #: Tensors that are only read.
    outputs: list[torch.Tensor]  #: Tensors that are written; those that are reduced or broadcast in place are read too.
    #: The inputs as ``Group``'s methods take them: one tensor if all blocks are equally large.
    input_arg: torch.Tensor | list[torch.Tensor]
    output_arg: torch.Tensor | list[torch.Tensor]  #: The outputs, likewise.


def make_tensors(
    collective: Collective, position: int, size: int, move: Callable[[torch.Tensor], torch.Tensor] = lambda t: t
) -> Tensors:
    """Return new tensors of one rank; sums of them are exact unless the collective is ``rough``.

    ``move`` copies every tensor into the memory in which it is to be.
    """
    c, positions = collective, range(size)

    def brought(source: int, target: int) -> torch.Tensor:
        return move(_values(c, c.block_elements(source, target), source * size + target, size))

    def garbage(source: int, target: int) -> torch.Tensor:
        return move(_values(c, c.block_elements(source, target), size * size, size))

    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    match c.kind:
        case OpKind.ALLREDUCE | OpKind.REDUCE | OpKind.BROADCAST:
            outputs = [brought(position, 0)]
        case OpKind.ALLGATHER | OpKind.GATHER:
            inputs = [brought(position, 0)]
            if c.kind is OpKind.ALLGATHER or position == c.root:
                outputs = [garbage(source, 0) for source in positions]
        case OpKind.SCATTER:
            inputs = [brought(position, target) for target in positions] if position == c.root else []
            outputs = [garbage(c.root, position)]
        case OpKind.REDUCE_SCATTER:
            inputs = [brought(position, target) for target in positions]
            outputs = [garbage(0, position)]
        case OpKind.ALLTOALL:
            inputs = [brought(position, target) for target in positions]
            outputs = [garbage(source, position) for source in positions]
        case OpKind.SEND_RECV:
            inputs, outputs = ([brought(0, 1)], []) if position == 0 else ([], [garbage(0, 1)])
        case OpKind.BARRIER:
            pass
    input_arg: torch.Tensor | list[torch.Tensor] = inputs
    output_arg: torch.Tensor | list[torch.Tensor] = outputs
    if not c.uneven:
        if c.kind in (OpKind.REDUCE_SCATTER, OpKind.ALLTOALL):
            inputs, input_arg = _together(inputs, move)
        if c.kind in (OpKind.ALLGATHER, OpKind.ALLTOALL):
            outputs, output_arg = _together(outputs, move)
    return Tensors(inputs, outputs, input_arg, output_arg)


def expected(collective: Collective, brought: Sequence[Tensors]) -> list[list[torch.Tensor]]:
    """Return the expected outputs of every rank, from the tensors of all ranks."""
    c, positions = collective, range(len(brought))
    inputs = [tensors.inputs for tensors in brought]
    outputs = [tensors.outputs for tensors in brought]
    match c.kind:
        case OpKind.ALLREDUCE:
            total = _reduced(c, [held[0] for held in outputs])
            return [[total] for _ in positions]
        case OpKind.REDUCE:
            total = _reduced(c, [held[0] for held in outputs])
            return [[total] if position == c.root else outputs[position] for position in positions]
        case OpKind.BROADCAST:
            return [[outputs[c.root][0]] for _ in positions]
        case OpKind.ALLGATHER | OpKind.GATHER:
            gathered = [held[0] for held in inputs]
            return [gathered if c.kind is OpKind.ALLGATHER or position == c.root else [] for position in positions]
        case OpKind.SCATTER:
            return [[inputs[c.root][position]] for position in positions]
        case OpKind.REDUCE_SCATTER:
            return [[_reduced(c, [held[position] for held in inputs])] for position in positions]
        case OpKind.ALLTOALL:
            return [[held[position] for held in inputs] for position in positions]
        case OpKind.SEND_RECV:
            return [[], [inputs[0][0]]]
        case OpKind.BARRIER:
            return [[] for _ in positions]


def _together(
    blocks: Sequence[torch.Tensor], move: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return equal blocks as parts of one tensor, and that tensor."""
    joined = move(torch.cat(list(blocks)))
    length = len(blocks[0])
    return [joined[length * index : length * (index + 1)] for index in range(len(blocks))], joined


def _values(collective: Collective, count: int, which: int, size: int) -> torch.Tensor:
    """Return ``count`` elements that no other block of the collective has."""
    dtype: torch.dtype = getattr(torch, collective.dtype.name.lower())
    reduction = collective.reduction if collective.kind in _REDUCING else ReduceOp.NONE
    if collective.rough:
        generator = np.random.default_rng([which, collective.num_elements])
        return torch.from_numpy(generator.standard_normal(count)).to(dtype)
    index = np.arange(count, dtype=np.int64) * (size * size + 1) + which + 1
    mixed = (index * 2_654_435_761 % 2**32) >> 8
    if collective.dtype is DType.BOOL:
        values = mixed % 2
    elif reduction is ReduceOp.PRODUCT:
        values = mixed % 3 + 1 if dtype in (torch.int64, torch.int32) else 2 ** (mixed % 2)
    elif collective.dtype.itemsize == 1:
        # An average must not overflow on the way; a sum may, and wraps like torch's.
        span = 248 // size if reduction is ReduceOp.AVG else 256
        values = mixed % span - (0 if dtype is torch.uint8 else span // 2)
    else:
        span = 256 if dtype is torch.bfloat16 else 2048 if collective.dtype.itemsize == 2 else 2**20
        values = mixed % span - span // 2
    return torch.from_numpy(values).to(dtype)


def _reduced(collective: Collective, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype, reduction, stacked = tensors[0].dtype, collective.reduction, torch.stack(list(tensors))
    if reduction in _BITWISE:
        total = tensors[0]
        for tensor in tensors[1:]:
            total = _BITWISE[reduction](total, tensor)
        return total
    if dtype is torch.bool:
        return stacked.any(0) if reduction in (ReduceOp.SUM, ReduceOp.MAX) else stacked.all(0)
    wide = stacked.float() if collective.dtype.is_half else stacked if stacked.is_floating_point() else stacked.long()
    match reduction:
        case ReduceOp.MIN:
            total = wide.amin(0)
        case ReduceOp.MAX:
            total = wide.amax(0)
        case ReduceOp.PRODUCT:
            total = wide.prod(0)
        case _:
            total = wide.sum(0)
    if reduction is ReduceOp.AVG:
        total = torch.div(total, len(tensors), rounding_mode=None if wide.is_floating_point() else "trunc")
    return total.to(dtype)
