"""Which processor a rank waits on: none that another rank of the host waits on, where there are enough.

The scheduler of the operating system wakes a sleeper near to whoever wakes it. In a virtual machine whose idle
processors are halted that is mostly the same one (a halted processor counts as taken away by the hypervisor), and two
ranks that wait for each other then take turns on it for seconds. Measured with 2 ranks on 2 cores: 4 KiB 0.36 ms
instead of 0.09, 4 MiB 2.0 ms instead of 0.7. So every rank says in its memory where it waits, goes elsewhere if it
finds a lower rank there, and while it sleeps may be woken anywhere but on the others' processors. Awake, nobody is
bound to anything: what the thread may use is then what it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from typing import Protocol, final

from totalreduce.transports.shm_memory import CPU_WORD, Outbox

__all__ = ["Neighbour", "Seat"]


class Neighbour(Protocol):
    """Another rank of the host; ``Link``."""

    @property
    def peer(self) -> int:
        """Its rank."""

    @property
    def cpu(self) -> int:
        """Number of the processor that it last waited on, plus one; 0 if it never said."""


@final
class Seat:
    """Where this rank waits. Any thread; each is moved by itself only."""

    def __init__(self, rank: int, outbox: Outbox) -> None:
        """Say nothing yet."""
        self._rank, self._words, self._getcpu = rank, outbox.words, _getcpu()
        self._kept: dict[int, tuple[set[int], set[int]]] = {}  #: By thread: what it may use, and what for now.

    def settle(self, neighbours: Iterable[Neighbour]) -> bool:
        """Say where this thread is, away from lower ranks if possible; returns whether it is alone there."""
        mine = self._report()
        others = {neighbour.cpu: neighbour.peer for neighbour in neighbours}
        if mine not in others:
            return True
        if any(neighbour.cpu == mine and neighbour.peer < self._rank for neighbour in neighbours):
            self.keep(neighbours)
            self.leave()
            return self._report() not in others
        return False

    def keep(self, neighbours: Iterable[Neighbour]) -> None:
        """Keep this thread off the neighbours' processors until ``leave``, if that leaves it any."""
        with contextlib.suppress(OSError):  # a sandbox forbids it: the scheduler does what it likes
            allowed = os.sched_getaffinity(0)
            free = allowed.difference([neighbour.cpu - 1 for neighbour in neighbours])
            if free and len(free) < len(allowed):
                self._kept.setdefault(threading.get_ident(), (allowed, free))
                os.sched_setaffinity(0, free)

    def leave(self) -> None:
        """Undo ``keep``, unless somebody else has decided meanwhile what the thread may use."""
        kept = self._kept.pop(threading.get_ident(), None)
        if kept is not None:
            allowed, free = kept
            with contextlib.suppress(OSError):
                if os.sched_getaffinity(0) == free:
                    os.sched_setaffinity(0, allowed)

    def _report(self) -> int:
        mine = self._getcpu() + 1
        if self._words[CPU_WORD] != mine:
            self._words[CPU_WORD] = mine
        return mine


def _getcpu() -> Callable[[], int]:
    """The C library's function, which asks no kernel; or one that never knows."""
    try:
        function: Callable[[], int] = ctypes.CDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return lambda: -1
    return function
