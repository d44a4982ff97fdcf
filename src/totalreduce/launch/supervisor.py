"""Watches the workers of one run, and ends them: their ends, time-outs, and the signals of the launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import final

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.ending import Escalation, find_first_failure
from totalreduce.launch.live import LiveJob
from totalreduce.launch.losses import EndOnLoss
from totalreduce.launch.processes import Processes
from totalreduce.launch.workers import RunResult, Worker

__all__ = ["Supervisor", "signals_to"]

#: How long output is awaited after the last worker's end, if a process that it started holds the pipe open.
_DRAIN_S = 1.0
#: How long after the workers' end those that only serve may end by themselves, before the others' time begins.
_SERVERS_S = 7.0
#: How long a killed worker may take to end. After that it is stuck in the kernel, and left there.
_KILL_S = 10.0
_TICK_S = 0.05
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Batch systems send these to say that a job must end soon. The workers get them, and the run goes on.
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


@final
class Supervisor:
    """Watches the workers of one run."""

    def __init__(self, processes: Processes, policy: EndOnLoss, escalation: Escalation, live: LiveJob | None) -> None:
        """Begin."""
        self._processes, self._policy, self._escalation, self._live = processes, policy, escalation, live
        self._first_to_end: Worker | None = None
        self._signals: list[signal.Signals] = []
        self._is_to_stop = False
        self._interrupted_by: signal.Signals | None = None
        self._timed_out = False
        self._started_at = self._last_end = time.monotonic()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Remember a signal; a second one kills at once, even if the terminal blocks the output."""
        if number in _PASSED_ON:
            self._processes.send_all(signal.Signals(number))
            return
        if number == signal.SIGTSTP:
            self._is_to_stop = True
            return
        self._signals.append(signal.Signals(number))
        if self._interrupted_by or len(self._signals) > 1:
            self._processes.send_all(signal.SIGKILL)

    def _stop_if_asked(self) -> None:
        """Stop the workers and this process, as Ctrl-Z asks for, until this process is continued.

        The workers get SIGSTOP: their process groups are orphaned, so that SIGTSTP would not stop them.
        """
        if self._is_to_stop:
            self._is_to_stop = False
            self._processes.send_all(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._processes.send_all(signal.SIGCONT)

    def start(self, seats: Sequence[int]) -> None:
        """Start the workers of some seats. Raises ``ConfigurationError`` if one cannot be started."""
        for rank in seats:
            self._processes.placement.queue(rank)
        self._start_waiting(time.monotonic())

    def _start_waiting(self, now: float) -> None:
        """Start the workers that have a place, as many as can be started at the same time."""
        placement, workers = self._processes.placement, self._processes.workers
        if self._escalation.stopping:
            placement.waiting.clear()
        failed: list[tuple[int, ConfigurationError]] = []
        for rank in placement.take_startable():
            if rank in workers:
                workers[rank].finish(now)
            try:
                workers[rank] = self._policy.start(rank, now)
            except ConfigurationError as error:
                failed.append((rank, error))
        for rank, reason in failed:
            if not self._policy.start_failed(rank, reason):
                self._fails_by(workers[rank], now)

    def _fails_by(self, worker: Worker, now: float) -> None:
        """Let the run end, because a worker has failed."""
        self._first_to_end = worker
        self._escalation.failed(now)

    def watch(self, timeout_s: float | None) -> None:
        """Return when all workers have ended and their output is read, or when killed workers do not end."""
        give_up_at = float("inf")
        while not self._all_done() and time.monotonic() < give_up_at:
            self._processes.read(_TICK_S)
            self._stop_if_asked()
            now = time.monotonic()
            self._look_for_ends(now)
            self._policy.take_turn(now)
            self._start_waiting(now)
            if self._live is not None:
                self._live.write()
            numbers, self._signals = self._signals, []
            for number in numbers:
                self._interrupted_by = self._interrupted_by or number
                self._escalation.interrupted(number, now)
            if timeout_s is not None and not self._timed_out and now - self._started_at >= timeout_s:
                self._timed_out = True
                self._escalation.interrupted(signal.SIGTERM, now)
            due = self._escalation.due(now)
            if due is not None:
                self._processes.send_all(due)
                give_up_at = now + _KILL_S if due is signal.SIGKILL else give_up_at

    def _all_done(self) -> bool:
        if not self._processes.have_ended or (self._policy.is_pending and not self._escalation.stopping):
            return False
        return not self._processes.is_output_open or time.monotonic() - self._last_end > _DRAIN_S

    def _look_for_ends(self, now: float) -> None:
        ended = self._processes.take_ended(now)
        if not ended:
            return
        self._last_end = now
        failed = self._policy.ended(ended, now)
        if failed and not self._escalation.stopping:
            # Of workers that ended at the same time the killed one is the cause: the others noticed its death.
            self._fails_by(min(failed, key=lambda worker: (not worker.ended_by_signal, worker.rank)), now)
        if self._processes.placement.serving and not self._processes.num_running and not self._policy.is_pending:
            # Servers end by themselves when the workers have closed their group, if these have ever formed it.
            self._escalation.failed(now + _SERVERS_S)

    def result(self) -> RunResult:
        """Return the result of the run, after :meth:`Processes.finish`."""
        results = {rank: self._processes.result_of(each) for rank, each in sorted(self._processes.workers.items())}
        ended = self._first_to_end
        first = find_first_failure(results[ended.rank], tuple(results.values())) if ended is not None else None
        if self._interrupted_by:
            code = 128 + self._interrupted_by
        elif self._timed_out:
            code = 124
        else:
            code = first.exit_code if first else 0
        output, errors = self._processes.sink.captured()
        return RunResult(
            exit_code=code,
            workers=tuple(results.values()),
            first_failure=first,
            interrupted_by=self._interrupted_by.name if self._interrupted_by else None,
            timed_out=self._timed_out,
            seconds=round(self._last_end - self._started_at, 3),
            lost=tuple(self._processes.sink.losses()),
            output=output,
            errors=errors,
        )


@contextlib.contextmanager
def signals_to(supervisor: Supervisor) -> Iterator[None]:
    """Let the supervisor handle the signals that end a process; ignored signals stay ignored (``nohup``)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*_FORWARDED, *_PASSED_ON, signal.SIGTSTP)}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, supervisor.on_signal)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
