"""Operations of names that were carried out in the fast lane before: they begin there without a record in the engine.

In the fast lane most operations end within microseconds. The engine adopts an operation that has not ended when
anything else happens to the engine.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import final

from totalreduce.engine.operation import Operation
from totalreduce.engine.submission import Submission
from totalreduce.fastlane.lane import LaneCarriage

__all__ = ["KnownCarriages"]

#: Names whose carriages are kept. A carriage has some two KiB. The fast lane has two entries for half of them; the
#: others take entries that are free at the moment.
_NAMES_MAX = 1024


@final
class KnownCarriages:
    """The carriage of the last operation of every name, by scope and name."""

    def __init__(self) -> None:
        self._carriages: OrderedDict[tuple[str, str], LaneCarriage] = OrderedDict()

    def find(self, submission: Submission) -> LaneCarriage | None:
        """Return the carriage of the last operation of a name, if the submitted operation is of the same layout.

        Any thread may call it.
        """
        name = submission.name
        carriage = None if name is None else self._carriages.get((submission.scope, name))
        if carriage is None:
            return None
        signature = carriage.layout.signature
        if signature is not submission.signature and signature != submission.signature:
            return None
        return carriage if submission.ranks is None or submission.ranks == carriage.ranks else None

    def learn(self, submission: Submission, operation: Operation) -> None:
        """Keep the carriage of a submitted operation. Called under the lock."""
        name, carriage = submission.name, operation.carriage
        if name is None or submission.repeats or not isinstance(carriage, LaneCarriage):
            return
        key = (submission.scope, name)
        self._carriages[key] = carriage
        self._carriages.move_to_end(key)
        if len(self._carriages) > _NAMES_MAX:
            self._carriages.popitem(last=False)
