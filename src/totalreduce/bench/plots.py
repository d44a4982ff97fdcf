"""Figures as pictures; needs matplotlib, which is optional (``pip install totalreduce[plot]``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from totalreduce.cli.pictures import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
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
class Line:
    """One line; ``dashed`` for values that were computed, not measured."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One of several pictures beside and below each other; ``axes_names`` are of x and y."""

    title: str
    axes_names: tuple[str, str]
    lines: Sequence[Line]


def draw_bars(path: Path, title: str, unit: str, bars: Sequence[Bar]) -> None:
    """Draw stacked bars beside each other."""
    figure, axes = _axes(title, max(6.0, 1.1 * len(bars)))
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


def draw_lines(path: Path, title: str, axes_names: tuple[str, str], lines: Sequence[Line]) -> None:
    """Draw lines over logarithmic axes; lines whose names begin alike have one colour."""
    figure, axes = _axes(title, 8.0)
    colours: dict[str, str] = {}
    for line in lines:
        colour = colours.setdefault(line.name.split(",", maxsplit=1)[0], f"C{len(colours)}")
        look: dict[str, Any] = (
            {"linestyle": "--", "marker": "o", "fillstyle": "none"} if line.dashed else {"marker": "s"}
        )
        axes.plot(line.x, line.y, color=colour, label=line.name, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    _finish(axes, axes_names)
    axes.legend()
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
        _finish(axes, panel.axes_names)
    figure.legend([handles[name] for name in names], names, loc="outside lower center")
    save_figure(figure, path)


def _axes(title: str, width: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 5.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize="medium", wrap=True)
    return figure, axes


def _finish(axes: Axes, names: tuple[str, str]) -> None:
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    axes.grid(visible=True, which="major", alpha=0.3)
