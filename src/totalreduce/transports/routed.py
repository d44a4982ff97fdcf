"""Two transports as one: shared memory for the ranks of this host, a network for all others.

Both transports use the same endpoint, but each sees only its own peers as ready. A wait is for both: each of them has
an epoll object, and epoll objects nest.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Collection
from typing import Any, final

import numpy as np

from totalreduce.transports.base import Endpoint, Made, Outgoing, Transport
from totalreduce.transports.shm import ShmTransport
from totalreduce.transports.tcp import TcpTransport

__all__ = ["RoutedTransport"]

#: The longest wait, because of the network's own timers (retries, verdicts).
_TIMERS_S = 0.05


@final
class _FilteredEndpoint:
    """The endpoint with the peers of one of the transports."""

    def __init__(self, endpoint: Endpoint, peers: Collection[int]) -> None:
        self._all_ready, self._peers = endpoint.ready_peers, frozenset(peers)
        # Bound once: a message shall not cost a second call.
        self.next_message, self.message_sent = endpoint.next_message, endpoint.message_sent
        self.may_receive, self.accept, self.delivered = endpoint.may_receive, endpoint.accept, endpoint.delivered
        self.peer_lost = endpoint.peer_lost

    def ready_peers(self, *, bulk: bool = False) -> Collection[int]:
        return self._peers.intersection(self._all_ready(bulk=bulk))


@final
class RoutedTransport(Transport):
    """Local peers by ``local``, all others by ``remote``. One thread at a time except for ``wait`` and ``wake``."""

    def __init__(self, local: ShmTransport, remote: TcpTransport) -> None:
        """Join two transports of one rank; ``local.members`` are the ranks of this host."""
        self.rank, self.world_size = local.rank, local.world_size
        self.counters, self.boards = local.counters, local.boards
        self.bulk_peers = set(remote.bulk_peers).difference(local.members)
        remote.count_in(local.counters)
        self._local, self._remote = local, remote
        self._epoll = select.epoll()
        self._epoll.register(local.fileno(), select.EPOLLIN)
        self._epoll.register(remote.fileno(), select.EPOLLIN)

    @property
    def ranks_per_host(self) -> int:
        return self._local.ranks_per_host

    def attach(self, endpoint: Endpoint) -> None:
        members = self._local.members
        self._local.attach(_FilteredEndpoint(endpoint, members))
        self._remote.attach(_FilteredEndpoint(endpoint, set(range(self.world_size)).difference(members)))

    def use_relay(self, make: Callable[[Any], Made]) -> Made | None:
        return self._remote.use_relay(make)

    def allocate(self, num_bytes: int) -> np.ndarray[Any, Any] | None:
        return self._local.allocate(num_bytes)

    def keep_rests(self, is_withdrawn: Callable[[Outgoing], bool]) -> bool:
        is_local_done = self._local.keep_rests(is_withdrawn)
        return self._remote.keep_rests(is_withdrawn) and is_local_done

    def progress(self) -> bool:
        more = self._local.progress()
        more = self._remote.progress() or more
        return more or self._local.can_send()  # messages of other hosts may have made some ready for this one

    def wait(self, timeout_s: float, *, eager: bool = False) -> None:
        if not self._local.fall_asleep(eager=eager):
            return
        try:
            self._epoll.poll(min(timeout_s, _TIMERS_S))
        finally:
            self._local.wake_up(eager=eager)

    def wake(self) -> None:
        self._local.wake()  # its bell is enough, because every wait includes it

    def connected_peers(self) -> Collection[int]:
        return {*self._local.connected_peers(), *self._remote.connected_peers()}

    def idle(self) -> bool:
        return self._local.idle() and self._remote.idle()

    def let_go(self) -> None:
        self._local.let_go()
        self._remote.let_go()
        self._epoll.close()

    def close(self, timeout_s: float) -> None:
        """Close both: the network first, because messages may still be on their way there."""
        deadline = time.monotonic() + timeout_s
        self._remote.close(timeout_s)
        self._local.close(max(0.0, deadline - time.monotonic()))
        self._epoll.close()
