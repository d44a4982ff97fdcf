"""The analysis of a merged trace: late ranks, the time that operations spend in each phase, hidden communication.

An operation is compared if every rank has it and finished it without an error. Its time on a rank, from submission to
end, is divided into five phases:

- waiting: until the latest rank has submitted it. It comes first, because earlier work on a rank gains nothing.
- coordination: from then until the ranks have agreed that it is ready everywhere. Only operations of a native
  library, outside plans, need that.
- queue: until the first byte leaves or arrives, or until the native operation begins.
- copy: into and out of the fusion buffer of a native operation.
- wire: from the first byte, or the start of the native collective, to its end.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["LateRank", "OperationReport", "RankReport", "TensorReport", "TimeSplit", "TimelineReport", "analyse"]

#: Phases by the name of a part of an operation's span; other parts are named after a native collective.
_CATEGORIES = {
    "NEGOTIATE": "coordination",
    "QUEUED": "queue",
    "QUEUE": "queue",
    "FUSE": "copy",
    "COPY": "copy",
    "WIRE": "wire",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSplit:
    """Time of operations by phase, in seconds. The times of operations that overlap are added."""

    waiting_s: float
    coordination_s: float
    queue_s: float
    copy_s: float
    wire_s: float

    @property
    def total_s(self) -> float:
        """The sum of all phases."""
        return self.waiting_s + self.coordination_s + self.queue_s + self.copy_s + self.wire_s


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationReport:
    """One operation that all ranks have finished without an error."""

    name: str
    iteration: int
    num_bytes: int
    late_rank: int | None
    """The rank that submitted it last; ``None`` if all ranks did at the same time."""
    late_s: float
    """The time from the first submission to the last."""
    duration_s: float
    """From the latest submission until it was done on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRank:
    """A rank that was last at least once."""

    rank: int
    times_last: int
    median_s: float
    """Median time after the first rank, over the operations for which it was last."""
    worst_s: float
    worst_operation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """One rank."""

    rank: int
    split: TimeSplit
    """The phases of the operations compared."""
    hidden_share: float | None
    """Share of the time with at least one operation, compared or not, in which no caller was blocked in ``wait``;
    ``None`` without operations."""
    dropped_events: int
    """Number of the latest events, which ``max_events`` left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorReport:
    """All operations compared of one name."""

    name: str
    count: int
    num_bytes: int
    """Size of the largest."""
    median_s: float
    """From the latest submission until it was done on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineReport:
    """The result of ``analyse``. Equal traces give equal reports."""

    ranks: tuple[RankReport, ...]
    """In the order of ranks."""
    total: TimeSplit
    """The sum over all ranks."""
    late: tuple[LateRank, ...]
    """The rank that was last most often comes first."""
    tensors: tuple[TensorReport, ...]
    """The slowest first."""
    operations: tuple[OperationReport, ...]
    """In the order of their first submission."""
    incomplete_operations: int
    """Not compared: at least one rank lacks them."""
    failed_operations: int
    """Not compared: they failed or were not finished on at least one rank."""
    ambiguous_operations: int
    """Not compared: a rank has several of that name and iteration, of different subgroups."""
    missing_ranks: tuple[int, ...]
    """Ranks below the highest one without a timeline."""
    clocks: tuple[tuple[int, ...], ...]
    """The ranks by the clock that they share. Between clocks, submissions are compared by wall clock only."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON objects."""
        return dataclasses.asdict(self)


@dataclass(slots=True)
class _Operation:
    """An operation on one rank; times in microseconds of the merged trace."""

    begin: int
    end: int
    num_bytes: int
    outcome: str
    parts: list[tuple[str, int, int]]

    def split(self, latest: int) -> dict[str, int]:
        """Return the microseconds of each phase, if the latest rank submitted the operation at ``latest``."""
        spent = {"waiting": min(latest, self.end) - self.begin}
        for label, begin, end in self.parts:
            category = _CATEGORIES.get(label, "wire")
            spent[category] = spent.get(category, 0) + max(0, end - max(begin, latest))
        return spent


#: Name, the number shown behind it, and the iteration; they differ for operations numbered by their names.
_Key = tuple[str, int, int]


def analyse(trace: Mapping[str, Any]) -> TimelineReport:
    """Compare the ranks of a merged trace: that of ``merged_trace``, or the JSON of ``merge_timelines``."""
    headers = trace["metadata"]["ranks"]
    ranks = [header["rank"] for header in headers]
    operations, waits = _collect(trace["traceEvents"])
    busy: dict[int, list[tuple[int, int]]] = defaultdict(list)
    by_key: dict[_Key, dict[int, list[_Operation]]] = defaultdict(lambda: defaultdict(list))
    for rank, key, operation in operations:
        busy[rank].append((operation.begin, operation.end))
        by_key[key][rank].append(operation)
    compared: list[tuple[_Key, dict[int, _Operation]]] = []
    incomplete = failed = ambiguous = 0
    for key, found in by_key.items():
        if any(len(same) > 1 for same in found.values()):
            ambiguous += 1
        elif len(found) < len(ranks):
            incomplete += 1
        elif any(operation.outcome != "done" for (operation,) in found.values()):
            failed += 1
        else:
            compared.append((key, {rank: operation for rank, (operation,) in found.items()}))
    compared.sort(key=lambda item: (min(operation.begin for operation in item[1].values()), item[0]))
    spent: dict[int, dict[str, int]] = {rank: defaultdict(int) for rank in ranks}
    reports = []
    for key, by_rank in compared:
        reports.append(_compare(key, by_rank))
        latest = _latest(by_rank)
        for rank, operation in by_rank.items():
            for category, microseconds in operation.split(latest).items():
                spent[rank][category] += microseconds
    clocks: dict[str, list[int]] = defaultdict(list)
    for header in headers:
        clocks[header["clock"]].append(header["rank"])
    return TimelineReport(
        ranks=tuple(
            RankReport(
                rank=header["rank"],
                split=_time_split([spent[header["rank"]]]),
                hidden_share=_hidden_share(busy[header["rank"]], waits[header["rank"]]),
                dropped_events=header["events_dropped"],
            )
            for header in headers
        ),
        total=_time_split(spent.values()),
        late=_late_ranks(reports),
        tensors=_tensors(reports),
        operations=tuple(reports),
        incomplete_operations=incomplete,
        failed_operations=failed,
        ambiguous_operations=ambiguous,
        missing_ranks=tuple(sorted(set(range(max(ranks))) - set(ranks))),
        clocks=tuple(tuple(sharing) for sharing in clocks.values()),
    )


