"""``totalreduce bench sparse``: selection and exchange of one flat gradient, by the sparse methods and dense peers."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from totalreduce.bench.launching import Setting, run_benchmark
from totalreduce.bench.methods import make_method
from totalreduce.bench.options import (
    HostsOption,
    JsonOption,
    RanksOption,
    RanksPerHostOption,
    RateOption,
    RoundsOption,
    TransportOption,
    make_setting,
)
from totalreduce.bench.plots import Bar, draw_bars, require_matplotlib
from totalreduce.bench.report import duration, times, write_json
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate
from totalreduce.cli.report import format_bytes, print_table, share
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.pytorch.sizes import even_bucket_elements

__all__ = [
    "DISTRIBUTIONS",
    "PARTS",
    "PEERS",
    "DistributionOption",
    "PlotOption",
    "SparseFigure",
    "bench_sparse",
    "format_count",
    "make_parameters",
    "measure_sparse",
    "parse_count",
    "summarise",
]

#: What else can be measured in the same run.
PEERS = ("gloo", "fp16", "powersgd-hook")
DISTRIBUTIONS = ("normal", "student", "embedding")
#: Where a step's time goes, in the order of a worker's samples.
PARTS = ("selection", "coding", "waiting", "writing")
#: A count within this share of k is on target.
_NEAR = 0.05
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}

DistributionOption = Annotated[
    str,
    typer.Option(
        help="Of the gradient's elements: normal, student (heavy tails, 3 degrees of freedom), or embedding (rows of "
        "64, present in a step the more seldom the further back they are)."
    ),
]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Draw the figures into this file, as out.png or .svg.")]


@dataclass(frozen=True, slots=True)
class SparseFigure:
    """One method or peer.

    Attributes:
        contestant: Its name.
        seconds: From the gradient to the result in its place, on the slowest rank: mean of a round, median over rounds.
        gains: The peer's time divided by this one's, round by round, by peer: above 1, this one is faster.
        parts_s: Means over ranks and steps of what ``PARTS`` names; empty for peers.
        sent_bytes: By the average rank in a step, the engine's headers included; ``None`` where unknown.
        received_bytes: Likewise.
        payload_sent_bytes: Without headers, as the method counts it.
        payload_received_bytes: Likewise.
        imbalance_sent: Largest over mean of what ranks sent in a step, mean over steps.
        imbalance_received: Likewise.
        bytes_per_selected: Bytes sent, headers included, for each element that the average rank has selected.
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
    parts_s: dict[str, float]
    sent_bytes: float | None
    received_bytes: float | None
    payload_sent_bytes: float | None
    payload_received_bytes: float | None
    imbalance_sent: float | None
    imbalance_received: float | None
    bytes_per_selected: float | None
    selected_over_k: float | None
    selected_near: float | None
    applied_over_k: float | None
    applied_near: float | None
    rescans: float | None
    error: float
    xi: float | None


