"""``totalreduce timeline``: the ranks' timelines as one file for Perfetto, and what they say together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from totalreduce.cli.pictures import require_matplotlib
from totalreduce.cli.report import print_table, share, write_document
from totalreduce.cli.timeline_picture import draw_step, step_of
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.observe.analysis import TimelineReport, TimeSplit, analyse
from totalreduce.observe.merge import merged_trace, write_merged

__all__ = ["timeline"]

_OUT = "timeline.json"
_NAME_WIDTH = 36
_RANKS_LISTED_MAX = 8


def timeline(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Every rank's file, or the folder of rankN.json.", show_default=False),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The merged timeline.", show_default=f"{_OUT} beside the first FILE"),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of a table, at most.")] = 10,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw one step into this file, as step.svg or .png.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--iteration", min=0, help="The step that --plot draws.", show_default="the last"),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report, every operation included.")
    ] = None,
) -> None:
    """Merge the ranks' timelines into one for Perfetto, and say who is late and where the time goes.

    The files are those that tr.init(timeline=...) or TOTALREDUCE_TIMELINE had written.

    [bold]Examples[/bold]

    totalreduce timeline totalreduce-timeline
    totalreduce timeline run.rank*.json --out run.json --top 20
    totalreduce timeline totalreduce-timeline --json report.json
    totalreduce timeline totalreduce-timeline --plot step.svg
    """
    if plot is not None:
        require_matplotlib(plot)
    paths = _rank_files(files)
    target = out or paths[0].parent / _OUT
    trace = merged_trace(paths)
    if target.resolve() in {path.resolve() for path in paths}:
        raise ConfigurationError(f"--out {target} is one of the ranks' files; name another")
    try:
        write_merged(trace, target)
    except OSError as error:
        raise ConfigurationError(f"cannot write --out {target}: {error.strerror}") from error
    report = analyse(trace)
    if plot is not None:
        draw_step(plot, step_of(trace, step))
    write_document(json_file, report.as_dict())
    _print(report, top)
    print(f"timeline: {target}\nOpen it at https://ui.perfetto.dev (Open trace file).")


def _rank_files(given: Sequence[Path]) -> list[Path]:
    """The files, and of each folder those of its ranks. Raises ``ConfigurationError``."""
    found: dict[Path, Path] = {}
    for path in given:
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if re.fullmatch(r"rank\d+\.json", file.name))
            if not files:
                raise ConfigurationError(
                    f"no timelines in {path}: tr.init(timeline=FOLDER) writes a rankN.json per rank when the group is "
                    "closed; name files that are called otherwise one by one"
                )
        for file in files:
            if file.resolve() in found:
                raise ConfigurationError(f"{file} is given twice")
            found[file.resolve()] = file
    return list(found.values())


def _print(report: TimelineReport, top: int) -> None:
    if len(report.ranks) > 1:
        print_table(
            f"Late ranks: the last to submit one of {len(report.operations)} operations",
            ("rank", "last", "median ms", "worst ms", "worst operation"),
            [
                (
                    str(late.rank),
                    str(late.times_last),
                    _ms(late.median_s),
                    _ms(late.worst_s),
                    _name(late.worst_operation),
                )
                for late in report.late[:top]
            ],
            _left_out(len(report.late), top) or "How late: after the first to submit.",
        )
    rows = [(str(rank.rank), *_columns(rank.split), share(rank.hidden_share)) for rank in report.ranks[:top]]
    total = report.total
    shares = [share(part / total.total_s if total.total_s else None) for part in _parts(total)]
    print_table(
        "Where the time of the operations goes (ms)",
        ("rank", "waiting", "coordination", "queue", "copy", "wire", "hidden"),
        [*rows, ("all", *_columns(total), ""), ("share", *shares, "")],
        _left_out(len(report.ranks), top),
    )
    print_table(
        "Slowest tensors, once all ranks are there",
        ("tensor", "median ms", "operations", "size"),
        [
            (_name(tensor.name), _ms(tensor.median_s), str(tensor.count), decimal(tensor.num_bytes))
            for tensor in report.tensors[:top]
        ],
        _left_out(len(report.tensors), top),
    )
    console = Console()
    for note in _notes(report):
        console.print(f"[yellow]note:[/yellow] {note}", highlight=False, soft_wrap=True)


def _notes(report: TimelineReport) -> list[str]:
    """What limits the figures."""
    notes = []
    if len(report.clocks) > 1:
        notes.append(
            f"the ranks have {len(report.clocks)} clocks (hosts), laid side by side by wall time: who is late, waiting "
            "and coordination are only as good as that, usually to some milliseconds"
        )
    dropped = [rank.rank for rank in report.ranks if rank.dropped_events]
    if dropped:
        events = sum(rank.dropped_events for rank in report.ranks)
        notes.append(f"rank {_listed(dropped)} left out {events} later events (max_events of its timeline)")
    if report.missing_ranks:
        notes.append(f"no timeline of rank {_listed(report.missing_ranks)}")
    for count, why in (
        (report.incomplete_operations, "not every rank has them"),
        (report.failed_operations, "they failed or were not finished"),
        (report.ambiguous_operations, "a rank has several of the same name, of different subgroups"),
    ):
        if count:
            notes.append(f"operations not compared: {count}; {why}")
    return notes


def _columns(split: TimeSplit) -> list[str]:
    return [_ms(seconds) for seconds in _parts(split)]


def _parts(split: TimeSplit) -> tuple[float, ...]:
    return split.waiting_s, split.coordination_s, split.queue_s, split.copy_s, split.wire_s


def _left_out(count: int, top: int) -> str:
    return f"{count - top} more: --top, --json." if count > top else ""


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_RANKS_LISTED_MAX])) + (" ..." if len(ranks) > _RANKS_LISTED_MAX else "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _name(name: str) -> str:
    """The end of a long name tells more than its beginning."""
    return escape(name if len(name) <= _NAME_WIDTH else f"...{name[3 - _NAME_WIDTH :]}")
