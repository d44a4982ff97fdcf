"""A forked child of a rank's process: it cannot use the rank's group, and must not keep the rank's connections open.

A fork copies memory and descriptors, but no thread. The copy of a group in a child has no thread that would move its
messages, its locks may be held by threads that are not there, and what it did to the connections, to the memory shared
with other ranks, or to an epoll object would happen to the parent's. So everything that a program may call checks that
it is in its process (``HomeProcess``), before it takes a lock.

The copies of the sockets are a danger of their own: as long as a child has them open, the other ranks do not see the
end of the parent. So they are closed right after the fork. Python has hooks for that, and none to take one away again;
the list of what is to be closed is therefore the one thing in this package that belongs to the process and not to a
group.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any, Protocol, final

from totalreduce.foundation.errors import GroupClosed

__all__ = ["HomeProcess", "let_go_in_children"]

_log = logging.getLogger(__name__)


@final
class HomeProcess:
    """The process in which an object was made, and may be used."""

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        """``what``: names the object in messages."""
        self._what, self._pid = what, os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and no forked child of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Return if this is that process.

        Raises:
            GroupClosed: This is a forked child.
        """
        if os.getpid() != self._pid:
            raise GroupClosed(
                f"{self._what} belongs to process {self._pid}, and this is process {os.getpid()}, forked from it. "
                "Communicate in the parent; or start the child with multiprocessing's 'spawn' and call init() in it"
            )


class HoldsDescriptors(Protocol):
    """Has descriptors that a child must not keep."""

    def let_go(self) -> None:
        """Close them. Called in a child, in its only thread; the object is not used there any more.

        It must take no lock, and must not tell an epoll object anything, because that is the parent's too.
        """


_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def let_go_in_children(holder: HoldsDescriptors) -> None:
    """Have ``holder.let_go()`` called in every child that is forked from now on, as long as the holder lives."""
    _holders.add(holder)


def _in_child() -> None:
    for holder in list(_holders):
        try:
            holder.let_go()
        except Exception:  # the fork has happened: the child may be about something else altogether
            _log.debug("a forked child could not let go of %r", holder, exc_info=True)


os.register_at_fork(after_in_child=_in_child)
