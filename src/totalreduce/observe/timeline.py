"""The timeline: the phases of all operations of a rank, as a Chrome trace that Perfetto opens.

Inside the engine's calls an event is one tuple appended to a list; the rest happens in ``close``. One tuple holds an
entire span, so that leaving events out (``max_events``) never leaves half a span.

A rank is a process of the trace. An operation name is one of its tracks, with a span per iteration from
``submitted`` to ``done`` and its parts inside it: QUEUED and WIRE, or, where a native library carried it out,
NEGOTIATE, QUEUE, FUSE or COPY, the kind of collective, COPY. Time blocked in ``wait`` is on the track "caller",
additions stand on "computation"; "bytes in flight" is a counter.
"""

# An observer's methods have the arguments of the events, whether this observer uses them or not.
# ruff: noqa: ARG002

from __future__ import annotations

import atexit
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from totalreduce.foundation import checks
from totalreduce.foundation.call_names import track_and_number
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.forking import HomeProcess
from totalreduce.foundation.observer import Observer
from totalreduce.foundation.os_errors import describe_error
from totalreduce.foundation.types import operation_id
from totalreduce.observe.chrome_trace import FORMAT, Event, Tracks, span, write_trace

__all__ = ["Timeline", "rank_path"]

_log = logging.getLogger(__name__)


class _Operation(NamedTuple):
    name: str
    iteration: int
    submitted: float
    #: The ends of its parts. Each part begins where the one before ends; the last ends with the operation.
    ends: tuple[float, ...]
    done: float
    outcome: str
    sizes: Event
    native: str = ""  #: The collective, if a native library carried it out

    def parts(self) -> tuple[str, ...]:
        """Return the names of the parts: as many as ``ends``, or more if no byte arrived or left."""
        if not self.native:
            return "QUEUED", "WIRE"
        return "NEGOTIATE", "QUEUE", "COPY" if self.sizes["fused"] == 1 else "FUSE", self.native.upper(), "COPY"


class _Span(NamedTuple):
    label: str
    track: str
    begin: float
    end: float
    args: Event


class _Instant(NamedTuple):
    label: str
    name: str
    now: float
    args: Event


class _OpenOperation:
    """An operation in flight; becomes one ``_Operation``."""

    __slots__ = ("first_byte", "iteration", "num_bytes", "priority", "received", "sent", "submitted")

    def __init__(self, iteration: int, submitted: float, num_bytes: int, priority: int) -> None:
        self.iteration, self.submitted, self.num_bytes, self.priority = iteration, submitted, num_bytes, priority
        self.first_byte: float | None = None
        self.sent = self.received = 0

    def finish(self, name: str, now: float, outcome: str) -> _Operation:
        sizes: Event = {
            "bytes": self.num_bytes,
            "priority": self.priority,
            "bytes sent": self.sent,
            "bytes received": self.received,
        }
        ends = (now,) if self.first_byte is None else (self.first_byte, now)
        return _Operation(name, self.iteration, self.submitted, ends, now, outcome, sizes)


