"""The processes of a run, workers and spares: their output is read, and their ends are noticed."""

from __future__ import annotations

import os
import selectors
import signal
import time
from typing import IO, final

from totalreduce.launch.ending import failure_of
from totalreduce.launch.output import OutputSink
from totalreduce.launch.placement import Placement
from totalreduce.launch.spares import Spare, Spares
from totalreduce.launch.workers import Worker, WorkerResult

__all__ = ["Processes"]

_READ_BYTES = 64 * 1024


@final
class Processes:
    """The processes that a run has started."""

    def __init__(self, placement: Placement, sink: OutputSink) -> None:
        """Begin without any process."""
        self.placement = placement  #: Starts them on hosts.
        self.sink = sink  #: Takes the output of the workers.
        self.workers: dict[int, Worker] = {}  #: By rank: the worker that was started last.
        self.spares = Spares()  #: The spares, whose output is kept until they have a seat.
        self._selector = selectors.DefaultSelector()
        self._pipes: dict[IO[bytes], tuple[IO[bytes], Worker, bool]] = {}

    @property
    def num_running(self) -> int:
        """The number of workers that run or are just being started; without those that only serve."""
        running = {rank for rank, each in self.workers.items() if not each.ended} | set(self.placement.waiting)
        return len(running - set(self.placement.serving))

    @property
    def have_ended(self) -> bool:
        """Whether all workers have ended, and none is just being started."""
        return not self.placement.waiting and all(worker.ended for worker in self.workers.values())

    @property
    def is_output_open(self) -> bool:
        """Whether output can still come."""
        return bool(self._pipes)

    def start(self, rank: int, incarnation: int | None) -> Worker:
        """Start the worker of a seat that has a place (``Placement.start``)."""
        return self._watched(self.placement.start(rank, incarnation, self.sink.targets[rank]))

    def start_spare(self, host: str, *, serves: bool) -> None:
        """Start a spare on a host, for a seat that serves or for another one (``Placement.start_spare``)."""
        spare = self.placement.start_spare(host, serves=serves)
        self.spares.waiting.append(spare)
        self._watched(spare.worker)

    def seat_spare(self, rank: int, incarnation: int) -> Worker | None:
        """Give the seat of a rank to a spare of its host, which is returned; ``None`` if there is none."""
        place = self.placement.pool.place_of(rank)
        spare = None if place is None else self.spares.take(place.host, serves=rank in self.placement.serving)
        if spare is None:
            return None
        spare.seat(rank, self.placement.environment(rank, incarnation))
        for is_error, data in enumerate(spare.held):
            self.sink.feed(rank, bytes(data), is_error=bool(is_error))
        return spare.worker

    def _watched(self, worker: Worker) -> Worker:
        """Return a worker whose output and end are noticed from now on."""
        for is_error, pipe in enumerate((worker.process.stdout, worker.process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                source = (pipe, worker, bool(is_error))
                self._pipes[pipe] = source
                self._selector.register(pipe, selectors.EVENT_READ, source)
        if worker.exit_descriptor is not None:
            self._selector.register(worker.exit_descriptor, selectors.EVENT_READ)
        return worker

    def watch(self, file: IO[bytes]) -> None:
        """Let :meth:`read` return when a file is readable."""
        self._selector.register(file, selectors.EVENT_READ)

    def forget(self, file: IO[bytes]) -> None:
        """Watch a file no more."""
        self._selector.unregister(file)

    def take_ended(self, now: float) -> list[Worker]:
        """Return the workers that have ended since the last call, whose output was read."""
        ended = [worker for worker in self.workers.values() if worker.poll(now)]
        for worker in ended:
            self._read_rest(worker)
            if worker.exit_descriptor is not None:
                self._selector.unregister(worker.exit_descriptor)
        return ended

    def take_ended_spares(self, now: float) -> list[Spare]:
        """Return the spares that have ended without a seat since the last call, whose output was read."""
        ended = self.spares.take_ended(now)
        for spare in ended:
            self._read_rest(spare.worker)
            self.end_spare(spare, now)
        return ended

    def end_spare(self, spare: Spare, now: float) -> None:
        """End a spare, and do without its output."""
        if spare.worker.exit_descriptor is not None:
            self._selector.unregister(spare.worker.exit_descriptor)
        for pipe in (spare.worker.process.stdout, spare.worker.process.stderr):
            if pipe in self._pipes:
                self._close_pipe(pipe)
        spare.worker.finish(now)

    def result_of(self, worker: Worker) -> WorkerResult:
        """Return the result of a worker that has ended, with what its standard error says."""
        failure = failure_of(self.sink.last_errors(worker.rank))
        return worker.result(failure.lines, failure.error, failure.traceback)

    def send_all(self, number: signal.Signals) -> None:
        """Send a signal to the workers that run."""
        for worker in self.workers.values():
            if not worker.ended:
                worker.send(number)

    def read(self, timeout_s: float) -> None:
        """Pass output on when some comes, or the end of a worker is noticed, or the time is over."""
        begin = time.monotonic()
        if self.sink.streams.is_pending:
            self.sink.streams.wait(timeout_s, self._selector.fileno())
            timeout_s = 0.0
        is_held = self.sink.streams.is_full
        # A worker's end ends this wait through its pidfd, so the ends of workers are noticed in their order.
        for key, _ in self._selector.select(timeout_s):
            if key.data is not None and not is_held and not self._read_pipe(*key.data):
                self._close_pipe(key.data[0])
        if not is_held:
            # What came since the begin may go on in the pipe, where this turn has not read everything.
            self.sink.overdue(begin)

    def _read_pipe(self, pipe: IO[bytes], worker: Worker, is_error: bool) -> bool:
        """Pass on the bytes in a pipe; returns false at the end of the stream."""
        try:
            data = os.read(pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return True
        shown = worker.shown(data, is_error=is_error)
        spare = self.spares.of(worker)
        if spare is not None:
            spare.hold(shown, is_error=is_error)
        else:
            self.sink.feed(worker.rank, shown, is_error=is_error)
        return bool(data)

    def _read_rest(self, worker: Worker) -> None:
        """Read what a worker that has ended has written, which says whether it was started, or why not."""
        for source in [each for each in self._pipes.values() if each[1] is worker]:
            self._read_pipe(*source)

    def _close_pipe(self, pipe: IO[bytes]) -> None:
        self._selector.unregister(pipe)
        del self._pipes[pipe]
        pipe.close()

    def finish(self) -> None:
        """Kill the processes that still run, reap all, read and close the pipes."""
        now = time.monotonic()
        for worker in self.workers.values():
            if worker.exit_descriptor is not None and not worker.ended:
                self._selector.unregister(worker.exit_descriptor)
            worker.finish(now)
        for spare in self.spares.waiting:
            self.end_spare(spare, now)
        for source in list(self._pipes.values()):
            self._read_pipe(*source)
            self._close_pipe(source[0])
        self._selector.close()
        self.sink.close()
