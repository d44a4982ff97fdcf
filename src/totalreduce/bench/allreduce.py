"""``totalreduce bench allreduce``: time, algorithm and bus bandwidth by size, as nccl-tests define them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

import typer

from totalreduce.bench.arithmetic import bus_factor, parse_sizes, wire_limit_s
from totalreduce.bench.collectives import CollectiveRow, CollectivesParameters, CollectivesSamples, Contestant
from totalreduce.bench.command import benchmark
from totalreduce.bench.goodput import goodput_caption, mean_goodput
from totalreduce.bench.launching import SHARED, Results, Setting, run_benchmark
from totalreduce.bench.report import Report, Table, duration, size, times
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate, slowest
from totalreduce.cli.report import format_bytes, share
from totalreduce.foundation.errors import ConfigurationError

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


@benchmark(
    "allreduce",
    "totalreduce bench allreduce -n 2 --against gloo",
    "totalreduce bench allreduce --emulate-hosts 8 --sizes 4MiB,64MiB --against gloo --json out.json",
    "totalreduce bench allreduce -n 4 --against gloo,openmpi,mpich --mpirun mpich=/opt/mpich/bin/mpirun",
    shared=("ranks", "emulate_hosts", "emulate_rate", "ranks_per_host", "transport", "against", "mpirun", "rounds"),
    rounds=15,
)
def bench_allreduce(
    setting: Setting,
    *,
    sizes: Annotated[str, typer.Option(help="Bytes per rank, separated by commas.")] = "4KiB,1MiB,4MiB,16MiB,64MiB",
    dtype: Annotated[str, typer.Option(help="float32, float64, float16, bfloat16, int32 or int64.")] = "float32",
) -> Report:
    """Time allreduce by size, beside gloo, Open MPI and MPICH if asked to.

    Where ranks share memory, Total Reduce is measured a second time with tensors of Group.empty ("shared"), as
    DistributedOptimizer uses them.

    Every timed result is checked on every rank; a wrong one ends the run without a figure.
    """
    figures, results = measure_allreduce(setting, parse_sizes(sizes), dtype)
    table = _table(setting, dtype, figures, results.ranks)
    return Report([table], setting.as_document(), results.machine, figures, results.raw())


def measure_allreduce(
    setting: Setting, sizes: list[int], dtype: str
) -> tuple[list[AllreduceFigure], Results[CollectivesSamples]]:
    """Run the workers; returns the figures and the ranks' samples."""
    if dtype not in _DTYPES:
        raise ConfigurationError(f"--dtype is one of {', '.join(_DTYPES)}, not {dtype!r}")
    if setting.mpi_peers and dtype in ("float16", "bfloat16"):
        raise ConfigurationError(f"MPI has no {dtype}; leave --against {', '.join(setting.mpi_peers)} out")
    contestants = [Contestant(peer, "auto") for peer in ("totalreduce", SHARED, *setting.peers[1:])]
    parameters = CollectivesParameters(sizes, {"allreduce": contestants}, dtype)
    results = run_benchmark("collectives_worker", parameters, setting, CollectivesSamples)
    return summarise(results.ranks, setting.rate_bits_per_s, setting.hosts), results


def summarise(
    ranks: Sequence[CollectivesSamples], rate_bits_per_s: float | None, num_hosts: int = 0
) -> list[AllreduceFigure]:
    """From every rank's samples to figures. Pure.

    With ``num_hosts`` (0: each rank counts as one) the wire's limit is that of a host's link, which what is combined
    inside the host crosses once for all its ranks.
    """
    num_links = num_hosts or len(ranks)
    goodput = mean_goodput(ranks)
    return [
        figure
        for rows in zip(*(rank.rows for rank in ranks), strict=True)
        for figure in _figures(rows, num_links, goodput, rate_bits_per_s)
    ]


def _figures(
    rows: Sequence[CollectiveRow], num_links: int, goodput: float, rate_bits_per_s: float | None
) -> list[AllreduceFigure]:
    """One size: the samples of every rank."""
    num_bytes = rows[0].size
    peers = [contestant.peer for contestant in rows[0].contestants]
    samples = {peer: slowest([row.seconds[number] for row in rows]) for number, peer in enumerate(peers)}
    figures = []
    for number, (peer, own) in enumerate(samples.items()):
        seconds = estimate(own)
        sent = [sample for row in rows for sample in row.bytes_sent[number]]
        algorithm = num_bytes / seconds.median
        nominal = rate_bits_per_s and wire_limit_s(num_bytes, num_links, rate_bits_per_s)
        compared = peer not in _OURS
        figures.append(
            AllreduceFigure(
                size=num_bytes,
                count=rows[0].count,
                peer=peer,
                seconds=seconds,
                algorithm_bytes_per_s=algorithm,
                bus_bytes_per_s=algorithm * bus_factor(len(rows)),
                share_of_rate=None if nominal is None else nominal / seconds.median,
                share_of_tcp=wire_limit_s(num_bytes, num_links, goodput) / seconds.median,
                gain=ratio_estimate(own, samples["totalreduce"]) if compared else None,
                gain_shared=ratio_estimate(own, samples[SHARED]) if compared and SHARED in samples else None,
                bytes_sent=fmean(sent) if sent else None,
            )
        )
    return figures


def _table(
    setting: Setting, dtype: str, figures: list[AllreduceFigure], ranks: Sequence[CollectivesSamples]
) -> Table[AllreduceFigure]:
    shared = any(figure.peer == SHARED for figure in figures)
    return Table(
        f"allreduce, {setting.describe()}",
        [
            ("size", lambda figure: format_bytes(figure.size)),
            ("count", lambda figure: str(figure.count)),
            ("type", lambda _: dtype),
            ("by", lambda figure: figure.peer),
            ("time (95 %)", lambda figure: duration(figure.seconds)),
            ("algbw GB/s", lambda figure: f"{figure.algorithm_bytes_per_s / 1e9:.3f}"),
            ("busbw GB/s", lambda figure: f"{figure.bus_bytes_per_s / 1e9:.3f}"),
            ("of rate", lambda figure: share(figure.share_of_rate)),
            ("of TCP", lambda figure: share(figure.share_of_tcp)),
            ("sent", lambda figure: size(figure.bytes_sent)),
            ("Total Reduce faster by", lambda figure: times(figure.gain)),
            *([("shared by", lambda figure: times(figure.gain_shared))] if shared else []),
        ],
        figures,
        f"Median of {setting.rounds} rounds of the slowest rank, all results checked. {goodput_caption(ranks)}",
    )
