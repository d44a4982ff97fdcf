"""``totalreduce bench urgent``: small urgent allreduces while a large one is in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from totalreduce.bench.arithmetic import parse_size, wire_limit_s
from totalreduce.bench.command import benchmark
from totalreduce.bench.goodput import mean_goodput
from totalreduce.bench.launching import BenchmarkFailedError, Results, Setting, run_benchmark
from totalreduce.bench.report import Report, Table, duration
from totalreduce.bench.sampling import Estimate, estimate, percentile, slowest
from totalreduce.cli.report import format_bytes, share
from totalreduce.foundation.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class UrgentParameters:
    """The sizes and the interval; the fields are options."""

    bulk: Annotated[str, typer.Option(help="Size of the large allreduce.")] = "256MiB"
    size: Annotated[str, typer.Option(help="Size of each urgent allreduce.")] = "4KiB"
    interval_ms: Annotated[float, typer.Option(help="An urgent allreduce is submitted this often.")] = 20.0

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.interval_ms <= 0:
            raise ConfigurationError(f"--interval-ms must be positive, not {self.interval_ms:g}")

    @property
    def bulk_bytes(self) -> int:
        """Size of the large allreduce."""
        return parse_size(self.bulk)

    @property
    def urgent_bytes(self) -> int:
        """Size of each urgent allreduce."""
        return parse_size(self.size)


@dataclass(frozen=True, slots=True)
class PeerSamples:
    """One peer on one rank."""

    alone_s: list[float]  #: Seconds of the bulk alone, by round.
    loaded_s: list[float]  #: Seconds of the bulk with urgent operations, by round.
    #: By round and urgent operation: its latency in seconds, and 1 if the bulk was in flight.
    urgent: list[list[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class UrgentSamples:
    """The samples of one rank; the goodput is that of plain TCP streams, before and after."""

    goodput_bits_per_s: list[float]
    peers: dict[str, PeerSamples]


@dataclass(frozen=True, slots=True)
class UrgentFigure:
    """One peer."""

    peer: str  #: ``totalreduce`` or ``fifo``.
    num_urgent: int  #: Urgent operations that met the bulk in flight on every rank; others do not count.
    p50_s: float  #: Median latency, from a rank's own submission until done; of each operation the slowest rank counts.
    p99_s: float  #: 99th percentile of the same.
    max_s: float  #: The longest.
    alone_s: Estimate  #: The bulk without urgent operations.
    loaded_s: Estimate  #: The bulk with them.
    #: Share of the nominal rate that the loaded bulk reached; ``None`` where nothing is shaped.
    bulk_share_of_rate: float | None
    bulk_share_of_tcp: float  #: Share of the goodput of plain TCP streams in the same run that it reached.


@benchmark(
    "urgent",
    "totalreduce bench urgent --emulate-hosts 4",
    "totalreduce bench urgent -n 2 --bulk 64MiB --interval-ms 5 --against fifo",
    shared=("ranks", "emulate_hosts", "emulate_rate", "against", "rounds"),
    rounds=3,
)
def bench_urgent(setting: Setting, parameters: UrgentParameters) -> Report:
    """Time small urgent allreduces while a large one is in flight.

    Every result is checked on every rank; a wrong one ends the run without a figure.
    """
    figures, results = measure_urgent(setting, parameters)
    table = _table(setting, parameters, figures)
    return Report([table], setting.as_document(), results.machine, figures, results.raw())


def measure_urgent(setting: Setting, parameters: UrgentParameters) -> tuple[list[UrgentFigure], Results[UrgentSamples]]:
    """Run the workers; returns the figures and the ranks' samples."""
    setting.refuse_mpi("urgent")
    if "gloo" in setting.against:
        raise ConfigurationError("bench urgent compares --against fifo only; gloo knows no priorities")
    results = run_benchmark("totalreduce.bench.urgent_worker", parameters, setting, UrgentSamples)
    return summarise(results.ranks, parameters.bulk_bytes, setting.rate_bits_per_s), results


def summarise(ranks: Sequence[UrgentSamples], bulk_bytes: int, rate_bits_per_s: float | None) -> list[UrgentFigure]:
    """From every rank's samples to figures. Pure."""
    world_size, goodput = len(ranks), mean_goodput(ranks)
    figures = []
    for peer in ranks[0].peers:
        own = [rank.peers[peer] for rank in ranks]
        latencies = _latencies([samples.urgent for samples in own])
        if not latencies:
            raise BenchmarkFailedError(
                f"{peer}: the bulk allreduce was over before an urgent one was submitted; use a larger "
                "--bulk or a shorter --interval-ms"
            )
        loaded = estimate(slowest([samples.loaded_s for samples in own]))
        nominal = rate_bits_per_s and wire_limit_s(bulk_bytes, world_size, rate_bits_per_s)
        figures.append(
            UrgentFigure(
                peer=peer,
                num_urgent=len(latencies),
                p50_s=percentile(latencies, 0.5),
                p99_s=percentile(latencies, 0.99),
                max_s=max(latencies),
                alone_s=estimate(slowest([samples.alone_s for samples in own])),
                loaded_s=loaded,
                bulk_share_of_rate=None if nominal is None else nominal / loaded.median,
                bulk_share_of_tcp=wire_limit_s(bulk_bytes, world_size, goodput) / loaded.median,
            )
        )
    return figures


def _latencies(ranks: list[list[list[tuple[float, float]]]]) -> list[float]:
    """The slowest rank's latency of every operation that met the bulk in flight on all of them."""
    return [
        max(latency for latency, _ in operation)
        for rounds in zip(*ranks, strict=True)
        for operation in zip(*rounds, strict=True)
        if all(in_flight for _, in_flight in operation)
    ]


def _table(setting: Setting, parameters: UrgentParameters, figures: list[UrgentFigure]) -> Table[UrgentFigure]:
    urgent, bulk = format_bytes(parameters.urgent_bytes), format_bytes(parameters.bulk_bytes)
    return Table(
        f"{urgent} while {bulk} is in flight, {setting.describe()}",
        [
            ("by", lambda figure: figure.peer),
            ("urgent ops", lambda figure: str(figure.num_urgent)),
            ("p50 ms", lambda figure: f"{figure.p50_s * 1000:.2f}"),
            ("p99 ms", lambda figure: f"{figure.p99_s * 1000:.2f}"),
            ("max ms", lambda figure: f"{figure.max_s * 1000:.2f}"),
            ("bulk alone", lambda figure: duration(figure.alone_s)),
            ("bulk beside them", lambda figure: duration(figure.loaded_s)),
            ("of rate", lambda figure: share(figure.bulk_share_of_rate)),
            ("of TCP", lambda figure: share(figure.bulk_share_of_tcp)),
        ],
        figures,
        "Latency: from a rank's own submission until done, the slowest rank of each. All results checked.",
    )
