"""One trace out of the ranks' traces, with their clocks laid side by side."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.observe.chrome_trace import FORMAT, Event, write_trace

__all__ = ["merge_timelines"]


def merge_timelines(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Merge the files of several ranks into one that shows all of them.

    Ranks of one host share the kernel's monotonic clock and line up to the microsecond. Hosts line up as well
    as their wall clocks do: some milliseconds apart with NTP.

    Args:
        paths: Files written by ``Timeline``, one per rank, in any order.
        out: File to write; replaced as a whole.

    Returns:
        ``out`` as a path.

    Raises:
        ConfigurationError: No files, a file that is no timeline, or two files of one rank.
        OSError: ``out`` could not be written.
    """
    if not paths:
        raise ConfigurationError("no timelines to merge: name the file of at least one rank")
    traces = sorted((_read(Path(path)) for path in paths), key=lambda trace: trace["metadata"]["rank"])
    ranks = [trace["metadata"]["rank"] for trace in traces]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise ConfigurationError(f"two timelines of rank {twice[0]}: give every rank's file once, and of one run only")
    origins = _origins([trace["metadata"] for trace in traces])
    start = min(origins)
    shifts = [round((origin - start) * 1e6) for origin in origins]
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    metadata: Event = {
        "format": f"{FORMAT}-merged",
        "origin_wall_s": start,
        "ranks": [t["metadata"] for t in traces],
    }
    write_trace(target, _shifted(traces, shifts), metadata)
    return target


def _origins(headers: Sequence[dict[str, Any]]) -> list[float]:
    """Wall time at which each trace begins, with one difference between the clocks per kernel."""
    differences: dict[str, float] = {}
    for header in headers:
        differences.setdefault(header["clock"], header["origin_wall_s"] - header["origin_clock_s"])
    return [header["origin_clock_s"] + differences[header["clock"]] for header in headers]


def _shifted(traces: Sequence[dict[str, Any]], shifts: Sequence[int]) -> Iterator[Event]:
    for trace, shift in zip(traces, shifts, strict=True):
        for event in trace["traceEvents"]:
            yield {**event, "ts": event["ts"] + shift} if "ts" in event else event


def _read(path: Path) -> dict[str, Any]:
    try:
        trace = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read the timeline {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not a timeline: {error}") from error
    if not isinstance(trace, dict) or trace.get("metadata", {}).get("format") != FORMAT:
        raise ConfigurationError(f"{path} is not the timeline of one rank (its format is not {FORMAT})")
    return trace
