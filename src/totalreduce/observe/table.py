"""The view of a job for a terminal, as tables of Rich."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from totalreduce.observe.view import JobView, RankRow

__all__ = ["job_tables"]

_STYLES = {
    "running": "green",
    "starting": "yellow",
    "no group": "yellow",
    "silent": "bold red",
    "lost": "bold red",
    "ended": "dim",
}
#: The width of the bar of a step's time, in characters, and links and events that are shown.
_BAR, _LINKS, _EVENTS = 12, 6, 8


def job_tables(view: JobView) -> Group:
    """Return everything that is shown of a job."""
    parts: list[RenderableType] = [_summary(view)]
    parts += [Text(f"seat {late.seat} {late.why}", style="yellow") for late in view.late[:_EVENTS]]
    parts.append(_ranks(view))
    if view.links:
        parts.append(_links(view))
    for name, figures in view.training.items():
        shown = ", ".join(f"{key.replace('_', ' ')} {_number(value)}" for key, value in figures.items())
        parts.append(Text(f"{name}: {shown}"))
    faults = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in view.faults.items() if count)
    parts.append(Text(f"faults: {faults or 'none'}", style="red" if faults else "dim"))
    for event in view.events[-_EVENTS:]:
        at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        parts.append(Text(f"{at} {event['text']}"))
    return Group(*parts)


def _summary(view: JobView) -> Text:
    running = sum(row.state == "running" for row in view.ranks)
    facts = [
        f"{running} of {view.world_size} ranks",
        f"membership {view.epoch}",
        f"step {view.step:,}",
        f"{_seconds(view.step_s)} a step: {_seconds(view.compute_s)} computing, {_seconds(view.exposed_s)} exposed",
        f"{_hidden(view)} hidden",
        f"{_size(view.sent_per_s)}/s",
    ]
    return Text.assemble((view.job or "job", "bold"), "  ", (view.command, "dim"), "\n", "  ".join(facts))


def _hidden(figures: JobView | RankRow) -> str:
    """Return the share of the communication that is hidden, once a step has been timed."""
    return f"{figures.hidden_share:.0%}" if figures.step_s else "-"


def _ranks(view: JobView) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("seat", "rank", "host", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("busy/exposed", no_wrap=True)
    for name in ("hidden", "sent/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note")
    longest = max((row.step_s for row in view.ranks), default=0.0)
    for row in view.ranks:
        table.add_row(
            str(row.seat),
            "-" if row.rank is None else str(row.rank),
            row.host,
            Text(row.state, style=_STYLES.get(row.state, "")),
            f"{row.step:,}",
            _seconds(row.step_s),
            _bar(row, longest),
            _hidden(row),
            _size(row.sent_per_s),
            Text("late", style="yellow") if row.is_late else row.note,
        )
    return table


def _bar(row: RankRow, longest: float) -> Text:
    parts = [round(_BAR * seconds / longest) if longest else 0 for seconds in (row.compute_s, row.exposed_s)]
    return Text.assemble(("█" * parts[0], "blue"), ("▒" * parts[1], "yellow"))


def _links(view: JobView) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("link")
    table.add_column("rate", justify="right")
    table.add_column("total", justify="right")
    for link in view.links[:_LINKS]:
        table.add_row(f"{link.sender} → {link.receiver}", f"{_size(link.per_s)}/s", _size(link.total))
    return table


def _seconds(seconds: float) -> str:
    if seconds == 0:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _size(num_bytes: float) -> str:
    return decimal(round(num_bytes)).replace(" bytes", " B")


def _number(value: float | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
