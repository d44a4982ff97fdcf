"""Shared memory between the ranks of one host: messages are staged in the sender's memory and read there.

* ``shm_memory.py`` says what the memory looks like, ``shm_pool.py`` where bodies wait, ``shm_rings.py`` how messages
  move, ``shm_sleep.py`` how a rank sleeps and is woken; ``shm_setup.py`` and ``shm_reception.py`` are how two ranks
  meet, and ``shm_link.py`` is what they have then. Here they are put together and watched.
* A message is copied once, when it is taken; then its memory is the sender's again. The receiver may compute from the
  staged body directly (``base.Lease``). A message is taken only if it can be staged, whatever its length.
* The end of the connection to a peer is a crash; what the dead rank had published is read first. A heartbeat that
  stands still is a frozen process. Time in which this rank itself did not look does not count.

See docs/design/0004-shared-memory.md.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Sequence
from typing import Any, final

import numpy as np

from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.errors import ProtocolError
from totalreduce.transports.base import Endpoint, Transport, TransportCounters
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.liveness import Liveness
from totalreduce.transports.shm_link import Link
from totalreduce.transports.shm_memory import BEAT_WORD, Fences, Layout, Outbox, shm_available
from totalreduce.transports.shm_pool import StagingPool
from totalreduce.transports.shm_reception import Reception
from totalreduce.transports.shm_setup import listen
from totalreduce.transports.shm_sleep import Sleep

__all__ = ["ShmTransport", "listen", "shm_available"]

#: While messages move without a pause the sockets are looked at this often.
_LOOK_S = 0.005
_POOL_BYTES = 16 * 1024 * 1024


@final
class ShmTransport(Transport):
    """One rank's shared memory. One thread at a time but for ``wait`` and ``wake``."""

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str | None],
        listener: socket.socket,
        identity: JobIdentity,
        config: TcpConfig,
        *,
        max_body_bytes: int = 1024 * 1024,
        pool_bytes: int = _POOL_BYTES,
    ) -> None:
        """Take over a listening socket.

        Args:
            rank: This rank.
            addresses: By rank, where the ranks of this host listen; ``None`` for the others.
            listener: From ``listen``; its address is already known to the others.
            identity: What makes a peer one of us.
            config: Heartbeats and deadlines.
            max_body_bytes: Bodies up to this, and a quarter of the pool, travel in one piece; equal on all ranks.
            pool_bytes: About how much may be staged; equal on all ranks.

        Raises:
            ConfigurationError: There is no shared memory; says why.
        """
        self.rank, self.world_size = rank, len(addresses)
        self.counters = TransportCounters()
        self._config = config
        members = [member for member, address in enumerate(addresses) if address is not None]
        self._index = {member: index for index, member in enumerate(members)}
        self._layout = Layout.choose(len(members), max_body_bytes, pool_bytes)
        self._fences = Fences()
        self._outbox = Outbox(self._layout)
        self._pool = StagingPool(self._outbox.view, self._layout)
        self._sleep = Sleep(rank, self._outbox, self._fences, spins=(os.cpu_count() or 1) >= len(members))
        ours = (self._outbox.fd, self._sleep.fd)
        self._reception = Reception(
            rank, addresses, listener, identity, config, self._layout, ours, self._sleep.epoll, self.counters
        )
        self._links: dict[int, Link] = {}
        self._sockets: dict[int, Link] = {}
        self._gone: set[int] = set()
        self._endpoint: Endpoint | None = None
        self._next_look = 0.0
        self._liveness = Liveness(config, time.monotonic())

    @property
    def ranks_per_host(self) -> int:
        """How many ranks share memory."""
        return len(self._index)

    @property
    def members(self) -> Collection[int]:
        """The ranks of this host, this one included."""
        return self._index.keys()

    def attach(self, endpoint: Endpoint) -> None:
        """Say who asks and answers."""
        self._endpoint = endpoint

    def connected_peers(self) -> Collection[int]:
        """Peers with an established connection."""
        return set(self._links)

    def idle(self) -> bool:
        """Whether no message is half-way out."""
        return not any(link.outgoing.busy or link.outgoing.lends for link in tuple(self._links.values()))

    def allocate(self, num_bytes: int) -> np.ndarray[Any, Any] | None:
        """Memory in this rank's arena."""
        return self._outbox.arena.allocate(num_bytes)

    # ----------------------------------------------------------------------------------------------------- progress

    def progress(self) -> bool:
        """One round: now and then sockets, then read, then write, then now and then timers."""
        endpoint = self._endpoint
        assert endpoint is not None, "attach() comes first"
        now = time.monotonic()
        if self._sleep.sockets_called or now >= self._next_look:
            self._look(now)
        more = False
        for link in tuple(self._links.values()):
            outgoing = link.outgoing
            outgoing.blocked = False
            if outgoing.lends:
                outgoing.collect(endpoint)
            if outgoing.busy:  # nobody else says that there is something to send
                more = self._send(link, endpoint) or more
            if link.incoming.has_mail or link.ended is not None:
                more = self._receive(link, endpoint) or more
        for peer in tuple(endpoint.ready_peers()):
            link_of_peer = self._links.get(peer)
            if link_of_peer is None:
                self._send_nowhere(peer, endpoint, now)
            elif link_of_peer.ended is None:
                more = self._send(link_of_peer, endpoint) or more
        if now >= self._liveness.due_at:
            self._timers(now)
            more = more or self.can_send()  # word of a loss is not to wait
        for link in tuple(self._links.values()):
            link.outgoing.tell()
        return more

    def can_send(self) -> bool:
        """Whether a message became ready since ``progress`` that can leave."""
        assert self._endpoint is not None
        links = (self._links.get(peer) for peer in self._endpoint.ready_peers())
        return any(link is not None and link.ended is None and not link.outgoing.blocked for link in links)

    def _receive(self, link: Link, endpoint: Endpoint) -> bool:
        try:
            more = link.incoming.receive(endpoint)
        except ProtocolError as error:
            self._lose(link.peer, f"protocol violation: {error}")
            return True
        if link.ended is not None and not link.incoming.has_mail:
            reason = f"its connection ended ({link.ended})"
            if link.used:
                self._lose(link.peer, reason)
            else:
                self._drop(link)
                self._reception.absent[link.peer] = reason
            return True
        return more

    def _send(self, link: Link, endpoint: Endpoint) -> bool:
        try:
            return link.outgoing.send(endpoint)
        except ProtocolError as error:
            self._lose(link.peer, f"protocol violation: {error}")
            return True

    def _send_nowhere(self, peer: int, endpoint: Endpoint, now: float) -> None:
        """There is a message for a peer that has not arrived, or has gone."""
        if peer in self._gone:
            while endpoint.next_message(peer) is not None:
                pass  # nobody will read it
            return
        reason = self._reception.why_not(peer, now)
        if reason is not None:
            self._lose(peer, reason)

    # ------------------------------------------------------------------------------------------------------ waiting

    def wait(self, timeout_s: float, *, eager: bool = False) -> None:
        """Sleep until a peer or ``wake`` rings, or a socket has something to say."""
        self._sleep.wait(min(timeout_s, self._liveness.due_at - time.monotonic()), eager=eager)

    def wake(self) -> None:
        """End a ``wait``."""
        self._sleep.wake()

    def fileno(self) -> int:
        """Becomes readable when somebody rings or a socket has something to say. For whoever has more to wait for."""
        return self._sleep.epoll.fileno()

    def fall_asleep(self, *, eager: bool) -> bool:
        """For whoever waits for ``fileno`` himself: true if he may, and then he calls ``wake_up``."""
        return self._sleep.fall_asleep(eager=eager)

    def wake_up(self, *, eager: bool) -> None:
        """The end of such a wait."""
        self._sleep.wake_up(eager=eager)
        self._sleep.sockets_called = True  # or the epoll object would stay readable

    # ------------------------------------------------------------------------------------------- sockets and timers

    def _look(self, now: float) -> None:
        """Connect, accept, shake hands, notice ends."""
        self._next_look = now + _LOOK_S
        self._sleep.sockets_called = False
        self._reception.connect_to_all(now)
        for fd, _ in self._sleep.epoll.poll(0):
            if not self._reception.on_event(fd, now) and fd in self._sockets:
                self._on_end(fd)
        self._take_arrivals(now)

    def _take_arrivals(self, now: float) -> None:
        reception = self._reception
        arrived, reception.arrived = reception.arrived, []
        for peer, sock, bell, mapping in arrived:
            link = Link(
                peer,
                (self._index[self.rank], self._index[peer]),
                sock,
                bell,
                (self._outbox, mapping),
                self._layout,
                self._pool,
                self._fences,
                now,
            )
            self._links[peer] = self._sockets[sock.fileno()] = link
            self._sleep.watched = tuple(self._links.values())
        failed, reception.failed = reception.failed, []
        for peer, reason in failed:
            self._lose(peer, reason)

    def _on_end(self, fd: int) -> None:
        """Nothing is ever sent on an established connection: this is its end."""
        link = self._sockets[fd]
        try:
            data = link.sock.recv(1)
            link.ended = "it sent what it must not" if data else "the connection was closed by the other end"
        except BlockingIOError:
            return
        except OSError as error:
            link.ended = str(error)
        self._forget_socket(link)

    def _forget_socket(self, link: Link) -> None:
        fd = link.sock.fileno()
        if self._sockets.pop(fd, None) is not None:
            self._sleep.epoll.unregister(fd)

    def _drop(self, link: Link) -> None:
        self._forget_socket(link)
        del self._links[link.peer]
        self._sleep.watched = tuple(self._links.values())
        link.close()

    def _lose(self, peer: int, reason: str) -> None:
        link = self._links.get(peer)
        if link is not None:
            self._drop(link)
        self._gone.add(peer)
        assert self._endpoint is not None
        self._endpoint.peer_lost(peer, reason)

    def _timers(self, now: float) -> None:
        self._outbox.words[BEAT_WORD] += 1
        self.counters.heartbeats_sent += len(self._links)
        links = tuple(self._links.values())
        self._liveness.look((link.pulse for link in links), now)
        for link in links:
            link.take_pulse(now)
            reason = self._liveness.verdict(link.pulse, now)
            if reason is not None and link.ended is None:
                self._lose(link.peer, reason)
        self._reception.expire(now)
        self._take_arrivals(now)

    # -------------------------------------------------------------------------------------------------------- close

    def let_go(self) -> None:
        """Close the sockets of a forked child, so that their ends show when the parent dies."""
        for link in self._links.values():
            link.sock.close()
        self._reception.let_go()
        self._sleep.epoll.close()

    def close(self, timeout_s: float) -> None:  # noqa: ARG002  (what was published stays readable without this rank)
        """End all connections; the peers first read what this rank has published."""
        self._reception.close()
        for link in list(self._links.values()):
            self._drop(link)
        self._sleep.close()
        self._outbox.close()
