"""How a rank waits for its peers in shared memory: it announces its sleep, looks once more, and waits for its bell.

A bell is an event counter of the kernel. Two bits of a rank's sleep word say whether it sleeps and what would wake it;
the other bits count, so that no rank is woken twice from the same sleep. Each side first writes its own words and then
reads those of the other side, with a fence between: one of the two always sees the other.

Where there are enough processors, no two ranks wait on the same one. The operating system wakes a sleeper near to the
process that wakes it. In a virtual machine whose idle processors are halted that is mostly the same processor (a halted
one counts as taken away by the hypervisor), and two ranks that wait for each other then take turns on it for seconds.
Measured with 2 ranks on 2 cores: 4 KiB 0.36 ms instead of 0.09, 4 MiB 2.0 ms instead of 0.7. So every rank writes into
its memory on which processor it waits, and moves away if a lower rank waits there; while it sleeps, it may be woken on
any processor but those of the other ranks. Awake, a thread may use the processors that it could use before.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, final

from totalreduce.transports.shm_memory import OWNER, Fences, Outbox

__all__ = ["ASLEEP", "WANTS_ROOM", "Doorbell", "ProcessorChoice", "Sleep"]

#: Bits of the sleep word. ``ASLEEP``: a message wakes the rank; ``WANTS_ROOM``: a returned piece or entry does so too.
ASLEEP, WANTS_ROOM = 1, 2
#: How long to look again and again before sleeping, at most and at least, where the processor is this rank's alone.
#: Measured with 2 ranks on 2 cores, 4 KiB: 0.10 ms an allreduce instead of 0.24. Waking a halted virtual processor
#: takes 0.1 ms and more, so a shorter limit keeps two ranks that sleep asleep.
_SPIN_S, _SPIN_S_MIN = 300e-6, 5e-6
#: How often to let others run before sleeping, where ranks share cores. 4 ranks on 2 cores, 4 KiB: 0.28 ms, not 0.35.
_YIELDS = 8


class Neighbour(Protocol):
    """Another rank of the host: a ``ShmConnection``."""

    @property
    def peer(self) -> int:
        """Its rank."""

    @property
    def cpu(self) -> int:
        """Number of the processor on which it last waited, plus one; 0 if it has not waited yet."""

    @property
    def has_work(self) -> bool:
        """Whether ``progress`` could move a message now."""

    @property
    def wants_room(self) -> bool:
        """Whether a message waits until the peer has read something."""


@final
class Doorbell:
    """A peer's bell."""

    def __init__(self, fd: int, words: memoryview, fences: Fences) -> None:
        """Take over the event counter ``fd``; ``words`` are those of the peer's memory."""
        self.fences = fences  #: The fences of this machine.
        #: Whether something was published since the last ``ring_if_owed``. For the thread that moves messages.
        self.owed = False
        self._full, self._words = fences.full, words
        self._fd, self._lock, self._woken = fd, threading.Lock(), 0

    def ring(self, bits: int) -> None:
        """Wake the peer if it sleeps with one of ``bits``, to see what was written before. Any thread."""
        self._full()
        sleep = self._words[OWNER.sleep]
        if sleep & bits and sleep != self._woken:
            self._woken = sleep
            with self._lock, contextlib.suppress(BlockingIOError):
                if self._fd >= 0:
                    os.eventfd_write(self._fd, 1)

    def ring_if_owed(self) -> None:
        """Wake the peer if messages were published and it sleeps.

        This is not done with every message: a peer that wakes may take the core of this rank, which then has not sent
        their messages to the other peers yet.
        """
        if self.owed:
            self.owed = False
            self.ring(ASLEEP)

    def close(self) -> None:
        """Close the counter; ringing does nothing from now on."""
        with self._lock:  # a late ``ring`` must not write to the next file with this number
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@final
class Sleep:
    """This rank's bell, its sleep word, and the epoll object in which all its sockets are registered."""

    def __init__(self, rank: int, outbox: Outbox, *, spins: bool) -> None:
        """``spins``: there are as many cores as ranks."""
        self.epoll = select.epoll()  #: For the bell and for sockets; level-triggered for sockets.
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  #: The bell, to be given to the peers.
        # Edge-triggered: every ring is an event of its own, and the counter need not be read.
        self.epoll.register(self.fd, select.EPOLLIN | select.EPOLLET)
        #: The connections that are looked at before sleeping. The tuple is replaced, never changed.
        self.neighbours: tuple[Neighbour, ...] = ()
        self.sockets_called = False  #: Whether a socket is readable. The method that looks at the sockets clears it.
        #: Returns whether something else has changed in the memories of the neighbours.
        self.watched: Callable[[], bool] = lambda: False
        self._full, self._words, self._spins = outbox.fences.full, outbox.words, spins
        self._lock, self._sleepers, self._count = threading.Lock(), 0, 0
        self._processor = ProcessorChoice(rank, outbox)
        self._woken = False
        self._began, self._spin_s = 0.0, _SPIN_S

    def wait(self, timeout_s: float, *, eager: bool) -> None:
        """Sleep until a peer or ``wake`` rings, or a socket is readable; for ``eager`` see ``Transport.wait``."""
        if self.fall_asleep(eager=eager):
            try:
                self._note(self.epoll.poll(max(0.0, timeout_s)))
            finally:
                self.wake_up(eager=eager)

    def fall_asleep(self, *, eager: bool) -> bool:
        """Look again for a moment, then tell the peers that this rank sleeps; false if there is something to do.

        Any thread. If the result is true, the same thread calls ``wake_up`` afterwards.
        """
        if self._something_to_do():
            return False
        self._began = time.monotonic()
        if eager and self._look_again():
            return False
        self._announce(1)
        self._full()
        if self._something_to_do():
            self.wake_up(eager=eager)
            return False
        if eager:
            self._processor.avoid(self.neighbours)
        return True

    def wake_up(self, *, eager: bool) -> None:
        """End a sleep that ``fall_asleep`` began."""
        self._processor.restore()
        self._announce(-1)
        self._woken = False
        if eager:
            # Spin as long as that would have been the shorter way; not where other programs have the cores.
            pays = time.monotonic() - self._began < 2 * _SPIN_S
            self._spin_s = min(_SPIN_S, 2 * self._spin_s) if pays else max(_SPIN_S_MIN, self._spin_s / 2)

    def wake(self) -> None:
        """Wake this rank. Any thread."""
        self._woken = True
        with self._lock:
            if self._sleepers and self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Close the bell and the epoll object."""
        self.epoll.close()
        with self._lock:  # a late ``wake`` must not write to the next file with this number
            fd, self.fd = self.fd, -1
        os.close(fd)

    def _look_again(self) -> bool:
        """Spin, or let other processes run, before sleeping; returns whether there is something to do now."""
        if not (self._processor.choose(self.neighbours) and self._spins):
            for _turn in range(_YIELDS):
                os.sched_yield()
                if self._something_to_do():
                    return True
            return False
        while time.monotonic() < self._began + self._spin_s:
            # Lets other threads of this process have the interpreter, but no other process this core.
            if self._note(self.epoll.poll(0)):
                return True
            if self._something_to_do():
                self._spin_s = min(_SPIN_S, 2 * self._spin_s)
                return True
        return False

    def _note(self, events: Sequence[tuple[int, int]]) -> bool:
        if any(fd != self.fd for fd, _ in events):
            self.sockets_called = True
        return self.sockets_called

    def _something_to_do(self) -> bool:
        if self._woken:
            self._woken = False
            return True
        return any(neighbour.has_work for neighbour in self.neighbours) or self.watched()

    def _announce(self, change: int) -> None:
        with self._lock:
            self._sleepers += change
            self._count += 1
            bits = 0
            if self._sleepers:
                wants_room = any(neighbour.wants_room for neighbour in self.neighbours)
                bits = ASLEEP | WANTS_ROOM if wants_room else ASLEEP
            self._words[OWNER.sleep] = self._count << 2 | bits


@final
class ProcessorChoice:
    """The processor on which this rank waits. Any thread; each thread moves only itself."""

    def __init__(self, rank: int, outbox: Outbox) -> None:
        self._rank, self._words, self._getcpu = rank, outbox.words, _getcpu()
        #: By thread: the processors that it could use before ``avoid``, and those that it may use until ``restore``.
        self._restricted: dict[int, tuple[set[int], set[int]]] = {}

    def choose(self, neighbours: Iterable[Neighbour]) -> bool:
        """Announce this thread's processor, after moving away from lower ranks if possible.

        Returns:
            Whether no other rank waits on that processor.
        """
        mine = self._announce()
        others = {neighbour.cpu for neighbour in neighbours}
        if mine not in others:
            return True
        if any(neighbour.cpu == mine and neighbour.peer < self._rank for neighbour in neighbours):
            self.avoid(neighbours)
            self.restore()
            return self._announce() not in others
        return False

    def avoid(self, neighbours: Iterable[Neighbour]) -> None:
        """Keep this thread off the neighbours' processors until ``restore``, if others are left for it."""
        with contextlib.suppress(OSError):  # a sandbox forbids it: the scheduler decides
            allowed = os.sched_getaffinity(0)
            free = allowed.difference([neighbour.cpu - 1 for neighbour in neighbours])
            if free and len(free) < len(allowed):
                self._restricted.setdefault(threading.get_ident(), (allowed, free))
                os.sched_setaffinity(0, free)

    def restore(self) -> None:
        """Undo ``avoid``, unless the thread's processors were changed from outside meanwhile."""
        restricted = self._restricted.pop(threading.get_ident(), None)
        if restricted is not None:
            allowed, free = restricted
            with contextlib.suppress(OSError):
                if os.sched_getaffinity(0) == free:
                    os.sched_setaffinity(0, allowed)

    def _announce(self) -> int:
        mine = self._getcpu() + 1
        if self._words[OWNER.processor] != mine:
            self._words[OWNER.processor] = mine
        return mine


def _getcpu() -> Callable[[], int]:
    """Return the C library's function, which makes no system call; or a function that returns -1."""
    try:
        function: Callable[[], int] = ctypes.CDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return lambda: -1
    return function
