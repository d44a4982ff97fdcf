"""The thread that writes this process's figures into the folder of the job, about once a second.

It takes no part in training: it reads counters under the engine's lock for some microseconds, and writes a file that
lies in memory. A process has at most one such thread, however many groups it forms, because it has one file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass, field, replace
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
#: The time after which writing is tried again if it has failed, and how long the thread's last document is awaited.
_RETRY_S, _JOIN_S = 30.0, 1.0


@dataclass(slots=True)
class _Followed:
    """What the thread knows of an engine that it follows. ``reading`` is the last one, ``figures`` those of it."""

    reading: Reading
    figures: RankFigures | None = None


@dataclass(frozen=True, slots=True)
class _Session:
    """The engines that one thread follows, and what ends it: ``stop`` is set when the last engine has left."""

    followed: dict[Runner, _Followed] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)


@final
class Publisher:
    """Writes the figures of the engines that it follows: of that one whose training has taken the most steps.

    Only its thread writes, and it holds no lock while it does: a folder that does not answer delays no thread that
    trains.
    """

    def __init__(self, folder: Path, seat: int, incarnation: int = 0, *, interval_s: float = INTERVAL_S) -> None:
        """Begin without a thread."""
        self._board, self._seat, self._incarnation, self._interval_s = Board(folder), seat, incarnation, interval_s
        self.home = HomeProcess("the publisher of figures")  #: The process in which it writes.
        self._lock = threading.Lock()  #: For the engines of the session, and the beginning and end of its thread.
        self._session: _Session | None = None
        self._thread: threading.Thread | None = None
        self._has_warned, self._retry_at = False, float("-inf")
        self.cpu_s = 0.0  #: The processor time that its thread has taken so far, for the benchmark.
        self.documents = 0  #: The number of documents that were written.

    def follow(self, runner: Runner) -> None:
        """Publish the figures of an engine from now on."""
        followed = _Followed(Reading.of(runner))
        with self._lock:
            if self._session is not None:
                self._session.followed[runner] = followed
                return
            self._session = _Session({runner: followed})
            self._thread = threading.Thread(
                target=self._run, args=(self._session,), name="totalreduce-figures", daemon=True
            )
            self._thread.start()

    def leave(self, runner: Runner) -> None:
        """Publish the figures of an engine a last time. The thread ends with the last engine.

        It is awaited for a second at most.
        """
        if not self.home.is_here:
            return
        with self._lock:
            session, thread = self._session, self._thread
            if session is None or runner not in session.followed:
                return
            if len(session.followed) > 1:
                del session.followed[runner]
                return
            self._session = self._thread = None  # the thread keeps the session, and so the engine, for the last figures
        session.stop.set()
        if thread is not None:
            thread.join(_JOIN_S)

    def _run(self, session: _Session) -> None:
        self._warn_of_an_open_folder()
        while not session.stop.is_set():
            self._write(session, is_open=True)
            self.cpu_s = time.thread_time()
            session.stop.wait(self._interval_s)
        self._write(session, is_open=False)
        self.cpu_s = time.thread_time()

    def _warn_of_an_open_folder(self) -> None:
        with contextlib.suppress(OSError):  # the first document finds that, and says so
            if not self._board.is_private():
                _log.warning(
                    "the folder %s of the live view does not belong to this user alone, so others may change what is "
                    "shown: make it with mode 700",
                    self._board.path,
                )

    def _write(self, session: _Session, *, is_open: bool) -> None:
        """Write one document. If that fails, a warning says so once, and it is tried again after ``_RETRY_S``."""
        with self._lock:
            runner, followed = max(session.followed.items(), key=lambda item: item[0].meter.totals.steps)
        try:
            after = Reading.of(runner)
            figures = figures_of(
                runner, followed.reading, after, self._seat, self._incarnation, previous=followed.figures
            )
            followed.reading, followed.figures = after, figures
        except GroupClosed:
            if is_open or followed.figures is None:
                return
            figures = followed.figures
        if is_open and time.monotonic() < self._retry_at:
            return
        try:
            self._board.write_figures(self._seat, replace(figures, is_open=is_open).encode())
            self.documents += 1
        except OSError as error:
            self._retry_at = time.monotonic() + _RETRY_S
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "the figures of seat %d cannot be written into %s: %s. The live view does without them until that "
                    "is possible; the job goes on",
                    self._seat,
                    self._board.path,
                    describe_error(error),
                )


def figures_of(
    runner: Runner,
    before: Reading,
    after: Reading,
    seat: int,
    incarnation: int,
    *,
    previous: RankFigures | None = None,
) -> RankFigures:
    """Return the figures of the time between two readings of an engine.

    The times of steps are those of ``previous``, the figures before, if no timed step has ended since; and 0 if there
    are none, or if ``before`` is a reading of another group of the training, or of a later step.
    """
    report = StepReport.between(before, after)
    step_s, compute_s, exposed_s = _step_times(before, after, report, previous)
    seconds = max(1e-3, report.seconds)
    engine, statistics = runner.engine, after.statistics
    pending, pending_s, pending_ranks, reason = "", 0.0, engine.members.everybody, ""
    with runner.locked():
        # Messages between two ranks may be awaited for long, for instance by a server, and keep nobody waiting.
        collectives = engine.table.select(lambda each: each.signature.kind is not OpKind.SEND_RECV)
        oldest = min(collectives, key=lambda each: each.submitted_at, default=None)
        if oldest is not None:
            pending, pending_s = oldest.name, max(0.0, after.at - oldest.submitted_at)
            pending_ranks = oldest.ranks
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
        step_s=step_s,
        compute_s=compute_s,
        exposed_s=exposed_s,
        since_step_s=after.at - after.totals.ended_at if after.totals.ended_at else 0.0,
        hidden_share=report.hidden_share,
        bytes_sent=statistics.bytes_sent,
        bytes_received=statistics.bytes_received,
        sent_per_s=report.bytes_sent / seconds,
        received_per_s=report.bytes_received / seconds,
        links=tuple(links),
        pending=pending,
        pending_s=pending_s,
        pending_of_all=len(pending_ranks) == engine.members.world_size,
        pending_ranks=() if len(pending_ranks) == engine.members.world_size else pending_ranks,
        reason=reason,
        stalls=statistics.stalls,
        mismatches=statistics.mismatches,
        refused_connections=statistics.refused_connections,
        dropped_messages=statistics.dropped_messages,
        sources=_figures_of_sources(runner),
    )


def _step_times(
    before: Reading, after: Reading, report: StepReport, previous: RankFigures | None
) -> tuple[float, float, float]:
    """Return the mean time of a step in seconds, and its parts: computing, and exposed waits."""
    old, new = before.totals, after.totals
    if new.steps < old.steps or (old.steps == 0 and new.step_s - old.step_s > report.seconds):
        # The training goes on from a saved state, or a new engine goes on with the totals of the one before: then the
        # first difference is that of all steps of the training, which have taken longer than the time between readings.
        return 0.0, 0.0, 0.0
    if new.timed_steps > old.timed_steps:
        return report.step_s, report.compute_s, report.exposed_s
    return (0.0, 0.0, 0.0) if previous is None else (previous.step_s, previous.compute_s, previous.exposed_s)


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
