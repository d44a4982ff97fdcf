"""How benchmarks show durations and ratios, and the document that they write."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from totalreduce.bench.launching import Setting
from totalreduce.bench.sampling import Estimate
from totalreduce.cli.report import write_document

__all__ = ["duration", "print_progress", "times", "write_json"]


def duration(figure: Estimate) -> str:
    """Median with its interval: ``12.3 ms [12.1, 12.9]``."""
    unit, name = (1.0, "s") if figure.median >= 1 else (1e-3, "ms") if figure.median >= 1e-3 else (1e-6, "µs")
    low, high = figure.low / unit, figure.high / unit
    return f"{figure.median / unit:.4g} {name} \\[{low:.4g}, {high:.4g}]"


def times(figure: Estimate | None) -> str:
    """A ratio with its interval: ``1.23x [1.20, 1.25]``; empty where there is none."""
    return "" if figure is None else f"{figure.median:.2f}x \\[{figure.low:.2f}, {figure.high:.2f}]"


def print_progress(text: str) -> None:
    """Say on stderr what is going on."""
    print(text, file=sys.stderr, flush=True)


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
