"""One rank of ``bench allreduce``: every peer on every size, interleaved, every timed result checked."""

from __future__ import annotations

import time
from typing import Any

import torch

from totalreduce.bench import values
from totalreduce.bench.arithmetic import repetitions
from totalreduce.bench.context import Context
from totalreduce.bench.launching import SHARED
from totalreduce.cli.report import format_bytes

__all__ = ["measure"]

_WARMUP_ROUNDS = 2


def measure(context: Context, parameters: dict[str, Any]) -> dict[str, Any]:
    """Time each size with each peer.

    Args:
        context: This rank.
        parameters: ``sizes`` in bytes and ``dtype`` by name.

    Returns:
        ``goodput_bits_per_s`` samples, and per size ``seconds`` and ``bytes_sent`` of one operation, per peer
        and round.

    Raises:
        WrongResultError: A timed operation did not give the closed form.
    """
    dtype = values.dtype_by_name(parameters["dtype"])
    goodput = [context.goodput()]
    peers = list(context.peers)
    if all(shares for (shares,) in context.exchange([context.group.shares_memory])):
        peers.insert(1, SHARED)
    rows = [_measure_size(context, peers, size, dtype) for size in parameters["sizes"]]
    goodput.append(context.goodput())
    return {"goodput_bits_per_s": goodput, "sizes": rows}


def _measure_size(context: Context, peers: list[str], size: int, dtype: torch.dtype) -> dict[str, Any]:
    count = max(1, size // dtype.itemsize)
    times = repetitions(count * dtype.itemsize)
    usual = torch.empty(count * times, dtype=dtype)
    shared = context.group.empty(count * times, dtype=dtype) if SHARED in peers else usual
    seconds: dict[str, list[float]] = {peer: [] for peer in peers}
    bytes_sent: dict[str, list[float]] = {peer: [] for peer in peers if peer == SHARED or context.has_engine(peer)}
    for index in range(-_WARMUP_ROUNDS, context.rounds):
        for peer in peers:
            if peer == SHARED:
                elapsed, sent = _sample(context, "totalreduce", shared, times)
            else:
                elapsed, sent = _sample(context, peer, usual, times)
            if index >= 0:
                seconds[peer].append(elapsed / times)
                if peer in bytes_sent:
                    bytes_sent[peer].append(sent / times)
    context.report(f"allreduce {format_bytes(size)}: {context.rounds} rounds of {', '.join(peers)} checked")
    return {"size": count * dtype.itemsize, "count": count, "seconds": seconds, "bytes_sent": bytes_sent}


def _sample(context: Context, peer: str, buffer: torch.Tensor, times: int) -> tuple[float, int]:
    tensors = list(buffer.view(times, -1))
    if peer in context.mpi:
        count, dtype = len(tensors[0]), str(buffer.dtype).removeprefix("torch.")
        return len(tensors) * context.mpi[peer].sample("allreduce", count, len(tensors), dtype), 0
    reduce = context.allreduce(peer)
    values.fill(buffer, rank=context.rank)
    context.barrier()
    before = context.group_of(peer).statistics().bytes_sent if context.has_engine(peer) else 0
    begin = time.monotonic()
    for tensor in tensors:
        reduce(tensor)
    elapsed = time.monotonic() - begin
    after = context.group_of(peer).statistics().bytes_sent if context.has_engine(peer) else 0
    values.check(buffer, world_size=context.world_size, what=f"allreduce of {len(tensors[0])} elements by {peer}")
    return elapsed, after - before
