"""Listening sockets, refused connections, and sockets that cannot be opened because descriptors are short."""

from __future__ import annotations

import errno
import logging
import select
import socket
from typing import Any, final

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import describe_error
from totalreduce.transports.base import TransportCounters

__all__ = ["DescriptorShortage", "Listener"]

_log = logging.getLogger(__name__)

#: For how long nothing is accepted after the system had no descriptor or no memory for a connection.
_PAUSE_S = 0.1
#: Errors that last until this process, or the machine, has freed something.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@final
class Listener:
    """Accepts connections, and counts those that are refused. It is level-triggered in the epoll object.

    A connection that cannot be accepted, for want of a descriptor for instance, stays in the kernel's queue and would
    make the epoll object readable again at once: a loop that takes all the time of a core and logs as fast as it can.
    So the listening socket is not polled for ``_PAUSE_S`` after such an error. Connections wait in the queue meanwhile.
    They are not accepted and closed with a spare descriptor, because a rank may be among them.
    """

    def __init__(self, rank: int, sock: socket.socket, epoll: select.epoll, counters: TransportCounters) -> None:
        self.sock = sock  #: The listening socket.
        self.epoll = epoll  #: The epoll object in which it is registered.
        self.counters = counters  #: Where refused connections are counted.
        #: When the listening socket is to be polled again, in seconds; infinite while it is polled.
        self.resume_at = float("inf")
        self.last_refusal = ""  #: Why a connection was last refused; "" if none was.
        self._rank, self._failures = rank, 0
        epoll.register(sock.fileno(), select.EPOLLIN)

    def accept(self, now: float) -> tuple[socket.socket, Any] | None:
        """Return the next connection, non-blocking, and its address; ``None`` if none can be accepted now."""
        try:
            sock, address = self.sock.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            self._failures += 1
            if error.errno in _EXHAUSTED:
                self.epoll.modify(self.sock.fileno(), 0)
                self.resume_at = now + _PAUSE_S
            if _is_logged(self._failures):
                _log.warning(
                    "rank %d cannot accept a connection (number %d); it is tried again: %s",
                    self._rank,
                    self._failures,
                    describe_error(error),
                )
            return None
        sock.setblocking(False)
        return sock, address

    def refused(self, reason: str) -> None:
        """Count a connection that was refused, and log the reason."""
        self.last_refusal = reason
        self.counters.refused_connections += 1
        if _is_logged(self.counters.refused_connections):
            count = self.counters.refused_connections
            _log.warning("rank %d refused a connection (number %d): %s", self._rank, count, reason)

    def resume(self, now: float) -> None:
        """Poll the listening socket again at ``resume_at``."""
        if now >= self.resume_at:
            self.resume_at = float("inf")
            self.epoll.modify(self.sock.fileno(), select.EPOLLIN)

    def let_go(self) -> None:
        """Close the socket in a forked child. The epoll object belongs to the parent too, and is not changed."""
        self.sock.close()

    def close(self) -> None:
        """Accept no more connections."""
        self.epoll.unregister(self.sock.fileno())
        self.sock.close()


@final
class DescriptorShortage:
    """Connections to peers that cannot be opened because this process has no descriptor left.

    The peers are not to blame: such a connection is tried again for a while, and then this rank fails.
    """

    def __init__(self, rank: int, patience_s: float) -> None:
        """``patience_s``: how long the shortage may last before this rank fails."""
        self._rank, self._patience_s = rank, patience_s
        self._since: float | None = None
        self._failures = 0

    @property
    def lasts(self) -> bool:
        """Whether the last attempt to open a connection failed."""
        return self._since is not None

    def occurred(self, peer: int, error: OSError, now: float) -> None:
        """Note that a connection to ``peer`` could not be opened. Raises ``ConfigurationError``."""
        self._since = now if self._since is None else self._since
        self._failures += 1
        text = f"rank {self._rank} cannot connect to rank {peer}: {describe_error(error)}"
        if now - self._since > self._patience_s:
            raise ConfigurationError(text) from error
        if _is_logged(self._failures):
            _log.warning("%s. It is tried again (number %d)", text, self._failures)

    def ended(self) -> None:
        """Note that a connection could be opened."""
        self._since = None


def _is_logged(count: int) -> bool:
    """Whether this is the 1st, 2nd, 4th, 8th time: strangers must not fill the log."""
    return count & (count - 1) == 0
