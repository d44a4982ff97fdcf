"""``totalreduce bench collectives``: every collective's time, and how near it is to what its links allow."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from totalreduce.bench.allreduce import mean_goodput
from totalreduce.bench.arithmetic import bus_factor_of, parse_sizes, wire_bytes
from totalreduce.bench.launching import Setting, run_benchmark
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
from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules import SCHEDULES, algorithms_of

__all__ = ["CollectiveFigure", "bench_collectives", "contestants", "measure_collectives", "parse_kinds", "summarise"]

_KINDS = [kind.name.lower() for kind in OpKind if kind is not OpKind.BARRIER]
#: Kinds whose schedule can be chosen by the caller.
_CHOOSABLE = (OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.REDUCE, OpKind.ALLGATHER, OpKind.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class CollectiveFigure:
    """One collective, one size, one contestant.

    Attributes:
        kind: Which collective.
        size: Bytes of the tensor, or of all blocks of one rank together.
        peer: Who was measured.
        schedule: ``auto``, or the one that was asked for.
        chosen: The schedule that carried it out; empty for others than Total Reduce.
        seconds: Time of one operation on the slowest rank.
        expected_s: What the selector expects of that schedule; ``None`` for others than Total Reduce.
        algorithm_bytes_per_s: ``size / seconds``.
        bus_bytes_per_s: As nccl-tests define it.
        share_of_rate: Of the nominal rate, of what must cross the busiest host's link; ``None`` on one host.
        share_of_tcp: Of the goodput of plain TCP streams between the hosts in the same run; ``None`` on one host.
        gain: The peer's time divided by Total Reduce's own choice, round by round; ``None`` for that itself.
    """

    kind: str
    size: int
    peer: str
    schedule: str
    chosen: str
    seconds: Estimate
    expected_s: float | None
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    share_of_rate: float | None
    share_of_tcp: float | None
    gain: Estimate | None


def bench_collectives(
    *,
    kinds: Annotated[str, typer.Option(help=f"all, or some of {', '.join(_KINDS)}, separated by commas.")] = "all",
    sizes: Annotated[
        str, typer.Option(help="Bytes of the tensor, or of all blocks of one rank together; separated by commas.")
    ] = "16MiB",
    schedule: Annotated[
        str,
        typer.Option(help="Schedules to measure beside the selector's choice, separated by commas; all: every one."),
    ] = "auto",
    ranks: RanksOption = None,
    emulate_hosts: HostsOption = 0,
    emulate_rate: RateOption = "1gbit",
    ranks_per_host: RanksPerHostOption = None,
    transport: TransportOption = "auto",
    against: AgainstOption = None,
    mpirun: MpirunOption = None,
    rounds: RoundsOption = 7,
    json: JsonOption = None,
) -> None:
    """Time every collective, and compare it with what must cross the busiest host's link.

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
    figures, results = measure_collectives(setting, parse_kinds(kinds), parse_sizes(sizes), schedule)
    _print(setting, figures, results)
    write_json(json, "collectives", setting, [asdict(figure) for figure in figures], results)


def parse_kinds(text: str) -> list[OpKind]:
    """Collectives by name.

    Raises:
        ConfigurationError: There is none of that name.
    """
    names = _KINDS if text == "all" else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in _KINDS]
    if unknown:
        raise ConfigurationError(f"--kinds is all or some of {', '.join(_KINDS)}, not {', '.join(unknown)}")
    return [OpKind[name.upper()] for name in names]


def contestants(kind: OpKind, peers: list[str], schedule: str) -> list[tuple[str, str]]:
    """Who takes turns: every peer, and Total Reduce by every wanted schedule that there is for this collective.

    Raises:
        ConfigurationError: A schedule is not known.
    """
    names = [Algorithm.AUTO.value, *SCHEDULES]
    wanted = names if schedule == "all" else [name.strip() for name in schedule.split(",")]
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise ConfigurationError(f"--schedule is all or some of {', '.join(names)}, not {', '.join(unknown)}")
    available = [str(algorithm) for algorithm in algorithms_of(kind)] if kind in _CHOOSABLE else []
    explicit = [("totalreduce", name) for name in wanted if name in available]
    return [("totalreduce", "auto"), *explicit, *((peer, "auto") for peer in peers if peer != "totalreduce")]


