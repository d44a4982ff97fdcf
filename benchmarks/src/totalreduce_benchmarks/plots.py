"""Pictures that only these benchmarks draw: bars beside each other, and panels of lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from totalreduce.bench.plots import Line, axes_with_title, finish_axes
from totalreduce.cli.pictures import save_figure

if TYPE_CHECKING:
    from matplotlib.lines import Line2D


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar, and its interval."""

    name: str  #: Stands below.
    height: float
    low: float  #: Lower end of the interval.
    high: float  #: Upper end.
    #: Heights of its parts, from below; scaled to ``height``, which may be a median where parts are means.
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Panel:
    """One of several pictures beside and below each other; ``axes_names`` are of x and y."""

    title: str
    axes_names: tuple[str, str]
    lines: Sequence[Line]


def draw_bars(path: Path, title: str, unit: str, bars: Sequence[Bar]) -> None:
    """Draw stacked bars beside each other."""
    figure, axes = axes_with_title(title, max(6.0, 1.1 * len(bars)))
    names = list(dict.fromkeys(part for bar in bars for part in bar.parts))
    for bar in bars:
        base = 0.0
        scale = bar.height / (sum(bar.parts.values()) or 1.0)
        for number, part in enumerate(names):
            if part in bar.parts:
                height = bar.parts[part] * scale
                axes.bar(bar.name, height, bottom=base, color=f"C{number}")
                base += height
        if not bar.parts:
            axes.bar(bar.name, bar.height, color="0.6")
        axes.errorbar(
            bar.name, bar.height, yerr=[[bar.height - bar.low], [bar.high - bar.height]], color="black", capsize=3
        )
    for number, part in enumerate(names):
        axes.bar(bars[0].name, 0.0, color=f"C{number}", label=part)
    if names:
        axes.legend()
    axes.set_ylabel(unit)
    save_figure(figure, path)


def draw_panels(path: Path, title: str, columns: int, panels: Sequence[Panel]) -> None:
    """Draw lines over a logarithmic x, so many panels in a row; lines of one name have one colour and one legend."""
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    figure = Figure(figsize=(6.0 * columns, 3.2 * rows + 0.25 * len(names)), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    handles: dict[str, Line2D] = {}
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        for line in panel.lines:
            # Ten colours; those beyond have them again, dashed.
            place = names.index(line.name)
            (handles[line.name],) = axes.plot(
                line.x, line.y, label=line.name, color=f"C{place % 10}", linestyle="-" if place < 10 else "--"
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(panel.title, fontsize="medium")
        finish_axes(axes, panel.axes_names)
    figure.legend([handles[name] for name in names], names, loc="outside lower center")
    save_figure(figure, path)
