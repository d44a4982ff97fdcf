"""One rank of ``bench allreduce``: every peer on every size, interleaved, every timed result checked."""

from __future__ import annotations

import time
from typing import Any

import torch

from totalreduce.cli.bench import values
from totalreduce.cli.bench.arithmetic import format_bytes, repetitions
from totalreduce.cli.bench.context import Context

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
    rows = [_measure_size(context, size, dtype) for size in parameters["sizes"]]
    goodput.append(context.goodput())
    return {"goodput_bits_per_s": goodput, "sizes": rows}


def _measure_size(context: Context, size: int, dtype: torch.dtype) -> dict[str, Any]:
    count = max(1, size // dtype.itemsize)
    times = repetitions(count * dtype.itemsize)
    buffer = torch.empty(count * times, dtype=dtype)
    tensors = list(buffer.view(times, count))
    seconds: dict[str, list[float]] = {peer: [] for peer in context.peers}
    bytes_sent: dict[str, list[float]] = {peer: [] for peer in context.peers if context.has_engine(peer)}
    for index in range(-_WARMUP_ROUNDS, context.rounds):
        for peer in context.peers:
            elapsed, sent = _sample(context, peer, buffer, tensors)
            if index >= 0:
                seconds[peer].append(elapsed / times)
                if peer in bytes_sent:
                    bytes_sent[peer].append(sent / times)
    context.report(f"allreduce {format_bytes(size)}: {context.rounds} rounds of {', '.join(context.peers)} checked")
    return {"size": count * dtype.itemsize, "count": count, "seconds": seconds, "bytes_sent": bytes_sent}


def _sample(context: Context, peer: str, buffer: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[float, int]:
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
