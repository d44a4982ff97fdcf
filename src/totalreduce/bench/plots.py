"""Figures as pictures; needs matplotlib, which is optional (``pip install totalreduce[plot]``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from totalreduce.foundation.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Bar", "Line", "Panel", "draw_bars", "draw_lines", "draw_panels", "require_matplotlib"]

_FORMATS = (".png", ".svg", ".pdf")
_DPI = 150


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar, and its interval.

    Attributes:
        name: Stands below.
        height: Of all.
        low: Lower end of the interval.
        high: Upper end.
        parts: What it is made of, from below; they may be means where ``height`` is a median, so they are scaled to it.
    """

    name: str
    height: float
    low: float
    high: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """One line; ``dashed`` for what was computed, not measured."""

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


def require_matplotlib(path: Path | None) -> None:
    """Look before anything is measured whether a picture can be drawn; without a path none is wanted.

    Raises:
        ConfigurationError: It cannot.
    """
    if path is None:
        return
    if path.suffix not in _FORMATS:
        raise ConfigurationError(f"--plot writes {', '.join(_FORMATS)}, not {path.name!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib: pip install 'totalreduce[plot]', or leave --plot out")


def draw_bars(path: Path | None, title: str, unit: str, bars: Sequence[Bar]) -> None:
    """Stacked bars beside each other; nothing where no file was asked for.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    if path is None:
        return
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
    _save(figure, path)


def draw_lines(path: Path | None, title: str, axes_names: tuple[str, str], lines: Sequence[Line]) -> None:
    """Lines over logarithmic axes; a name that comes twice has one colour. Nothing where no file was asked for.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    if path is None:
        return
    figure, axes = _axes(title, 8.0)
    colours: dict[str, str] = {}
    for line in lines:
        colour = colours.setdefault(line.name.split(",", maxsplit=1)[0], f"C{len(colours)}")
        style = "--" if line.dashed else "-"
        marker = "o" if line.dashed else "s"
        axes.plot(
            line.x,
            line.y,
            style,
            marker=marker,
            fillstyle="none" if line.dashed else "full",
            color=colour,
            label=line.name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(axes_names[0])
    axes.set_ylabel(axes_names[1])
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    _save(figure, path)


def draw_panels(path: Path | None, title: str, columns: int, panels: Sequence[Panel]) -> None:
    """Lines over a logarithmic x, so many panels in a row. Nothing where no file was asked for.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    if path is None:
        return
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.0 * columns, 3.2 * rows), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        for line in panel.lines:
            axes.plot(line.x, line.y, label=line.name)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(panel.title, fontsize="medium")
        axes.set_xlabel(panel.axes_names[0])
        axes.set_ylabel(panel.axes_names[1])
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend()
    _save(figure, path)


def _axes(title: str, width: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 5.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize="medium", wrap=True)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise ConfigurationError(f"cannot write --plot {path}: {error.strerror}") from error
