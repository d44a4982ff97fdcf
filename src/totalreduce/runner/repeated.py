"""An operation that is started again and again: what the runner remembers from start to start.

In the fast lane most operations end within microseconds. So a repeated operation is begun there without a record in the
engine; the engine adopts it if it has not ended when anything else happens to the engine.
"""

from __future__ import annotations

from typing import final

from totalreduce.engine.names import NameRecord
from totalreduce.engine.submission import Submission
from totalreduce.fastlane.lane import Carriage

__all__ = ["Repeated"]


@final
class Repeated:
    """What the runner keeps of a repeated operation.

    Attributes:
        submission: The operation as it is submitted.
        record: What the engine keeps of its name; ``None`` before the first start.
        carriage: What the fast lane keeps of it; ``None`` if the last start was not carried out there.
        key: The key of the last start.
        ended: Whether the last start has ended by itself, so that the engine never knew of it.
    """

    __slots__ = ("carriage", "ended", "key", "record", "submission")

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.record: NameRecord | None = None
        self.carriage: Carriage | None = None
        self.key, self.ended = (0, 0), False
