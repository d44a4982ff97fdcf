"""Greetings: the first exchange of a bucket, with flags (finite, gradients present) and the method's numbers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allgather, Alltoall

__all__ = ["Greetings", "greet", "greet_with_block"]


@dataclass(frozen=True, slots=True)
class Greetings:
    """The greetings of all ranks to this rank."""

    finite: bool  #: Whether the gradients of all ranks are finite.
    present: Array  #: For each segment whether some rank had a gradient.
    numbers: Array  #: uint32, shape (world size, numbers per rank): by source. No numbers with ``greet_with_block``.


def greet(
    rank: int, *, finite: bool, present: Array, numbers: Sequence[Sequence[int] | Array]
) -> Generator[Action, Any, Greetings]:
    """Exchange greetings: a few bytes for each rank, so that a thousand ranks cost kilobytes.

    ``numbers`` has a row of numbers from 0 to 2^32 - 1 for each destination; the rows of all ranks are equally long.
    """
    flags = _flags(finite=finite, present=present)
    blocks = [np.concatenate([flags, np.asarray(row, np.uint32).view(np.uint8)]) for row in numbers]
    size = blocks[rank].size
    received = yield Alltoall(blocks, [size] * len(blocks))
    received[rank] = blocks[rank]
    table = np.stack(received)
    rows = np.ascontiguousarray(table[:, flags.size :]).view(np.uint32).reshape(len(blocks), -1)
    return _greetings(table[:, : flags.size], present.size, rows)


def greet_with_block(
    world_size: int, *, finite: bool, present: Array, block: Array, size: int, meanwhile: Callable[[], None]
) -> Generator[Action, Any, tuple[Greetings, list[Array]]]:
    """Exchange greetings together with a block: one exchange instead of two if the largest size of a block is known.

    ``size`` is that size in bytes, equal on all ranks.

    Returns:
        The greetings, and the block of each rank with zeros at its end.
    """
    flags = _flags(finite=finite, present=present)
    message = np.zeros(flags.size + size, np.uint8)
    message[: flags.size] = flags
    message[flags.size : flags.size + block.size] = block
    received = yield Allgather(message, [message.size] * world_size, meanwhile)
    no_numbers = np.empty((world_size, 0), np.uint32)
    greetings = _greetings(np.stack([other[: flags.size] for other in received]), present.size, no_numbers)
    return greetings, [other[flags.size :] for other in received]


def _flags(*, finite: bool, present: Array) -> Array:
    return np.packbits(np.concatenate([np.array([finite]), present]))


def _greetings(flags: Array, num_segments: int, numbers: Array) -> Greetings:
    bits = np.unpackbits(flags, axis=1)[:, : 1 + num_segments].astype(bool)
    return Greetings(bool(bits[:, 0].all()), np.logical_or.reduce(bits[:, 1:]), numbers)
