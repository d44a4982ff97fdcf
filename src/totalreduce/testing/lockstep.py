"""Exchanges of sparse methods between ranks that live in one process: no thread, no network, every byte counted.

Up to a thousand ranks and more; see ``totalreduce.sparse.actions``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allgather, Allreduce, Alltoall, Broadcast, Exchange, Messages

__all__ = ["Traffic", "run_exchanges"]


@dataclass(slots=True)
class Traffic:
    """Payload by rank, in bytes; collectives are counted as direct exchanges (an allreduce as a ring)."""

    sent: Array  #: Bytes that each rank has sent.
    received: Array  #: Bytes that each rank has received.
    rounds: int = 0  #: Number of actions that had to follow each other.


def run_exchanges(exchanges: Sequence[Exchange]) -> tuple[list[Any], Traffic]:
    """Run one exchange per rank to its end; returns the results by rank, and the traffic.

    Raises:
        AssertionError: Ranks ask for different actions: the method is broken.
    """
    size = len(exchanges)
    traffic = Traffic(np.zeros(size, np.int64), np.zeros(size, np.int64))
    results: list[Any] = [None] * size
    replies: list[Any] = [None] * size
    while True:
        actions: list[Action | None] = []
        for rank, exchange in enumerate(exchanges):
            try:
                actions.append(exchange.send(replies[rank]))
            except StopIteration as stop:
                results[rank] = stop.value
                actions.append(None)
        if all(action is None for action in actions):
            return results, traffic
        kinds = {type(action) for action in actions}
        assert len(kinds) == 1, f"ranks ask for different actions: {kinds}"
        traffic.rounds += 1
        replies = _CARRY[kinds.pop()](actions, traffic)


def _allgather(actions: Sequence[Allgather], traffic: Traffic) -> list[Any]:
    blocks = [action.block.copy() for action in actions]
    for rank, action in enumerate(actions):
        if action.meanwhile is not None:
            action.meanwhile()
        assert list(action.sizes) == [block.size for block in blocks], f"rank {rank} expects other sizes"
        traffic.sent[rank] += blocks[rank].size * (len(blocks) - 1)
        traffic.received[rank] += sum(action.sizes) - blocks[rank].size
    return [list(blocks)] * len(actions)


def _alltoall(actions: Sequence[Alltoall], traffic: Traffic) -> list[Any]:
    replies = []
    for rank, action in enumerate(actions):
        came = [other.blocks[rank].copy() for other in actions]
        assert list(action.sizes) == [block.size for block in came], f"rank {rank} expects other sizes"
        for source, block in enumerate(came):
            if source != rank:
                traffic.sent[source] += block.size
                traffic.received[rank] += block.size
        replies.append(came)
    return replies


def _allreduce(actions: Sequence[Allreduce], traffic: Traffic) -> list[Any]:
    total = actions[0].values.copy()
    for action in actions[1:]:
        total += action.values
    moved = 2 * total.nbytes * (len(actions) - 1) // len(actions)
    traffic.sent += moved
    traffic.received += moved
    for action in actions:
        action.values[...] = total
    return [action.values for action in actions]


def _broadcast(actions: Sequence[Broadcast], traffic: Traffic) -> list[Any]:
    root = actions[0].root
    block = actions[root].block.copy()
    for rank, action in enumerate(actions):
        assert (action.root, action.size) == (root, block.size), f"rank {rank} expects another root or size"
        if rank != root:
            traffic.received[rank] += block.size
    traffic.sent[root] += block.size * (len(actions) - 1)
    return [block.copy() for _ in actions]


def _messages(actions: Sequence[Messages], traffic: Traffic) -> list[Any]:
    replies: list[dict[int, Array]] = []
    for rank, action in enumerate(actions):
        came = {}
        for source, size in action.receives.items():
            block = actions[source].sends[rank].copy()
            assert block.size == size, f"rank {rank} expects {size} bytes from {source}, which sends {block.size}"
            came[source] = block
            traffic.sent[source] += size
            traffic.received[rank] += size
        replies.append(came)
    sent = sum(len(action.sends) for action in actions)
    assert sent == sum(len(action.receives) for action in actions), "a message that no rank receives"
    return replies


_CARRY: dict[type, Callable[[Any, Traffic], list[Any]]] = {
    Allgather: _allgather,
    Alltoall: _alltoall,
    Allreduce: _allreduce,
    Broadcast: _broadcast,
    Messages: _messages,
}
