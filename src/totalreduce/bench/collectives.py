"""``totalreduce bench collectives``: the time of every collective beside the limit of its links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

import typer

from totalreduce.bench.arithmetic import bus_factor_of, parse_sizes, wire_bytes
from totalreduce.bench.command import benchmark
from totalreduce.bench.goodput import goodput_caption, mean_goodput
from totalreduce.bench.launching import SHARED, Results, Setting, run_benchmark
from totalreduce.bench.report import Report, Table, duration, milliseconds, times
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate, slowest
from totalreduce.cli.report import format_bytes, share
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules import SCHEDULES, algorithms_of

_KINDS = [kind.name.lower() for kind in OpKind if kind is not OpKind.BARRIER]
#: Kinds whose schedule can be chosen by the caller.
_CHOOSABLE = (OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.REDUCE, OpKind.ALLGATHER, OpKind.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A peer, and the schedule it is asked for: ``auto`` unless the peer is Total Reduce."""

    peer: str
    schedule: str


@dataclass(frozen=True, slots=True)
class CollectivesParameters:
    """Sizes in bytes, and by the name of each collective the contestants that take turns.

    ``shared`` takes part where the ranks share memory.
    """

    sizes: list[int]
    contestants: dict[str, list[Contestant]]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One collective of one size on one rank."""

    kind: str  #: Which collective.
    size: int  #: Bytes of the tensor, or of all blocks of one rank together.
    count: int  #: Elements of the same.
    contestants: list[Contestant]  #: Those that took part.
    seconds: list[list[float]]  #: Of one operation, by contestant and round.
    bytes_sent: list[list[float]]  #: By this rank in one operation, by contestant and round; empty where unknown.
    #: Processor time of this rank's process for one operation, by contestant and round; empty where unknown.
    cpu_s: list[list[float]]
    expected_s: dict[str, float]  #: Seconds that the selector expects of every schedule.


@dataclass(frozen=True, slots=True)
class CollectivesSamples:
    """The samples of one rank; the goodput is that of plain TCP streams, before and after."""

    goodput_bits_per_s: list[float]
    rows: list[CollectiveRow]


@dataclass(frozen=True, slots=True)
class CollectiveFigure(Contestant):
    """One collective, one size, one contestant: ``shared`` is Total Reduce with tensors of ``Group.empty``."""

    kind: str  #: Which collective.
    size: int  #: Bytes of the tensor, or of all blocks of one rank together.
    count: int  #: Elements of the same.
    chosen: str  #: The schedule that carried it out; empty for others than Total Reduce.
    seconds: Estimate  #: Time of one operation on the slowest rank.
    #: Seconds that the selector expects of that schedule; ``None`` for others than Total Reduce.
    expected_s: float | None
    algorithm_bytes_per_s: float  #: ``size / seconds``.
    bus_bytes_per_s: float  #: As nccl-tests define it.
    #: Of the nominal rate, for the bytes that must cross the busiest host's link; ``None`` without any.
    share_of_rate: float | None
    share_of_tcp: float | None  #: Of the goodput of plain TCP streams on the same links in the same run; likewise.
    #: The peer's time divided by Total Reduce's own choice, round by round: above 1, Total Reduce is faster.
    gain: Estimate | None
    gain_shared: Estimate | None  #: The same beside ``shared``, where that was measured.
    bytes_sent: float | None  #: By the average rank for one operation, headers included; ``None`` where unknown.
    cpu_s: float | None  #: Processor time of the average rank for one operation; ``None`` where unknown.


@benchmark(
    "collectives",
    "totalreduce bench collectives --emulate-hosts 8 --against gloo",
    "totalreduce bench collectives --emulate-hosts 2 --ranks-per-host 4 --kinds allreduce --schedule all",
    "totalreduce bench collectives -n 4 --sizes 4KiB,1MiB,16MiB --against gloo,openmpi",
    shared=("ranks", "emulate_hosts", "emulate_rate", "ranks_per_host", "transport", "against", "mpirun", "rounds"),
    rounds=7,
)
def bench_collectives(
    setting: Setting,
    *,
    kinds: Annotated[str, typer.Option(help=f"all, or some of {', '.join(_KINDS)}, separated by commas.")] = "all",
    sizes: Annotated[
        str, typer.Option(help="Bytes of the tensor, or of all blocks of one rank together; separated by commas.")
    ] = "16MiB",
    schedule: Annotated[
        str,
        typer.Option(help="Schedules to measure beside the selector's choice, separated by commas; all: every one."),
    ] = "auto",
) -> Report:
    """Time every collective, and compare it with the bytes that must cross the busiest host's link.

    Every timed result is checked on every rank; a wrong one ends the run without a figure.
    """
    figures, results = measure_collectives(setting, parse_kinds(kinds), parse_sizes(sizes), schedule)
    table = _table(setting, figures, results.ranks)
    return Report([table], setting.as_document(), results.machine, figures, results.raw())


def parse_kinds(text: str) -> list[OpKind]:
    """Return the collectives of these names."""
    names = _KINDS if text == "all" else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in _KINDS]
    if unknown:
        raise ConfigurationError(f"--kinds is all or some of {', '.join(_KINDS)}, not {', '.join(unknown)}")
    return [OpKind[name.upper()] for name in names]


def contestants(kind: OpKind, peers: list[str], schedule: str) -> list[Contestant]:
    """Return the contestants: every peer, and Total Reduce by every wanted schedule that this collective has."""
    names = [Algorithm.AUTO.value, *SCHEDULES]
    wanted = names if schedule == "all" else [name.strip() for name in schedule.split(",")]
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise ConfigurationError(f"--schedule is all or some of {', '.join(names)}, not {', '.join(unknown)}")
    available = [str(algorithm) for algorithm in algorithms_of(kind)] if kind in _CHOOSABLE else []
    others = [Contestant(peer, "auto") for peer in peers if peer != "totalreduce"]
    explicit = [name for name in wanted if name in available]
    return [*(Contestant("totalreduce", name) for name in ("auto", *explicit)), *others]


def measure_collectives(
    setting: Setting, kinds: list[OpKind], sizes: list[int], schedule: str = "auto"
) -> tuple[list[CollectiveFigure], Results[CollectivesSamples]]:
    """Run the workers; returns the figures and the ranks' samples."""
    taking_part = {kind.name.lower(): contestants(kind, setting.peers, schedule) for kind in kinds}
    parameters = CollectivesParameters(sizes, taking_part)
    results = run_benchmark("totalreduce.bench.collectives_worker", parameters, setting, CollectivesSamples)
    return summarise(results.ranks, setting.host_of_rank, setting.rate_bits_per_s), results


