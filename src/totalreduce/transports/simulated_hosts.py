"""The hosts of a simulated network: cores that threads share, and network cards that messages share. Virtual time.

``SimulatedNetwork`` alone lets messages cost nothing but time on links. With ``SimulatedHosts`` every message also
takes processor time of both ranks, and all messages between two hosts pass the network cards of both, one after the
other.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

__all__ = ["Clock", "HostModel", "Processor", "SimulatedHosts", "Thread"]

_Action = Callable[[], None]
#: Two moments that are closer than this, in seconds, are one: sums of floating-point numbers differ in the last bits.
_INSTANT_S = 1e-12
#: A rank has no more threads at a time: one trains, one moves messages, one selects.
_THREADS_MAX = 3


class Clock(Protocol):
    """Virtual time, and what happens later."""

    now: float

    def after(self, delay_s: float, action: _Action) -> None:
        """Call ``action`` after a delay in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostModel:
    """The hosts of a job, and what messages cost there."""

    host_of_rank: Sequence[int]  #: The number of each rank's host, from 0.
    card_bytes_per_s: float  #: The bandwidth of a host's network card, in each direction.
    cores: int = 1 << 20  #: The number of cores of a host.
    shared_cores: bool = False  #: Whether the hosts are emulated on one machine and share its ``cores``.
    message_s: float = 0.0  #: Processor seconds that a message takes on each of its two ranks.
    byte_s: float = 0.0  #: Processor seconds that a byte of a message takes on each of its two ranks.
    #: Processor seconds that a message takes from the other threads of each of its two ranks' hosts: the kernel handles
    #: packets in whatever thread runs, and what a woken thread displaces from caches is loaded again.
    beside_message_s: float = 0.0
    beside_byte_s: float = 0.0  #: The same for a byte of a message.
    #: Seconds for which a thread that wakes up waits for a core, if all cores are busy and no more threads train than
    #: there are cores.
    wake_s: float = 0.0
    #: The same if twice as many threads train as there are cores. Between and beyond these numbers of threads the wait
    #: is on the straight line through both.
    crowded_wake_s: float = 0.0
    #: The share of a core's time that is lost while several ranks train on it in turns, from 0 to 1.
    sharing_loss: float = 0.0
    #: The number of bytes that a card which was idle for long sends at once, as a token bucket does.
    burst_bytes: int = 0


@final
class Processor:
    """Cores that running threads share evenly: with more threads than cores, all threads run equally slower.

    Threads that train have large working sets. If there are more of them than cores, each one finds the caches filled
    by another one at the beginning of its time slices, and a share of all time is lost.
    """

    def __init__(
        self, clock: Clock, cores: int, *, sharing_loss: float = 0.0, wake_s: float = 0.0, crowded_wake_s: float = 0.0
    ) -> None:
        """Make idle cores.

        Args:
            clock: Virtual time.
            cores: The number of cores.
            sharing_loss: The share of the time that is lost while more threads train than there are cores.
            wake_s: As in ``HostModel``.
            crowded_wake_s: As in ``HostModel``.
        """
        self._clock, self._cores, self._sharing_loss = clock, cores, sharing_loss
        self._wake_s, self._crowded_wake_s = wake_s, max(wake_s, crowded_wake_s)
        self._training = 0
        #: How many processor seconds a thread that ran from the beginning would have got.
        self._served_s, self._changed_s = 0.0, 0.0
        self._running: list[tuple[float, int, _Action]] = []
        self._count, self._plans = 0, 0

    def run(self, seconds: float, action: _Action) -> None:
        """Call ``action`` when a thread has had so many seconds of a core."""
        self._serve()
        self._count += 1
        heapq.heappush(self._running, (self._served_s + seconds, self._count, action))
        self._plan()

    def train(self, seconds: float, action: _Action) -> None:
        """Do the same for a thread that trains."""

        def ended() -> None:
            self._serve()
            self._training -= 1
            self._plan()
            action()

        self._serve()
        self._training += 1
        self.run(seconds, ended)

    @property
    def wake_s(self) -> float:
        """For how many seconds a thread that wakes up now waits for a core."""
        if len(self._running) < self._cores:
            return 0.0
        crowd = max(0.0, self._training / self._cores - 1.0)
        return self._wake_s + crowd * (self._crowded_wake_s - self._wake_s)

    @property
    def _speed(self) -> float:
        speed = min(1.0, self._cores / max(1, len(self._running)))
        return speed * (1.0 - self._sharing_loss) if self._training > self._cores else speed

    def _serve(self) -> None:
        now = self._clock.now
        self._served_s += (now - self._changed_s) * self._speed
        self._changed_s = now

    def _plan(self) -> None:
        """Plan the next end. A plan that was made before is void."""
        self._plans += 1
        if self._running:
            number, wait_s = self._plans, (self._running[0][0] - self._served_s) / self._speed
            self._clock.after(max(0.0, wait_s), lambda: self._end(number))

    def _end(self, number: int) -> None:
        if number != self._plans:
            return
        self._serve()
        ended = []
        while self._running and self._running[0][0] <= self._served_s + _INSTANT_S:
            ended.append(heapq.heappop(self._running)[2])
        self._plan()
        for action in ended:
            action()