def measure_collectives(
    setting: Setting, kinds: list[OpKind], sizes: list[int], schedule: str = "auto"
) -> tuple[list[CollectiveFigure], list[dict[str, Any]]]:
    """Run the workers; returns the figures and each rank's raw result.

    Raises:
        BenchmarkFailedError: A rank failed or a result was wrong.
        ConfigurationError: The setting makes no sense.
    """
    taking_part = {kind.name.lower(): contestants(kind, setting.peers, schedule) for kind in kinds}
    parameters = {"kinds": list(taking_part), "sizes": sizes, "contestants": taking_part}
    results = run_benchmark("collectives", parameters, setting)
    return summarise(results, taking_part, setting.host_of_rank, setting.rate_bits_per_s), results


def summarise(
    results: list[dict[str, Any]],
    taking_part: dict[str, list[tuple[str, str]]],
    hosts: tuple[int, ...],
    rate_bits_per_s: float | None,
) -> list[CollectiveFigure]:
    """From every rank's samples to figures. Pure."""
    goodput = mean_goodput(results) if rate_bits_per_s else None
    figures = []
    for index, row in enumerate(results[0]["rows"]):
        kind, size = OpKind[row["kind"].upper()], row["size"]
        must_cross = 8 * wire_bytes(kind, size, hosts)
        # By contestant and round: the slowest rank.
        slowest = [
            [max(ranks) for ranks in zip(*by_rank, strict=True)]
            for by_rank in zip(*(result["rows"][index]["seconds"] for result in results), strict=True)
        ]
        expected = row["expected_s"]
        for (peer, schedule), samples in zip(taking_part[row["kind"]], slowest, strict=True):
            seconds = estimate(samples)
            own = peer in ("totalreduce", "fifo")
            chosen = min(expected, key=expected.__getitem__) if own and schedule == "auto" else schedule if own else ""
            figures.append(
                CollectiveFigure(
                    row["kind"],
                    size,
                    peer,
                    schedule,
                    chosen,
                    seconds,
                    expected.get(chosen),
                    size / seconds.median,
                    size / seconds.median * bus_factor_of(kind, len(results)),
                    must_cross / rate_bits_per_s / seconds.median if rate_bits_per_s and must_cross else None,
                    must_cross / goodput / seconds.median if goodput and must_cross else None,
                    None if samples is slowest[0] else ratio_estimate(samples, slowest[0]),
                )
            )
    return figures


def _print(setting: Setting, figures: list[CollectiveFigure], results: list[dict[str, Any]]) -> None:
    rows = [
        (
            figure.kind,
            format_bytes(figure.size),
            figure.peer if not figure.chosen else f"{figure.chosen}{' (chosen)' if figure.schedule == 'auto' else ''}",
            duration(figure.seconds),
            "" if figure.expected_s is None else f"{figure.expected_s * 1000:.3g} ms",
            f"{figure.algorithm_bytes_per_s / 1e9:.3f}",
            f"{figure.bus_bytes_per_s / 1e9:.3f}",
            share(figure.share_of_rate),
            share(figure.share_of_tcp),
            times(figure.gain),
        )
        for figure in figures
    ]
    print_table(
        f"collectives, {setting.describe()}",
        (
            "collective",
            "size",
            "by",
            "time (95 %)",
            "expected",
            "algbw GB/s",
            "busbw GB/s",
            "of rate",
            "of TCP",
            "chosen one faster by",
        ),
        rows,
        f"Median of {setting.rounds} rounds of the slowest rank, all results checked. "
        f"Plain TCP stream in the same run: {mean_goodput(results) / 1e9:.3f} Gbit/s per link.",
    )
