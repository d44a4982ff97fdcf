"""``totalreduce bench allreduce``: time, algorithm and bus bandwidth by size, as nccl-tests define them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from totalreduce.bench.arithmetic import bus_factor, parse_sizes, wire_limit_s
from totalreduce.bench.launching import SHARED, Setting, run_benchmark
from totalreduce.bench.options import (
    AgainstOption,
    HostsOption,
    JsonOption,
    MpirunOption,
    RanksOption,
    RanksPerHostOption,
    RateOption,
    RoundsOption,
    TransportOption,
    make_setting,
)
from totalreduce.bench.report import duration, times, write_json
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate
from totalreduce.cli.report import format_bytes, print_table, share
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["AllreduceFigure", "bench_allreduce", "mean_goodput", "measure_allreduce", "summarise"]

_OURS = ("totalreduce", SHARED)
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")


@dataclass(frozen=True, slots=True)
class AllreduceFigure:
    """One size, one peer.

    Attributes:
        size: Bytes per rank.
        count: Elements per rank.
        peer: Who was measured; ``shared`` is Total Reduce with tensors of ``Group.empty``.
        seconds: Time of one operation on the slowest rank.
        algorithm_bytes_per_s: ``size / seconds``.
        bus_bytes_per_s: ``algorithm_bytes_per_s * 2 (n - 1) / n``.
        share_of_rate: Of the nominal rate of the links; ``None`` where nothing is shaped.
        share_of_tcp: Of the goodput of plain TCP streams on the same links in the same run.
        gain: The peer's time divided by Total Reduce's, round by round: above 1, Total Reduce is faster.
        gain_shared: The same beside ``shared``, where that was measured.
        bytes_sent: By the average rank for one operation, headers included; ``None`` where unknown.
    """

    size: int
    count: int
    peer: str
    seconds: Estimate
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    share_of_rate: float | None
    share_of_tcp: float
    gain: Estimate | None
    gain_shared: Estimate | None
    bytes_sent: float | None


def bench_allreduce(
    *,
    sizes: Annotated[str, typer.Option(help="Bytes per rank, separated by commas.")] = "4KiB,1MiB,4MiB,16MiB,64MiB",
    dtype: Annotated[str, typer.Option(help="float32, float64, float16, bfloat16, int32 or int64.")] = "float32",
    ranks: RanksOption = None,
    emulate_hosts: HostsOption = 0,
    emulate_rate: RateOption = "1gbit",
    ranks_per_host: RanksPerHostOption = None,
    transport: TransportOption = "auto",
    against: AgainstOption = None,
    mpirun: MpirunOption = None,
    rounds: RoundsOption = 15,
    json: JsonOption = None,
) -> None:
    """Time allreduce by size, beside gloo, Open MPI and MPICH if asked to.

    Where ranks share memory, Total Reduce is measured a second time with tensors of Group.empty ("shared"), as
    DistributedOptimizer uses them.

    Every timed result is checked on every rank; a wrong one ends the run without a figure.
    """
    setting = make_setting(
        ranks,
        emulate_hosts,
        emulate_rate,
        against,
        rounds,
        ranks_per_host=ranks_per_host,
        transport=transport,
        mpirun=mpirun,
    )
    figures, results = measure_allreduce(setting, parse_sizes(sizes), dtype)
    _print(setting, dtype, figures, results)
    write_json(json, "allreduce", setting, [asdict(figure) for figure in figures], results)


def measure_allreduce(
    setting: Setting, sizes: list[int], dtype: str
) -> tuple[list[AllreduceFigure], list[dict[str, Any]]]:
    """Run the workers; returns the figures and each rank's raw result.

    Raises:
        BenchmarkFailedError: A rank failed or a result was wrong.
        ConfigurationError: No result of this dtype could be checked.
    """
    if dtype not in _DTYPES:
        raise ConfigurationError(f"--dtype is one of {', '.join(_DTYPES)}, not {dtype!r}")
    if setting.mpi_peers and dtype in ("float16", "bfloat16"):
        raise ConfigurationError(f"MPI has no {dtype}; leave --against {', '.join(setting.mpi_peers)} out")
    results = run_benchmark("allreduce", {"sizes": sizes, "dtype": dtype}, setting)
    peers = list(results[0]["sizes"][0]["seconds"])
    return summarise(results, peers, setting.rate_bits_per_s, setting.hosts), results


def summarise(
    results: list[dict[str, Any]], peers: list[str], rate_bits_per_s: float | None, num_hosts: int = 0
) -> list[AllreduceFigure]:
    """From every rank's samples to figures. Pure.

    With ``num_hosts`` (0: each rank counts as one) the wire's limit is that of a host's link, which what is combined
    inside the host crosses once for all its ranks.
    """
    world_size = len(results)
    num_links = num_hosts or world_size
    goodput = mean_goodput(results)
    figures = []
    for index, row in enumerate(results[0]["sizes"]):
        slowest = {
            peer: [max(rank) for rank in zip(*(r["sizes"][index]["seconds"][peer] for r in results), strict=True)]
            for peer in peers
        }
        for peer in peers:
            seconds = estimate(slowest[peer])
            sent = [sample for r in results for sample in r["sizes"][index]["bytes_sent"].get(peer, [])]
            algorithm = row["size"] / seconds.median
            nominal = rate_bits_per_s and wire_limit_s(row["size"], num_links, rate_bits_per_s)
            figures.append(
                AllreduceFigure(
                    row["size"],
                    row["count"],
                    peer,
                    seconds,
                    algorithm,
                    algorithm * bus_factor(world_size),
                    None if nominal is None else nominal / seconds.median,
                    wire_limit_s(row["size"], num_links, goodput) / seconds.median,
                    None if peer in _OURS else ratio_estimate(slowest[peer], slowest["totalreduce"]),
                    ratio_estimate(slowest[peer], slowest[SHARED]) if peer not in _OURS and SHARED in peers else None,
                    sum(sent) / len(sent) if sent else None,
                )
            )
    return figures


def mean_goodput(results: list[dict[str, Any]]) -> float:
    """Bits per second of a plain TCP stream, averaged over links and over the run."""
    samples = [sample for result in results for sample in result["goodput_bits_per_s"]]
    return float(sum(samples) / len(samples))


def _print(setting: Setting, dtype: str, figures: list[AllreduceFigure], results: list[dict[str, Any]]) -> None:
    shared = any(figure.peer == SHARED for figure in figures)
    rows = [
        (
            format_bytes(figure.size),
            str(figure.count),
            dtype,
            figure.peer,
            duration(figure.seconds),
            f"{figure.algorithm_bytes_per_s / 1e9:.3f}",
            f"{figure.bus_bytes_per_s / 1e9:.3f}",
            share(figure.share_of_rate),
            share(figure.share_of_tcp),
            "" if figure.bytes_sent is None else format_bytes(figure.bytes_sent),
            times(figure.gain),
            *([times(figure.gain_shared)] if shared else []),
        )
        for figure in figures
    ]
    goodput = mean_goodput(results) / 1e9
    print_table(
        f"allreduce, {setting.describe()}",
        (
            "size",
            "count",
            "type",
            "by",
            "time (95 %)",
            "algbw GB/s",
            "busbw GB/s",
            "of rate",
            "of TCP",
            "sent",
            "Total Reduce faster by",
            *(["shared by"] if shared else []),
        ),
        rows,
        f"Median of {setting.rounds} rounds of the slowest rank, all results checked. "
        f"Plain TCP stream in the same run: {goodput:.3f} Gbit/s per link.",
    )
