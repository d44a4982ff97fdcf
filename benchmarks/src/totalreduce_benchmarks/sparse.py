"""``totalreduce bench sparse``: selection and exchange of one flat gradient, by the sparse methods and dense peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Annotated

import typer

from totalreduce.bench.arithmetic import format_count, parse_count
from totalreduce.bench.command import benchmark
from totalreduce.bench.launching import Results, Setting, run_benchmark
from totalreduce.bench.methods import DISTRIBUTIONS, DistributionOption, make_method
from totalreduce.bench.report import Report, Table, duration, number, size, times
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate, slowest
from totalreduce.cli.report import share
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.pytorch.sizes import even_bucket_elements
from totalreduce_benchmarks.plots import Bar, draw_bars

#: Peers in the same run.
PEERS = ("gloo", "fp16", "powersgd-hook")
#: Where a step's time goes, in the order of a worker's samples.
PARTS = ("selection", "coding", "waiting", "writing")
#: A count within this share of k is on target.
_NEAR = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseParameters:
    """The gradient, the methods and the peers; the fields are options."""

    elements: Annotated[str, typer.Option(help="Elements of the gradient, float32, as 14.7M.")] = "14.7M"
    density: Annotated[float, typer.Option(help="Share of the elements that is sent, from 0 to 1.")] = 0.01
    methods: Annotated[str, typer.Option(help="Separated by commas.")] = (
        "oktopk,topka,gtopk,topkdsa,gaussiank,shared,powersgd,coded,dense"
    )
    distribution: DistributionOption = "normal"
    bucket_elements: Annotated[
        str | None,
        typer.Option(
            help="Elements that are selected and sent together, at most. [dim]default: as DistributedOptimizer's, a "
            "quarter of all; of fewer than 28 million a third, a half, or all[/dim]",
        ),
    ] = None
    steps: Annotated[int, typer.Option(help="Timed steps in a row, after an untimed one.")] = 3
    warm_up: Annotated[int, typer.Option(help="Untimed steps at first, from 3.")] = 4
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure this too, in turns in the same run: gloo (dense allreduce of torch.distributed), fp16 and "
            "powersgd-hook (torch's own hooks of DDP over gloo). Repeatable, or separated by commas."
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        for count in (self.elements, self.bucket_elements or self.elements):
            parse_count(count)
        if not self.method_names:
            raise ConfigurationError("--methods names none")
        for name in self.method_names:
            make_method(name, self.density)
        unknown = set(self.peers) - set(PEERS)
        if unknown:
            raise ConfigurationError(f"--against knows {', '.join(PEERS)} here, not {', '.join(unknown)}")
        if self.distribution not in DISTRIBUTIONS:
            raise ConfigurationError(f"--distribution is {', '.join(DISTRIBUTIONS)}, not {self.distribution!r}")
        if self.steps < 1 or self.warm_up < 3:
            raise ConfigurationError(
                f"--steps is at least 1 and --warm-up at least 3 (torch's PowerSGD hook begins then), not {self.steps} "
                f"and {self.warm_up}"
            )

    @property
    def method_names(self) -> list[str]:
        """The sparse methods, each once."""
        return _names([self.methods])

    @property
    def peers(self) -> list[str]:
        """The peers, each once."""
        return _names(self.against or ())

    @property
    def count(self) -> int:
        """Elements of the gradient."""
        return parse_count(self.elements)

    @property
    def edges(self) -> list[int]:
        """Where buckets begin, and where the last one ends: equal ones, as large parameters are cut."""
        most = even_bucket_elements(self.count) if self.bucket_elements is None else parse_count(self.bucket_elements)
        pieces = -(-self.count // most)
        return [self.count * piece // pieces for piece in range(pieces + 1)]


@dataclass(frozen=True, slots=True)
class ContestantSamples:
    """The samples of a method or peer on one rank.

    Attributes:
        seconds: By round and step.
        error: Of the untimed step, see ``SparseFigure``.
        xi: Likewise.
        parts: Seconds by step, in the order of ``PARTS``; this and the following fields are those of methods only.
        bytes: By step: sent and received, with headers; sent and received, without.
        counts: By step and bucket: k, selected and applied; a step has none where a method has no k.
        rescans: Candidates that were listed again, mean of a step.
    """

    seconds: list[list[float]]
    error: float = 0.0
    xi: float | None = None
    parts: list[list[float]] = field(default_factory=list)
    bytes: list[list[int]] = field(default_factory=list)
    counts: list[list[list[int]]] = field(default_factory=list)
    rescans: float = 0.0


@dataclass(frozen=True, slots=True)
class SparseSamples:
    """The samples of one rank, by contestant."""

    contestants: dict[str, ContestantSamples]


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseTraffic:
    """What a method has ranks send; ``None`` where that is not known.

    Attributes:
        sent_bytes: By the average rank in a step, the engine's headers included.
        received_bytes: Likewise.
        payload_sent_bytes: Without headers, as the method counts it.
        payload_received_bytes: Likewise.
        imbalance_sent: Bytes sent by the busiest rank in a step over the mean of all ranks, mean over steps.
        imbalance_received: Likewise.
        bytes_per_selected: Bytes sent, headers included, for each element that the average rank has selected.
    """

    sent_bytes: float | None = None
    received_bytes: float | None = None
    payload_sent_bytes: float | None = None
    payload_received_bytes: float | None = None
    imbalance_sent: float | None = None
    imbalance_received: float | None = None
    bytes_per_selected: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseFigure(SparseTraffic):
    """One method or peer.

    Attributes:
        contestant: Its name.
        seconds: From the gradient to the result in its place, on the slowest rank: mean of a round, median over rounds.
        gains: The peer's time divided by this one's, round by round, by peer: above 1, this one is faster.
        parts_s: Mean seconds over ranks and steps, by the names in ``PARTS``; empty for peers.
        selected_over_k: Mean over ranks, buckets and steps.
        selected_near: Share of these within 5 % of k.
        applied_over_k: Mean over buckets and steps.
        applied_near: Share of these within 5 % of k.
        rescans: How often candidates had to be listed again in a timed step, on the average rank.
        error: ``|update - mean| / |mean|``, with the mean over ranks of gradient and residual together.
        xi: ``|top k of that mean - top k of the update|`` over the norm of the mean gradient; where there is a k.
    """

    contestant: str
    seconds: Estimate
    gains: dict[str, Estimate]
    error: float
    xi: float | None
    parts_s: dict[str, float] = field(default_factory=dict)
    selected_over_k: float | None = None
    selected_near: float | None = None
    applied_over_k: float | None = None
    applied_near: float | None = None
    rescans: float | None = None


@benchmark(
    "sparse",
    "totalreduce bench sparse -n 4 --against gloo,fp16,powersgd-hook",
    "totalreduce bench sparse --emulate-hosts 4 --elements 25.6M --methods oktopk,topka --against gloo --plot out.png",
    shared=("transport", "ranks", "emulate_hosts", "ranks_per_host", "emulate_rate", "rounds"),
    plot=True,
    rounds=7,
)
def bench_sparse(setting: Setting, parameters: SparseParameters) -> Report:
    """Time selection and allreduce of one flat gradient by the sparse methods, in turns with dense peers.

    Every step has a fresh gradient; a method's residual goes on from step to step as in training. A step ends when the
    result lies where a gradient would.

    In an untimed step every method's result is checked: the same bits on all ranks, and all that went in came out or
    is in the residuals.
    """
    figures, results = measure_sparse(setting, parameters)
    what = (
        f"{format_count(parameters.count)} float32 ({parameters.distribution}), density {parameters.density:g}, "
        f"{setting.describe()}"
    )
    return Report(
        _tables(setting, parameters, what, figures),
        setting.as_document(),
        results.machine,
        [{"parameters": parameters, **asdict(figure)} for figure in figures],
        results.raw(),
        lambda path: draw_bars(
            path, f"selection and allreduce of {what}", "ms for one step", [_bar(figure) for figure in figures]
        ),
    )


def measure_sparse(setting: Setting, parameters: SparseParameters) -> tuple[list[SparseFigure], Results[SparseSamples]]:
    """Run the workers; returns the figures and the ranks' samples."""
    if setting.ranks < 2:
        raise ConfigurationError(f"sparse methods are compared on at least 2 ranks, not {setting.ranks}")
    results = run_benchmark("totalreduce_benchmarks.sparse_worker", parameters, setting, SparseSamples)
    return summarise(results.ranks), results


