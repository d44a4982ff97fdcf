"""``totalreduce bench allreduce``: time, algorithm and bus bandwidth by size, as nccl-tests define them."""

from __future__ import annotations

from typing import Annotated

import typer

from totalreduce.bench.arithmetic import parse_sizes
from totalreduce.bench.collectives import (
    CollectiveFigure,
    CollectivesParameters,
    CollectivesSamples,
    Contestant,
    summarise,
)
from totalreduce.bench.command import benchmark
from totalreduce.bench.goodput import goodput_caption
from totalreduce.bench.launching import SHARED, Results, Setting, run_benchmark
from totalreduce.bench.report import Report, Table, duration, milliseconds, size, times
from totalreduce.cli.report import format_bytes, share
from totalreduce.foundation.errors import ConfigurationError

_DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")


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

    Where ranks share memory, Total Reduce is measured a second time as DistributedOptimizer uses it: with prepared
    operations on tensors of Group.empty ("shared").

    Every timed result is checked on every rank; a wrong one ends the run without a figure.
    """
    figures, results = measure_allreduce(setting, parse_sizes(sizes), dtype)
    shared = any(figure.peer == SHARED for figure in figures)
    table = Table(
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
            ("CPU per rank", lambda figure: milliseconds(figure.cpu_s)),
            ("Total Reduce faster by", lambda figure: times(figure.gain)),
            *([("shared by", lambda figure: times(figure.gain_shared))] if shared else []),
        ],
        figures,
        f"Median of {setting.rounds} rounds of the slowest rank, all results checked. {goodput_caption(results.ranks)}",
    )
    return Report([table], setting.as_document(), results.machine, figures, results.raw())


def measure_allreduce(
    setting: Setting, sizes: list[int], dtype: str
) -> tuple[list[CollectiveFigure], Results[CollectivesSamples]]:
    """Run the workers; returns the figures and the ranks' samples. Where there is one host each rank counts as one."""
    if dtype not in _DTYPES:
        raise ConfigurationError(f"--dtype is one of {', '.join(_DTYPES)}, not {dtype!r}")
    if setting.mpi_peers and dtype in ("float16", "bfloat16"):
        raise ConfigurationError(f"MPI has no {dtype}; leave --against {', '.join(setting.mpi_peers)} out")
    contestants = [Contestant(peer, "auto") for peer in ("totalreduce", SHARED, *setting.peers[1:])]
    parameters = CollectivesParameters(sizes, {"allreduce": contestants}, dtype)
    results = run_benchmark("totalreduce.bench.collectives_worker", parameters, setting, CollectivesSamples)
    hosts = setting.host_of_rank if setting.hosts else range(setting.ranks)
    return summarise(results.ranks, hosts, setting.rate_bits_per_s), results
