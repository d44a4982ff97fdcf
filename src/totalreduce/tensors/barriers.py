"""Barriers that a rank submits once, however often a call that waits for one is interrupted."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import final

from totalreduce.tensors.work import Work

__all__ = ["Barriers"]


@final
class Barriers:
    """The barriers of one rank for which a call has exceeded its time-out or was interrupted. Any thread may call it.

    The other ranks count such a barrier, so this rank must not submit another one in its place: the next call waits for
    the same barrier. Some of these barriers may have ended meanwhile.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count()  #: Numbers for the barriers that are submitted.
        self._late: deque[Work] = deque()

    def wait(self, submit: Callable[[], Work], timeout_s: float) -> Work:
        """Wait for the barrier of an earlier call, or for one that ``submit`` submits; return it.

        Raises:
            DeadlineExceededError: It has not ended after ``timeout_s`` seconds.
        """
        try:
            work = self._late.popleft()
        except IndexError:
            work = submit()
        try:
            work.wait(timeout_s)
        except BaseException:  # also Ctrl-C
            if work.exception() is None:
                self._late.append(work)
            raise
        return work

    def clear(self) -> None:
        """Forget all barriers, which have ended."""
        self._late.clear()
