"""Which servers hold a shard: the head of its chain, which serves it, and replicas behind the head.

Shards are placed by rendezvous hashing (Thaler and Ravishankar, 1998): each shard has an order of all servers, and its
chain are the first ones of this order that are present. So a server that is lost is replaced by the next one, which has
a replica, and no other shard moves; when the server comes back, it gets what it had. The first servers of the shards
are dealt out in turns, so that all servers head equally many shards while none is lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

__all__ = ["chains_of"]


def chains_of(
    shards: Sequence[int], servers: Sequence[int], present: Collection[int], length: int
) -> dict[int, tuple[int, ...]]:
    """Return the chain of each shard, its head first. It is shorter than ``length`` if fewer servers are present."""
    return {shard: tuple(server for server in _order(shard, servers) if server in present)[:length] for shard in shards}


def _order(shard: int, servers: Sequence[int]) -> list[int]:
    first = servers[shard % len(servers)]
    return [first, *sorted((s for s in servers if s != first), key=lambda server: _score(shard, server))]


def _score(shard: int, server: int) -> bytes:
    return hashlib.blake2b(f"shard {shard}, server {server}".encode(), digest_size=8).digest()
