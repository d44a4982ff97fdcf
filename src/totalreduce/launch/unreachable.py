"""Whether an address can be reached, by a deadline, and why not: an unknown name, nobody listens, no route, no answer.

Neither the system's look-up of names nor torch's store keeps a deadline, so both run in threads (``within``).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from totalreduce.foundation.unreachable import Obstacle, describe_unreachable

__all__ = ["await_listener", "why_unreachable", "within"]

_ADVICE = {
    Obstacle.NOBODY_LISTENS: (
        "Was rank 0 started there, and has it ended? Check that MASTER_ADDR and MASTER_PORT are the same on all ranks; "
        "a firewall can refuse connections, too"
    ),
    Obstacle.NO_ANSWER: (
        "A firewall may drop what is sent to this port (open it on rank 0's host), or the host is off, or MASTER_ADDR "
        "is not its address in this network"
    ),
    Obstacle.NO_ROUTE: (
        "Check that MASTER_ADDR is the address of rank 0's host in a network that both hosts share (`ip route get` "
        "shows the interface), and that this interface is up"
    ),
}
#: The longest time of one attempt to connect. The system repeats its request ever more rarely within one attempt.
_ATTEMPT_S = 5.0
#: An attempt that is shorter than this, at the deadline, tells less than the one before it.
_TELLING_S = 0.5
#: The pause between two attempts: short at first.
_PAUSE_S, _PAUSE_MAX_S = 0.01, 0.25

_T = TypeVar("_T")


def within(timeout_s: float, call: Callable[[], _T]) -> _T:
    """Return the result of ``call``, which has no deadline of its own.

    Raises:
        TimeoutError: It has not returned in time. The thread that waits for it stays until the process ends.
        BaseException: What ``call`` has raised.
    """
    outcome: Future[_T] = Future()

    def body() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=body, name="totalreduce-within", daemon=True).start()
    return outcome.result(timeout_s)


def await_listener(host: str, port: int, timeout_s: float) -> str | None:
    """Wait until somebody accepts connections at an address.

    Returns:
        ``None`` as soon as a connection is accepted; after ``timeout_s`` a sentence that says why none is.
    """
    until, pause_s, cause = time.monotonic() + timeout_s, _PAUSE_S, ""
    while True:
        left_s = until - time.monotonic()
        if cause and left_s <= 0:
            return cause
        found = why_unreachable(host, port, max(0.001, min(left_s, _ATTEMPT_S)))
        if found is None:
            return None
        if not cause or left_s >= _TELLING_S:
            cause = found
        time.sleep(max(0.0, min(pause_s, until - time.monotonic())))
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def why_unreachable(host: str, port: int, timeout_s: float, *, serves: bool = False) -> str | None:
    """Try to connect to rank 0's address once; return a sentence with the cause and what to check.

    Args:
        host: The value of ``MASTER_ADDR``.
        port: The value of ``MASTER_PORT``.
        timeout_s: Seconds to wait for an answer, also for that of the name service.
        serves: This process is rank 0, whose server has failed, so that nobody listens tells nothing.

    Returns:
        The sentence; ``None`` if the address is not the cause: a process there accepts connections, or ``serves``.
    """
    until = time.monotonic() + timeout_s
    try:
        found = within(timeout_s, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except TimeoutError:
        return (
            f"the name service of this host does not answer for the name {host!r} (MASTER_ADDR). Check "
            "/etc/resolv.conf and the network of this host, or set MASTER_ADDR to the IP address of rank 0's host"
        )
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        return (
            f"this host does not know the name {host!r} (MASTER_ADDR): {reason}. Check its spelling and the "
            "DNS or /etc/hosts of this host, or set MASTER_ADDR to the IP address of rank 0's host"
        )
    failure: OSError = TimeoutError()
    for number, (*_, address) in enumerate(found):
        try:
            share_s = max(0.001, (until - time.monotonic()) / (len(found) - number))
            with socket.create_connection((str(address[0]), port), share_s):
                return None
        except OSError as error:
            failure = error
    if serves and isinstance(failure, ConnectionRefusedError):
        return None
    return describe_unreachable(failure, host, port, _ADVICE)
