"""Everybody's selection goes to everybody: the exchange of the methods that differ in how they select only."""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import Any, TypeVar

from totalreduce.kernels import merging
from totalreduce.sparse import blocks
from totalreduce.sparse.actions import Action, Allgather, Array
from totalreduce.sparse.common import TopkSession
from totalreduce.sparse.session import Update
from totalreduce.sparse.settings import TopkSettings

__all__ = ["GatheringSession"]

S = TypeVar("S", bound=TopkSettings)


class GatheringSession(TopkSession[S]):
    """All that was chosen anywhere is applied: a rank keeps what it did not choose, and what rounding cut off."""

    def _exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        selection, kind, n = self._selection, self._settings.values, self._num_elements
        sent = blocks.rounded(selection.values, kind)
        block = blocks.pack(selection.indices, sent, 0, n, kind)
        greetings = yield from self._greet(present, [[block.size]] * self._world_size)
        if not greetings.finite:
            return None
        keep_rest = functools.partial(self._gradients.put, selection.indices, selection.values - sent)
        gathered = yield Allgather(block, greetings.numbers[:, 0].tolist(), keep_rest)
        own = selection.indices, sent
        lists = [own if rank == self._rank else other for rank, other in enumerate(gathered)]
        indices, values = merging.add_up(*blocks.unpack_all(lists, [(0, n)] * self._world_size))
        return Update(greetings.present, indices, values)
