"""What the conformance suite submits, and what must come out: the reference in plain torch.

Nothing here knows how a collective is carried out. Ranks are *places*, their numbers among those that take part.
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
        reduction: Where something is reduced.
        num_elements: Of the tensor, or of the largest block.
        uneven: Blocks have sizes of their own, some have none (allgatherv and so on; see ``block_elements``).
        root: Place of the root.
        priority: Smaller is more urgent.
        rough: Normal floats instead of integers: their sums depend on the order of the addends.
        schedule: Explicit, or ``AUTO``.
        members: The ranks that take part, in their order; by default all. Of a message its sender and its receiver.
        any_source: The receiver of a message does not say who sends it.
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
        """Elements of the block that place ``source`` has for place ``target``: 0, half or all of ``num_elements``."""
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

    def sources(self, place: int, size: int) -> range:
        """The places that ``place`` gets something from, itself included."""
        match self.kind:
            case OpKind.REDUCE | OpKind.GATHER if place != self.root:
                return range(place, place + 1)
            case OpKind.SCATTER | OpKind.BROADCAST if place != self.root:
                return range(self.root, self.root + 1)
            case OpKind.SCATTER:
                return range(place, place + 1)
            case OpKind.SEND_RECV:
                return range(place + 1)
            case _:
                return range(size)


@dataclass(frozen=True, slots=True)
class Tensors:
    """What one rank passes.

    Attributes:
        inputs: Tensors that are only read.
        outputs: Tensors that are written; those that are reduced or broadcast in place bring what they hold.
        whole_input: The inputs as ``Group``'s methods take them: one tensor where all blocks are equally large.
        whole_output: The outputs, likewise.
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    whole_input: torch.Tensor | list[torch.Tensor]
    whole_output: torch.Tensor | list[torch.Tensor]


def make_tensors(
    collective: Collective, place: int, size: int, settle: Callable[[torch.Tensor], torch.Tensor] = lambda t: t
) -> Tensors:
    """Fresh tensors of one rank; sums of them are exact unless the collective is ``rough``.

    ``settle``: gives every tensor the memory where it is to be.
    """
    c, everybody = collective, range(size)

    def brought(source: int, target: int) -> torch.Tensor:
        return settle(_values(c, c.block_elements(source, target), source * size + target, size))

    def garbage(source: int, target: int) -> torch.Tensor:
        return settle(_values(c, c.block_elements(source, target), size * size, size))

    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    match c.kind:
        case OpKind.ALLREDUCE | OpKind.REDUCE | OpKind.BROADCAST:
            outputs = [brought(place, 0)]
        case OpKind.ALLGATHER | OpKind.GATHER:
            inputs = [brought(place, 0)]
            if c.kind is OpKind.ALLGATHER or place == c.root:
                outputs = [garbage(source, 0) for source in everybody]
        case OpKind.SCATTER:
            inputs = [brought(place, target) for target in everybody] if place == c.root else []
            outputs = [garbage(c.root, place)]
        case OpKind.REDUCE_SCATTER:
            inputs = [brought(place, target) for target in everybody]
            outputs = [garbage(0, place)]
        case OpKind.ALLTOALL:
            inputs = [brought(place, target) for target in everybody]
            outputs = [garbage(source, place) for source in everybody]
        case OpKind.SEND_RECV:
            inputs, outputs = ([brought(0, 1)], []) if place == 0 else ([], [garbage(0, 1)])
        case OpKind.BARRIER:
            pass
    whole_input: torch.Tensor | list[torch.Tensor] = inputs
    whole_output: torch.Tensor | list[torch.Tensor] = outputs
    if not c.uneven:
        if c.kind in (OpKind.REDUCE_SCATTER, OpKind.ALLTOALL):
            inputs, whole_input = _together(inputs, settle)
        if c.kind in (OpKind.ALLGATHER, OpKind.ALLTOALL):
            outputs, whole_output = _together(outputs, settle)
    return Tensors(inputs, outputs, whole_input, whole_output)


def expected(collective: Collective, brought: Sequence[Tensors]) -> list[list[torch.Tensor]]:
    """The outputs of every rank, from what all ranks brought."""
    c, everybody = collective, range(len(brought))
    inputs = [tensors.inputs for tensors in brought]
    outputs = [tensors.outputs for tensors in brought]
    match c.kind:
        case OpKind.ALLREDUCE:
            total = _reduced(c, [held[0] for held in outputs])
            return [[total] for _ in everybody]
        case OpKind.REDUCE:
            total = _reduced(c, [held[0] for held in outputs])
            return [[total] if place == c.root else outputs[place] for place in everybody]
        case OpKind.BROADCAST:
            return [[outputs[c.root][0]] for _ in everybody]
        case OpKind.ALLGATHER | OpKind.GATHER:
            gathered = [held[0] for held in inputs]
            return [gathered if c.kind is OpKind.ALLGATHER or place == c.root else [] for place in everybody]
        case OpKind.SCATTER:
            return [[inputs[c.root][place]] for place in everybody]
        case OpKind.REDUCE_SCATTER:
            return [[_reduced(c, [held[place] for held in inputs])] for place in everybody]
        case OpKind.ALLTOALL:
            return [[held[place] for held in inputs] for place in everybody]
        case OpKind.SEND_RECV:
            return [[], [inputs[0][0]]]
        case OpKind.BARRIER:
            return [[] for _ in everybody]


def _together(
    blocks: Sequence[torch.Tensor], settle: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Equal blocks as parts of one tensor, and that tensor."""
    whole = settle(torch.cat(list(blocks)))
    length = len(blocks[0])
    return [whole[length * index : length * (index + 1)] for index in range(len(blocks))], whole


def _values(collective: Collective, count: int, which: int, size: int) -> torch.Tensor:
    """``count`` elements that no other block of the collective has."""
    dtype: torch.dtype = getattr(torch, collective.dtype.name.lower())
    reduction = collective.reduction if collective.kind in _REDUCING else ReduceOp.NONE
    if collective.rough:
        generator = np.random.default_rng([which, collective.num_elements])
        return torch.from_numpy(generator.standard_normal(count)).to(dtype)
    place = np.arange(count, dtype=np.int64) * (size * size + 1) + which + 1
    mixed = (place * 2_654_435_761 % 2**32) >> 8
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
