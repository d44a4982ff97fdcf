"""Tables for people, JSON for everybody else."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from totalreduce.cli.bench.launching import Setting
from totalreduce.cli.bench.sampling import Estimate
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["duration", "print_progress", "print_table", "share", "times", "write_document", "write_json"]


def duration(figure: Estimate) -> str:
    """Median with its interval: ``12.3 ms [12.1, 12.9]``."""
    unit, name = (1.0, "s") if figure.median >= 1 else (1e-3, "ms") if figure.median >= 1e-3 else (1e-6, "µs")
    low, high = figure.low / unit, figure.high / unit
    return f"{figure.median / unit:.4g} {name} \\[{low:.4g}, {high:.4g}]"


def share(value: float | None) -> str:
    """``94.6 %``; empty where there is none."""
    return "" if value is None else f"{value * 100:.1f} %"


def times(figure: Estimate | None) -> str:
    """A ratio with its interval: ``1.23x [1.20, 1.25]``; empty where there is none."""
    return "" if figure is None else f"{figure.median:.2f}x \\[{figure.low:.2f}, {figure.high:.2f}]"


def print_progress(text: str) -> None:
    """Say on stderr what is going on."""
    print(text, file=sys.stderr, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """Print to standard output; the first column left, figures right."""
    table = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # In a pipe rich assumes 80 columns and would cut figures off.
    Console(width=None if sys.stdout.isatty() else 220).print(table)


def write_json(path: Path | None, kind: str, setting: Setting, figures: Any, results: list[dict[str, Any]]) -> None:
    """Write figures, raw samples of every rank, versions and machine.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    document = {
        "benchmark": kind,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "setting": {
            "ranks": setting.ranks,
            "hosts": setting.hosts,
            "rate_bits_per_s": setting.rate_bits_per_s,
            "peers": setting.peers,
            "rounds": setting.rounds,
        },
        "environment": results[0]["environment"],
        "figures": figures,
        "raw": results,
    }
    write_document(path, document)


def write_document(path: Path | None, document: dict[str, Any]) -> None:
    """Write JSON; nothing where no file was asked for.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    if path is None:
        return
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write --json {path}: {error.strerror}") from error
