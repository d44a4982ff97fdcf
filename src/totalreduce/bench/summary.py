"""``totalreduce bench report``: a fixed, short set of benchmarks as the README's table, in Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from totalreduce.bench.allreduce import AllreduceFigure, measure_allreduce
from totalreduce.bench.launching import SHARED, Setting
from totalreduce.bench.replay import ReplayFigure, measure_replay
from totalreduce.bench.report import print_progress
from totalreduce.bench.sparse import SparseFigure, format_count, make_parameters, measure_sparse
from totalreduce.bench.step import StepFigure, measure_step
from totalreduce.bench.traces import as_document, find_traces, load_trace
from totalreduce.bench.urgent import UrgentFigure, measure_urgent
from totalreduce.cli.report import format_bytes, write_document
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.emulate import EmulatedNetwork

__all__ = ["Row", "bench_report", "to_markdown"]

_MIB = 1 << 20
#: As many as ResNet-50 has parameters.
_SPARSE_ELEMENTS = 25_600_000


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: what was measured, the figure, and what it is compared with."""

    what: str
    figure: str
    against: str


def bench_report(
    *,
    emulate: Annotated[
        bool | None,
        typer.Option("--emulate/--no-emulate", help="With emulated hosts (root, Linux). Default: where possible."),
    ] = None,
    traces_dir: Annotated[list[Path] | None, typer.Option(help="Replay these traces instead of those shipped.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write every figure and all samples.")] = None,
) -> None:
    """Run a fixed set of benchmarks against gloo and print the table that the README shows.

    Takes a few minutes. Progress goes to stderr, Markdown to stdout.
    """
    rows: list[Row] = []
    raw: list[dict[str, Any]] = []
    _one_host(rows, raw)
    if _can_emulate(emulate):
        _emulated(rows, raw, traces_dir or [])
    print(to_markdown(rows, raw[0]["environment"]))
    write_document(json, {"rows": [[row.what, row.figure, row.against] for row in rows], "raw": raw})


def to_markdown(rows: list[Row], environment: dict[str, Any]) -> str:
    """The table, and what it was measured on. Pure."""
    lines = ["| what | figure | against |", "|---|---|---|"]
    lines += [f"| {row.what} | {row.figure} | {row.against} |" for row in rows]
    lines += [
        "",
        (
            f"Measured by `totalreduce bench report` on {environment['processor']}, {environment['cores']} "
            f"cores; totalreduce {environment['totalreduce']}, torch {environment['torch']}, "
            f"Python {environment['python']}. Medians with 95 % intervals; all results checked on every rank."
        ),
    ]
    return "\n".join(lines)


def _can_emulate(wanted: bool | None) -> bool:
    """Emulated hosts where asked for; otherwise where this machine can, saying so where it cannot.

    Raises:
        ConfigurationError: Asked for, but not possible.
    """
    if wanted is False:
        return False
    try:
        EmulatedNetwork(1)  # made, not entered: it only checks what is needed
    except ConfigurationError as error:
        if wanted:
            raise
        print_progress(f"without emulated hosts: {error}")
        return False
    return True


def _one_host(rows: list[Row], raw: list[dict[str, Any]]) -> None:
    for ranks in (2, 4):
        setting = Setting(ranks=ranks, hosts=0, rate="1gbit", against=("gloo",), rounds=11)
        print_progress(f"allreduce, {setting.describe()}")
        figures, results = measure_allreduce(setting, [_MIB, 16 * _MIB, 64 * _MIB], "float32")
        rows += _allreduce_rows(setting, figures)
        raw += results
    setting = Setting(ranks=4, hosts=0, rate="1gbit", against=("gloo",), rounds=4)
    print_progress(f"training step, {setting.describe()}")
    parameters = {
        "model": "mlp",
        "overlap": "backward",
        "steps": 10,
        "bucket_bytes": 4 * _MIB,
        "no_communication": False,
        "timeline": False,
    }
    figures_of_step, results = measure_step(setting, parameters)
    rows += _step_rows(setting, figures_of_step)
    raw += results


def _emulated(rows: list[Row], raw: list[dict[str, Any]], directories: list[Path]) -> None:
    setting = Setting(ranks=8, hosts=8, rate="1gbit", against=("gloo",), rounds=7)
    print_progress(f"allreduce, {setting.describe()}")
    figures, results = measure_allreduce(setting, [4 * _MIB, 64 * _MIB], "float32")
    rows += _allreduce_rows(setting, figures)
    raw += results

    parameters = make_parameters(
        elements=str(_SPARSE_ELEMENTS),
        density=0.01,
        methods="oktopk,topka",
        distribution="normal",
        bucket_elements=str(_SPARSE_ELEMENTS),
        steps=3,
        warm_up=4,
        against=["gloo"],
    )
    for hosts in (2, 4):
        setting = Setting(ranks=hosts, hosts=hosts, rate="1gbit", against=("gloo",), rounds=7)
        print_progress(f"sparse, {setting.describe()}")
        sparse, results = measure_sparse(setting, parameters)
        rows += _sparse_rows(setting, sparse)
        raw += results

    setting = Setting(ranks=4, hosts=4, rate="1gbit", against=(), rounds=3)
    print_progress(f"urgent, {setting.describe()}")
    urgent, results = measure_urgent(setting, 256 * _MIB, 4096, 0.02)
    rows += _urgent_rows(setting, urgent)
    raw += results

    setting = Setting(ranks=4, hosts=4, rate="1gbit", against=("gloo", "fifo"), rounds=2)
    print_progress(f"replay, {setting.describe()}")
    parameters = {
        "traces": [as_document(load_trace(path)) for path in find_traces((), directories)],
        "balance": "time",
        "ratio": 1.0,
        "steps": 5,
        "bucket_bytes": 4 * _MIB,
    }
    replay, results = measure_replay(setting, parameters)
    rows += _replay_rows(setting, replay)
    raw += results


def _allreduce_rows(setting: Setting, figures: list[AllreduceFigure]) -> list[Row]:
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
            f"{figure.contestant} of {format_count(_SPARSE_ELEMENTS)} elements, {setting.describe()}",
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
