"""``totalreduce bench report``: a short set of benchmarks as the table of docs/results/benchmarks.md, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from totalreduce.bench.allreduce import measure_allreduce
from totalreduce.bench.arithmetic import format_count, parse_count
from totalreduce.bench.collectives import CollectiveFigure
from totalreduce.bench.command import benchmark
from totalreduce.bench.launching import SHARED, Results, Setting
from totalreduce.bench.machine import Machine
from totalreduce.bench.report import print_progress
from totalreduce.bench.urgent import UrgentFigure, UrgentParameters, measure_urgent
from totalreduce.cli.report import format_bytes, write_document
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.emulate import EmulatedNetwork
from totalreduce.planning.traces import find_traces, load_trace
from totalreduce_benchmarks.replay import ReplayFigure, ReplayJob, ReplayParameters, measure_replay
from totalreduce_benchmarks.sparse import SparseFigure, SparseParameters, measure_sparse
from totalreduce_benchmarks.step import StepFigure, StepParameters, measure_step

_MIB = 1 << 20
#: As many as ResNet-50 has parameters.
_SPARSE_ELEMENTS = "25.6M"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: the case, its figure, and the comparison."""

    what: str
    figure: str
    against: str


@dataclass(frozen=True, slots=True)
class _Part:
    """A benchmark of the report: its name, its setting, how it is measured, and how its figures become rows."""

    what: str
    setting: Setting
    measure: Callable[[Setting], tuple[list[Any], Results[Any]]]
    rows: Callable[[Setting, list[Any]], list[Row]]


@benchmark(
    "report",
    "totalreduce bench report > figures.md",
    "totalreduce bench report --traces-dir traces --json figures.json",
    json=False,
)
def bench_report(
    *,
    emulate: Annotated[
        bool | None,
        typer.Option("--emulate/--no-emulate", help="With emulated hosts (root, Linux). Default: where possible."),
    ] = None,
    traces_dir: Annotated[list[Path] | None, typer.Option(help="Replay these traces instead of those shipped.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write every figure and all samples.")] = None,
) -> None:
    """Run a fixed set of benchmarks against gloo and print the table of docs/results/benchmarks.md.

    Takes a few minutes. Progress goes to stderr, Markdown to stdout.
    """
    rows: list[Row] = []
    raw: list[dict[str, Any]] = []
    parts = [*_one_host(), *(_emulated(traces_dir or []) if _can_emulate(emulate) else [])]
    machine: Machine | None = None
    for part in parts:
        print_progress(f"{part.what}, {part.setting.describe()}")
        figures, results = part.measure(part.setting)
        rows += part.rows(part.setting, figures)
        raw += results.raw()
        machine = machine or results.machine
    assert machine is not None
    print(to_markdown(rows, machine))
    write_document(json, {"rows": [[row.what, row.figure, row.against] for row in rows], "raw": raw})


def to_markdown(rows: list[Row], machine: Machine) -> str:
    """Return the table with the machine under it. Pure."""
    lines = ["| what | figure | against |", "|---|---|---|"]
    lines += [f"| {row.what} | {row.figure} | {row.against} |" for row in rows]
    lines += [
        "",
        (
            f"Measured by `totalreduce bench report` on {machine.processor}, {machine.cores} "
            f"cores; totalreduce {machine.totalreduce}, torch {machine.torch}, "
            f"Python {machine.python}. Medians with 95 % intervals; all results checked on every rank."
        ),
    ]
    return "\n".join(lines)


def _can_emulate(wanted: bool | None) -> bool:
    """Emulated hosts where asked for; otherwise where this machine can, saying so where it cannot."""
    if wanted is False:
        return False
    try:
        EmulatedNetwork(1)  # made, not entered: it only checks the requirements
    except ConfigurationError as error:
        if wanted:
            raise
        print_progress(f"without emulated hosts: {error}")
        return False
    return True


def _one_host() -> Iterator[_Part]:
    for ranks in (2, 4):
        yield _allreduce(Setting(ranks=ranks, against=("gloo",), rounds=11), 1, 16, 64)
    parameters = StepParameters(bucket=4)
    setting = Setting(ranks=4, against=("gloo",), rounds=4)
    yield _Part("training step", setting, lambda setting: measure_step(setting, parameters), _step_rows)


