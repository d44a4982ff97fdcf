"""A transport over somebody else's messages: what MPI and ``torch.distributed`` have in common.

A ``Wire`` sends and receives between two ranks, in order: *heads* (a header, and a body that is small enough to travel
with it) and *bodies*. ``PassingTransport`` makes a transport of one:

* From one peer there is one body at a time, and the next head waits for it, so nothing overtakes.
* An empty head says that the sender says nothing more to this rank; it is answered in the same way.
* Heartbeats go both ways between ranks that have met, unless the wire is only looked at now and then.
* There is no descriptor to wait on: ``wait`` looks, sleeps a little, and sleeps longer the longer nothing comes.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection

from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import HEADER_BYTES, Frame, Header
from totalreduce.transports.base import Delivery, Endpoint, Outgoing, Transport, TransportCounters
from totalreduce.transports.liveness import Liveness, Pulse

__all__ = ["HEAD_BYTES", "PassingTransport", "Wire", "WireError"]

#: The longest head. What fits travels as one message, copied once; what does not is not copied at all.
HEAD_BYTES = 8 * 1024
_INLINE_BYTES = HEAD_BYTES - HEADER_BYTES
_FAREWELL = b""
#: How long ``wait`` looks without sleeping, and how long it sleeps between two looks. A sleep costs 50 us on top.
_SPIN_S = 100e-6
_PAUSE_MIN_S, _PAUSE_MAX_S = 20e-6, 1e-3
#: A body shows when all of it is here, so a long one is allowed its time on a slow network.
_SLOWEST_BYTES_PER_S = 1e6
#: How long ``close`` waits for the farewells of the peers, at most.
_FAREWELL_S = 1.0


class WireError(Exception):
    """The library says that a peer cannot be reached."""


class Wire(ABC):
    """Messages of a library between this rank and each peer. Any thread; calls exclude each other.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
    """

    rank: int
    world_size: int

    @property
    def beats(self) -> bool:
        """Whether it is looked at often enough for heartbeats."""
        return True

    @abstractmethod
    def usable(self) -> bool:
        """Whether the calling thread may use it."""

    @abstractmethod
    def poll(self) -> bool:
        """See what has come and what has left; whether anything has."""

    @abstractmethod
    def failures(self) -> list[tuple[int, str]]:
        """Peers that cannot be reached any more, and why; each once."""

    @abstractmethod
    def may_send(self, peer: int) -> bool:
        """Whether there is room for a message."""

    @abstractmethod
    def send(self, peer: int, head: bytes, body: memoryview | None) -> None:
        """Begin to send; the body's memory must stay as it is until it has left.

        Raises:
            WireError: The peer cannot be reached.
        """

    def beat(self, peer: int, head: bytes) -> None:
        """Send a heartbeat, if there is room; notice if the peer cannot be reached.

        Raises:
            WireError: It cannot.
        """
        if self.may_send(peer):
            self.send(peer, head, None)

    @abstractmethod
    def bodies_left(self, peer: int) -> int:
        """How many bodies to ``peer`` have left since the last call."""

    @abstractmethod
    def busy(self, peer: int) -> bool:
        """Whether something that must leave before the end has not left."""

    @abstractmethod
    def head(self, peer: int) -> memoryview | None:
        """The oldest head from ``peer`` that was not released."""

    @abstractmethod
    def receive(self, peer: int, view: memoryview) -> None:
        """Begin to receive the body that belongs to the head; ``view`` is written until ``received``.

        Raises:
            WireError: The peer cannot be reached.
        """

    @abstractmethod
    def received(self, peer: int) -> bool:
        """Whether the body is complete."""

    @abstractmethod
    def release(self, peer: int) -> None:
        """The head has been read (and its body received).

        Raises:
            WireError: The peer cannot be reached.
        """

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Stop receiving, so that nothing is written any more, and give everything back."""


