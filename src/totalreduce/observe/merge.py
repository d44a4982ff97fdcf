"""One trace made of the ranks' traces, with the differences of their clocks removed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.named_files import read_named
from totalreduce.observe.chrome_trace import FORMAT, write_trace

__all__ = ["merge_timelines", "merged_trace", "write_merged"]

#: The longest timeline that is read; JSON of this length takes several times as much memory.
_FILE_BYTES_MAX = 1 << 30
_MERGED_FORMAT = f"{FORMAT}-merged"


def merged_trace(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """Return one trace with all ranks. Raises ``ConfigurationError``.

    Ranks of one host share the kernel's monotonic clock and agree to the microsecond. Hosts agree as far as their wall
    clocks do: to some milliseconds with NTP. The trace has ``traceEvents``, rank after rank, and ``metadata``, whose
    ``ranks`` are the metadata of the ranks' own files.
    """
    if not paths:
        raise ConfigurationError("no timelines to merge: name the file of at least one rank")
    traces = sorted((_read(Path(path)) for path in paths), key=lambda trace: trace["metadata"]["rank"])
    headers = [trace["metadata"] for trace in traces]
    ranks = [header["rank"] for header in headers]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise ConfigurationError(f"two timelines of rank {twice[0]}: give every rank's file once, and of one run only")
    origins = _origins(headers)
    start = min(origins)
    for trace, origin in zip(traces, origins, strict=True):
        shift = round((origin - start) * 1e6)
        for event in trace["traceEvents"]:
            if "ts" in event:
                event["ts"] += shift
    return {
        "traceEvents": [event for trace in traces for event in trace["traceEvents"]],
        "metadata": {"format": _MERGED_FORMAT, "origin_wall_s": start, "ranks": headers},
    }


def write_merged(trace: dict[str, Any], out: str | os.PathLike[str]) -> Path:
    """Write a trace of ``merged_trace`` to ``out``, which is replaced at once; missing folders are made."""
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_trace(target, trace["traceEvents"], trace["metadata"])
    return target


def merge_timelines(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Merge the files of several ranks into the file ``out``, and return it; see ``merged_trace``."""
    return write_merged(merged_trace(paths), out)


def _origins(headers: Sequence[dict[str, Any]]) -> list[float]:
    """Return the wall time at which each trace begins, with one difference between the clocks per kernel."""
    differences: dict[str, float] = {}
    for header in headers:
        differences.setdefault(header["clock"], header["origin_wall_s"] - header["origin_clock_s"])
    return [header["origin_clock_s"] + differences[header["clock"]] for header in headers]


def _read(path: Path) -> dict[str, Any]:
    try:
        trace: Any = json.loads(read_named(path, _FILE_BYTES_MAX))
    except OSError as error:
        raise ConfigurationError(f"cannot read the timeline {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not a timeline: {error}") from error
    found = trace.get("metadata", {}).get("format") if isinstance(trace, dict) else None
    if found == _MERGED_FORMAT:
        raise ConfigurationError(f"{path} is not the timeline of one rank but a merged one: give the ranks' own files")
    if found != FORMAT:
        raise ConfigurationError(f"{path} is not the timeline of one rank (its format is not {FORMAT})")
    assert isinstance(trace, dict)
    return trace