@final
class _Idle:
    """Cores of which there are more than threads: nobody waits."""

    wake_s = 0.0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def run(self, seconds: float, action: _Action) -> None:
        self._clock.after(seconds, action)

    train = run


@final
class Thread:
    """A thread that does one thing after the other."""

    def __init__(self, processor: Processor | _Idle, clock: Clock) -> None:
        """``processor``: the cores on which it runs."""
        self._processor, self._clock = processor, clock
        self._waiting: deque[tuple[float, _Action]] = deque()
        self._is_busy = False
        self.busy_s = 0.0  #: The processor seconds of all that it was given.

    def run(self, seconds: float, action: _Action) -> None:
        """Call ``action`` when the thread has had so many seconds of a core, after all that it was given before."""
        self.busy_s += seconds
        self._waiting.append((seconds, action))
        if not self._is_busy:
            self._is_busy = True
            wake_s = self._processor.wake_s
            if wake_s:
                self._clock.after(wake_s, self._next)
            else:
                self._next()

    def _next(self) -> None:
        self._is_busy = bool(self._waiting)
        if self._waiting:
            seconds, action = self._waiting.popleft()
            self._processor.run(seconds, lambda: self._ended(action))

    def _ended(self, action: _Action) -> None:
        action()
        self._next()


@final
class _Card:
    """One direction of a network card, which carries one message at a time."""

    def __init__(self, clock: Clock, bytes_per_s: float, burst_bytes: int) -> None:
        self._clock, self._bytes_per_s, self._burst_s = clock, bytes_per_s, burst_bytes / bytes_per_s
        self._free_at = 0.0
        self.busy_s = 0.0  #: The seconds in which it has carried something.
        self.num_bytes = 0  #: The bytes that it has carried.

    def carry(self, num_bytes: int, began_at: float) -> float:
        """Return when the last byte has passed; the first one came at ``began_at`` or as soon as the card is free.

        A message whose bytes come one after the other may have begun in the past.
        """
        seconds = num_bytes / self._bytes_per_s
        # Tokens that were saved while the card was idle let the first bytes pass at once.
        self._free_at = max(self._free_at, began_at - self._burst_s) + seconds
        self.busy_s += seconds
        self.num_bytes += num_bytes
        return max(self._free_at, self._clock.now)