def _emulated(directories: list[Path]) -> Iterator[_Part]:
    yield _allreduce(Setting(ranks=8, hosts=8, against=("gloo",), rounds=7), 4, 64)
    sparse = SparseParameters(
        elements=_SPARSE_ELEMENTS,
        methods="oktopk,topka",
        bucket_elements=_SPARSE_ELEMENTS,
        against=["gloo"],
    )
    for hosts in (2, 4):
        setting = Setting(ranks=hosts, hosts=hosts, against=("gloo",), rounds=7)
        yield _Part("sparse", setting, lambda setting: measure_sparse(setting, sparse), _sparse_rows)
    urgent = UrgentParameters()
    setting = Setting(ranks=4, hosts=4, against=(), rounds=3)
    yield _Part("urgent", setting, lambda setting: measure_urgent(setting, urgent), _urgent_rows)
    traces = [load_trace(path) for path in find_traces((), directories)]
    replay = ReplayJob(traces, ReplayParameters(bucket=4))
    setting = Setting(ranks=4, hosts=4, against=("gloo", "fifo"), rounds=2)
    yield _Part("replay", setting, lambda setting: measure_replay(setting, replay), _replay_rows)


def _allreduce(setting: Setting, *sizes_mib: int) -> _Part:
    sizes = [size * _MIB for size in sizes_mib]
    return _Part("allreduce", setting, lambda setting: measure_allreduce(setting, sizes, "float32"), _allreduce_rows)


def _allreduce_rows(setting: Setting, figures: list[CollectiveFigure]) -> list[Row]:
    """Total Reduce's time, with tensors in shared memory too where there is any; gloo's beside it."""
    rows = []
    for figure in (figure for figure in figures if figure.peer != "gloo"):
        gloo = next(other for other in figures if other.size == figure.size and other.peer == "gloo")
        shared = figure.peer == SHARED
        gain = gloo.gain_shared if shared else gloo.gain
        assert gain is not None
        wire = "" if figure.share_of_rate is None else f", {figure.share_of_rate * 100:.1f} % of the nominal rate"
        rows.append(
            Row(
                f"allreduce of {format_bytes(figure.size)}, {setting.describe()}{', Group.empty' if shared else ''}",
                f"{_time(figure.seconds.median)}{wire}",
                f"{gain.median:.2f}x gloo's speed [{gain.low:.2f}, {gain.high:.2f}]",
            )
        )
    return rows


def _sparse_rows(setting: Setting, figures: list[SparseFigure]) -> list[Row]:
    return [
        Row(
            f"{figure.contestant} of {format_count(parse_count(_SPARSE_ELEMENTS))} elements, {setting.describe()}",
            f"{_time(figure.seconds.median)}, {format_bytes(figure.sent_bytes)} sent per rank",
            f"{gain.median:.1f}x dense gloo's speed [{gain.low:.1f}, {gain.high:.1f}]",
        )
        for figure in figures
        if figure.sent_bytes is not None and (gain := figure.gains["gloo"])
    ]


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _urgent_rows(setting: Setting, figures: list[UrgentFigure]) -> list[Row]:
    return [
        Row(
            f"urgent 4 KiB while 256 MiB is in flight, {setting.describe()}",
            f"p50 {figure.p50_s * 1000:.1f} ms, p99 {figure.p99_s * 1000:.1f} ms",
            f"the 256 MiB keep {(figure.bulk_share_of_rate or 0) * 100:.1f} % of the nominal rate",
        )
        for figure in figures
    ]


def _replay_rows(setting: Setting, figures: list[ReplayFigure]) -> list[Row]:
    rows = []
    for figure in (figure for figure in figures if figure.peer == "totalreduce"):
        gains = {
            other.peer: other.gain.median for other in figures if other.model == figure.model and other.gain is not None
        }
        rows.append(
            Row(
                f"replayed step of {figure.model} where communication equals compute, {setting.describe()}",
                f"{figure.step_s.median:.3f} s, {figure.over_ideal:.3f}x the ideal",
                f"{gains['gloo']:.2f}x DDP's order over gloo, {gains['fifo']:.2f}x FIFO "
                f"(at most {figure.ceiling:.2f}x possible)",
            )
        )
    return rows


def _step_rows(setting: Setting, figures: list[StepFigure]) -> list[Row]:
    ours = next(figure for figure in figures if figure.contestant == "totalreduce")
    ddp = next(figure for figure in figures if figure.contestant == "gloo")
    assert ddp.ratio is not None
    return [
        Row(
            f"training step of an MLP with 14.6 M parameters, {setting.describe()}",
            f"{ours.seconds.median * 1000:.0f} ms",
            f"{ddp.ratio.median:.2f} of DDP's time over gloo [{ddp.ratio.low:.2f}, {ddp.ratio.high:.2f}]",
        )
    ]