def bench_sparse(
    *,
    elements: Annotated[str, typer.Option(help="Elements of the gradient, float32, as 14.7M.")] = "14.7M",
    density: Annotated[float, typer.Option(help="Share of the elements that is sent, from 0 to 1.")] = 0.01,
    methods: Annotated[
        str, typer.Option(help="Separated by commas.")
    ] = "oktopk,topka,gtopk,topkdsa,gaussiank,shared,powersgd,dense",
    distribution: DistributionOption = "normal",
    bucket_elements: Annotated[
        str | None,
        typer.Option(
            help="Elements that are selected and sent together, at most. [dim]default: as DistributedOptimizer's, a "
            "quarter of all; of fewer than twelve millions a third, a half, or all[/dim]"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps in a row, after an untimed one.")] = 3,
    warm_up: Annotated[int, typer.Option("--warm-up", help="Untimed steps at first, from 3.")] = 4,
    transport: TransportOption = "auto",
    ranks: RanksOption = None,
    emulate_hosts: HostsOption = 0,
    ranks_per_host: RanksPerHostOption = None,
    emulate_rate: RateOption = "1gbit",
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            help="Measure this too, in turns in the same run: gloo (dense allreduce of torch.distributed), fp16 and "
            "powersgd-hook (torch's own hooks of DDP over gloo). Repeatable, or separated by commas.",
        ),
    ] = None,
    rounds: RoundsOption = 7,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Time selection and allreduce of one flat gradient by the sparse methods, in turns with dense peers.

    Every step has a fresh gradient; a method's residual goes on from step to step as in training. A step ends when the
    result lies where a gradient would.

    In an untimed step every method's result is checked: the same bits on all ranks, and all that went in came out or
    is in the residuals.
    """
    setting = make_setting(
        ranks, emulate_hosts, emulate_rate, None, rounds, ranks_per_host=ranks_per_host, transport=transport
    )
    parameters = make_parameters(
        elements=elements,
        density=density,
        methods=methods,
        distribution=distribution,
        bucket_elements=bucket_elements,
        steps=steps,
        warm_up=warm_up,
        against=[name for text in against or () for name in text.split(",")],
    )
    require_matplotlib(plot)
    figures, results = measure_sparse(setting, parameters)
    what = f"{format_count(parameters['elements'])} float32 ({distribution}), density {density:g}, {setting.describe()}"
    _print(setting, parameters, what, figures)
    write_json(json, "sparse", setting, [{"parameters": parameters, **asdict(figure)} for figure in figures], results)
    draw_bars(plot, f"selection and allreduce of {what}", "ms for one step", [_bar(figure) for figure in figures])


def make_parameters(
    *,
    elements: str,
    density: float,
    methods: str,
    distribution: str,
    bucket_elements: str | None,
    steps: int,
    warm_up: int,
    against: list[str],
) -> dict[str, Any]:
    """What the workers need to know, ready for JSON.

    Raises:
        ConfigurationError: Something makes no sense.
    """
    names = _names(methods)
    for name in names:
        make_method(name, density)
    peers = list(dict.fromkeys(name.strip() for name in against))
    if set(peers) - set(PEERS):
        raise ConfigurationError(f"--against knows {', '.join(PEERS)} here, not {', '.join(set(peers) - set(PEERS))}")
    if distribution not in DISTRIBUTIONS:
        raise ConfigurationError(f"--distribution is {', '.join(DISTRIBUTIONS)}, not {distribution!r}")
    if steps < 1 or warm_up < 3:
        raise ConfigurationError(
            f"--steps is at least 1 and --warm-up at least 3 (torch's PowerSGD hook begins then), not {steps} and "
            f"{warm_up}"
        )
    count = parse_count(elements)
    return {
        "elements": count,
        "density": density,
        "methods": names,
        "against": peers,
        "distribution": distribution,
        "bucket_elements": even_bucket_elements(count) if bucket_elements is None else parse_count(bucket_elements),
        "steps": steps,
        "warm_up": warm_up,
    }


def measure_sparse(setting: Setting, parameters: dict[str, Any]) -> tuple[list[SparseFigure], list[dict[str, Any]]]:
    """Run the workers; returns the figures and each rank's raw result.

    Raises:
        BenchmarkFailedError: A rank failed or a result was wrong.
        ConfigurationError: There are too few ranks.
    """
    if setting.ranks < 2:
        raise ConfigurationError(f"sparse methods are compared on at least 2 ranks, not {setting.ranks}")
    results = run_benchmark("sparse", parameters, setting)
    return summarise(results), results


def summarise(results: list[dict[str, Any]]) -> list[SparseFigure]:
    """From every rank's samples to figures. Pure."""
    names = list(results[0]["contestants"])
    columns = {name: [result["contestants"][name] for result in results] for name in names}
    seconds = {name: _round_times([rank["seconds"] for rank in ranks]) for name, ranks in columns.items()}
    peers = [name for name in PEERS if name in names]
    return [
        _figure(name, ranks, seconds[name], {peer: seconds[peer] for peer in peers if peer != name})
        for name, ranks in columns.items()
    ]


def parse_count(text: str) -> int:
    """Elements of ``14.7M``, ``100k`` or ``512``.

    Raises:
        ConfigurationError: Not a count, or not at least one and below 2^31 of them.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgG]?)\s*", text)
    if match is None:
        raise ConfigurationError(f"{text!r} is not a number of elements; write for example 14.7M, 100k or 512")
    count = round(float(match[1]) * _COUNT_UNITS[match[2].lower()])
    if not 1 <= count < 2**31:
        raise ConfigurationError(f"there are from 1 to 2^31 - 1 elements, not {text!r}")
    return count


def format_count(count: float) -> str:
    """``14700000`` as ``14.7 M``; at most three significant digits."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.3g}"


def _names(methods: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    if not names:
        raise ConfigurationError("--methods names none")
    return names


def _round_times(ranks: list[list[list[float]]]) -> list[float]:
    """The mean step of each round, each step as long as on the slowest rank."""
    return [fmean(max(step) for step in zip(*steps, strict=True)) for steps in zip(*ranks, strict=True)]


def _figure(
    name: str, ranks: list[dict[str, Any]], seconds: list[float], peers: dict[str, list[float]]
) -> SparseFigure:
    sparse = "bytes" in ranks[0]
    traffic = [_means(rank["bytes"]) for rank in ranks] if sparse else []
    sent, received, payload_sent, payload_received = _means(traffic) if sparse else [None] * 4
    selected, applied = _shares_of_k([rank["counts"] for rank in ranks]) if sparse else ([], [])
    chosen = _selected([rank["counts"] for rank in ranks]) if sparse else []
    return SparseFigure(
        contestant=name,
        seconds=estimate(seconds),
        gains={peer: ratio_estimate(theirs, seconds) for peer, theirs in peers.items()},
        parts_s=dict(zip(PARTS, _means([_means(rank["parts"]) for rank in ranks]), strict=True)) if sparse else {},
        sent_bytes=sent,
        received_bytes=received,
        payload_sent_bytes=payload_sent,
        payload_received_bytes=payload_received,
        imbalance_sent=_imbalance([rank["bytes"] for rank in ranks], 0) if sparse else None,
        imbalance_received=_imbalance([rank["bytes"] for rank in ranks], 1) if sparse else None,
        bytes_per_selected=sent / fmean(chosen) if sent is not None and any(chosen) else None,
        selected_over_k=fmean(selected) if selected else None,
        selected_near=_near(selected),
        applied_over_k=fmean(applied) if applied else None,
        applied_near=_near(applied),
        rescans=fmean(rank["rescans"] for rank in ranks) if selected else None,
        error=ranks[0]["error"],
        xi=ranks[0]["xi"],
    )


def _means(rows: list[list[float]]) -> list[float]:
    return [fmean(column) for column in zip(*rows, strict=True)]


def _imbalance(ranks: list[list[list[float]]], column: int) -> float:
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


def _print(setting: Setting, parameters: dict[str, Any], what: str, figures: list[SparseFigure]) -> None:
    peers = [peer for peer in PEERS if peer in parameters["against"]]
    rows = [
        (
            figure.contestant,
            duration(figure.seconds),
            *(f"{1000 * figure.parts_s[part]:.1f}" if figure.parts_s else "" for part in PARTS),
            *(times(figure.gains.get(peer)) for peer in peers),
        )
        for figure in figures
    ]
    print_table(
        f"selection and allreduce of {what}",
        ("by", "step (95 %)", *(f"{part} ms" for part in PARTS), *(f"faster than {peer}" for peer in peers)),
        rows,
        f"Slowest rank; mean of {parameters['steps']} steps, median of {setting.rounds} rounds. Parts: means over "
        "ranks. coding: computing within the exchange; waiting: nothing to compute, in any bucket.",
    )
    print_table(
        "what travelled, and what it was worth",
        (
            "by",
            "sent",
            "max / mean",
            "received",
            "max / mean",
            "payload sent",
            "per selected",
            "selected / k",
            "near k",
            "applied / k",
            "near k",
            "rescans",
            "error",
            "xi",
        ),
        [_row(figure) for figure in figures],
        "Per rank and step, with headers; max / mean: over ranks; near k: within 5 %, of all buckets and steps. "
        "error: of the update, relative to the dense mean of gradients and residuals.",
    )


def _row(figure: SparseFigure) -> tuple[str, ...]:
    def number(value: float | None, form: str = ".3f") -> str:
        return "" if value is None else f"{value:{form}}"

    def size(value: float | None) -> str:
        return "" if value is None else format_bytes(value)

    return (
        figure.contestant,
        size(figure.sent_bytes),
        number(figure.imbalance_sent),
        size(figure.received_bytes),
        number(figure.imbalance_received),
        size(figure.payload_sent_bytes),
        "" if figure.bytes_per_selected is None else f"{figure.bytes_per_selected:.2f} B",
        number(figure.selected_over_k),
        share(figure.selected_near),
        number(figure.applied_over_k),
        share(figure.applied_near),
        number(figure.rescans, ".1f"),
        f"{figure.error:.2g}",
        number(figure.xi),
    )