class PassingTransport(Transport):
    """One rank's end of a ``Wire``. One thread at a time but for ``wait`` and ``wake``."""

    def __init__(self, wire: Wire, config: TcpConfig) -> None:
        """Take over a wire; of ``config`` the heartbeats count."""
        self.rank, self.world_size = wire.rank, wire.world_size
        self.counters = TransportCounters()
        self._wire, self._config = wire, config
        self._endpoint: Endpoint | None = None
        self._peers = [peer for peer in range(wire.world_size) if peer != wire.rank]
        self._leaving: dict[int, deque[Outgoing]] = {peer: deque() for peer in self._peers}
        #: By peer: a delivery and the memory its body began to arrive in.
        self._arriving: dict[int, tuple[Delivery, memoryview]] = {}
        self._gone: set[int] = set()
        self._farewells: set[int] = set()  #: Who was told that nothing more comes.
        self._pulses: dict[int, Pulse] = {}  #: Of the peers with which something was exchanged.
        self._heartbeat = Header(Frame.HEARTBEAT, 0).pack()
        self._liveness = Liveness(config, time.monotonic())
        self._woken = threading.Event()
        self._pause_s = _PAUSE_MIN_S

    @property
    def ranks_per_host(self) -> int:
        return self.hosts.count(self.hosts[self.rank])

    def attach(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def connected_peers(self) -> Collection[int]:
        """Everybody who is there: messages need no connection, and each peer will be told when this rank goes."""
        return set(self._peers) - self._gone

    def idle(self) -> bool:
        wire = self._wire
        return not wire.usable() or not any(wire.busy(peer) for peer in self._peers if peer not in self._gone)

    def wake(self) -> None:
        self._woken.set()

    # ----------------------------------------------------------------------------------------------------- progress

    def progress(self) -> bool:
        """One round: look, read, write, timers."""
        endpoint, wire = self._endpoint, self._wire
        assert endpoint is not None, "attach() comes first"
        if not wire.usable():
            return False
        moved = wire.poll()
        now = time.monotonic()
        for peer, reason in wire.failures():
            self._lose(peer, reason)
        for peer in self._peers:
            moved = self._guard(peer, now, reading=True) or moved
        for peer in tuple(endpoint.ready_peers()):
            moved = self._guard(peer, now, reading=False) or moved
        if now >= self._liveness.due_at:
            self._timers(now)
        if moved:
            self._pause_s = _PAUSE_MIN_S
        return moved

    def wait(self, timeout_s: float, *, eager: bool = False) -> None:
        """Look again and again, at shorter and then at longer intervals."""
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
                time.sleep(0)  # whoever wants this core, or Python, has it
            else:
                self._woken.wait(min(self._pause_s, deadline - now))
                self._pause_s = min(2 * self._pause_s, _PAUSE_MAX_S)
        self._woken.clear()

    def _guard(self, peer: int, now: float, *, reading: bool) -> bool:
        """Read or write, and turn what goes wrong into the loss of the peer."""
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
            self._lose(peer, str(error))
        return True

    def _lose(self, peer: int, reason: str) -> None:
        assert self._endpoint is not None
        if peer not in self._gone:
            self._gone.add(peer)
            self._endpoint.peer_lost(peer, reason)

    # ------------------------------------------------------------------------------------------------------ writing

    def _write(self, peer: int, endpoint: Endpoint, now: float) -> bool:
        moved = False
        deaf = peer in self._gone or peer in self._farewells
        while deaf or self._wire.may_send(peer):
            message = endpoint.next_message(peer)
            if message is None:
                break
            if deaf:
                continue
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
        """Tell a peer that it hears nothing more; at most once."""
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
                self._deliver(peer, *arriving)
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

    def _deliver(self, peer: int, delivery: Delivery, arrived: memoryview) -> None:
        assert self._endpoint is not None
        del self._arriving[peer]
        if delivery.view is not arrived:
            delivery.view[:] = arrived  # what has begun to arrive cannot be redirected, only copied
        self._wire.release(peer)
        self._endpoint.delivered(delivery)

    def _meet(self, peer: int, now: float) -> Pulse:
        pulse = self._pulses.get(peer)
        if pulse is None:
            pulse = self._pulses[peer] = Pulse(now)
            self.counters.connections += 1
        return pulse

    # ------------------------------------------------------------------------------------------------------- timers

    def _timers(self, now: float) -> None:
        self._liveness.look(self._pulses.values(), now)
        if not self._wire.beats:
            return
        for peer, pulse in list(self._pulses.items()):
            if peer in self._gone:
                continue
            if peer not in self._arriving and self._wire.head(peer) is not None:
                pulse.heard_at = now  # it has said something that this rank could not hear yet
            reason = self._liveness.verdict(pulse, now, extra_s=self._transfer_s(peer))
            if reason is not None:
                self._lose(peer, reason)
            elif self._liveness.is_beat_due(pulse, now):
                self.counters.heartbeats_sent += 1
                try:
                    self._wire.beat(peer, self._heartbeat)
                except WireError as error:
                    self._lose(peer, str(error))

    def _transfer_s(self, peer: int) -> float:
        """Return how long the bodies that are on their way to or from a peer may take; it says nothing meanwhile."""
        bodies = [len(message.body or b"") for message in self._leaving[peer]]
        if peer in self._arriving:
            bodies.append(len(self._arriving[peer][1]))
        return sum(bodies) / _SLOWEST_BYTES_PER_S

    # -------------------------------------------------------------------------------------------------------- close

    def close(self, timeout_s: float) -> None:
        """Say that nothing more comes, wait until every peer has said so too, give the wire back."""
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
