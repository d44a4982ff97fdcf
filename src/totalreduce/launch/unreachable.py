"""Why an address cannot be reached: an unknown name, nobody who listens, no route, no answer."""

from __future__ import annotations

import errno
import socket

from totalreduce.foundation.os_errors import describe_error

__all__ = ["why_unreachable"]

_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


def why_unreachable(host: str, port: int, timeout_s: float, *, serves: bool = False) -> str | None:
    """Try to connect to rank 0's address once; return a sentence with the cause and what to check.

    Libraries that wait for a peer report a time-out whatever the cause was. This is for use after such a time-out.

    Args:
        host: The value of ``MASTER_ADDR``.
        port: The value of ``MASTER_PORT``.
        timeout_s: Seconds to wait for an answer.
        serves: This process is rank 0, whose server has failed, so that nobody listens tells nothing.

    Returns:
        The sentence; ``None`` if the address is not the cause: a process there accepts connections, or ``serves``.
    """
    try:
        with socket.create_connection((host, port), timeout_s):
            return None
    except socket.gaierror as error:
        return (
            f"this host does not know the name {host!r} (MASTER_ADDR): {error.strerror}. Check its spelling and the "
            "DNS or /etc/hosts of this host, or set MASTER_ADDR to the IP address of rank 0's host"
        )
    except ConnectionRefusedError:
        if serves:
            return None
        return (
            f"nobody listens at port {port} of {host}. Was rank 0 started there, and has it ended? Check that "
            "MASTER_ADDR and MASTER_PORT are the same on all ranks; a firewall can refuse connections, too"
        )
    except TimeoutError:
        return (
            f"{host} does not answer at port {port}. A firewall may drop what is sent to this port (open it on rank "
            "0's host), or the host is off, or MASTER_ADDR is not its address in this network"
        )
    except OSError as error:
        if error.errno in _NO_ROUTE:
            return (
                f"there is no route from this host to {host}: {describe_error(error)}. Check that MASTER_ADDR is the "
                "address of rank 0's host in a network that both hosts share (`ip route get` shows the interface), and "
                "that this interface is up"
            )
        return f"a connection to {host}, port {port}, failed: {describe_error(error)}"
