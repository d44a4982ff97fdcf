"""TopkA: everybody's k largest go to everybody, who adds them up in the order of ranks.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017. One exchange and the least delay,
but a rank receives k elements from each of the others: the bytes grow as the number of ranks does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from totalreduce.sparse.gathering import GatheringSession
from totalreduce.sparse.session import BucketShape
from totalreduce.sparse.settings import TopkSettings

__all__ = ["TopkA", "TopkASession"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TopkA(TopkSettings):
    """Settings of TopkA; see ``TopkSettings``."""

    name: ClassVar[str] = "topka"

    def session(self, shape: BucketShape, rank: int, world_size: int) -> TopkASession:
        """The state of one bucket on one rank."""
        return TopkASession(self, shape, rank, world_size)


@final
class TopkASession(GatheringSession[TopkA]):
    """See ``session.Session``: the k largest by ``Selector``, exchanged as ``gathering`` does."""
