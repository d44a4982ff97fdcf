"""``Gate``: whether the operations of a group are taken at present."""

from __future__ import annotations

import threading
from typing import final
from weakref import WeakSet

from totalreduce.foundation.errors import ConfigurationError

__all__ = ["Gate"]


@final
class Gate:
    """Takes the operations of a group, or refuses them for a reason. The barrier is an operation, too."""

    __slots__ = ("_admitted", "is_formed", "reason")

    def __init__(self) -> None:
        #: Whether the group is formed. Where ranks can be replaced, a program gets a group that is not.
        self.is_formed = True
        self.reason = ""  #: Why operations are refused; "" if they are taken.
        self._admitted: WeakSet[object] = WeakSet()  #: Threads.

    def await_formation(self, reason: str) -> None:
        """Refuse operations for good: when the group is formed, it gets a new engine and a new gate."""
        self.is_formed, self.reason = False, reason

    def refuse(self, reason: str) -> None:
        """Refuse operations from now on, for another reason than before if they were refused already."""
        self.reason = reason

    def take(self) -> None:
        """Take operations again."""
        self.reason = ""

    def admit_thread(self) -> None:
        """Take the operations of the present thread, also while those of others are refused."""
        self._admitted.add(threading.current_thread())

    def check(self) -> None:
        """Raise ``ConfigurationError`` with the reason if an operation of the present thread is refused."""
        if self.reason and threading.current_thread() not in self._admitted:
            raise ConfigurationError(self.reason)
