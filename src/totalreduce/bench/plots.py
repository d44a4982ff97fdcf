"""Figures as pictures; needs matplotlib, which is optional (``pip install totalreduce[plot]``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from totalreduce.cli.pictures import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Line:
    """One line; ``dashed`` for values that were computed, not measured."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def draw_lines(path: Path, title: str, axes_names: tuple[str, str], lines: Sequence[Line]) -> None:
    """Draw lines over logarithmic axes; lines whose names begin alike have one colour."""
    figure, axes = axes_with_title(title, 8.0)
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
    finish_axes(axes, axes_names)
    axes.legend()
    save_figure(figure, path)


def axes_with_title(title: str, width: float) -> tuple[Figure, Axes]:
    """Return a picture with one part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 5.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize="medium", wrap=True)
    return figure, axes


def finish_axes(axes: Axes, names: tuple[str, str]) -> None:
    """Write the names of x and y, and draw the grid."""
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    axes.grid(visible=True, which="major", alpha=0.3)
