"""``totalreduce bench ps``: pushes to and pulls from a parameter server, beside the ring allreduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

import typer

from totalreduce.bench.arithmetic import format_count, parse_count, parse_size
from totalreduce.bench.command import benchmark
from totalreduce.bench.launching import Results, Setting, run_benchmark
from totalreduce.bench.report import Report, Table, duration, size, times
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate, slowest
from totalreduce.cli.report import format_bytes
from totalreduce.foundation.errors import ConfigurationError

#: The contestants, in the order of the tables.
SPARSE = ("push, new keys", "push, known keys", "pull, new keys", "pull, known keys")
DENSE = ("ring allreduce", "push_range", "pull_range", "push_pull_range")


@dataclass(frozen=True, slots=True)
class PsParameters:
    """The table and what is pushed; the fields are options."""

    keys: Annotated[str, typer.Option(help="Number of keys, as 100M; the table has one float32 for each.")] = "10M"
    density: Annotated[float, typer.Option(help="Share of the keys in each push and pull of listed keys.")] = 0.01
    dense: Annotated[str, typer.Option(help="Size of the dense range, and of the allreduce.")] = "64MiB"
    optimizer: Annotated[str, typer.Option(help="sum, sgd, momentum, adagrad, adam or ftrl.")] = "sum"
    bound: Annotated[int, typer.Option(help="Of the steps whose staleness is counted: Bounded(bound).")] = 4
    steps: Annotated[int, typer.Option(help="The number of these steps.")] = 50
    servers: Annotated[
        int, typer.Option(min=0, help="So many of the ranks, the last ones, only serve. 0: each rank is a server, too.")
    ] = 0

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if not 0 < self.density <= 0.5 or self.num_listed < 1:
            raise ConfigurationError(f"--density must be above 0, at most 0.5, and choose a key; not {self.density:g}")
        if self.optimizer not in ("sum", "sgd", "momentum", "adagrad", "adam", "ftrl"):
            raise ConfigurationError(
                f"--optimizer is sum, sgd, momentum, adagrad, adam or ftrl, not {self.optimizer!r}"
            )
        if self.bound < 0 or self.steps < 1:
            raise ConfigurationError("--bound must be at least 0 and --steps at least 1")
        if self.servers < 0:
            raise ConfigurationError(f"--servers must be at least 0, not {self.servers}")

    @property
    def num_keys(self) -> int:
        """The number of keys."""
        return parse_count(self.keys)

    @property
    def num_listed(self) -> int:
        """The number of keys in a list."""
        return int(self.num_keys * self.density)

    @property
    def num_dense(self) -> int:
        """The number of elements of the dense range."""
        return parse_size(self.dense) // 4


@dataclass(frozen=True, slots=True)
class PsSamples:
    """The samples of one rank."""

    seconds: dict[str, list[float]]  #: Of every call, by contestant; empty on a rank that only serves.
    bytes_sent: dict[str, float]  #: By this rank, as a worker and as a server, in one call; likewise.
    kernel_seconds: dict[str, list[float]]  #: Of operations on a table in this process alone; on rank 0, else empty.
    hit_rate: float  #: The share of the requests of known keys that a digest was enough for.
    staleness: dict[str, int]  #: How often a pull was so many steps ahead of the slowest worker.
    waited_s: float  #: The seconds for which the program waited in these steps.


@dataclass(frozen=True, slots=True)
class PsFigure:
    """One contestant."""

    what: str  #: What was done.
    seconds: Estimate  #: Time of a call, of the slowest rank, median over rounds.
    keys_per_s: float  #: Keys of all ranks for each second and server; of kernels, on one core.
    bytes_sent: float | None  #: By the average rank in one call; ``None`` for kernels.
    ratio: Estimate | None  #: The ring's time divided by this; ``None`` where there is no ring.


@benchmark(
    "ps",
    "totalreduce bench ps -n 2",
    "totalreduce bench ps --emulate-hosts 4 --keys 100M --optimizer adagrad",
    "totalreduce bench ps --emulate-hosts 8 --servers 4",
    shared=("transport", "ranks", "emulate_hosts", "emulate_rate", "rounds"),
    rounds=7,
)
def bench_ps(setting: Setting, parameters: PsParameters) -> Report:
    """Time a parameter server with a server on each rank or on others: listed keys, known or new, and a dense range.

    The ring allreduce of as many elements takes turns with the dense range. What is pulled is checked on every rank.
    """
    figures, results = measure_ps(setting, parameters)
    tables = _tables(setting, parameters, figures, _workers(results.ranks))
    return Report(tables, setting.as_document(), results.machine, figures, results.raw())


def measure_ps(setting: Setting, parameters: PsParameters) -> tuple[list[PsFigure], Results[PsSamples]]:
    """Run the workers; returns the figures and the ranks' samples."""
    setting.refuse_mpi("ps")
    if parameters.servers >= setting.ranks:
        raise ConfigurationError(f"--servers {parameters.servers} leaves no worker of {setting.ranks} ranks")
    results = run_benchmark("totalreduce.bench.ps_worker", parameters, setting, PsSamples)
    return summarise(results.ranks, parameters.num_listed, parameters.num_dense), results


