"""The thread that writes this process's figures into the folder of the job, about once a second.

It takes no part in training: it reads counters under the engine's lock for some microseconds, and writes a file that
lies in memory. A process has at most one such thread, however many groups it forms, because it has one file.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import final

from totalreduce.foundation.errors import GroupClosed
from totalreduce.foundation.forking import HomeProcess
from totalreduce.foundation.os_errors import describe_error
from totalreduce.foundation.types import OpKind
from totalreduce.groups.steps import Reading, StepReport
from totalreduce.observe.board import Board
from totalreduce.observe.figures import Link, RankFigures
from totalreduce.runner.meter import Figure
from totalreduce.runner.runner import Runner

__all__ = ["Publisher", "publish"]

_log = logging.getLogger(__name__)

#: The time between two documents of a rank.
INTERVAL_S = 1.0


@final
class Publisher:
    """Writes the figures of the engines that it follows: of that one whose training has taken the most steps.

    Attributes:
        cpu_s: The processor time that its thread has taken so far, for the benchmark.
        documents: The number of documents that were written.
    """

    def __init__(self, folder: Path, seat: int, incarnation: int = 0, *, interval_s: float = INTERVAL_S) -> None:
        """Begin without a thread.

        Args:
            folder: The folder of the job.
            seat: The place of this process in the job.
            incarnation: How often the process of this seat was started before.
            interval_s: The time between two documents.
        """
        self._board, self._seat, self._incarnation, self._interval_s = Board(folder), seat, incarnation, interval_s
        self.home = HomeProcess("the publisher of figures")
        self._lock = threading.Lock()
        self._followed: dict[Runner, Reading] = {}  #: With the last reading of each.
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._has_failed = False
        self.cpu_s, self.documents = 0.0, 0

    def follow(self, runner: Runner) -> None:
        """Publish the figures of an engine from now on."""
        with self._lock:
            self._followed[runner] = Reading.of(runner)
            if self._stop is None and not self._has_failed:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="totalreduce-figures", daemon=True
                )
                self._thread.start()

    def leave(self, runner: Runner) -> None:
        """Publish the figures of an engine a last time. The thread ends with the last engine."""
        if not self.home.is_here:
            return
        with self._lock:
            is_last = set(self._followed) == {runner}
        if is_last:
            self._write(is_open=False)
        with self._lock:
            self._followed.pop(runner, None)
            if self._followed or self._stop is None:
                return
            stop, thread, self._stop = self._stop, self._thread, None
        stop.set()
        if thread is not None:
            thread.join(1.0)

    def _run(self, stop: threading.Event) -> None:
        while True:
            self._write()
            self.cpu_s = time.thread_time()
            if stop.wait(self._interval_s):
                return

    def _write(self, *, is_open: bool = True) -> None:
        """Write one document. If that fails, a warning says so, and nothing is written any more."""
        with self._lock:
            if self._has_failed or not self._followed:
                return
            runner = max(self._followed, key=lambda each: each.meter.totals.steps)
            before = self._followed[runner]
            try:
                after = self._followed[runner] = Reading.of(runner)
                figures = figures_of(runner, before, after, self._seat, self._incarnation)
                self._board.write_figures(self._seat, replace(figures, is_open=is_open).encode())
                self.documents += 1
            except GroupClosed:
                return
            except OSError as error:
                self._has_failed = True
                _log.warning(
                    "the figures of seat %d cannot be written into %s: %s. The live view does without them; the job "
                    "goes on",
                    self._seat,
                    self._board.path,
                    describe_error(error),
                )


def figures_of(runner: Runner, before: Reading, after: Reading, seat: int, incarnation: int) -> RankFigures:
    """Return the figures of the time between two readings of an engine."""
    report = StepReport.between(before, after)
    seconds = max(1e-3, report.seconds)
    engine, statistics = runner.engine, after.statistics
    pending, pending_s, reason = "", 0.0, ""
    with runner.locked():
        # Messages between two ranks may be awaited for long, for instance by a server, and keep nobody waiting.
        collectives = engine.table.select(lambda each: each.signature.kind is not OpKind.SEND_RECV)
        oldest = min(collectives, key=lambda each: each.submitted_at, default=None)
        if oldest is not None:
            pending, pending_s = oldest.name, max(0.0, after.at - oldest.submitted_at)
            reason = engine.stalls.explain(oldest, after.at)
    links = [
        Link(
            peer=peer,
            sent=after.sent_to.get(peer, 0),
            received=after.received_from.get(peer, 0),
            sent_per_s=(after.sent_to.get(peer, 0) - before.sent_to.get(peer, 0)) / seconds,
            received_per_s=(after.received_from.get(peer, 0) - before.received_from.get(peer, 0)) / seconds,
        )
        for peer in sorted({*after.sent_to, *after.received_from})
    ]
    return RankFigures(
        seat=seat,
        rank=engine.rank,
        world_size=engine.members.world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        epoch=engine.outbox.epoch,
        incarnation=incarnation,
        step=report.step,
        step_s=report.step_s,
        compute_s=report.compute_s,
        exposed_s=report.exposed_s,
        since_step_s=after.at - after.totals.ended_at if after.totals.ended_at else 0.0,
        hidden_share=report.hidden_share,
        bytes_sent=statistics.bytes_sent,
        bytes_received=statistics.bytes_received,
        sent_per_s=report.bytes_sent / seconds,
        received_per_s=report.bytes_received / seconds,
        links=tuple(links),
        pending=pending,
        pending_s=pending_s,
        reason=reason,
        stalls=statistics.stalls,
        mismatches=statistics.mismatches,
        refused_connections=statistics.refused_connections,
        dropped_messages=statistics.dropped_messages,
        sources=_figures_of_sources(runner),
    )


def _figures_of_sources(runner: Runner) -> dict[str, dict[str, Figure]]:
    """Return the figures of what belongs to the training. A source that fails has none this time.

    Sources are read while other threads change what they read, which is rarely found half changed.
    """
    found = {}
    for name, source in list(runner.meter.sources.items()):
        try:
            found[name] = dict(source())
        except Exception:
            _log.debug("the figures of %s cannot be read now", name, exc_info=True)
    return found


#: The publisher of this process: its file belongs to the process, and not to a group.
_publisher: Publisher | None = None
_making = threading.Lock()


def publish(runner: Runner, folder: Path, seat: int, incarnation: int) -> Publisher:
    """Have the process's publisher follow an engine, and return the publisher, whose ``leave`` ends that.

    The arguments are those of ``Publisher``; those of the first call count.
    """
    global _publisher  # noqa: PLW0603
    with _making:
        if _publisher is None or not _publisher.home.is_here:
            _publisher = Publisher(folder, seat, incarnation)
        publisher = _publisher
    publisher.follow(runner)
    return publisher
