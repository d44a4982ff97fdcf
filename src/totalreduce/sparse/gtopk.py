"""gTopk: select the k largest sums along a tree of ranks.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks", ICDCS
2019. A rank adds the k elements that it receives to its own and sends the k largest sums on, along a binomial tree for
any number of ranks; rank 0 broadcasts the result. The bytes grow as the logarithm of the number of ranks.

In the paper a contribution that a rank drops is lost if another subtree brings the same element to the root: the ranks
that contributed assume that it was applied. Here these ranks clear all elements that they have sent, and a rank that
merges keeps dropped sums and rounding errors in its own residual. So every contribution is in exactly one place.

All blocks have the largest size of k elements, so that no sizes are exchanged.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from totalreduce.codecs import blocks
from totalreduce.kernels import merging, selection
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Broadcast, Messages
from totalreduce.sparse.common import TopkSession
from totalreduce.sparse.session import BucketShape, Update
from totalreduce.sparse.settings import TopkSettings

__all__ = ["GTopk", "GTopkSession"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GTopk(TopkSettings):
    """Settings of gTopk; see ``TopkSettings``."""

    name: ClassVar[str] = "gtopk"

    def session(self, shape: BucketShape, rank: int, world_size: int) -> GTopkSession:
        return GTopkSession(self, shape, rank, world_size)


@final
class GTopkSession(TopkSession[GTopk]):
    """The session of GTopk."""

    def _exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        greetings = yield from self._greet(present)
        if not greetings.finite:
            return None
        size = blocks.block_bytes_max(self.report.k, self._num_elements, self._settings.values)
        block = yield from self._climb(size)
        block = yield Broadcast(block, size, 0)
        return Update(greetings.present, *blocks.unpack(block, 0, self._num_elements))

    def _climb(self, size: int) -> Generator[Action, Any, Array]:
        """Merge the blocks that come and send the result on; return the block that this rank has made."""
        rank, distance = self._rank, 1
        indices, values = self._selection.indices, self._selection.values
        self._gradients.erase(indices)
        block = np.empty(0, np.uint8)
        while distance < self._world_size:
            sends, receives = {}, {}
            if rank % (2 * distance) == distance:
                block = sends[rank - distance] = self._leave(indices, values, size)
            elif rank % (2 * distance) == 0 and rank + distance < self._world_size:
                receives[rank + distance] = size
            came = yield Messages(sends, receives)
            for other in came.values():
                lists = blocks.unpack_all([(indices, values), other], [(0, self._num_elements)] * 2)
                indices, values = self._merge(lists)
            distance *= 2
        return self._leave(indices, values, size) if rank == 0 else block

    def _merge(self, lists: blocks.Lists) -> tuple[Array, Array]:
        """Return the k largest sums; the others become residual."""
        indices, values = merging.add_up(*lists)
        k = min(self.report.k, indices.size)
        if k < indices.size:
            least = selection.kth_magnitude([values], k)
            kept_indices, kept_values = indices.copy(), values.copy()
            kept = selection.keep_largest(kept_indices, kept_values, least.bits, k - least.above)
            dropped = ~merging.found_in(indices, kept_indices[:kept])
            self._gradients.add(indices[dropped], values[dropped])
            return kept_indices[:kept], kept_values[:kept]
        return indices, values

    def _leave(self, indices: Array, values: Array, size: int) -> Array:
        """Return a block of the sums; the rounding errors become residual."""
        sent = blocks.rounded(values, self._settings.values)
        self._gradients.add(indices, values - sent)
        return blocks.pack(indices, sent, 0, self._num_elements, self._settings.values, size=size)