def _workers(ranks: Sequence[PsSamples]) -> list[PsSamples]:
    return [rank for rank in ranks if rank.seconds]


def summarise(all_ranks: Sequence[PsSamples], num_listed: int, num_dense: int) -> list[PsFigure]:
    """From every rank's samples to figures. Pure."""
    figures = []
    ranks = _workers(all_ranks)
    num_servers = len(all_ranks) - len(ranks) or len(ranks)
    taken = {what: slowest([rank.seconds[what] for rank in ranks]) for what in ranks[0].seconds}
    for what, seconds in taken.items():
        count = (num_dense if what in DENSE else num_listed) * len(ranks) / num_servers
        sent = fmean(rank.bytes_sent[what] for rank in ranks)
        ratio = ratio_estimate(taken[DENSE[0]], seconds) if what in DENSE[1:] else None
        found = estimate(seconds)
        figures.append(PsFigure(what, found, count / found.median, sent, ratio))
    for what, seconds in ranks[0].kernel_seconds.items():
        found = estimate(seconds)
        figures.append(PsFigure(what, found, num_listed / found.median, None, None))
    return figures


def _tables(
    setting: Setting, parameters: PsParameters, figures: Sequence[PsFigure], ranks: Sequence[PsSamples]
) -> list[Table[PsFigure]]:
    time_column = ("time (95 %)", lambda figure: duration(figure.seconds))
    rate = lambda figure: f"{figure.keys_per_s / 1e6:.3g} M"  # noqa: E731
    histogram: dict[int, int] = {}
    for rank in ranks:
        for steps, count in rank.staleness.items():
            histogram[int(steps)] = histogram.get(int(steps), 0) + count
    seen = ", ".join(f"{steps}: {count}" for steps, count in sorted(histogram.items()))
    listed = f"{format_count(parameters.num_listed)} of {format_count(parameters.num_keys)} keys"
    return [
        Table(
            f"{listed}, a list for each rank, {parameters.optimizer}, {setting.describe()}",
            [
                ("what", lambda figure: figure.what),
                time_column,
                ("keys/s and server", rate),
                ("sent per rank", lambda figure: size(figure.bytes_sent)),
            ],
            [figure for figure in figures if figure.what in SPARSE],
            f"Of the requests with known keys, {fmean(rank.hit_rate for rank in ranks):.0%} travelled as a digest.",
        ),
        Table(
            f"a range of {format_bytes(4 * parameters.num_dense)}, {setting.describe()}",
            [
                ("what", lambda figure: figure.what),
                time_column,
                ("keys/s and server", rate),
                ("sent per rank", lambda figure: size(figure.bytes_sent)),
                ("ring / this", lambda figure: times(figure.ratio)),
            ],
            [figure for figure in figures if figure.what in DENSE],
            "A push_pull sees what other ranks have pushed by then; the ring has all"
            + (f", of the {len(ranks)} ranks that do not only serve." if parameters.servers else "."),
        ),
        Table(
            f"the table alone, {listed}, one core",
            [("what", lambda figure: figure.what), time_column, ("keys/s", rate)],
            [figure for figure in figures if figure.bytes_sent is None],
            f"Staleness of pulls in {parameters.steps} steps of Bounded({parameters.bound}), rank 0 slower: {seen}.",
        ),
    ]