def summarise(samples: Sequence[SparseSamples]) -> list[SparseFigure]:
    """From every rank's samples to figures. Pure."""
    columns = {name: [rank.contestants[name] for rank in samples] for name in samples[0].contestants}
    seconds = {name: _round_times([rank.seconds for rank in ranks]) for name, ranks in columns.items()}
    peers = [name for name in PEERS if name in columns]
    return [
        _figure(name, ranks, seconds[name], {peer: seconds[peer] for peer in peers if peer != name})
        for name, ranks in columns.items()
    ]


def _names(texts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))


def _round_times(ranks: list[list[list[float]]]) -> list[float]:
    """The mean step of each round, each step as long as on the slowest rank."""
    return [fmean(slowest(steps)) for steps in zip(*ranks, strict=True)]


def _figure(
    name: str, ranks: list[ContestantSamples], seconds: list[float], peers: dict[str, list[float]]
) -> SparseFigure:
    gains = {peer: ratio_estimate(theirs, seconds) for peer, theirs in peers.items()}
    plain = SparseFigure(contestant=name, seconds=estimate(seconds), gains=gains, error=ranks[0].error, xi=ranks[0].xi)
    if not ranks[0].bytes:
        return plain
    sent, received, payload_sent, payload_received = _means([_means(rank.bytes) for rank in ranks])
    selected, applied = _shares_of_k([rank.counts for rank in ranks])
    chosen = _selected([rank.counts for rank in ranks])
    return replace(
        plain,
        parts_s=dict(zip(PARTS, _means([_means(rank.parts) for rank in ranks]), strict=True)),
        sent_bytes=sent,
        received_bytes=received,
        payload_sent_bytes=payload_sent,
        payload_received_bytes=payload_received,
        imbalance_sent=_imbalance([rank.bytes for rank in ranks], 0),
        imbalance_received=_imbalance([rank.bytes for rank in ranks], 1),
        bytes_per_selected=sent / fmean(chosen) if any(chosen) else None,
        selected_over_k=fmean(selected) if selected else None,
        selected_near=_near(selected),
        applied_over_k=fmean(applied) if applied else None,
        applied_near=_near(applied),
        rescans=fmean(rank.rescans for rank in ranks) if selected else None,
    )


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(column) for column in zip(*rows, strict=True)]


