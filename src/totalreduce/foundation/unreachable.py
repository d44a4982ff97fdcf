"""Why an address cannot be reached: nobody listens, no route, no answer."""

from __future__ import annotations

import enum
import errno
from collections.abc import Mapping

from totalreduce.foundation.os_errors import describe_error

__all__ = ["Obstacle", "describe_unreachable"]

_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


class Obstacle(enum.Enum):
    """What keeps a connection from being made, by the answer of the network."""

    NOBODY_LISTENS = enum.auto()
    NO_ANSWER = enum.auto()
    NO_ROUTE = enum.auto()


def describe_unreachable(error: OSError, host: str, port: int, advice: Mapping[Obstacle, str]) -> str:
    """Return a sentence about a connection that could not be made, and the advice for this cause.

    Args:
        error: The error of the attempt to connect.
        host: The name or the address of the host.
        port: The port.
        advice: What to check for each cause: full sentences without the last full stop. Other errors have none.
    """
    obstacle = _obstacle_of(error)
    match obstacle:
        case Obstacle.NOBODY_LISTENS:
            cause = f"nobody listens at port {port} of {host}"
        case Obstacle.NO_ANSWER:
            cause = f"{host} does not answer at port {port}"
        case Obstacle.NO_ROUTE:
            cause = f"there is no route from this host to {host} (port {port}): {describe_error(error)}"
        case None:
            return f"a connection to {host}, port {port}, failed: {describe_error(error)}"
    return f"{cause}. {advice[obstacle]}"


def _obstacle_of(error: OSError) -> Obstacle | None:
    if isinstance(error, ConnectionRefusedError):
        return Obstacle.NOBODY_LISTENS
    if isinstance(error, TimeoutError):
        return Obstacle.NO_ANSWER
    return Obstacle.NO_ROUTE if error.errno in _NO_ROUTE else None
