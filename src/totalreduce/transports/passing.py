"""A transport over another library's messages: the common part of MPI and ``torch.distributed``.

A ``Wire`` sends and receives between two ranks, in order: *heads* (a header, and a body that is small enough to travel
with it) and *bodies*. ``PassingTransport`` makes a transport of a wire:

* From one peer there is one body at a time, and the next head waits for it, so no message overtakes another one.
* An empty head, the *farewell*, says that the sender sends nothing more to this rank; it is answered in the same way.
* Heartbeats go both ways between ranks that have exchanged something, unless the wire is polled only now and then.
* There is no descriptor to wait on: ``wait`` polls, sleeps a little, and sleeps longer the longer nothing comes.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection

from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import HEADER_BYTES, Frame, Header
from totalreduce.transports.base import Delivery, Endpoint, Outgoing, Transport, TransportCounters
from totalreduce.transports.liveness import Liveness, Pulse

__all__ = ["HEAD_BYTES", "PassingTransport", "Wire", "WireError"]

#: The longest head. A message that fits is copied once; the body of a longer message is not copied at all.
HEAD_BYTES = 8 * 1024
_INLINE_BYTES = HEAD_BYTES - HEADER_BYTES
_FAREWELL = b""
#: How long ``wait`` polls without sleeping, and how long it sleeps between two polls. A sleep costs 50 us on top.
_SPIN_S = 100e-6
_PAUSE_MIN_S, _PAUSE_MAX_S = 20e-6, 1e-3
#: A body is noticed only when it is complete, so a long one is allowed this speed of a slow network.
_SLOWEST_BYTES_PER_S = 1e6
#: How long ``close`` waits for the farewells of the peers, at most.
_FAREWELL_S = 1.0


class WireError(Exception):
    """The library reports that a peer cannot be reached."""


class Wire(ABC):
    """Messages of a library between this rank and each peer. Any thread; calls exclude each other.

    ``send``, ``beat``, ``receive`` and ``release`` raise ``WireError`` if the peer cannot be reached.
    """

    rank: int
    world_size: int

    @property
    def beats(self) -> bool:
        """Whether the wire is polled often enough for heartbeats."""
        return True

    def usable(self) -> bool:
        """Whether the calling thread may use the wire."""
        return True

    @abstractmethod
    def poll(self) -> bool:
        """Find out what has arrived and what has left; returns whether anything has."""

    @abstractmethod
    def failures(self) -> list[tuple[int, str]]:
        """Return the peers that cannot be reached any more, and why; each once."""

    @abstractmethod
    def may_send(self, peer: int) -> bool:
        """Whether there is room for a message."""

    @abstractmethod
    def send(self, peer: int, head: bytes, body: memoryview | None) -> None:
        """Begin to send; the body's memory must not change until it has left."""

    def beat(self, peer: int, head: bytes) -> None:
        """Send a heartbeat, if there is room."""
        if self.may_send(peer):
            self.send(peer, head, None)

    @abstractmethod
    def bodies_left(self, peer: int) -> int:
        """Return how many bodies to ``peer`` have left since the last call."""

    @abstractmethod
    def busy(self, peer: int) -> bool:
        """Whether something that must leave before the end has not left."""

    @abstractmethod
    def head(self, peer: int) -> memoryview | None:
        """Return the oldest head from ``peer`` that was not released."""

    @abstractmethod
    def receive(self, peer: int, view: memoryview) -> None:
        """Begin to receive the body that belongs to the head; ``view`` is written until ``received``."""

    @abstractmethod
    def received(self, peer: int) -> bool:
        """Whether the body is complete."""

    @abstractmethod
    def release(self, peer: int) -> None:
        """Release the head, which has been read, and whose body has been received."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Stop receiving, so that no memory is written any more, and give up all resources."""