def summarise(
    ranks: Sequence[CollectivesSamples], hosts: Sequence[int], rate_bits_per_s: float | None
) -> list[CollectiveFigure]:
    """From every rank's samples to figures. Pure.

    Args:
        ranks: Their samples.
        hosts: Host of every rank: data that a host combines cross its link once for all its ranks.
        rate_bits_per_s: Nominal rate of a host's link.
    """
    goodput = mean_goodput(ranks)
    figures = []
    for rows in zip(*(rank.rows for rank in ranks), strict=True):
        row, expected = rows[0], rows[0].expected_s
        kind = OpKind[row.kind.upper()]
        must_cross = 8 * wire_bytes(kind, row.size, hosts)
        every = [slowest(samples) for samples in zip(*(rank.seconds for rank in rows), strict=True)]
        shared = [samples for one, samples in zip(row.contestants, every, strict=True) if one.peer == SHARED]
        for number, (contestant, samples) in enumerate(zip(row.contestants, every, strict=True)):
            peer, seconds = contestant.peer, estimate(samples)
            chosen = ""
            if peer in ("totalreduce", "fifo"):
                is_auto = contestant.schedule == "auto" and expected
                chosen = min(expected, key=expected.__getitem__) if is_auto else contestant.schedule
            compared = number > 0 and peer != SHARED
            sent = [sample for rank in rows for sample in rank.bytes_sent[number]]
            cpu_s = [sample for rank in rows for sample in rank.cpu_s[number]]
            figures.append(
                CollectiveFigure(
                    kind=row.kind,
                    size=row.size,
                    count=row.count,
                    peer=peer,
                    schedule=contestant.schedule,
                    chosen=chosen,
                    seconds=seconds,
                    expected_s=expected.get(chosen),
                    algorithm_bytes_per_s=row.size / seconds.median,
                    bus_bytes_per_s=row.size / seconds.median * bus_factor_of(kind, len(ranks)),
                    share_of_rate=_share(must_cross, rate_bits_per_s, seconds),
                    share_of_tcp=_share(must_cross, goodput, seconds),
                    gain=ratio_estimate(samples, every[0]) if compared else None,
                    gain_shared=ratio_estimate(samples, shared[0]) if compared and shared else None,
                    bytes_sent=fmean(sent) if sent else None,
                    cpu_s=fmean(cpu_s) if cpu_s else None,
                )
            )
    return figures


def _share(must_cross_bits: float, bits_per_s: float | None, seconds: Estimate) -> float | None:
    return must_cross_bits / bits_per_s / seconds.median if bits_per_s and must_cross_bits else None


def _table(
    setting: Setting, figures: list[CollectiveFigure], ranks: Sequence[CollectivesSamples]
) -> Table[CollectiveFigure]:
    def schedule(figure: CollectiveFigure) -> str:
        return f"{figure.chosen}{' (chosen)' if figure.schedule == 'auto' else ''}" if figure.chosen else figure.peer

    def expected(figure: CollectiveFigure) -> str:
        return "" if figure.expected_s is None else f"{figure.expected_s * 1000:.3g} ms"

    return Table(
        f"collectives, {setting.describe()}",
        [
            ("collective", lambda figure: figure.kind),
            ("size", lambda figure: format_bytes(figure.size)),
            ("by", schedule),
            ("time (95 %)", lambda figure: duration(figure.seconds)),
            ("expected", expected),
            ("algbw GB/s", lambda figure: f"{figure.algorithm_bytes_per_s / 1e9:.3f}"),
            ("busbw GB/s", lambda figure: f"{figure.bus_bytes_per_s / 1e9:.3f}"),
            ("of rate", lambda figure: share(figure.share_of_rate)),
            ("of TCP", lambda figure: share(figure.share_of_tcp)),
            ("CPU per rank", lambda figure: milliseconds(figure.cpu_s)),
            ("chosen one faster by", lambda figure: times(figure.gain)),
        ],
        figures,
        f"Median of {setting.rounds} rounds of the slowest rank, all results checked. {goodput_caption(ranks)}",
    )
