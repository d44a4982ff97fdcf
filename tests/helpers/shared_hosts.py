"""Hosts of several ranks in one process: shared memory between the ranks of a host, TCP between hosts."""

import secrets
from collections.abc import Sequence

from totalreduce.foundation.config import TcpConfig
from totalreduce.transports import shm, tcp
from totalreduce.transports.base import Transport
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.routed import RoutedTransport

__all__ = ["hosts_of", "two_per_host"]

NEAR = TcpConfig()


def hosts_of(ranks_per_host: int, world_size: int, config: TcpConfig = NEAR) -> list[Transport]:
    """Return the transports of all ranks; the ranks of a host follow each other."""
    identity = JobIdentity(secrets.token_bytes(32), "test", 0)
    doors = [shm.listen() for _ in range(world_size)]
    listeners = [tcp.listen("127.0.0.1") for _ in range(world_size)]
    addresses = [listener.getsockname()[:2] for listener in listeners]
    transports: list[Transport] = []
    for rank in range(world_size):
        host = rank // ranks_per_host
        names = [name if peer // ranks_per_host == host else None for peer, (_, name) in enumerate(doors)]
        local = shm.ShmTransport(rank, names, doors[rank][0], identity, config)
        remote = tcp.TcpTransport(rank, addresses, listeners[rank], identity, config)
        transports.append(RoutedTransport(local, remote))
    return transports


def two_per_host(world_size: int) -> Sequence[Transport]:
    """Return the transports of ranks on hosts of two."""
    return hosts_of(2, world_size)
