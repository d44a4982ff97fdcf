"""Sleeping and waking: who has nothing to do says so in its memory, looks once more, and waits for its bell.

A bell is an event counter of the kernel. The sleep word says with two bits whether its owner sleeps and what would
interest it; the rest of it counts, so that nobody is woken twice from the same sleep. Both sides first say something,
then look at what the other has said, with a fence between: one of them always sees the other.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Sequence
from typing import Protocol, final

from totalreduce.transports.shm_memory import SLEEP_WORD, Fences, Outbox
from totalreduce.transports.shm_seat import Neighbour, Seat

__all__ = ["ASLEEP", "WANTS_ROOM", "Doorbell", "Sleep"]

#: Bits of the sleep word: anybody's message wakes; a piece or an entry given back does, too.
ASLEEP, WANTS_ROOM = 1, 2
#: How long to look again and again before sleeping, at most and at least, where the processor is this rank's alone.
#: Measured with 2 ranks on 2 cores, 4 KiB: 0.10 ms an allreduce instead of 0.24. Waking a halted virtual processor
#: takes 0.1 ms and more, so a shorter limit keeps two ranks that sleep asleep.
_SPIN_S, _SPIN_S_MIN = 300e-6, 5e-6
#: How often to let others run before sleeping, where ranks share cores. 4 ranks on 2 cores, 4 KiB: 0.28 ms, not 0.35.
_YIELDS = 8


@final
class Doorbell:
    """A peer's bell."""

    def __init__(self, fd: int, words: memoryview, fences: Fences) -> None:
        """Take over the event counter ``fd``; ``words``: the peer's."""
        self.fences = fences
        self._full, self._words = fences.full, words
        self._fd, self._lock, self._woken = fd, threading.Lock(), 0

    def ring(self, bits: int) -> None:
        """Wake the peer if it sleeps with one of ``bits``. After what it is to see was written. Any thread."""
        self._full()
        sleep = self._words[SLEEP_WORD]
        if sleep & bits and sleep != self._woken:
            self._woken = sleep
            with self._lock, contextlib.suppress(BlockingIOError):
                if self._fd >= 0:
                    os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Close the counter; ringing does nothing from now on."""
        with self._lock:  # a late ``ring`` must not write to whatever has this number next
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Watched(Neighbour, Protocol):
    """What may have something to do when nobody has rung; ``Link``."""

    @property
    def has_something(self) -> bool:
        """Whether there is something to do."""

    @property
    def wants_room(self) -> bool:
        """Whether something waits for room."""


@final
class Sleep:
    """This rank's bell, its sleep word, and the epoll object that everything it waits for is registered with.

    Attributes:
        epoll: For sockets, too; level-triggered.
        fd: The bell, to be given to the peers.
        watched: What to look at before sleeping; replaced, never changed.
        sockets_called: A socket had something to say. Whoever looks at the sockets clears it.
    """

    def __init__(self, rank: int, outbox: Outbox, fences: Fences, *, spins: bool) -> None:
        """``spins``: there are as many cores as ranks."""
        self.epoll = select.epoll()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Edge-triggered: every ring is an event of its own, and nobody has to read the counter.
        self.epoll.register(self.fd, select.EPOLLIN | select.EPOLLET)
        self.watched: tuple[Watched, ...] = ()
        self.sockets_called = False
        self._words, self._fences, self._spins = outbox.words, fences, spins
        self._lock, self._sleepers, self._count = threading.Lock(), 0, 0
        self._seat = Seat(rank, outbox)
        self._woken = False
        self._began, self._spin_s = 0.0, _SPIN_S

    def wait(self, timeout_s: float, *, eager: bool) -> None:
        """Sleep until a peer or ``wake`` rings, or a socket has something to say; for ``eager`` see ``base``."""
        if self.fall_asleep(eager=eager):
            try:
                self._note(self.epoll.poll(max(0.0, timeout_s)))
            finally:
                self.wake_up(eager=eager)

    def fall_asleep(self, *, eager: bool) -> bool:
        """Look again for a moment, then tell the peers that this rank sleeps; false if there is something to do.

        Any thread; every true is followed by ``wake_up`` in the same thread.
        """
        if self._something_to_do():
            return False
        self._began = time.monotonic()
        if eager and self._rest():
            return False
        self._announce(1)
        self._fences.full()
        if self._something_to_do():
            self.wake_up(eager=eager)
            return False
        if eager:
            self._seat.keep(self.watched)
        return True

    def wake_up(self, *, eager: bool) -> None:
        """The end of a sleep."""
        self._seat.leave()
        self._announce(-1)
        self._woken = False
        if eager:
            # Spin as long as that would have been the shorter way; not where other programs have the cores.
            pays = time.monotonic() - self._began < 2 * _SPIN_S
            self._spin_s = min(_SPIN_S, 2 * self._spin_s) if pays else max(_SPIN_S_MIN, self._spin_s / 2)

    def wake(self) -> None:
        """End a sleep of this rank. Any thread."""
        self._woken = True
        with self._lock:
            if self._sleepers and self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Close the bell and the epoll object."""
        self.epoll.close()
        with self._lock:  # a late ``wake`` must not write to whatever has this number next
            fd, self.fd = self.fd, -1
        os.close(fd)

    def _rest(self) -> bool:
        """What comes before sleeping; returns whether something came up."""
        if not (self._seat.settle(self.watched) and self._spins):
            for _turn in range(_YIELDS):
                os.sched_yield()
                if self._something_to_do():
                    return True
            return False
        while time.monotonic() < self._began + self._spin_s:
            # Lets other threads of this process have the interpreter, but nobody this core.
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
        return any(watched.has_something for watched in self.watched)

    def _announce(self, change: int) -> None:
        with self._lock:
            self._sleepers += change
            self._count += 1
            bits = 0
            if self._sleepers:
                wants_room = any(watched.wants_room for watched in self.watched)
                bits = ASLEEP | WANTS_ROOM if wants_room else ASLEEP
            self._words[SLEEP_WORD] = self._count << 2 | bits
