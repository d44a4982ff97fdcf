"""Dense: a method that sends all elements. It is the reference of the others, and leaves no residuals."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar, final

from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allreduce
from totalreduce.sparse.common import BaseSession
from totalreduce.sparse.session import BucketShape, Update

__all__ = ["Dense", "DenseSession"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """A method without settings."""

    name: ClassVar[str] = "dense"
    whole: ClassVar[bool] = False

    def session(self, shape: BucketShape, rank: int, world_size: int) -> DenseSession:
        return DenseSession(self.name, shape, rank, world_size)


@final
class DenseSession(BaseSession):
    """The session of Dense."""

    def _exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        self.report.k = self.report.selected = self._num_elements
        greetings = yield from self._greet(present)
        if not greetings.finite:
            return None
        total = yield Allreduce(self._gradients.flat())
        self._gradients.clear()
        return Update(greetings.present, None, total)
