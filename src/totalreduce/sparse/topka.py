"""TopkA: all ranks exchange their k largest elements and add them up in the order of the ranks.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017. It has one exchange and the least
delay, but a rank receives k elements from each of the others: the bytes are proportional to the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, final

from totalreduce.codecs import blocks
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action
from totalreduce.sparse.common import GatheringSession
from totalreduce.sparse.greeting import Greetings, greet_with_block
from totalreduce.sparse.session import BucketShape
from totalreduce.sparse.settings import TopkSettings

__all__ = ["TopkA", "TopkASession"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TopkA(TopkSettings):
    """Settings of TopkA; see ``TopkSettings``."""

    name: ClassVar[str] = "topka"

    def session(self, shape: BucketShape, rank: int, world_size: int) -> TopkASession:
        return TopkASession(self, shape, rank, world_size)


@final
class TopkASession(GatheringSession[TopkA]):
    """The session of TopkA.

    No rank has more than k elements, so sizes are not exchanged: a block has the largest size of k elements, which is
    2 % more, and that saves one exchange.
    """

    def _gather(
        self, present: Array, block: Array, meanwhile: Callable[[], None]
    ) -> Generator[Action, Any, tuple[Greetings, list[Array]]]:
        size = blocks.block_bytes_max(self.report.k, self._num_elements, self._settings.values)
        return (
            yield from greet_with_block(
                self._world_size,
                finite=self._selection.finite,
                present=present,
                block=block,
                size=size,
                meanwhile=meanwhile,
            )
        )
