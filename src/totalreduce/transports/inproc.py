"""Ranks as threads of one process: a transport without sockets, for tests and first experiments.

Each direction between two ranks holds at most ``window_bytes`` of messages. A body is copied when it leaves and copied
again when it is accepted, as a kernel would, so a schedule that reuses memory too early is noticed here as well.
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


class _Queue:
    """Messages from one rank to another."""

    __slots__ = ("bytes", "messages")

    def __init__(self) -> None:
        self.messages: deque[tuple[bytes, bytes]] = deque()
        self.bytes = 0


class InprocNetwork:
    """The shared part: all queues, and one condition per rank."""

    def __init__(self, world_size: int, *, window_bytes: int = 4 * 1024 * 1024) -> None:
        self.world_size, self.window_bytes = world_size, window_bytes
        self.lock = threading.Lock()
        self.queues = {(a, b): _Queue() for a in range(world_size) for b in range(world_size) if a != b}
        self.conditions = [threading.Condition(self.lock) for _ in range(world_size)]
        self.signals = [False] * world_size
        self.dead: dict[int, str] = {}
        #: (a, b): b has dropped its connection to a.
        self.dropped: set[tuple[int, int]] = set()

    def transport(self, rank: int) -> InprocTransport:
        """Return the transport of one rank."""
        return InprocTransport(self, rank)

    def kill(self, rank: int, reason: str) -> None:
        """Make ``rank`` look dead to all others: the fault that a thread can have."""
        with self.lock:
            self.dead[rank] = reason
            for other in range(self.world_size):
                self.signal(other)

    def signal(self, rank: int) -> None:
        """End the wait of a rank. The caller holds the lock."""
        self.signals[rank] = True
        self.conditions[rank].notify_all()


@final
class InprocTransport(Transport):
    """One rank's end of an ``InprocNetwork``."""

    def __init__(self, network: InprocNetwork, rank: int) -> None:
        """Use ``InprocNetwork.transport``."""
        self.rank, self.world_size = rank, network.world_size
        self.counters = TransportCounters()
        self.network = network  #: What the ranks share.
        self._reported: set[int] = set()
        self._met: set[int] = set()

    @property
    def ranks_per_host(self) -> int:
        return self.world_size

    def connected_peers(self) -> Collection[int]:
        return self._met

    def idle(self) -> bool:
        return True  # no message leaves in parts

    def wake(self) -> None:
        with self.network.lock:
            self.network.signal(self.rank)

    def progress(self) -> bool:
        endpoint = self._endpoint
        assert endpoint is not None, "attach() comes first"
        progress = self._send(endpoint)
        progress = self._receive(endpoint) or progress
        self._report_dead(endpoint)
        return progress

    def wait(self, timeout_s: float, *, eager: bool = False) -> None:  # noqa: ARG002  (the kernel waits well)
        network = self.network
        with network.lock:
            if not network.signals[self.rank]:
                network.conditions[self.rank].wait(timeout_s)
            network.signals[self.rank] = False

    def close(self, timeout_s: float) -> None:
        """Do nothing: queues keep the messages that were sent."""

    def _send(self, endpoint: Endpoint) -> bool:
        network, progress = self.network, False
        for peer in tuple(endpoint.ready_peers()):
            queue = network.queues[self.rank, peer]
            while queue.bytes < network.window_bytes:
                message = endpoint.next_message(peer)
                if message is None:
                    break
                body = bytes(message.body) if message.body is not None else b""
                with network.lock:
                    queue.messages.append((message.header, body))
                    queue.bytes += len(body)
                    network.signal(peer)
                endpoint.message_sent(message)
                self._met.add(peer)
                progress = True
        return progress

    def _receive(self, endpoint: Endpoint) -> bool:
        network, progress = self.network, False
        for peer in range(self.world_size):
            queue = network.queues.get((peer, self.rank))
            while queue is not None and queue.messages and endpoint.may_receive():
                with network.lock:
                    packed, body = queue.messages.popleft()
                    queue.bytes -= len(body)
                    network.signal(peer)  # there is room again
                progress = True
                self._met.add(peer)
                try:
                    delivery = endpoint.accept(peer, Header.unpack(packed))
                    delivery.view[:] = body
                    endpoint.delivered(delivery)
                except ProtocolError as error:
                    with network.lock:
                        network.dropped.add((peer, self.rank))
                        network.signal(peer)
                    endpoint.peer_lost(peer, f"protocol violation: {error}")
                    return progress
        return progress

    def _report_dead(self, endpoint: Endpoint) -> None:
        losses = [(rank, reason) for rank, reason in tuple(self.network.dead.items()) if rank != self.rank]
        losses += [(b, "its connection ended") for a, b in tuple(self.network.dropped) if a == self.rank]
        for peer, reason in losses:
            if peer not in self._reported:
                self._reported.add(peer)
                endpoint.peer_lost(peer, reason)