@final
class SimulatedHosts:
    """The threads and network cards of all ranks.

    A rank has a thread that moves messages (``move``), one that trains (``compute``), and a third one (``thread``).
    """

    def __init__(self, clock: Clock, model: HostModel) -> None:
        self.model, self._clock = model, clock
        num_hosts = max(model.host_of_rank) + 1
        num_processors = 1 if model.shared_cores else num_hosts
        ranks = len(model.host_of_rank) if model.shared_cores else max(Counter(model.host_of_rank).values())
        has_idle_cores = _THREADS_MAX * ranks <= model.cores
        processors = [
            _Idle(clock)
            if has_idle_cores
            else Processor(
                clock,
                model.cores,
                sharing_loss=model.sharing_loss,
                wake_s=model.wake_s,
                crowded_wake_s=model.crowded_wake_s,
            )
            for _ in range(num_processors)
        ]
        self._processors = [processors[0 if model.shared_cores else host] for host in model.host_of_rank]
        self._movers = [Thread(processor, clock) for processor in self._processors]
        self._outgoing, self._incoming = (
            [_Card(clock, model.card_bytes_per_s, model.burst_bytes) for _ in range(num_hosts)] for _ in range(2)
        )

    def compute(self, rank: int, seconds: float, action: _Action) -> None:
        """Call ``action`` when the thread that trains on a rank has had so many seconds of a core."""
        self._processors[rank].train(seconds, action)

    def thread(self, rank: int) -> Thread:
        """Return the third thread of a rank."""
        return Thread(self._processors[rank], self._clock)

    def move(self, rank: int, seconds: float, action: _Action) -> None:
        """The same in the thread that moves messages, after all that this thread was given before."""
        self._movers[rank].run(seconds, action)

    def is_local(self, source: int, target: int) -> bool:
        """Whether two ranks are on one host."""
        return self.model.host_of_rank[source] == self.model.host_of_rank[target]

    def send(self, source: int, target: int, num_bytes: int, left: _Action) -> None:
        """Prepare a message, and call ``left`` when its last byte has left the host, or lies in shared memory."""

        def leave() -> None:
            if self.is_local(source, target):
                left()
                return
            card = self._outgoing[self.model.host_of_rank[source]]
            self._clock.after(card.carry(num_bytes, self._clock.now) - self._clock.now, left)

        self._take_from_others(source, num_bytes)
        self.move(source, self._seconds_of(num_bytes), leave)

    def receive(self, source: int, target: int, num_bytes: int, arrived: _Action) -> None:
        """Take a message whose last byte has reached the host, and call ``arrived`` when the rank has read it."""

        def read() -> None:
            self._take_from_others(target, num_bytes)
            self.move(target, self._seconds_of(num_bytes), arrived)

        if self.is_local(source, target):
            read()
            return
        card = self._incoming[self.model.host_of_rank[target]]
        # Its bytes came one after the other; only where several hosts send at once do they wait here.
        began_at = self._clock.now - num_bytes / self.model.card_bytes_per_s
        self._clock.after(card.carry(num_bytes, began_at) - self._clock.now, read)

    def moved_s(self) -> list[float]:
        """Return the processor seconds of each rank's thread that moves messages, so far."""
        return [thread.busy_s for thread in self._movers]

    def card_s(self) -> list[float]:
        """Return the seconds in which each host's network card was busy, in its busier direction, so far."""
        return [max(a.busy_s, b.busy_s) for a, b in zip(self._outgoing, self._incoming, strict=True)]

    def card_bytes(self) -> list[int]:
        """Return the bytes through each host's network card, in its busier direction, so far."""
        return [max(a.num_bytes, b.num_bytes) for a, b in zip(self._outgoing, self._incoming, strict=True)]

    def _take_from_others(self, rank: int, num_bytes: int) -> None:
        """Take the processor time that a message costs beside the thread that moves it. The message does not wait."""
        seconds = self.model.beside_message_s + num_bytes * self.model.beside_byte_s
        if seconds:
            self._processors[rank].run(seconds, _nothing)

    def _seconds_of(self, num_bytes: int) -> float:
        return self.model.message_s + num_bytes * self.model.byte_s


def _nothing() -> None:
    """Nothing waits for this."""