def _collect(
    events: Iterable[Mapping[str, Any]],
) -> tuple[list[tuple[int, _Key, _Operation]], dict[int, list[tuple[int, int]]]]:
    """Return every rank's operations, and the times at which its callers were blocked."""
    operations: list[tuple[int, _Key, _Operation]] = []
    waits: dict[int, list[tuple[int, int]]] = defaultdict(list)
    # By track and time: the operations whose next part begins there. Usually that is one, but the track of all further
    # names holds several operations at a time. Parts that begin at one time are written in the order of operations.
    expecting: dict[tuple[int, int], list[tuple[int, _Operation]]] = defaultdict(list)

    def expect(track: int, at: int, number: int, operation: _Operation) -> None:
        if at < operation.end:
            heapq.heappush(expecting[track, at], (number, operation))

    for event in events:
        if event["ph"] != "X":
            continue
        begin, end, args = event["ts"], event["ts"] + event["dur"], event.get("args", {})
        track: int = event["tid"]
        if "outcome" in args:
            name, _, shown = event["name"].rpartition(" #")
            operation = _Operation(begin, end, args["bytes"], args["outcome"], [])
            expect(track, begin, len(operations), operation)
            operations.append((event["pid"], (name, int(shown), args["iteration"]), operation))
        elif event["name"] == "WAIT":
            waits[event["pid"]].append((begin, end))
        elif not args and (candidates := expecting.get((track, begin))):
            number, operation = heapq.heappop(candidates)
            operation.parts.append((event["name"], begin, end))
            expect(track, end, number, operation)
    return operations, waits


def _latest(found: Mapping[int, _Operation]) -> int:
    """Return when the last rank submitted the operation."""
    return max(operation.begin for operation in found.values())


def _compare(key: _Key, found: Mapping[int, _Operation]) -> OperationReport:
    name, number, _ = key
    first, latest = min(operation.begin for operation in found.values()), _latest(found)
    last = min(rank for rank, operation in found.items() if operation.begin == latest)
    return OperationReport(
        name=name,
        iteration=number,
        num_bytes=max(operation.num_bytes for operation in found.values()),
        late_rank=last if latest > first else None,
        late_s=(latest - first) / 1e6,
        duration_s=(max(operation.end for operation in found.values()) - latest) / 1e6,
    )


def _time_split(spent: Iterable[Mapping[str, int]]) -> TimeSplit:
    """Return the sum of several splits, which are microseconds by phase."""
    total: dict[str, int] = defaultdict(int)
    for part in spent:
        for category, microseconds in part.items():
            total[category] += microseconds
    return TimeSplit(
        waiting_s=total["waiting"] / 1e6,
        coordination_s=total["coordination"] / 1e6,
        queue_s=total["queue"] / 1e6,
        copy_s=total["copy"] / 1e6,
        wire_s=total["wire"] / 1e6,
    )


def _late_ranks(operations: Sequence[OperationReport]) -> tuple[LateRank, ...]:
    by_rank: dict[int, list[OperationReport]] = defaultdict(list)
    for operation in operations:
        if operation.late_rank is not None:
            by_rank[operation.late_rank].append(operation)
    found = []
    for rank, theirs in by_rank.items():
        worst = max(theirs, key=lambda operation: operation.late_s)
        found.append(
            LateRank(
                rank=rank,
                times_last=len(theirs),
                median_s=median(operation.late_s for operation in theirs),
                worst_s=worst.late_s,
                worst_operation=f"{worst.name} #{worst.iteration}",
            )
        )
    return tuple(sorted(found, key=lambda late: (-late.times_last, late.rank)))


def _tensors(operations: Sequence[OperationReport]) -> tuple[TensorReport, ...]:
    by_name: dict[str, list[OperationReport]] = defaultdict(list)
    for operation in operations:
        by_name[operation.name].append(operation)
    found = [
        TensorReport(
            name=name,
            count=len(same),
            num_bytes=max(operation.num_bytes for operation in same),
            median_s=median(operation.duration_s for operation in same),
        )
        for name, same in by_name.items()
    ]
    return tuple(sorted(found, key=lambda tensor: (-tensor.median_s, tensor.name)))


def _hidden_share(busy: Sequence[tuple[int, int]], waits: Sequence[tuple[int, int]]) -> float | None:
    """Return the share of the time covered by ``busy`` that ``waits`` do not cover."""
    total = _covered(busy)
    return (_covered([*busy, *waits]) - _covered(waits)) / total if total else None


def _covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of intervals."""
    length, reached = 0, None
    for begin, end in sorted(intervals):
        if reached is None or begin > reached:
            reached = begin
        length += max(0, end - reached)
        reached = max(reached, end)
    return length
