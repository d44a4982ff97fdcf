"""Coded: all elements travel, in the fewer bytes of a codec.

The ranks share the elements out evenly. Each rank encodes the regions of the others and sends them; adds up its own
region in the order of the ranks, without encoding its own part; encodes the sum, and sends it to all (the compressed
allreduce of Tang et al., "1-bit Adam", ICML 2021). What a code does not express stays in the residual of the rank that
has encoded it, the rest of a sum, too; so no rank has any other state.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, final

import numpy as np

from totalreduce.codecs.codec import Codec, seed_of
from totalreduce.codecs.int8 import Int8
from totalreduce.kernels import ahead, quantisation
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allgather, Alltoall
from totalreduce.sparse.common import BaseSession
from totalreduce.sparse.greeting import greet
from totalreduce.sparse.session import BucketShape, Update

__all__ = ["Coded", "CodedSession", "coded_sum"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Coded:
    """Settings of Coded.

    Attributes:
        codec: The codec: ``tr.Int8()``, or another one of ``totalreduce.codecs``.
    """

    name: ClassVar[str] = "coded"
    whole: ClassVar[bool] = False

    codec: Codec = field(default_factory=Int8)

    def session(self, shape: BucketShape, rank: int, world_size: int) -> CodedSession:
        return CodedSession(self, shape, rank, world_size)


@final
class CodedSession(BaseSession):
    """The session of Coded."""

    def __init__(self, settings: Coded, shape: BucketShape, rank: int, world_size: int) -> None:
        super().__init__(settings.name, shape, rank, world_size)
        self._codec = settings.codec
        ahead.load_codecs()

    def _exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        self.report.k = self.report.selected = self._num_elements
        values = self._gradients.flat()
        is_coded = bool(quantisation.within_limit(values))
        nothing: list[list[int]] = [[]] * self._world_size
        greetings = yield from greet(self._rank, finite=is_coded, present=present, numbers=nothing)
        if not greetings.finite:
            return None
        total = yield from coded_sum(values, self._codec, self._rank, self._world_size, self._steps)
        self._gradients.assign(values, 1.0)
        return Update(greetings.present, None, total)


def coded_sum(values: Array, codec: Codec, rank: int, world_size: int, step: int) -> Generator[Action, Any, Array]:
    """Return the sum of the values of all ranks; the same bits on every rank.

    Args:
        values: float32, ``within_limit``, contiguous, one-dimensional, of the same size on all ranks. Becomes what was
            not sent: the values of all ranks together lose exactly the sum, to the rounding of float32.
        codec: Encodes the values, and the sum.
        rank: This rank.
        world_size: The number of ranks.
        step: The number of the exchange, of which the codec's pseudo-random numbers depend.
    """
    edges = [values.size * other // world_size for other in range(world_size + 1)]
    regions = [values[begin:end] for begin, end in pairwise(edges)]
    own = regions[rank]
    blocks = [
        np.empty(0, np.uint8) if other == rank else _encoded(codec, region, seed_of(step, rank, other))
        for other, region in enumerate(regions)
    ]
    sizes = [codec.bytes_max(own.size)] * world_size
    if not codec.has_fixed_size:
        sizes = yield from _sizes([block.size for block in blocks], rank)
    sizes[rank] = 0
    received = yield Alltoall(blocks, sizes)
    total = np.zeros(own.size, np.float32)
    for other in range(world_size):
        if other == rank:
            total += own
        else:
            codec.decode(received[other], total, adds=True)
    if not quantisation.within_limit(total):  # a sum of values that can be encoded: training diverges
        np.clip(total, -quantisation.LIMIT, quantisation.LIMIT, out=total)
    block = _encoded(codec, total, seed_of(step, rank, rank))
    own[:] = total
    sizes = [codec.bytes_max(region.size) for region in regions]
    if not codec.has_fixed_size:
        sizes = yield from _sizes([block.size] * world_size, rank)
    sums = yield Allgather(block, sizes)
    result = np.empty(values.size, np.float32)
    for code, (begin, end) in zip(sums, pairwise(edges), strict=True):
        codec.decode(code, result[begin:end])
    return result


def _sizes(mine: list[int], rank: int) -> Generator[Action, Any, list[int]]:
    """Tell each rank the size of the block for it; return the sizes of the blocks for this rank, by source."""
    rows = [np.array([size], np.int64).view(np.uint8) for size in mine]
    received = yield Alltoall(rows, [8] * len(rows))
    received[rank] = rows[rank]
    return [int(np.ascontiguousarray(row).view(np.int64)[0]) for row in received]


def _encoded(codec: Codec, values: Array, seed: int) -> Array:
    """Return the code of values, which become what it does not express."""
    room = np.empty(codec.bytes_max(values.size), np.uint8)
    return room[: codec.encode(values, room, seed=seed, keeps=True)]
