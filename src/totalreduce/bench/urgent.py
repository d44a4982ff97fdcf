"""``totalreduce bench urgent``: how long a small urgent allreduce takes while a large one holds the wire."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from totalreduce.bench.allreduce import mean_goodput
from totalreduce.bench.arithmetic import parse_size, wire_limit_s
from totalreduce.bench.launching import BenchmarkFailedError, Setting, run_benchmark
from totalreduce.bench.options import (
    AgainstOption,
    HostsOption,
    JsonOption,
    RanksOption,
    RateOption,
    RoundsOption,
    make_setting,
)
from totalreduce.bench.report import duration, write_json
from totalreduce.bench.sampling import Estimate, estimate, percentile
from totalreduce.cli.report import format_bytes, print_table, share
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["UrgentFigure", "bench_urgent", "measure_urgent", "summarise"]

_URGENT_MAX = 1000


@dataclass(frozen=True, slots=True)
class UrgentFigure:
    """One peer.

    Attributes:
        peer: Who was measured.
        num_urgent: Urgent operations that met the bulk in flight on every rank; others do not count.
        p50_s: Median latency, from a rank's own submission until done; of each operation the slowest rank
            counts.
        p99_s: 99th percentile of the same.
        max_s: The longest.
        alone_s: The bulk without urgent operations.
        loaded_s: The bulk with them.
        bulk_share_of_rate: What the loaded bulk made of the nominal rate; ``None`` where nothing is shaped.
        bulk_share_of_tcp: What it made of plain TCP streams' goodput in the same run.
    """

    peer: str
    num_urgent: int
    p50_s: float
    p99_s: float
    max_s: float
    alone_s: Estimate
    loaded_s: Estimate
    bulk_share_of_rate: float | None
    bulk_share_of_tcp: float


def bench_urgent(
    *,
    bulk: Annotated[str, typer.Option(help="Size of the large allreduce.")] = "256MiB",
    size: Annotated[str, typer.Option(help="Size of each urgent allreduce.")] = "4KiB",
    interval_ms: Annotated[float, typer.Option(help="An urgent allreduce is submitted this often.")] = 20.0,
    ranks: RanksOption = None,
    emulate_hosts: HostsOption = 0,
    emulate_rate: RateOption = "1gbit",
    against: AgainstOption = None,
    rounds: RoundsOption = 3,
    json: JsonOption = None,
) -> None:
    """Time small urgent allreduces while a large one is in flight.

    Every result is checked on every rank; a wrong one ends the run without a figure.
    """
    setting = make_setting(ranks, emulate_hosts, emulate_rate, against, rounds)
    setting.refuse_mpi("urgent")
    figures, results = measure_urgent(setting, parse_size(bulk), parse_size(size), interval_ms / 1000)
    _print(setting, parse_size(bulk), parse_size(size), figures)
    write_json(json, "urgent", setting, [asdict(figure) for figure in figures], results)


def measure_urgent(
    setting: Setting, bulk_bytes: int, urgent_bytes: int, interval_s: float
) -> tuple[list[UrgentFigure], list[dict[str, Any]]]:
    """Run the workers; returns the figures and each rank's raw result.

    Raises:
        BenchmarkFailedError: A rank failed, a result was wrong, or no urgent one met the bulk in flight.
        ConfigurationError: ``gloo`` is among the peers: it knows no priorities.
    """
    if "gloo" in setting.against:
        raise ConfigurationError("bench urgent compares --against fifo only; gloo knows no priorities")
    if interval_s <= 0:
        raise ConfigurationError(f"--interval-ms must be positive, not {interval_s * 1000:g}")
    parameters = {
        "bulk_bytes": bulk_bytes,
        "urgent_bytes": urgent_bytes,
        "interval_s": interval_s,
        "urgent_max": _URGENT_MAX,
    }
    results = run_benchmark("urgent", parameters, setting)
    return summarise(results, setting.peers, bulk_bytes, setting.rate_bits_per_s), results


def summarise(
    results: list[dict[str, Any]], peers: list[str], bulk_bytes: int, rate_bits_per_s: float | None
) -> list[UrgentFigure]:
    """From every rank's samples to figures. Pure.

    Raises:
        BenchmarkFailedError: No urgent operation of a peer met the bulk in flight.
    """
    world_size, goodput = len(results), mean_goodput(results)
    figures = []
    for peer in peers:
        latencies = _latencies([result["peers"][peer]["urgent"] for result in results])
        if not latencies:
            raise BenchmarkFailedError(
                f"{peer}: the bulk allreduce was over before an urgent one was submitted; use a larger "
                "--bulk or a shorter --interval-ms"
            )
        alone, loaded = (
            estimate([max(ranks) for ranks in zip(*(r["peers"][peer][key] for r in results), strict=True)])
            for key in ("alone_s", "loaded_s")
        )
        nominal = rate_bits_per_s and wire_limit_s(bulk_bytes, world_size, rate_bits_per_s)
        figures.append(
            UrgentFigure(
                peer,
                len(latencies),
                percentile(latencies, 0.5),
                percentile(latencies, 0.99),
                max(latencies),
                alone,
                loaded,
                None if nominal is None else nominal / loaded.median,
                wire_limit_s(bulk_bytes, world_size, goodput) / loaded.median,
            )
        )
    return figures


def _latencies(ranks: list[list[list[list[float]]]]) -> list[float]:
    """The slowest rank's latency of every operation that met the bulk in flight on all of them."""
    return [
        max(latency for latency, _ in operation)
        for rounds in zip(*ranks, strict=True)
        for operation in zip(*rounds, strict=True)
        if all(in_flight for _, in_flight in operation)
    ]


def _print(setting: Setting, bulk_bytes: int, urgent_bytes: int, figures: list[UrgentFigure]) -> None:
    rows = [
        (
            figure.peer,
            str(figure.num_urgent),
            f"{figure.p50_s * 1000:.2f}",
            f"{figure.p99_s * 1000:.2f}",
            f"{figure.max_s * 1000:.2f}",
            duration(figure.alone_s),
            duration(figure.loaded_s),
            share(figure.bulk_share_of_rate),
            share(figure.bulk_share_of_tcp),
        )
        for figure in figures
    ]
    print_table(
        f"{format_bytes(urgent_bytes)} while {format_bytes(bulk_bytes)} is in flight, {setting.describe()}",
        (
            "by",
            "urgent ops",
            "p50 ms",
            "p99 ms",
            "max ms",
            "bulk alone",
            "bulk beside them",
            "of rate",
            "of TCP",
        ),
        rows,
        "Latency: from a rank's own submission until done, the slowest rank of each. All results checked.",
    )
