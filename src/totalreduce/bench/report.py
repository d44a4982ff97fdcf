"""The report of a benchmark: how it is printed, and the document that ``--json`` writes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from totalreduce.bench.machine import Machine
from totalreduce.bench.records import to_document
from totalreduce.bench.sampling import Estimate
from totalreduce.cli.report import format_bytes, print_table, write_document

F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Table(Generic[F]):
    """Figures as lines of a table."""

    title: str  #: Stands above the table.
    #: Of each column the head, and a function that returns the text of a figure.
    columns: Sequence[tuple[str, Callable[[F], str]]]
    figures: Sequence[F]  #: One record for each line.
    caption: str = ""  #: Stands below the table.

    def print(self) -> None:
        """Print the table to standard output."""
        rows = [[text(figure) for _, text in self.columns] for figure in self.figures]
        print_table(self.title, [head for head, _ in self.columns], rows, self.caption)

    def to_markdown(self) -> str:
        """Return the table in Markdown, with its title above and its caption below."""
        rows = [[head for head, _ in self.columns], ["---"] * len(self.columns)]
        rows += [[text(figure) for _, text in self.columns] for figure in self.figures]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([f"**{self.title}**", "", *lines, *(["", self.caption] if self.caption else [])]) + "\n"


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a command of ``totalreduce bench``."""

    tables: Sequence[Table[Any]]  #: Are printed in this order.
    setting: Any  #: The sizes, ranks, hosts and rounds.
    machine: Machine  #: The machine and the versions.
    figures: Any  #: Records.
    raw: Any  #: All samples.
    #: Draws the figures into a file; ``None`` where the command has no picture.
    draw: Callable[[Path], None] | None = None

    def save(self, name: str, path: Path | None) -> None:
        """Write figures, samples, versions and machine as JSON; without a path nothing is written."""
        document: Mapping[str, Any] = {
            "benchmark": name,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "setting": self.setting,
            "environment": self.machine,
            "figures": self.figures,
            "raw": self.raw,
        }
        write_document(path, to_document(document))


def duration(figure: Estimate | None) -> str:
    """Return the median with its interval: ``12.3 ms [12.1, 12.9]``; nothing for ``None``."""
    if figure is None:
        return ""
    unit, name = (1.0, "s") if figure.median >= 1 else (1e-3, "ms") if figure.median >= 1e-3 else (1e-6, "µs")
    return f"{figure.median / unit:.4g} {name} \\[{figure.low / unit:.4g}, {figure.high / unit:.4g}]"


def times(figure: Estimate | None, digits: int = 2) -> str:
    """Return a ratio with its interval: ``1.23x [1.20, 1.25]``; nothing for ``None``."""
    if figure is None:
        return ""
    return f"{figure.median:.{digits}f}x \\[{figure.low:.{digits}f}, {figure.high:.{digits}f}]"


def number(value: float | None, form: str = ".3f") -> str:
    """Return the formatted number; nothing for ``None``."""
    return "" if value is None else f"{value:{form}}"


def size(value: float | None) -> str:
    """Return a number of bytes as ``4 MiB``; nothing for ``None``."""
    return "" if value is None else format_bytes(value)


def milliseconds(seconds: float | None) -> str:
    """Return a duration as ``1.23 ms``; nothing for ``None``."""
    return "" if seconds is None else f"{1000 * seconds:.3g} ms"


def seconds(value: float | None) -> str:
    """Return a duration as ``2.16 s``, ``1.23 ms`` or ``45 µs``; nothing for ``None``."""
    if value is None:
        return ""
    unit, name = (1.0, "s") if value >= 1 else (1e-3, "ms") if value >= 1e-3 else (1e-6, "µs")
    return f"{value / unit:.3g} {name}"


def print_progress(text: str) -> None:
    """Tell the user on standard error how far the benchmark is."""
    print(text, file=sys.stderr, flush=True)
