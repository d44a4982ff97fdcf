"""Which thread moves the messages: the communication thread, or a caller that is blocked.

A caller that is blocked in ``wait`` has nothing else to do, so it *drives*: it moves the messages, and the
communication thread parks. A blocking operation then needs no change of threads, which takes longer than to send a
small message.
"""

from __future__ import annotations

import contextlib
import threading
from typing import final

__all__ = ["Turns"]

#: How long the communication thread stays parked without a call of ``unpark``. Data waits in the kernel meanwhile.
_PARKED_S = 0.01
#: The same while one driver goes on moving messages, which ends the wait when it leaves. To look every 10 ms cost a
#: rank 4 ms of processor time per second (8 ranks on 2 cores).
_PARKED_DEEP_S = 0.25
#: A submission so soon after a driver has left is probably the next blocking operation: the submitter will drive.
_NEXT_BLOCKING_S = 0.001


@final
class Turns:
    """The hand-over between callers and the communication thread."""

    def __init__(self) -> None:
        #: The object that the driving thread has put here; ``None`` while no caller drives. Written under the lock of
        #: the engine, but without it by a driver that an exception ends.
        self.driver: object | None = None
        self.parked = False  #: Whether the communication thread is parked.
        #: Whether the last driver left nothing in flight, so that the communication thread may park once more.
        self.resting = False
        self._left_at = 0.0
        #: The driver that was there when the communication thread parked last.
        self._parked_for: object | None = None
        self._parked_deep = False
        # Held until the parked thread is to look again. An Event would not do: Ctrl-C within its ``set`` can leave the
        # Event's lock held for ever.
        self._resume = threading.Lock()
        self._resume.acquire()

    def is_driven(self) -> bool:
        """Return whether a caller moves the messages at the moment."""
        return self.driver is not None

    def leave(self, now: float, *, resting: bool) -> None:
        """End the turn of the driver. ``resting``: nothing is in flight."""
        self._left_at, self.resting = now, resting
        self.driver = None
        if self._parked_deep:
            self.unpark()

    def rest(self, now: float, *, resting: bool) -> None:
        """As ``leave``, for a caller that has moved its own operation without a turn."""
        self._left_at, self.resting = now, resting

    def park(self) -> None:
        """Wait until ``unpark`` is called, for a short time at most. Called by the communication thread."""
        self.resting = False
        self.parked = True
        last, self._parked_for = self._parked_for, self.driver
        if last is None or self.driver is not last:
            self.pause()
        else:  # the same driver as the last time
            self._parked_deep = True
            if self.driver is last:  # it may have left before it could see that this thread parks
                self._resume.acquire(timeout=_PARKED_DEEP_S)
            self._parked_deep = False
        self.parked = False

    def pause(self) -> None:
        """As ``park``, without the note that this thread is parked."""
        self._resume.acquire(timeout=_PARKED_S)

    def unpark(self) -> None:
        """Let the communication thread look again."""
        with contextlib.suppress(RuntimeError):  # the lock is free already
            self._resume.release()

    def unpark_for_submission(self, now: float) -> None:
        """As ``unpark``, unless the thread that has submitted something is likely to drive at once."""
        if self.driver is None and now > self._left_at + _NEXT_BLOCKING_S:
            self.unpark()
