"""Memory for tensors that the other ranks of the host read in place: messages out of it are not staged.

The arena is the last part of a rank's memory file. It is as long as a fair share of the machine's memory, but no memory
is reserved for it until a tensor is allocated. The tensor's memory is reserved at once, so that a lack of memory is an
error there and not a signal at the first touch, and only if the containers of this process have so much left. Memory of
tensors that are gone serves later tensors; it is not given back to the system while the group exists.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import logging
import math
import os
import threading
import weakref
from collections import deque
from typing import Any, final

import numpy as np

from totalreduce.foundation.memory_room import memory_room

__all__ = ["Arena"]

_log = logging.getLogger(__name__)

_PAGE = 4096


@final
class Arena:
    """The part of the file ``fd``, mapped as ``view``, from ``start`` on. Any thread may call ``allocate``."""

    def __init__(self, fd: int, view: memoryview, start: int) -> None:
        self._fd, self._view = fd, view
        self._begin = np.frombuffer(view, np.uint8).ctypes.data
        self._stop = self._begin + len(view)
        #: The end of the reserved part, and the free ranges before it: (start, length), sorted, no two adjacent.
        self._start = self._top = start
        self._holes: list[tuple[int, int]] = []
        self._freed: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def allocate(self, num_bytes: int) -> np.ndarray[Any, Any] | None:
        """Return an uninitialised array of ``num_bytes`` uint8, or ``None``, after a warning, if memory is short.

        Its memory is free again when the array is deleted.
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
        """Allocate nothing more. Arrays that exist stay valid."""
        with self._lock:
            self._fd = -1

    def offset_of(self, body: memoryview) -> int:
        """Return the offset of ``body`` in the file; 0 if it does not lie in the arena."""
        if self._top == self._start or body.readonly:  # nothing was ever allocated, or the body is no tensor's
            return 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(body))
        return address - self._begin if self._begin <= address < self._stop else 0

    def _take(self, length: int) -> int | None:
        while self._freed:  # another thread may append to it meanwhile, when it deletes an array
            self._put_back(*self._freed.popleft())
        for index, (start, free) in enumerate(self._holes):
            if free >= length:
                self._holes[index : index + 1] = [(start + length, free - length)] if free > length else []
                return start
        start = self._top
        try:
            if start + length > len(self._view):
                raise OSError(0, f"{len(self._view) - start >> 20} MiB are left")
            room = memory_room()
            if room is not None and length > room:  # the kernel would end this process, and return no error
                raise OSError(errno.ENOMEM, f"the container of this process has {room >> 20} MiB left")
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
    if os.getpid() == owner:  # a forked child does not free the parent's memory
        freed.append((start, length))
