"""The trace format: the numbers of the tracks, and the file.

Times are integers of microseconds. Viewers parse fractions as floating-point numbers and lose a nanosecond now and
then, after which a sub-span no longer lies inside its span and is drawn elsewhere.

Format: "Trace Event Format" (Chromium project), JSON object form.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from totalreduce.foundation.files import replacing

__all__ = ["FORMAT", "Event", "Tracks", "span", "write_trace"]

FORMAT = "totalreduce-timeline-1"

Event = dict[str, object]

#: Tracks of a rank are numbered from a multiple of this, so that no two ranks share a number and none is a
#: process number: Perfetto takes a thread with the number of its process for the main thread and renames it.
_TRACKS_PER_RANK = 100_000
#: No screen shows more. A program that gives every call a new name would otherwise make a track per call.
_TRACKS_MAX = 1_000
_OVERFLOW = "other operations"


class Tracks:
    """Numbers the tracks of one rank in the order of their first use."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers: dict[str, int] = {}
        self._ends: dict[str, int] = {}

    def named(self, name: str) -> int:
        """Return the number of a track, which is made on first use."""
        if name not in self._numbers and len(self._numbers) >= _TRACKS_MAX:
            name = _OVERFLOW
        base = (self._rank + 1) * _TRACKS_PER_RANK
        return self._numbers.setdefault(name, base + len(self._numbers))

    def free(self, name: str, begin: int, end: int) -> int:
        """Return a track of that name on which no span ends after ``begin``: ``name``, or ``name (2)`` and so on.

        Spans that overlap without one containing the other cannot be drawn on one track.
        """
        if name not in self._numbers and len(self._numbers) >= _TRACKS_MAX:
            name = _OVERFLOW
        track, number = name, 1
        while self._ends.get(track, begin) > begin:
            number += 1
            track = f"{name} ({number})"
        self._ends[track] = end
        return self.named(track)

    def metadata(self, label: str) -> Iterator[Event]:
        """Yield the names and the order of the rank and its tracks."""
        yield {"ph": "M", "pid": self._rank, "name": "process_name", "args": {"name": label}}
        yield {"ph": "M", "pid": self._rank, "name": "process_sort_index", "args": {"sort_index": self._rank}}
        for order, (name, tid) in enumerate(self._numbers.items()):
            where: Event = {"ph": "M", "pid": self._rank, "tid": tid}
            yield {**where, "name": "thread_name", "args": {"name": name}}
            yield {**where, "name": "thread_sort_index", "args": {"sort_index": order}}


def span(pid: int, tid: int, name: str, *, begin: int, end: int, args: Event) -> Event:
    """Return a complete event from ``begin`` to ``end``, in microseconds."""
    event: Event = {"ph": "X", "pid": pid, "tid": tid, "ts": begin, "dur": end - begin, "name": name}
    return {**event, "args": args} if args else event


def write_trace(path: Path, events: Iterable[Event], metadata: Event) -> None:
    """Write a complete trace file or none, one event per line."""
    # ``default=str``: a stall report may hold any object, and must not make the file impossible.
    encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
    with replacing(path) as file, io.TextIOWrapper(file, encoding="utf-8") as stream:
        stream.write('{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for event in events:
            stream.write(separator + encode(event))
            separator = ",\n"
        stream.write(f'\n],\n"metadata":{encode(metadata)}}}\n')
