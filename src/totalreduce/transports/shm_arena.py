"""Memory for tensors that the other ranks of the host read where it lies: messages out of it are not staged.

The arena is the end of a rank's memory file, behind the outbox proper: as long as a fair share of the machine's memory,
but without any until somebody asks for some. What was asked for is reserved at once, so that a lack of memory shows
there and is no signal at the first touch. When the last tensor in it has gone it serves other tensors; it is not given
back to the system while the group lives.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import math
import os
import threading
import weakref
from collections import deque
from typing import Any, final

import numpy as np

__all__ = ["Arena"]

_log = logging.getLogger(__name__)

_PAGE = 4096


@final
class Arena:
    """The part of the file ``fd``, mapped as ``view``, from ``start`` on. ``allocate`` from any thread."""

    def __init__(self, fd: int, view: memoryview, start: int) -> None:
        """All of it free."""
        self._fd, self._view = fd, view
        self._begin = np.frombuffer(view, np.uint8).ctypes.data
        self._stop = self._begin + len(view)
        #: Where the reserved part ends, and what is free before that: (start, length), sorted, without neighbours.
        self._start = self._top = start
        self._holes: list[tuple[int, int]] = []
        self._freed: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def allocate(self, num_bytes: int) -> np.ndarray[Any, Any] | None:
        """Memory, shape ``(num_bytes,)`` of uint8, with whatever was in it; it is free when the array has gone.

        ``None`` where there is not enough, after a warning.
        """
        length = max(1, math.ceil(num_bytes / _PAGE)) * _PAGE
        with self._lock:
            start = self._take(length)
        if start is None:
            return None
        array = np.frombuffer(self._view[start : start + num_bytes], np.uint8)
        finalizer = weakref.finalize(array, _give_back, self._freed, start, length, os.getpid())
        finalizer.atexit = False
        return array

    def close(self) -> None:
        """No more memory from here; what was given out stays until it is let go of."""
        with self._lock:
            self._fd = -1

    def place_of(self, body: memoryview) -> int:
        """Where in the file ``body`` lies; 0 if it does not."""
        if self._top == self._start or body.readonly:  # nothing was ever allocated, or it is no tensor's
            return 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(body))
        return address - self._begin if self._begin <= address < self._stop else 0

    def _take(self, length: int) -> int | None:
        while self._freed:  # appended to by whoever lets go of an array, perhaps in the midst of this
            self._put_back(*self._freed.popleft())
        for index, (start, free) in enumerate(self._holes):
            if free >= length:
                self._holes[index : index + 1] = [(start + length, free - length)] if free > length else []
                return start
        start = self._top
        try:
            if start + length > len(self._view):
                raise OSError(0, f"{len(self._view) - start >> 20} MiB are left")
            os.posix_fallocate(self._fd, start, length)
        except OSError as error:
            _log.warning("no shared memory of %d MiB (%s): usual memory instead", length >> 20, error.strerror)
            return None
        self._top = start + length
        return start

    def _put_back(self, start: int, length: int) -> None:
        index = bisect.bisect(self._holes, (start, length))
        if index < len(self._holes) and start + length == self._holes[index][0]:
            length += self._holes.pop(index)[1]
        if index > 0 and sum(self._holes[index - 1]) == start:
            start, before = self._holes.pop(index - 1)
            length += before
        bisect.insort(self._holes, (start, length))


def _give_back(freed: deque[tuple[int, int]], start: int, length: int, owner: int) -> None:
    if os.getpid() == owner:  # in a child process the memory is still the parent's
        freed.append((start, length))
