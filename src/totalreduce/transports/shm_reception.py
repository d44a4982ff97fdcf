"""Who connects to whom, and who is let in: the listening socket and all connections that are not established yet.

A rank connects to every higher rank at once and is connected to by every lower one. A peer that cannot be reached, or
goes before anything was exchanged, is *absent*: no loss unless somebody needs it, for it may have left in good order.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections.abc import Sequence
from typing import final

from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.errors import AuthenticationError, ConfigurationError, ProtocolError
from totalreduce.foundation.os_errors import describe_error, is_out_of_descriptors
from totalreduce.transports.base import TransportCounters
from totalreduce.transports.door import Door, Shortage
from totalreduce.transports.handshake import Acceptor, Connector, JobIdentity
from totalreduce.transports.shm_memory import Layout, Mapping
from totalreduce.transports.shm_setup import Meeting, connect

__all__ = ["Reception"]

_log = logging.getLogger(__name__)

#: A busy listener is tried again, a peer that does not come is asked for, this often.
_RETRY_S = 0.1


@final
class Reception:
    """Meetings of one rank.

    Attributes:
        arrived: Peers that have proved who they are: (rank, socket, bell, memory). Whoever takes them clears the list.
        failed: Peers that are none of us, or have other settings: (rank, reason). The same.
        absent: Why a peer is not there, by rank.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str | None],
        listener: socket.socket,
        identity: JobIdentity,
        config: TcpConfig,
        layout: Layout,
        ours: tuple[int, int],
        epoll: select.epoll,
        counters: TransportCounters,
    ) -> None:
        """Take over the listener. ``ours``: this rank's memory file and bell, for the peers."""
        self.arrived: list[tuple[int, socket.socket, int, Mapping]] = []
        self.failed: list[tuple[int, str]] = []
        self.absent: dict[int, str] = {}
        self._rank, self._addresses = rank, addresses
        self._identity, self._config, self._layout, self._ours = identity, config, layout, ours
        self._epoll, self._counters = epoll, counters
        self._meetings: dict[int, Meeting] = {}
        self._met: set[int] = set()
        self._connect_at = {p: 0.0 for p, address in enumerate(addresses) if address is not None and p > rank}
        self._wanted_since: dict[int, float] = {}
        self._asked_at: dict[int, float] = {}
        self._door = Door(rank, listener, epoll)
        self._shortage = Shortage(rank, config.connect_timeout_s)

    def connect_to_all(self, now: float) -> None:
        """Connect to those whose time has come."""
        for peer in [peer for peer, due in self._connect_at.items() if now >= due]:
            address = self._addresses[peer]
            assert address is not None
            del self._connect_at[peer]
            try:
                sock = connect(address)
            except BlockingIOError:
                self._connect_at[peer] = now + _RETRY_S
            except OSError as error:
                if is_out_of_descriptors(error):
                    self._shortage.occurred(peer, error, now)
                    self._connect_at[peer] = now + _RETRY_S
                else:
                    self.absent[peer] = f"cannot connect to {address}: {error.strerror}"
            else:
                self._shortage.ended()
                self._meet(sock, Connector(self._identity, self._rank, peer), now)

    def on_event(self, fd: int, now: float) -> bool:
        """A socket is readable; returns whether it is one of these."""
        if fd == self._door.listener.fileno():
            self._accept(now)
        elif fd in self._meetings:
            self._advance(fd)
        else:
            return False
        return True

    def why_not(self, peer: int, now: float) -> str | None:
        """There is a message for a peer that has not arrived: why it never will, or ``None`` as long as it may."""
        if peer in self.absent:
            return self.absent[peer]
        if peer < self._rank and now - self._asked_at.setdefault(peer, now) > _RETRY_S:
            # It should have come. Does it still listen? An empty connection is ignored there.
            self._asked_at[peer] = now
            address = self._addresses[peer]
            assert address is not None
            try:
                connect(address).close()
            except BlockingIOError:
                pass
            except OSError as error:
                if not is_out_of_descriptors(error):
                    return f"cannot connect to {address}: {error.strerror}"
                self._shortage.occurred(peer, error, now)
            else:
                self._shortage.ended()
        timeout_s = self._config.connect_timeout_s
        if self._shortage.lasts:  # this rank cannot open a socket, which says nothing about the peer
            self._wanted_since.pop(peer, None)
        elif now - self._wanted_since.setdefault(peer, now) > timeout_s:
            return f"no connection within {timeout_s} s"
        return None

    def expire(self, now: float) -> None:
        """End the meetings that take too long; accept again after a pause."""
        self._door.resume(now)
        config = self._config
        for fd, meeting in list(self._meetings.items()):
            pending_s = now - meeting.opened_at
            if meeting.outgoing and pending_s > config.connect_timeout_s:
                self._refuse(fd, f"no connection within {config.connect_timeout_s} s", guilty=True)
            elif not meeting.outgoing and pending_s > config.handshake_timeout_s:
                self._refuse(fd, "it did not say who it is in time", guilty=True)

    def let_go(self) -> None:
        """Close the sockets of a forked child."""
        self._door.let_go()
        for meeting in self._meetings.values():
            meeting.close()

    def close(self) -> None:
        """Close everything that was not handed on."""
        self._door.close()
        for meeting in self._meetings.values():
            meeting.close()
        self._meetings.clear()

    def _accept(self, now: float) -> None:
        while True:
            accepted = self._door.accept(now)
            if accepted is None:
                return
            sock, _ = accepted
            pending = [fd for fd, meeting in self._meetings.items() if not meeting.outgoing]
            if len(pending) >= self._config.pending_handshakes_max:
                # The oldest goes: a peer needs but a moment for its handshake, so who idles cannot keep it out.
                self._refuse(pending[0], "too many connections that do not say who they are", guilty=True)
            sock.setblocking(False)
            self._meet(sock, Acceptor(self._identity, self._rank, len(self._addresses)), now)

    def _meet(self, sock: socket.socket, handshake: Connector | Acceptor, now: float) -> None:
        fd = sock.fileno()
        self._meetings[fd] = Meeting(sock, handshake, self._layout.card(), self._ours, now)
        self._epoll.register(fd, select.EPOLLIN)
        self._advance(fd, begin=True)

    def _advance(self, fd: int, *, begin: bool = False) -> None:
        meeting = self._meetings[fd]
        try:
            if begin:
                meeting.begin()
            if not meeting.advance():
                return
            mapping = Mapping(meeting.descriptors[0], self._layout)
        except (AuthenticationError, ProtocolError) as error:
            self._refuse(fd, str(error), guilty=True)
            return
        except OSError as error:
            if is_out_of_descriptors(error):  # the peer is not to blame
                raise ConfigurationError(
                    f"rank {self._rank} cannot share memory with rank {meeting.peer}: {describe_error(error)}"
                ) from error
            self._refuse(fd, str(error), guilty=False)
            return
        peer = meeting.peer
        if self._addresses[peer] is None or peer in self._met or (peer > self._rank) != meeting.outgoing:
            self._refuse(fd, f"rank {peer} is not expected here, or not again", guilty=True)
            return
        self._met.add(peer)
        del self._meetings[fd]
        memory, bell = meeting.descriptors
        os.close(memory)
        os.set_blocking(bell, False)
        self._counters.connections += 1
        self.arrived.append((peer, meeting.sock, bell, mapping))

    def _refuse(self, fd: int, reason: str, *, guilty: bool) -> None:
        """End a meeting. ``guilty``: not because it ended by itself."""
        meeting = self._meetings.pop(fd)
        self._epoll.unregister(fd)
        meeting.close()
        if meeting.outgoing and guilty:
            self.failed.append((meeting.peer, reason))
        elif meeting.outgoing:
            self.absent[meeting.peer] = f"its connection ended ({reason})"
        elif guilty or not meeting.silent:  # else a peer that only wanted to know whether this rank listens
            count = self._counters.refused_connections = self._counters.refused_connections + 1
            if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th: strangers must not fill the log
                _log.warning("rank %d refused a connection (number %d): %s", self._rank, count, reason)
