"""The stages of one rank: which operation has which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, final

from totalreduce.fastlane.board import CLASS_OF_STAGE, STAGE_CLASSES, StageClass

__all__ = ["StageUser", "Stages"]

#: How many users of a class are asked for a stage that they do not need any more.
_ASKED_MAX: Final = 16


class StageUser(Protocol):
    """What has a stage: the record of the last operation of a name."""

    stage: int | None  #: The number of the stage that it has; ``None`` if it has none.

    @property
    def is_over(self) -> bool:
        """Whether the operation has ended and no rank reads its stage any more."""


@final
class Stages:
    """The users of the stages. A user keeps its stage until another one needs it, because most operations come again.

    All methods take the same time whatever the number of stages.
    """

    def __init__(self) -> None:
        self._users: list[StageUser | None] = [None] * STAGE_CLASSES[-1].stop
        self._free = {kind: list(range(kind.stop - 1, kind.first - 1, -1)) for kind in STAGE_CLASSES}
        #: By class: the stage whose user is asked next.
        self._next = {kind: kind.first for kind in STAGE_CLASSES}

    def find(self, classes: Sequence[StageClass]) -> int | None:
        """Return the number of a stage that nobody uses, of the first class that has one; ``None`` if none has."""
        for kind in classes:
            if self._free[kind]:
                return self._free[kind][-1]
        for kind in classes:
            for _ in range(min(_ASKED_MAX, kind.stop - kind.first)):
                number = self._next[kind]
                self._next[kind] = number + 1 if number + 1 < kind.stop else kind.first
                user = self._users[number]
                if user is not None and user.is_over:
                    self._put_back(number)
                    return number
        return None

    def take(self, number: int, user: StageUser) -> None:
        """Give the stage that ``find`` has returned to a user."""
        free = self._free[CLASS_OF_STAGE[number]]
        assert free[-1] == number
        free.pop()
        self._users[number], user.stage = user, number

    def release(self, user: StageUser) -> None:
        """Take the stage of a user back that does not need it any more."""
        if user.stage is not None:
            self._put_back(user.stage)

    def _put_back(self, number: int) -> None:
        user = self._users[number]
        assert user is not None
        self._users[number] = user.stage = None
        self._free[CLASS_OF_STAGE[number]].append(number)