def _imbalance(ranks: list[list[list[int]]], column: int) -> float:
    """Mean over steps of the largest over the mean number of bytes that a rank has sent or received."""
    moved = [[rank[column] for rank in step] for step in zip(*ranks, strict=True)]
    return fmean(max(step) / fmean(step) if any(step) else 1.0 for step in moved)


def _shares_of_k(ranks: list[list[list[list[int]]]]) -> tuple[list[float], list[float]]:
    """Selected and applied counts over k, of every bucket and step; selected also of every rank that was to select."""
    selected, applied = [], []
    for steps in zip(*ranks, strict=True):
        for buckets in zip(*steps, strict=True):
            wanted = max(k for k, _, _ in buckets)
            if wanted:
                selected += [chosen / k for k, chosen, _ in buckets if k]
                applied.append(buckets[0][2] / wanted)
    return selected, applied


def _selected(ranks: list[list[list[list[int]]]]) -> list[int]:
    """Elements selected in a step, by every rank that was to select."""
    return [sum(bucket[1] for bucket in step) for rank in ranks for step in rank if any(bucket[0] for bucket in step)]


def _near(shares: list[float]) -> float | None:
    """Share within 5 % of 1."""
    return fmean(abs(one - 1) <= _NEAR for one in shares) if shares else None


def _bar(figure: SparseFigure) -> Bar:
    milliseconds = 1000 * figure.seconds.median
    parts = {part: 1000 * seconds for part, seconds in figure.parts_s.items()}
    return Bar(figure.contestant, milliseconds, 1000 * figure.seconds.low, 1000 * figure.seconds.high, parts)


def _tables(
    setting: Setting, parameters: SparseParameters, what: str, figures: list[SparseFigure]
) -> list[Table[SparseFigure]]:
    def part(name: str) -> Callable[[SparseFigure], str]:
        return lambda figure: f"{1000 * figure.parts_s[name]:.1f}" if figure.parts_s else ""

    def gain(peer: str) -> Callable[[SparseFigure], str]:
        return lambda figure: times(figure.gains.get(peer))

    def per_selected(figure: SparseFigure) -> str:
        return "" if figure.bytes_per_selected is None else f"{figure.bytes_per_selected:.2f} B"

    return [
        Table(
            f"selection and allreduce of {what}",
            [
                ("by", lambda figure: figure.contestant),
                ("step (95 %)", lambda figure: duration(figure.seconds)),
                *((f"{name} ms", part(name)) for name in PARTS),
                *((f"faster than {peer}", gain(peer)) for peer in PEERS if peer in parameters.peers),
            ],
            figures,
            f"Slowest rank; mean of {parameters.steps} steps, median of {setting.rounds} rounds. Parts: means over "
            "ranks. coding: computing within the exchange; waiting: nothing to compute, in any bucket.",
        ),
        Table(
            "what travelled, and what it was worth",
            [
                ("by", lambda figure: figure.contestant),
                ("sent", lambda figure: size(figure.sent_bytes)),
                ("max / mean", lambda figure: number(figure.imbalance_sent)),
                ("received", lambda figure: size(figure.received_bytes)),
                ("max / mean", lambda figure: number(figure.imbalance_received)),
                ("payload sent", lambda figure: size(figure.payload_sent_bytes)),
                ("per selected", per_selected),
                ("selected / k", lambda figure: number(figure.selected_over_k)),
                ("near k", lambda figure: share(figure.selected_near)),
                ("applied / k", lambda figure: number(figure.applied_over_k)),
                ("near k", lambda figure: share(figure.applied_near)),
                ("rescans", lambda figure: number(figure.rescans, ".1f")),
                ("error", lambda figure: f"{figure.error:.2g}"),
                ("xi", lambda figure: number(figure.xi)),
            ],
            figures,
            "Per rank and step, with headers; max / mean: over ranks; near k: within 5 %, of all buckets and steps. "
            "error: of the update, relative to the dense mean of gradients and residuals.",
        ),
    ]
