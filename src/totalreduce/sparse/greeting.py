"""What ranks tell each other about a bucket first: is it finite, who has gradients, and the method's numbers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from totalreduce.sparse.actions import Action, Alltoall, Array

__all__ = ["Greetings", "greet"]


@dataclass(frozen=True, slots=True)
class Greetings:
    """What everybody said to this rank.

    Attributes:
        finite: Whether everybody's gradients are.
        present: For each segment whether some rank had a gradient.
        numbers: uint32, shape (world size, so many numbers): by source.
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
    flags = np.packbits(np.concatenate([np.array([finite]), present]))
    blocks = [np.concatenate([flags, np.asarray(row, np.uint32).view(np.uint8)]) for row in numbers]
    size = blocks[rank].size
    told = yield Alltoall(blocks, [size] * len(blocks))
    told[rank] = blocks[rank]
    table = np.stack(told)
    bits = np.unpackbits(table[:, : flags.size], axis=1)[:, : 1 + present.size].astype(bool)
    return Greetings(
        finite=bool(bits[:, 0].all()),
        present=np.logical_or.reduce(bits[:, 1:]),
        numbers=np.ascontiguousarray(table[:, flags.size :]).view(np.uint32).reshape(len(blocks), -1),
    )
