"""The thread that selects from buckets and runs their exchanges during backward.

Exchanges go before selections: the thread continues with a reply before it selects from another bucket. When a caller
waits for all jobs and there is nothing to compute, this thread moves messages itself, which saves a wake-up per action.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, final

from totalreduce.foundation.errors import GroupClosed
from totalreduce.foundation.forking import HomeProcess
from totalreduce.sparse.actions import Action, Allgather, Carried, Carrier

__all__ = ["ExchangeWorker", "Job"]

#: Seconds for which this thread moves messages of one action before it looks for other work.
_PUSH_S = 0.02


@final
class Job:
    """The selection (``prepare``) and the exchange of one bucket in one round."""

    def __init__(
        self,
        channel: int,
        prepare: Callable[[], None],
        exchange: Callable[[], Generator[Action, Any, Any]],
        priority: int,
    ) -> None:
        self.channel, self.prepare, self.exchange, self.priority = channel, prepare, exchange, priority
        self.result: Future[Any] = Future()  #: The result of the exchange.
        self.running: Generator[Action, Any, Any] | None = None
        self.under_way: Carried | None = None
        self.steps = 0
        self.span = (0.0, 0.0)  #: The times at which the exchange began and ended (``time.monotonic``).


@final
class ExchangeWorker:
    """Runs jobs in one thread of its own, as many at a time as there are.

    Args:
        carrier: Carries out their actions.
        in_order: Whether all actions of one job must begin before those of the next, because a library needs the same
            order on all ranks.
    """

    def __init__(self, carrier: Carrier, *, in_order: bool = False) -> None:
        self._carrier, self._in_order = carrier, in_order
        self._home = HomeProcess("the sparse exchange")
        self._events: queue.PriorityQueue[tuple[int, int, Job | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._hurried = False
        self._waiting: dict[int, Job] = {}

    def start(self, job: Job) -> None:
        """Run a job; return at once. Raises ``GroupClosed``: the worker was closed, or this is a forked child."""
        self._home.check()
        with self._lock:
            if self._closed:
                raise GroupClosed("the sparse exchange was closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="totalreduce-sparse", daemon=True)
                self._thread.start()
        self._hurried = False
        self._put(1, job)

    def hurry(self) -> None:
        """Have the thread move messages itself: a caller waits, and starts no job until the present ones have ended."""
        self._hurried = True

    def close(self) -> None:
        """End the thread. Jobs that have not ended fail with ``GroupClosed``; harmless when called twice.

        In a forked child this does nothing: the thread is the parent's.
        """
        if not self._home.is_here:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
        self._put(2, None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _put(self, urgency: int, job: Job | None) -> None:
        self._events.put((urgency, next(self._numbers), job))

    def _run(self) -> None:
        while True:
            while self._hurried and self._waiting and self._events.empty():
                first = self._waiting[min(self._waiting)].under_way
                assert first is not None
                first.push(_PUSH_S)
            _, _, job = self._events.get()
            if job is None:
                return
            self._waiting.pop(job.channel, None)
            try:
                self._advance(job)
            except BaseException as error:
                job.running = None
                job.result.set_exception(error)
            del job  # else a bucket's memory would be kept until the next job comes

    def _advance(self, job: Job) -> None:
        reply = None
        if job.running is None:
            job.prepare()
            job.running = job.exchange()
            job.span = (time.monotonic(), 0.0)
        else:
            assert job.under_way is not None
            reply = job.under_way.reply()
        while True:
            try:
                action = job.running.send(reply)
            except StopIteration as stop:
                job.span = (job.span[0], time.monotonic())
                job.under_way = None  # frees the memory that it has received
                job.result.set_result(stop.value)
                return
            job.under_way = self._carrier.start(action, channel=job.channel, step=job.steps, priority=job.priority)
            job.steps += 1
            if isinstance(action, Allgather) and action.meanwhile is not None:
                job.under_way.push(0.0)  # else the action might wait for this thread, which has moved the last messages
                action.meanwhile()
            if not self._in_order:
                self._waiting[job.channel] = job
                job.under_way.on_done(lambda: self._put(0, job))
                return
            reply = job.under_way.reply()
