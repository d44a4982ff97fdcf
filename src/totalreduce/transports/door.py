"""Sockets where this process, or the machine, can open no more of them: wait, say so rarely, and go on or fail."""

from __future__ import annotations

import errno
import logging
import select
import socket
from typing import Any, final

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import describe_error

__all__ = ["Door", "Shortage"]

_log = logging.getLogger(__name__)

#: How long nobody is accepted after the system had no descriptor or no memory for a connection.
_PAUSE_S = 0.1
#: Errors that stay until this process, or the machine, has freed something.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@final
class Door:
    """Accepts connections. The epoll object is level-triggered for the listening socket.

    A connection that cannot be accepted, for want of a descriptor for instance, stays in the kernel's queue and would
    make the epoll object readable again at once: a loop that takes all the time of a core and logs as fast as it can.
    So the listening socket is not polled for ``_PAUSE_S`` after such an error. Connections wait in the queue meanwhile.
    They are not accepted and closed with a spare descriptor, because a rank may be among them.

    Attributes:
        listener: The socket.
        resume_at: When the listening socket is to be polled again, in seconds; infinite while it is polled.
    """

    def __init__(self, rank: int, listener: socket.socket, epoll: select.epoll) -> None:
        """Take over a non-blocking listening socket."""
        self.listener = listener
        self.resume_at = float("inf")
        self._rank, self._epoll = rank, epoll
        self._failures = 0
        epoll.register(listener.fileno(), select.EPOLLIN)

    def accept(self, now: float) -> tuple[socket.socket, Any] | None:
        """The next connection and where it comes from; ``None`` if there is none, or none can be accepted now."""
        try:
            return self.listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            self._failures += 1
            if error.errno in _EXHAUSTED:
                self._epoll.modify(self.listener.fileno(), 0)
                self.resume_at = now + _PAUSE_S
            if _is_logged(self._failures):
                _log.warning(
                    "rank %d cannot accept a connection (number %d); it is tried again: %s",
                    self._rank,
                    self._failures,
                    describe_error(error),
                )
            return None

    def resume(self, now: float) -> None:
        """Poll the listening socket again, if its time has come."""
        if now >= self.resume_at:
            self.resume_at = float("inf")
            self._epoll.modify(self.listener.fileno(), select.EPOLLIN)

    def let_go(self) -> None:
        """Close the socket of a forked child. The epoll object is the parent's, too, and is told nothing."""
        self.listener.close()

    def close(self) -> None:
        """Accept nobody any more."""
        self._epoll.unregister(self.listener.fileno())
        self.listener.close()


@final
class Shortage:
    """Connections to peers that cannot be opened, because this process has no descriptor left.

    The peers are not to blame: such a connection is tried again for a while, and then this rank fails.
    """

    def __init__(self, rank: int, patience_s: float) -> None:
        """``patience_s``: how long it may last."""
        self._rank, self._patience_s = rank, patience_s
        self._since: float | None = None
        self._failures = 0

    @property
    def lasts(self) -> bool:
        """Whether the last connection that was tried could not be opened."""
        return self._since is not None

    def occurred(self, peer: int, error: OSError, now: float) -> None:
        """A connection to ``peer`` could not be opened.

        Raises:
            ConfigurationError: That has been so for too long; names the limit.
        """
        self._since = now if self._since is None else self._since
        self._failures += 1
        text = f"rank {self._rank} cannot connect to rank {peer}: {describe_error(error)}"
        if now - self._since > self._patience_s:
            raise ConfigurationError(text) from error
        if _is_logged(self._failures):
            _log.warning("%s. It is tried again (number %d)", text, self._failures)

    def ended(self) -> None:
        """A connection could be opened."""
        self._since = None


def _is_logged(count: int) -> bool:
    """The 1st, 2nd, 4th, 8th time: the log must not fill."""
    return count & (count - 1) == 0
