"""Shared top-k: one rank selects for all, so that the values need no indices and are added by a dense allreduce.

CLT-k of Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression", NeurIPS 2020. The leader, another rank in
every step, broadcasts the indices of its k largest elements, 1 byte each at a density of 1 %; then an allreduce adds
the elements of all ranks at these indices. The ranks' residuals resemble each other, so the leader's selection suits
all ranks. Sums are neither selected nor rounded: the residuals are exactly zero at the indices of the update.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from totalreduce.codecs import blocks
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allreduce, Broadcast
from totalreduce.sparse.common import TopkSession
from totalreduce.sparse.session import BucketShape, Update
from totalreduce.sparse.settings import DensitySettings

__all__ = ["SharedTopk", "SharedTopkSession"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTopk(DensitySettings):
    """Settings of the shared top-k; see ``DensitySettings``."""

    name: ClassVar[str] = "shared"

    def session(self, shape: BucketShape, rank: int, world_size: int) -> SharedTopkSession:
        return SharedTopkSession(self, shape, rank, world_size)


@final
class SharedTopkSession(TopkSession[SharedTopk]):
    """The session of SharedTopk."""

    def _count(self) -> int:
        return super()._count() if self._rank == self._leader else 0

    def _exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        n, leader = self._num_elements, self._leader
        block = blocks.pack(self._selection.indices, np.empty(0, np.float32), 0, n, "none")
        greetings = yield from self._greet(present, [[block.size]] * self._world_size)
        if not greetings.finite:
            return None
        block = yield Broadcast(block, int(greetings.numbers[leader, 0]), leader)
        indices, _ = blocks.unpack(block, 0, n)
        total = yield Allreduce(self._gradients.take(indices))
        self._gradients.erase(indices)
        return Update(greetings.present, indices, total)

    @property
    def _leader(self) -> int:
        return self._steps % self._world_size
