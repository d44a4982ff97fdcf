"""A sparse method: every step exchanges the next share of the elements, so that all elements take turns.

Nothing is selected by magnitude, and no indices travel: all ranks know whose turn it is.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from totalreduce.sparse.actions import Action, Allreduce, Array
from totalreduce.sparse.common import BaseSession
from totalreduce.sparse.session import BucketShape, Update
from totalreduce.sparse.settings import DensitySettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns(DensitySettings):
    """Settings: the density is the share of the elements that one step exchanges."""

    name: ClassVar[str] = "turns"

    def session(self, shape: BucketShape, rank: int, world_size: int) -> "TurnsSession":
        """Return the state of one bucket on one rank."""
        return TurnsSession(self, shape, rank, world_size)


class TurnsSession(BaseSession):
    """One bucket on one rank."""

    def __init__(self, settings: Turns, shape: BucketShape, rank: int, world_size: int) -> None:
        super().__init__(settings.name, shape, rank, world_size)
        self._settings = settings

    def _exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        greetings = yield from self._greet(present)
        if not greetings.finite:
            return None
        k = self._settings.count(self._num_elements, self._steps)
        begin = self._steps * k
        indices = np.sort(np.arange(begin, begin + k) % max(1, self._num_elements)).astype(np.int32)
        self.report.k = self.report.selected = indices.size
        total = yield Allreduce(self._gradients.take(indices))
        self._gradients.erase(indices)  # what was exchanged is no residual
        return Update(greetings.present, indices, total)
