"""A forked child of a rank's process: it cannot use the rank's group, and must not keep the rank's connections open.

A fork copies memory and descriptors, but no thread. The copy of a group in a child has no thread that moves its
messages, its locks may be held by threads of the parent, and any change of the connections, of the memory shared with
other ranks, or of an epoll object would affect the parent. So every function that a program may call checks that it
runs in the process of its group (``HomeProcess``), before it takes a lock.

As long as a child has the copies of the sockets open, the other ranks do not notice the end of the parent. So they are
closed right after the fork. Python has hooks for that, but a hook cannot be removed; therefore the list of objects to
close belongs to the process and not to a group.
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
    """The process in which an object was made, and in which alone it may be used."""

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        """``what`` names the object in messages."""
        self._what, self._pid = what, os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and no forked child of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise ``GroupClosed`` if this is a forked child of that process."""
        if os.getpid() != self._pid:
            raise GroupClosed(
                f"{self._what} belongs to process {self._pid}, and this is process {os.getpid()}, forked from it. "
                "Communicate in the parent; or start the child with multiprocessing's 'spawn' and call init() in it"
            )


class HoldsDescriptors(Protocol):
    """An object with descriptors that a child must not keep."""

    def let_go(self) -> None:
        """Close them. Called in a child, in its only thread, where the object is not used any more.

        It must take no lock, and must not change an epoll object, because that belongs to the parent too.
        """


_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def let_go_in_children(holder: HoldsDescriptors) -> None:
    """Call ``holder.let_go()`` in every child that is forked from now on, as long as the holder exists."""
    _holders.add(holder)


def _in_child() -> None:
    for holder in list(_holders):
        try:
            holder.let_go()
        except Exception:  # the child may have nothing to do with the group
            _log.debug("a forked child could not let go of %r", holder, exc_info=True)


os.register_at_fork(after_in_child=_in_child)
