"""One rank of ``bench urgent``: small urgent allreduces while a large one is in flight."""

from __future__ import annotations

import time

import torch

from totalreduce.bench import values
from totalreduce.bench.context import Context, sleep_until
from totalreduce.bench.urgent import PeerSamples, UrgentParameters, UrgentSamples

_BULK_PRIORITY = 10
_URGENT_PRIORITY = 0
_FLIGHT_SHARE = 0.9
#: Urgent operations per bulk, at most.
_URGENT_MAX = 1000


def num_urgent(bulk_s: float, interval_s: float, limit: int) -> int:
    """How many urgent operations fit into nine tenths of the bulk's time: they should meet it in flight."""
    return max(1, min(limit, int(_FLIGHT_SHARE * bulk_s / interval_s)))


def measure(context: Context, parameters: UrgentParameters) -> UrgentSamples:
    """Time urgent operations beside a bulk one, and the bulk one alone."""
    bulk = torch.empty(parameters.bulk_bytes // 4)
    small = torch.empty(max(1, parameters.urgent_bytes // 4))
    interval_s = parameters.interval_ms / 1000
    before = context.goodput()
    for peer in context.peers:
        _run_bulk(context, peer, bulk, small, count=0, interval_s=interval_s)
    peers = {peer: PeerSamples([], [], []) for peer in context.peers}
    for index in range(context.rounds):
        for peer, samples in peers.items():
            alone_s, _ = _run_bulk(context, peer, bulk, small, count=0, interval_s=interval_s)
            # The slowest rank's time: all ranks must submit equally many urgent operations.
            longest_s = max(row[0] for row in context.exchange([alone_s]))
            count = num_urgent(longest_s, interval_s, _URGENT_MAX)
            loaded_s, urgent = _run_bulk(context, peer, bulk, small, count=count, interval_s=interval_s)
            samples.alone_s.append(alone_s)
            samples.loaded_s.append(loaded_s)
            samples.urgent.append(urgent)
        context.report(f"urgent: round {index + 1} of {context.rounds} checked")
    return UrgentSamples([before, context.goodput()], peers)


def _run_bulk(
    context: Context,
    peer: str,
    bulk: torch.Tensor,
    small: torch.Tensor,
    *,
    count: int,
    interval_s: float,
) -> tuple[float, list[tuple[float, float]]]:
    """Reduce the bulk with ``count`` urgent operations beside it; returns its time and their latencies."""
    group = context.group_of(peer)
    values.fill(bulk, rank=context.rank)
    values.fill(small, rank=context.rank)
    tensors = [small.clone() for _ in range(count)]
    urgent: list[tuple[float, float]] = []
    context.barrier()
    begin = time.monotonic()
    bulk_work = group.allreduce(bulk, name="bench.bulk", priority=_BULK_PRIORITY)
    finished: float | None = None
    for index, tensor in enumerate(tensors):
        sleep_until(begin + (index + 1) * interval_s)
        submitted = time.monotonic()
        in_flight = not bulk_work.done()
        group.allreduce(tensor, name=f"bench.urgent{index}", priority=_URGENT_PRIORITY).wait()
        now = time.monotonic()
        urgent.append((now - submitted, float(in_flight)))
        if finished is None and bulk_work.done():
            finished = now
    bulk_work.wait()
    elapsed = (finished or time.monotonic()) - begin
    context.barrier()  # nobody checks while another rank still works
    values.check(bulk, world_size=context.world_size, what=f"bulk allreduce by {peer}")
    for tensor in tensors:
        values.check(tensor, world_size=context.world_size, what=f"urgent allreduce by {peer}")
    return elapsed, urgent
