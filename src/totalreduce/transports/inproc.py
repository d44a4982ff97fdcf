"""Ranks as threads of one process: a real transport without sockets, for tests and for trying things out.

Each directed link holds at most ``window_bytes`` of messages; a body is copied out when it leaves and copied in when it
is accepted, like a kernel would, so a schedule that reuses memory too early shows here as well.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from typing import final

from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import Header
from totalreduce.transports.base import Endpoint, Transport, TransportCounters

__all__ = ["InprocNetwork", "InprocTransport"]


class _Link:
    """Messages from one rank to another."""

    __slots__ = ("bytes", "messages")

    def __init__(self) -> None:
        self.messages: deque[tuple[bytes, bytes]] = deque()
        self.bytes = 0


class InprocNetwork:
    """The shared part: all links and one condition per rank."""

    def __init__(self, world_size: int, *, window_bytes: int = 4 * 1024 * 1024) -> None:
        """Make a network for ``world_size`` ranks."""
        self.world_size, self.window_bytes = world_size, window_bytes
        self.lock = threading.Lock()
        self.links = {(a, b): _Link() for a in range(world_size) for b in range(world_size) if a != b}
        self.conditions = [threading.Condition(self.lock) for _ in range(world_size)]
        self.signals = [False] * world_size
        self.dead: dict[int, str] = {}
        #: (a, b): b has dropped its connection to a.
        self.dropped: set[tuple[int, int]] = set()

    def transport(self, rank: int) -> InprocTransport:
        """The transport of one rank."""
        return InprocTransport(self, rank)

    def kill(self, rank: int, reason: str) -> None:
        """Make ``rank`` look dead to everybody: the fault that a thread can have."""
        with self.lock:
            self.dead[rank] = reason
            self._signal_all()

    def _signal_all(self) -> None:
        for rank, condition in enumerate(self.conditions):
            self.signals[rank] = True
            condition.notify_all()


@final
class InprocTransport(Transport):
    """One rank's end of an ``InprocNetwork``."""

    def __init__(self, network: InprocNetwork, rank: int) -> None:
        """Use ``InprocNetwork.transport``."""
        self.rank, self.world_size = rank, network.world_size
        self.counters = TransportCounters()
        self._network = network
        self._endpoint: Endpoint | None = None
        self._reported: set[int] = set()
        self._met: set[int] = set()
        self._closed = False

    @property
    def ranks_per_host(self) -> int:
        return self.world_size

    def attach(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def connected_peers(self) -> Collection[int]:
        return self._met

    def idle(self) -> bool:
        return True

    def wake(self) -> None:
        with self._network.lock:
            self._network.signals[self.rank] = True
            self._network.conditions[self.rank].notify_all()

    def progress(self) -> bool:
        """Send while links have room, receive what is there."""
        endpoint = self._endpoint
        assert endpoint is not None, "attach() comes first"
        progress = self._send(endpoint)
        progress = self._receive(endpoint) or progress
        self._report_dead(endpoint)
        return progress

    def wait(self, timeout_s: float, *, eager: bool = False) -> None:  # noqa: ARG002  (the kernel waits well)
        """Wait for a message, for room, or for ``wake``."""
        network = self._network
        with network.lock:
            if not network.signals[self.rank]:
                network.conditions[self.rank].wait(timeout_s)
            network.signals[self.rank] = False

    def close(self, timeout_s: float) -> None:  # noqa: ARG002  (nothing can be pending)
        """Leave the network; links keep what was sent."""
        self._closed = True

    def _send(self, endpoint: Endpoint) -> bool:
        network, progress = self._network, False
        for peer in tuple(endpoint.ready_peers()):
            link = network.links[self.rank, peer]
            while link.bytes < network.window_bytes:
                message = endpoint.next_message(peer)
                if message is None:
                    break
                body = bytes(message.body) if message.body is not None else b""
                with network.lock:
                    link.messages.append((message.header, body))
                    link.bytes += len(body)
                    network.signals[peer] = True
                    network.conditions[peer].notify_all()
                endpoint.message_sent(message)
                self._met.add(peer)
                progress = True
        return progress

    def _receive(self, endpoint: Endpoint) -> bool:
        network, progress = self._network, False
        for peer in range(self.world_size):
            link = network.links.get((peer, self.rank))
            while link is not None and link.messages and endpoint.may_receive():
                with network.lock:
                    packed, body = link.messages.popleft()
                    link.bytes -= len(body)
                    network.signals[peer] = True  # there is room again
                    network.conditions[peer].notify_all()
                progress = True
                self._met.add(peer)
                try:
                    delivery = endpoint.accept(peer, Header.unpack(packed))
                    delivery.view[:] = body
                    endpoint.delivered(delivery)
                except ProtocolError as error:
                    with network.lock:
                        network.dropped.add((peer, self.rank))
                        network.signals[peer] = True
                        network.conditions[peer].notify_all()
                    endpoint.peer_lost(peer, f"protocol violation: {error}")
                    return progress
        return progress

    def _report_dead(self, endpoint: Endpoint) -> None:
        for rank, reason in tuple(self._network.dead.items()):
            if rank != self.rank and rank not in self._reported:
                self._reported.add(rank)
                endpoint.peer_lost(rank, reason)
        for rank, peer in tuple(self._network.dropped):
            if rank == self.rank and peer not in self._reported:
                self._reported.add(peer)
                endpoint.peer_lost(peer, "its connection ended")