class Timeline(Observer):
    """Observer that records one rank and writes the trace when closed, also when the interpreter exits.

    A process killed by a signal leaves no file: the trace is formatted at the end to keep the calls cheap. If the file
    cannot be written then, a warning is logged and the events are lost; the program goes on.

    Args:
        rank: This rank; the process number in the trace.
        path: File to write, replaced as a whole; missing folders are made.
        max_events: Spans and instants kept at most, the earliest ones; later ones are counted, and the count
            is written into the file. A kept event takes 300 to 600 bytes of memory.
        clock: The clock that drives the engine, in seconds.

    Raises:
        ConfigurationError: The file cannot be written there, or ``max_events`` is not positive.
    """

    def __init__(
        self,
        rank: int,
        path: str | os.PathLike[str],
        max_events: int = 500_000,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        checks.integer("max_events of a timeline", max_events, minimum=1)
        self.rank = rank  #: As given.
        self.path = Path(path)  #: As given.
        self.dropped = 0  #: Spans and instants left out so far.
        self._file = self.path.absolute()  # a program may change its working directory before the end
        _check_writable(self.path)
        self._max_events, self._clock = max_events, clock
        self._origin, self._origin_wall = clock(), time.time()
        self._open: dict[str, _OpenOperation] = {}
        self._events: list[_Operation | _Span | _Instant] = []
        self._closed = False
        self._home = HomeProcess("the timeline")
        atexit.register(self.close)

    def submitted(self, name: str, iteration: int, now: float, *, num_bytes: int, priority: int) -> None:
        self._open[name] = _OpenOperation(iteration, now, num_bytes, priority)

    def first_byte(self, name: str, iteration: int, now: float) -> None:
        operation = self._open.get(name)
        if operation is not None:
            operation.first_byte = now

    def sent(self, name: str, iteration: int, now: float, *, peer: int, lane: int, step: int, num_bytes: int) -> None:
        operation = self._open.get(name)
        if operation is not None:
            operation.sent += num_bytes

    def received(
        self, name: str, iteration: int, now: float, *, peer: int, lane: int, step: int, num_bytes: int
    ) -> None:
        operation = self._open.get(name)
        if operation is not None:
            operation.received += num_bytes

    def floating(self, name: str, iteration: int, now: float, *, peer: int, num_bytes: int) -> None:
        args: Event = {"from rank": peer, "bytes": num_bytes, "iteration": iteration}
        self._keep(_Instant("FLOATING", name, now, args))

    def reduced(self, name: str, iteration: int, now: float, *, lane: int, step: int, seconds: float) -> None:
        args: Event = {"operation": name, "iteration": iteration, "lane": lane, "step": step}
        self._keep(_Span("REDUCE", "computation", now - seconds, now, args))

    def promoted(self, name: str, iteration: int, now: float) -> None:
        self._keep(_Instant("PROMOTED", name, now, {"iteration": iteration}))

    def waited(self, name: str, iteration: int, begin: float, end: float) -> None:
        self._keep(_Span("WAIT", "caller", begin, end, {"operation": name, "iteration": iteration}))

    def done(self, name: str, iteration: int, now: float, *, error: BaseException | None) -> None:
        operation = self._open.pop(name, None)
        if operation is not None:
            self._keep(operation.finish(name, now, _outcome(error)))

    def requested(self, name: str, now: float, *, rank: int) -> None:
        self._keep(_Instant(f"READY {rank}", name, now, {"rank": rank}))

    def coordinated(
        self,
        name: str,
        iteration: int,
        *,
        kind: str,
        num_bytes: int,
        batch: int,
        fused: int,
        submitted: float,
        agreed: float,
        begun: float,
        packed: float,
        ended: float,
        unpacked: float,
        error: BaseException | None,
    ) -> None:
        sizes: Event = {"bytes": num_bytes, "batch": batch, "fused": fused}
        ends = (agreed, begun, packed, ended, unpacked)
        self._keep(_Operation(name, iteration, submitted, ends, unpacked, _outcome(error), sizes, kind))

    def stalled(self, report: Mapping[str, object], now: float) -> None:
        self._keep(_Instant("STALLED", "", now, dict(report)))

    def close(self) -> None:
        """Write the file. Later events are ignored; a second call does nothing, nor does a call in a forked child.

        If the file cannot be written, a warning is logged and no exception is raised: a job that has done its work must
        not fail for want of its trace.
        """
        if self._closed or not self._home.is_here:
            return
        atexit.unregister(self.close)
        # The dictionary is replaced, not emptied: at exit the engine's threads may still report events.
        still_open, self._open = self._open, {}
        now = self._clock()
        for name, operation in still_open.items():
            self._keep(operation.finish(name, now, "unfinished"))
        self._closed = True
        events, self._events = self._events, []
        metadata: Event = {
            "format": FORMAT,
            "rank": self.rank,
            "clock": _clock_identity(),
            "origin_clock_s": self._origin,
            "origin_wall_s": self._origin_wall,
            "events": len(events),
            "events_dropped": self.dropped,
        }
        try:
            write_trace(self._file, _Formatter(self.rank, self._origin, self.dropped).events(events), metadata)
        except Exception as error:
            _log.warning(
                "rank %d: the timeline %s could not be written: %s. Events lost: %d. The job is not affected",
                self.rank,
                self._file,
                describe_error(error),
                len(events) + self.dropped,
            )

    def _keep(self, event: _Operation | _Span | _Instant) -> None:
        if len(self._events) < self._max_events and not self._closed:
            self._events.append(event)
        else:
            self.dropped += 1


class _Formatter:
    """Turns a rank's events into those of a trace."""

    def __init__(self, rank: int, origin: float, dropped: int) -> None:
        self._rank, self._origin, self._dropped = rank, origin, dropped
        self._tracks = Tracks(rank)

    def events(self, events: list[_Operation | _Span | _Instant]) -> Iterator[Event]:
        """Yield the metadata, then all events in the order of time."""
        operations = sorted(
            (fact for fact in events if isinstance(fact, _Operation)), key=lambda operation: operation.submitted
        )
        spans = (fact for fact in events if isinstance(fact, _Span))
        body: list[tuple[int, Event]] = []
        for fact in sorted(spans, key=lambda fact: (fact.track, fact.begin)):
            begin, end = self._microseconds(fact.begin), self._microseconds(fact.end)
            tid = self._tracks.free(fact.track, begin, end)
            body.append((begin, span(self._rank, tid, fact.label, begin=begin, end=end, args=fact.args)))
        for operation in operations:
            body += self._operation(operation)
        # A floating message may know only the operation's id; the name is known since the submission.
        tracks = {track_and_number(operation.name)[0] for operation in operations}
        names = {f"{operation_id(track):#018x}": track for track in tracks}
        for instant in (fact for fact in events if isinstance(fact, _Instant)):
            body.append(self._instant(instant, names))
        body += self._in_flight(operations)
        left_out = f" ({self._dropped} later events left out)" if self._dropped else ""
        yield from self._tracks.metadata(f"rank {self._rank}{left_out}")
        for _, event in sorted(body, key=lambda timed: timed[0]):  # stable: a span stays before its parts
            yield event

    def _operation(self, operation: _Operation) -> Iterator[tuple[int, Event]]:
        begin, end = self._microseconds(operation.submitted), self._microseconds(operation.done)
        track, number = track_and_number(operation.name)
        tid = self._tracks.free(track, begin, end)
        args = {"iteration": operation.iteration, **operation.sizes, "outcome": operation.outcome}
        yield (
            begin,
            span(self._rank, tid, f"{track} #{number or operation.iteration}", begin=begin, end=end, args=args),
        )
        for label, at in zip(operation.parts(), operation.ends, strict=False):
            part_end = min(max(self._microseconds(at), begin), end)
            if part_end > begin:
                yield begin, span(self._rank, tid, label, begin=begin, end=part_end, args={})
            begin = part_end

    def _instant(self, instant: _Instant, names: Mapping[str, str]) -> tuple[int, Event]:
        at = self._microseconds(instant.now)
        track = track_and_number(names.get(instant.name, instant.name))[0] or "stalls"
        event: Event = {"ph": "i", "s": "t", "pid": self._rank, "tid": self._tracks.named(track), "ts": at}
        return at, {**event, "name": instant.label, "args": instant.args}

    def _in_flight(self, operations: list[_Operation]) -> Iterator[tuple[int, Event]]:
        changes: dict[int, int] = {}
        for operation in operations:
            size = operation.sizes["bytes"]
            assert isinstance(size, int)
            for at, change in ((operation.submitted, size), (operation.done, -size)):
                changes[self._microseconds(at)] = changes.get(self._microseconds(at), 0) + change
        level = 0
        for at, change in sorted(changes.items()):
            level += change
            yield (at, {"ph": "C", "pid": self._rank, "ts": at, "name": "bytes in flight", "args": {"bytes": level}})

    def _microseconds(self, at: float) -> int:
        return round((at - self._origin) * 1e6)


def rank_path(path: str | os.PathLike[str], rank: int) -> Path:
    """Return the file of a rank if all ranks were given one path.

    It is ``folder/rank3.json`` for a folder, and ``run.rank3.json`` for ``run.json``.
    """
    base = Path(path)
    return base.with_suffix(f".rank{rank}.json") if base.suffix == ".json" else base / f"rank{rank}.json"


def _outcome(error: BaseException | None) -> str:
    return "done" if error is None else f"{type(error).__name__}: {error}"


def _clock_identity() -> str:
    """Return a text that is equal for processes that share one monotonic clock: those of one booted kernel."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return platform.node()


def _check_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"timeline: cannot make the folder {path.parent}: {error.strerror}") from error
    if path.is_dir():
        raise ConfigurationError(f"timeline: {path} is a folder; name a file, for instance {path / 'rank0.json'}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigurationError(f"timeline: no permission to write into {path.parent}")
