"""How commands show figures: tables on the terminal, JSON files for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.named_files import write_named

__all__ = ["format_bytes", "print_table", "share", "write_document", "write_text"]


def format_bytes(size: float) -> str:
    """``4194304`` as ``4 MiB``; at most three significant digits."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def share(value: float | None) -> str:
    """Return ``94.6 %`` for 0.946, and nothing for ``None``."""
    return "" if value is None else f"{value * 100:.1f} %"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """Print a table to standard output; the first column is aligned left, figures are aligned right."""
    table = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # In a pipe rich assumes 80 columns and would cut figures off.
    Console(width=None if sys.stdout.isatty() else 400).print(table)


def write_document(path: Path | None, document: Mapping[str, Any]) -> None:
    """Write JSON; without a path nothing is written. Raises ``ConfigurationError``: the file cannot be written."""
    if path is not None:
        write_text(path, "--json", json.dumps(document, indent=1) + "\n")


def write_text(path: Path, option: str, text: str) -> None:
    """Write the file that an option of the command line names. Raises ``ConfigurationError``."""
    try:
        write_named(path, text)
    except OSError as error:
        raise ConfigurationError(f"cannot write {option} {path}: {error.strerror}") from error