class PassingTransport(Transport):
    """One rank's end of a ``Wire``. One thread at a time except for ``wait`` and ``wake``."""

    def __init__(self, wire: Wire, config: TcpConfig) -> None:
        """Take over a wire; ``config`` sets the heartbeats."""
        self.rank, self.world_size = wire.rank, wire.world_size
        self.counters = TransportCounters()
        self._wire = wire
        self._peers = [peer for peer in range(wire.world_size) if peer != wire.rank]
        self._leaving: dict[int, deque[Outgoing]] = {peer: deque() for peer in self._peers}
        #: By peer: a delivery, and the memory in which its body began to arrive.
        self._arriving: dict[int, tuple[Delivery, memoryview]] = {}
        self._gone: set[int] = set()
        #: Peers that could not be reached in this round, and why: they are lost in the next one.
        self._ended: dict[int, str] = {}
        self._farewells: set[int] = set()  #: Peers to which this rank has sent its farewell.
        self._pulses: dict[int, Pulse] = {}  #: By peer with which something was exchanged.
        self._heartbeat = Header(Frame.HEARTBEAT, 0).pack()
        self._liveness = Liveness(config, time.monotonic())
        self._woken = threading.Event()
        self._pause_s = _PAUSE_MIN_S

    @property
    def ranks_per_host(self) -> int:
        return self.hosts.count(self.hosts[self.rank])

    def connected_peers(self) -> Collection[int]:
        """Return all peers that are not lost: messages need no connection, and every peer gets a farewell."""
        return set(self._peers) - self._gone

    def idle(self) -> bool:
        wire = self._wire
        return not wire.usable() or not any(wire.busy(peer) for peer in self._peers if peer not in self._gone)

    def wake(self) -> None:
        self._woken.set()

    # ----------------------------------------------------------------------------------------------------- progress

    def progress(self) -> bool:
        """One round: poll, read, timers, write.

        A peer that cannot be reached any more is lost only when what has arrived from it was read: it may say why.
        """
        endpoint, wire = self._endpoint, self._wire
        assert endpoint is not None, "attach() comes first"
        if not wire.usable():
            return False
        moved = wire.poll()
        now = time.monotonic()
        ended, self._ended = {**self._ended, **dict(wire.failures())}, {}
        for peer in self._peers:
            moved = self._guard(peer, now, reading=True) or moved
        for peer, reason in ended.items():
            self._lose(peer, reason)
        if now >= self._liveness.due_at:
            self._check_timers(now)
        for peer in tuple(endpoint.ready_peers()):
            moved = self._guard(peer, now, reading=False) or moved
        moved = moved or bool(self._ended)
        if moved:
            self._pause_s = _PAUSE_MIN_S
        return moved

    def keep_rests(self, is_withdrawn: Callable[[Outgoing], bool]) -> bool:
        """Return whether the library reads no body of such a message: it can be told of no other memory."""
        reachable = (messages for peer, messages in self._leaving.items() if peer not in self._gone)
        return not any(is_withdrawn(message) for messages in reachable for message in messages)

    def wait(self, timeout_s: float, *, eager: bool = False) -> None:
        """Poll again and again, at shorter and then at longer intervals."""
        now = time.monotonic()
        deadline = min(now + timeout_s, max(now, self._liveness.due_at))
        if not self._wire.usable():
            self._woken.wait(timeout_s)
            self._woken.clear()
            return
        spin_until = now + (_SPIN_S if eager else 0.0)
        while not self._woken.is_set() and not self._wire.poll():
            now = time.monotonic()
            if now >= deadline:
                break
            if now < spin_until:
                time.sleep(0)  # other processes may have this core, and other threads the interpreter
            else:
                self._woken.wait(min(self._pause_s, deadline - now))
                self._pause_s = min(2 * self._pause_s, _PAUSE_MAX_S)
        self._woken.clear()

    def _guard(self, peer: int, now: float, *, reading: bool) -> bool:
        """Read or write; an error is the loss of the peer."""
        endpoint = self._endpoint
        assert endpoint is not None
        try:
            if reading:
                return self._read(peer, endpoint, now)
            return self._write(peer, endpoint, now)
        except ProtocolError as error:
            self._say_farewell(peer)
            self._lose(peer, f"protocol violation: {error}")
        except WireError as error:
            self._ended[peer] = str(error)
        return True

    def _lose(self, peer: int, reason: str) -> None:
        assert self._endpoint is not None
        if peer not in self._gone:
            self._gone.add(peer)
            self._endpoint.peer_lost(peer, reason)

    # ------------------------------------------------------------------------------------------------------ writing

    def _write(self, peer: int, endpoint: Endpoint, now: float) -> bool:
        moved = False
        if peer in self._gone or peer in self._farewells:
            while endpoint.next_message(peer) is not None:
                pass  # no rank will read it
            return False
        while self._wire.may_send(peer):
            message = endpoint.next_message(peer)
            if message is None:
                break
            moved = True
            self._meet(peer, now).spoke_at = now
            body = message.body
            if body is not None and len(body) > _INLINE_BYTES:
                self._leaving[peer].append(message)
                self._wire.send(peer, message.header, body)
            else:
                self._wire.send(peer, message.header if body is None else b"".join((message.header, body)), None)
                endpoint.message_sent(message)  # a copy is on its way
        return moved

    def _say_farewell(self, peer: int) -> None:
        """Tell a peer, at most once, that this rank sends nothing more."""
        if peer not in self._farewells:
            self._farewells.add(peer)
            self._wire.send(peer, _FAREWELL, None)

    # ------------------------------------------------------------------------------------------------------ reading

    def _read(self, peer: int, endpoint: Endpoint, now: float) -> bool:
        wire, moved = self._wire, False
        for _ in range(wire.bodies_left(peer)):
            endpoint.message_sent(self._leaving[peer].popleft())
            moved = True
        while peer not in self._gone:
            arriving = self._arriving.get(peer)
            if arriving is not None:
                if not wire.received(peer):
                    break
                self._deliver(peer, endpoint, *arriving)
            else:
                head = wire.head(peer)
                if head is None or not self._read_head(peer, head, endpoint, now):
                    break
            self._meet(peer, now).heard_at = now
            moved = True
        return moved

    def _read_head(self, peer: int, head: memoryview, endpoint: Endpoint, now: float) -> bool:
        """Read a head, or leave it for later; returns whether it was read."""
        wire = self._wire
        if not len(head):
            wire.release(peer)
            self._say_farewell(peer)
            self._lose(peer, "it closed its end")
            return True
        if len(head) < HEADER_BYTES:
            raise ProtocolError(f"a message of {len(head)} bytes")
        header = Header.unpack(head[:HEADER_BYTES])
        inline = header.body_bytes if header.body_bytes <= _INLINE_BYTES else 0
        if len(head) != HEADER_BYTES + inline:
            raise ProtocolError(f"{len(head) - HEADER_BYTES} bytes behind a header that announces {header.body_bytes}")
        self._meet(peer, now)
        if header.frame is Frame.HEARTBEAT:
            wire.release(peer)
            return True
        if header.frame is Frame.DATA and not endpoint.may_receive():
            return False
        delivery = endpoint.accept(peer, header)
        if inline == header.body_bytes:
            delivery.view[:] = head[HEADER_BYTES:]
            wire.release(peer)
            endpoint.delivered(delivery)
        else:
            view = delivery.view
            self._arriving[peer] = delivery, view
            wire.receive(peer, view)
        return True

    def _deliver(self, peer: int, endpoint: Endpoint, delivery: Delivery, arrived: memoryview) -> None:
        del self._arriving[peer]
        if delivery.view is not arrived:
            delivery.view[:] = arrived  # a body that has begun to arrive cannot be redirected, only copied
        self._wire.release(peer)
        endpoint.delivered(delivery)

    def _meet(self, peer: int, now: float) -> Pulse:
        pulse = self._pulses.get(peer)
        if pulse is None:
            pulse = self._pulses[peer] = Pulse(now)
            self.counters.connections += 1
        return pulse

    # ------------------------------------------------------------------------------------------------------- timers

    def _check_timers(self, now: float) -> None:
        self._liveness.look(self._pulses.values(), now)
        if not self._wire.beats:
            return
        for peer, pulse in list(self._pulses.items()):
            if peer in self._gone:
                continue
            if peer not in self._arriving and self._wire.head(peer) is not None:
                pulse.heard_at = now  # a head has arrived that this rank could not accept yet
            reason = self._liveness.verdict(pulse, now, extra_s=self._transfer_s(peer))
            if reason is not None:
                self._lose(peer, reason)
            elif self._liveness.is_beat_due(pulse, now):
                self.counters.heartbeats_sent += 1
                try:
                    self._wire.beat(peer, self._heartbeat)
                except WireError as error:
                    self._ended[peer] = str(error)

    def _transfer_s(self, peer: int) -> float:
        """Return how long the bodies on their way to and from a peer may take; the peer may be silent meanwhile."""
        bodies = [len(message.body or b"") for message in self._leaving[peer]]
        if peer in self._arriving:
            bodies.append(len(self._arriving[peer][1]))
        return sum(bodies) / _SLOWEST_BYTES_PER_S

    # -------------------------------------------------------------------------------------------------------- close

    def close(self, timeout_s: float) -> None:
        """Send the farewells, wait for those of the peers, and close the wire."""
        wire = self._wire
        deadline = time.monotonic() + min(timeout_s, _FAREWELL_S)
        if wire.usable():
            while time.monotonic() < deadline:
                self.progress()
                for peer in self._peers:
                    if peer not in self._gone and peer not in self._farewells and wire.may_send(peer):
                        try:
                            self._say_farewell(peer)
                        except WireError as error:
                            self._lose(peer, str(error))
                if self._gone.issuperset(self._peers):
                    break
                self.wait(min(0.02, max(0.0, deadline - time.monotonic())), eager=True)
        wire.close(max(0.0, deadline - time.monotonic()))
