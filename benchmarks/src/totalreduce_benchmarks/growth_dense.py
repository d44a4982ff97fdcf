"""What a dense allreduce costs every rank as the number of ranks grows: real engines over a simulated network.

The engines, their schedules and their messages are those of the library. Only the network and the clock are simulated:
every rank has one network card of the selector's default links. The processor time is that of the engine's calls,
without the network's.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, final

from totalreduce.bench.machine import describe_machine
from totalreduce.bench.plots import Line, draw_lines
from totalreduce.bench.report import Report, Table, milliseconds, print_progress
from totalreduce.cli.report import format_bytes
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.header import Header
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature
from totalreduce.planning.simulation import no_garbage_collection
from totalreduce.schedules import SCHEDULES
from totalreduce.schedules.select import candidates
from totalreduce.schedules.spec import LinkModel
from totalreduce.testing.simulation import SimulatedCluster, TimedSubmission
from totalreduce.transports import simulated
from totalreduce.transports.base import Endpoint, Lease, Outgoing

__all__ = ["DenseFigure", "dense_report", "simulate_dense"]

_LINKS = LinkModel()


@dataclass(frozen=True, slots=True)
class DenseFigure:
    """One allreduce of one size by one schedule on so many ranks, each on a host of its own.

    Attributes:
        ranks: Number of ranks.
        size: Bytes of the tensor.
        schedule: Its name.
        messages: Sent by the average rank, control messages included.
        messages_max: Sent by the rank that sends most.
        cpu_s: Processor time of the average rank's engine.
        cpu_s_max: The same of the busiest rank.
        simulated_s: Duration in the simulated network, without processor time.
        estimated_s: Duration by the selector's estimate, processor time included in its latency.
        chosen: Whether the selector chooses this schedule.
    """

    ranks: int
    size: int
    schedule: str
    messages: float
    messages_max: int
    cpu_s: float
    cpu_s_max: float
    simulated_s: float
    estimated_s: float
    chosen: bool


def dense_report(ranks: Sequence[int], sizes: Sequence[int], schedules: Sequence[str]) -> Report:
    """Return the report of all these numbers of ranks, sizes in bytes and schedules (all candidates, if empty)."""
    figures = []
    for world_size in ranks:
        for size in sizes:
            estimates = candidates(OpKind.ALLREDUCE, size, range(world_size), _LINKS)
            for name in SCHEDULES:
                if name in estimates and (not schedules or name in schedules):
                    figures.append(simulate_dense(name, world_size, size, estimates))
                    print_progress(f"growth: {name}, {world_size} ranks, {format_bytes(size)}")
    rate = f"{8 * _LINKS.bytes_per_s / 1e9:g} Gbit/s"
    table = Table(
        f"dense allreduce by number of ranks, one rank per host, {rate}",
        [
            ("ranks", lambda figure: str(figure.ranks)),
            ("size", lambda figure: format_bytes(figure.size)),
            ("schedule", lambda figure: f"{figure.schedule}{' (chosen)' if figure.chosen else ''}"),
            ("messages", lambda figure: f"{figure.messages:.0f}"),
            ("most", lambda figure: str(figure.messages_max)),
            ("CPU per rank", lambda figure: milliseconds(figure.cpu_s)),
            ("most", lambda figure: milliseconds(figure.cpu_s_max)),
            ("CPU per message", lambda figure: f"{1e6 * figure.cpu_s / figure.messages:.0f} µs"),
            ("on the wire", lambda figure: milliseconds(figure.simulated_s)),
            ("selector's estimate", lambda figure: milliseconds(figure.estimated_s)),
        ],
        figures,
        "Per rank, engines in one process. Processor time without the network's; wire time without processor time.",
    )
    return Report(
        [table],
        {"ranks": list(ranks), "sizes": list(sizes), "links": _LINKS},
        describe_machine(),
        figures,
        [],
        lambda path: draw_lines(
            path,
            f"processor time of a dense allreduce, {rate}",
            ("ranks", "ms per rank"),
            list(_lines(figures)),
        ),
    )


def simulate_dense(name: str, world_size: int, size: int, estimates: dict[str, float]) -> DenseFigure:
    """Carry out an allreduce by one schedule twice, and count the second time: then all programs exist.

    Args:
        name: The schedule's name.
        world_size: Number of ranks.
        size: Bytes of the tensor.
        estimates: The selector's estimates by schedule, in seconds.

    Raises:
        ArithmeticError: A rank has a wrong sum.
    """
    import numpy as np

    link = simulated.LinkModel(bytes_per_s=_LINKS.bytes_per_s)
    network = simulated.SimulatedNetwork(world_size, default=link, one_port=True, traced=False)
    cluster = SimulatedCluster(network, EngineConfig(stall_warning_s=0), validates=False)
    timed = [_Timed(endpoint) for endpoint in cluster.ranks]
    count = max(1, size // 4)
    signature = Signature(OpKind.ALLREDUCE, DType.FLOAT32, ReduceOp.SUM, 0, (count,), algorithm=name)
    tensors = np.empty((world_size, count), np.float32)
    before: list[int] = []
    begin = 0.0
    for turn in range(2):
        tensors[:] = np.arange(1, world_size + 1, dtype=np.float32)[:, None]
        before, begin = [rank.engine.counters.messages_sent for rank in cluster.ranks], network.now
        for rank, endpoint in enumerate(timed):
            network.attach(rank, endpoint)
            endpoint.seconds = 0.0
            buffer = memoryview(tensors[rank]).cast("B")
            cluster.submit(rank, TimedSubmission("dense", signature, [buffer], at_s=begin))
        with no_garbage_collection():
            cluster.run()
        if not (tensors == world_size * (world_size + 1) // 2).all():
            raise ArithmeticError(f"{name}, {world_size} ranks, {size} bytes, turn {turn}: a sum is wrong")
    ended = max(rank_submissions[-1].done_at_s or 0.0 for rank_submissions in cluster.submissions)
    sent = [rank.engine.counters.messages_sent - old for rank, old in zip(cluster.ranks, before, strict=True)]
    cpu_s = [endpoint.seconds for endpoint in timed]
    chosen = min(estimates, key=estimates.__getitem__) == name
    return DenseFigure(
        ranks=world_size,
        size=size,
        schedule=name,
        messages=fmean(sent),
        messages_max=max(sent),
        cpu_s=fmean(cpu_s),
        cpu_s_max=max(cpu_s),
        simulated_s=ended - begin,
        estimated_s=estimates[name],
        chosen=chosen,
    )


@final
class _Timed:
    """An endpoint whose calls are timed.

    Attributes:
        seconds: Processor time of all calls so far.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self.seconds = endpoint, 0.0

    def _timed(self, call: Any, *arguments: Any) -> Any:
        begin = time.thread_time()
        result = call(*arguments)
        self.seconds += time.thread_time() - begin
        return result

    def ready_peers(self, *, bulk: bool = False) -> Collection[int]:
        return self._endpoint.ready_peers(bulk=bulk)

    def next_message(self, peer: int, *, bulk: bool = False) -> Outgoing | None:
        message: Outgoing | None = self._timed(lambda: self._endpoint.next_message(peer, bulk=bulk))
        return message

    def message_sent(self, message: Outgoing) -> None:
        self._timed(self._endpoint.message_sent, message)

    def may_receive(self) -> bool:
        return self._endpoint.may_receive()

    def accept(self, peer: int, header: Header, lease: Lease | None = None) -> Any:
        return self._timed(self._endpoint.accept, peer, header, lease)

    def delivered(self, delivery: Any) -> None:
        self._timed(self._endpoint.delivered, delivery)

    def peer_lost(self, peer: int, reason: str) -> None:
        self._endpoint.peer_lost(peer, reason)


def _lines(figures: Sequence[DenseFigure]) -> Iterator[Line]:
    for size in dict.fromkeys(figure.size for figure in figures):
        for name in dict.fromkeys(figure.schedule for figure in figures):
            own = [figure for figure in figures if (figure.size, figure.schedule) == (size, name)]
            if own:
                ranks = [figure.ranks for figure in own]
                yield Line(f"{name}, {format_bytes(size)}", ranks, [1000 * figure.cpu_s for figure in own])
