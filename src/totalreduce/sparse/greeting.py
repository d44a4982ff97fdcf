"""What ranks tell each other about a bucket first: is it finite, who has gradients, and the method's numbers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from totalreduce.sparse.actions import Action, Allgather, Alltoall, Array

__all__ = ["Greetings", "greet", "greet_with_block"]


@dataclass(frozen=True, slots=True)
class Greetings:
    """What everybody said to this rank.

    Attributes:
        finite: Whether everybody's gradients are.
        present: For each segment whether some rank had a gradient.
        numbers: uint32, shape (world size, so many numbers): by source. None with a block.
    """

    finite: bool
    present: Array
    numbers: Array


def greet(
    rank: int, *, finite: bool, present: Array, numbers: Sequence[Sequence[int] | Array]
) -> Generator[Action, Any, Greetings]:
    """Tell and be told: a few bytes for each rank, so that a thousand ranks cost kilobytes.

    Args:
        rank: This one's.
        finite: Whether this rank's gradients are.
        present: For each segment whether this rank has a gradient.
        numbers: By destination, from 0 to 2^32 - 1; equally many for all, on all ranks.
    """
    flags = _flags(finite=finite, present=present)
    blocks = [np.concatenate([flags, np.asarray(row, np.uint32).view(np.uint8)]) for row in numbers]
    size = blocks[rank].size
    told = yield Alltoall(blocks, [size] * len(blocks))
    told[rank] = blocks[rank]
    table = np.stack(told)
    heard = np.ascontiguousarray(table[:, flags.size :]).view(np.uint32).reshape(len(blocks), -1)
    return _greetings(table[:, : flags.size], present.size, heard)


def greet_with_block(
    world_size: int, *, finite: bool, present: Array, block: Array, size: int, meanwhile: Callable[[], None]
) -> Generator[Action, Any, tuple[Greetings, list[Array]]]:
    """Tell everybody, and send a block along: one exchange instead of two where all know how long a block can be.

    Args:
        world_size: Number of ranks.
        finite: Whether this rank's gradients are.
        present: For each segment whether this rank has a gradient.
        block: To all.
        size: Bytes that no rank's block exceeds; equal on all ranks.
        meanwhile: See ``Allgather``.

    Returns:
        What everybody said, and everybody's block with zeros behind it.
    """
    flags = _flags(finite=finite, present=present)
    message = np.zeros(flags.size + size, np.uint8)
    message[: flags.size] = flags
    message[flags.size : flags.size + block.size] = block
    told = yield Allgather(message, [message.size] * world_size, meanwhile)
    nothing = np.empty((world_size, 0), np.uint32)
    greetings = _greetings(np.stack([other[: flags.size] for other in told]), present.size, nothing)
    return greetings, [other[flags.size :] for other in told]


def _flags(*, finite: bool, present: Array) -> Array:
    return np.packbits(np.concatenate([np.array([finite]), present]))


def _greetings(flags: Array, num_segments: int, numbers: Array) -> Greetings:
    bits = np.unpackbits(flags, axis=1)[:, : 1 + num_segments].astype(bool)
    return Greetings(bool(bits[:, 0].all()), np.logical_or.reduce(bits[:, 1:]), numbers)
