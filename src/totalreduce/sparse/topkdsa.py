"""TopkDSA: split, reduce and gather all sums, with each region sparse or dense, whichever is shorter.

Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning", SC 2019, in its form of
split-allgather. The bucket is cut into equal regions, one per rank; each rank sends every region's elements to the
owner, which adds them and sends all sums to all ranks. Sums are not selected, so the gathered blocks grow with the
number of ranks, up to the dense size: at a density of 1 %, a region of 32 ranks is a quarter full. A region travels as
plain values if that is shorter.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, final

import numpy as np

from totalreduce.codecs import blocks
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allgather, Alltoall
from totalreduce.sparse.regions import RegionSession, reduce_region, to_owners
from totalreduce.sparse.session import BucketShape, Update
from totalreduce.sparse.settings import TopkSettings

__all__ = ["TopkDSA", "TopkDSASession"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TopkDSA(TopkSettings):
    """Settings of TopkDSA; see ``TopkSettings``."""

    name: ClassVar[str] = "topkdsa"

    def session(self, shape: BucketShape, rank: int, world_size: int) -> TopkDSASession:
        return TopkDSASession(self, shape, rank, world_size)


@final
class TopkDSASession(RegionSession[TopkDSA]):
    """The session of TopkDSA."""

    def _exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        selection, kind, size = self._selection, self._settings.values, self._world_size
        sent = blocks.rounded(selection.values, kind)
        cuts = [self._num_elements * rank // size for rank in range(size + 1)]
        parts = to_owners(selection.indices, sent, cuts, self._rank, kind)
        greetings = yield from self._greet(present, [[part.size] for part in parts])
        if not greetings.finite:
            return None
        received = yield Alltoall(parts, greetings.numbers[:, 0].tolist())
        indices, exact = reduce_region(received, selection.indices, sent, cuts, self._rank)
        applied = blocks.rounded(exact, kind)
        some = np.flatnonzero(applied)  # plain values do not tell that a sum is zero
        indices, exact, applied = indices[some], exact[some], applied[some]
        block = _pack(indices, applied, cuts[self._rank], cuts[self._rank + 1], kind)
        sizes = yield Allgather(np.array([block.size], np.uint32).view(np.uint8), [4] * size)
        lengths = np.concatenate(sizes).view(np.uint32).tolist()
        gathered = yield Allgather(block, lengths, functools.partial(self._keep_own, cuts, indices, exact - applied))
        spans = list(pairwise(cuts))
        lists = [_sparse(block, begin, end, kind) for block, (begin, end) in zip(gathered, spans, strict=True)]
        lists[self._rank] = indices, applied
        all_indices, all_values, _ = blocks.unpack_all(lists, spans)
        self._keep_others(cuts, all_indices)
        return Update(greetings.present, all_indices, all_values)


def _pack(indices: Array, values: Array, begin: int, end: int, kind: blocks.ValueKind) -> Array:
    """Encode a region's sums: as a block, or as plain values if the block would not be shorter."""
    block = blocks.pack(indices, values, begin, end, kind)
    if block.size < blocks.value_bytes(end - begin, kind):
        return block
    dense = np.zeros(end - begin, np.float32)
    dense[indices - begin] = values
    return blocks.pack_values(dense, kind)


def _sparse(block: Array, begin: int, end: int, kind: blocks.ValueKind) -> Array | tuple[Array, Array]:
    """Return a block unchanged, and the nonzero elements of plain values."""
    if block.size != blocks.value_bytes(end - begin, kind):
        return block
    dense = blocks.unpack_values(block, kind)
    indices = np.flatnonzero(dense)
    return (indices + begin).astype(np.int32), dense[indices]
