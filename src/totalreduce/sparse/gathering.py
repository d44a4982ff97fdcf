"""The exchange of methods in which every rank sends its selection to all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from totalreduce.kernels import merging
from totalreduce.sparse import blocks
from totalreduce.sparse.actions import Action, Allgather, Array
from totalreduce.sparse.common import TopkSession
from totalreduce.sparse.greeting import Greetings
from totalreduce.sparse.session import Update
from totalreduce.sparse.settings import TopkSettings

__all__ = ["GatheringSession"]

S = TypeVar("S", bound=TopkSettings)


class GatheringSession(TopkSession[S]):
    """All ranks apply the sum of all selections; a rank keeps its unselected elements and its rounding errors."""

    def _exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        selection, kind, n = self._selection, self._settings.values, self._num_elements
        sent = blocks.rounded(selection.values, kind)
        block = blocks.pack(selection.indices, sent, 0, n, kind)
        keep_rest = functools.partial(self._gradients.put, selection.indices, selection.values - sent)
        greetings, gathered = yield from self._gather(present, block, keep_rest)
        if not greetings.finite:
            return None
        own = selection.indices, sent
        lists = [own if rank == self._rank else other for rank, other in enumerate(gathered)]
        indices, values = merging.add_up(*blocks.unpack_all(lists, [(0, n)] * self._world_size))
        return Update(greetings.present, indices, values)

    def _gather(
        self, present: Array, block: Array, meanwhile: Callable[[], None]
    ) -> Generator[Action, Any, tuple[Greetings, list[Array]]]:
        """Return the greetings and the blocks of all ranks."""
        greetings = yield from self._greet(present, [[block.size]] * self._world_size)
        gathered = (yield Allgather(block, greetings.numbers[:, 0].tolist(), meanwhile)) if greetings.finite else []
        return greetings, gathered
