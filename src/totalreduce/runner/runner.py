"""The threads that drive an engine over a transport. No other file of this package starts a thread.

There are two threads, as in the Total Reduce design. The *communication thread* moves messages. The *computation
thread* carries out the computation list. With fewer than two cores per rank the second thread would only take turns
with the first one, so the communication thread then adds by itself, while the segment is still in its cache (measured:
2 ranks on 2 cores, 64 MiB: 20 ms against 26 ms). A caller that is blocked moves messages itself (``turns``).

The thread that moves messages holds ``_moving``, but not while it waits for the network. Calls into the engine hold the
lock of the ``EngineEndpoint``.

A signal handler may run in the main thread between any two of its steps. If it raises an exception, as that of Ctrl-C
does, while the thread is in a function of the runner, the thread leaves with the exception and the group fails: a
message or a change of the engine may be cut in two, so no thread may move anything after that (``_failure`` is set
before ``_moving`` is free again). The communication thread ends the connections at once, from which the other ranks
learn it. A handler that closes the group does so in another thread (``carry_out_apart``), because the thread that it
has interrupted may hold the locks.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar, TypeVarTuple, Unpack, final

from totalreduce.engine.any_receives import AnyReceive
from totalreduce.engine.engine import Engine
from totalreduce.engine.operation import Operation, State
from totalreduce.engine.stall import StallReport
from totalreduce.engine.submission import Submission
from totalreduce.fastlane.lane import LaneCarriage
from totalreduce.foundation.errors import (
    ConfigurationError,
    DeadlineExceededError,
    GroupClosed,
    PeerLost,
    TotalReduceError,
)
from totalreduce.foundation.forking import HomeProcess, let_go_in_children
from totalreduce.foundation.header import Frame, Header
from totalreduce.relay.relay import Relay, RelaySettings
from totalreduce.runner.carriers import make_carriers
from totalreduce.runner.endpoint import EngineEndpoint, complete_owners
from totalreduce.runner.gate import Gate
from totalreduce.runner.handle import End, Handle
from totalreduce.runner.meter import Meter
from totalreduce.runner.turns import Turns
from totalreduce.transports.base import Transport
from totalreduce.transports.relay import RelayPort

__all__ = ["ComputeMode", "Runner"]

_log = logging.getLogger(__name__)

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")
ComputeMode = Literal["auto", "thread", "inline"]

#: The longest time between two calls of ``Engine.tick``, in seconds.
_TICK_S = 0.15
#: A round may call it so much earlier. Transports look for silent peers every 0.125 s (half of
#: ``TcpConfig.heartbeat_s``): both then fall into the same round, so that an idle rank wakes half as often.
_TICK_EARLY_S = 0.03
#: How long ``let_messages_leave`` waits at most, in seconds: Python's interval for switching threads.
_LEAVE_S = 0.005
#: How long a call that raises an error waits at most, in seconds: until other ranks have been told of the error, or
#: until the connections have ended on which messages are half-way out.
_TELLING_S = 0.5


@final
class Runner:
    """An engine, a transport, and the threads that connect them."""

    def __init__(self, engine: Engine, transport: Transport, *, compute: ComputeMode = "auto") -> None:
        """Start the threads.

        ``compute``: whether there is a computation thread ("thread"), or the thread that moves messages also adds
        ("inline"). "auto" decides by the number of cores.
        """
        self.engine, self.transport = engine, transport
        self.home = HomeProcess(f"the group of rank {engine.rank}")
        cores = len(os.sched_getaffinity(0))
        with_thread = compute == "thread" or (compute == "auto" and cores >= 2 * transport.ranks_per_host)
        with_thread = with_thread and engine.members.world_size > 1
        self._endpoint = EngineEndpoint(engine, make_carriers(transport), inline=not with_thread)
        self._lock = self._endpoint.lock
        self._turns = Turns()
        self._moving = threading.Lock()
        self._stop = False
        self.gate = Gate()
        self._sleepers = 0  #: Threads that wait for the network, or are about to: they must be woken.
        self._next_tick = 0.0
        self.meter = Meter()
        self._failure: BaseException | None = None
        #: Whether this rank is to close the group. Then an exception that ends it is no error.
        self._is_closing = False
        #: Whether the transport is open. It is closed even if a driver does not come back in time.
        self._is_open = True
        self._deadline = 0.0  #: When the threads end after ``close``.
        engine.outbox.bulk_peers = frozenset(transport.bulk_peers)
        engine.telling.connected = transport.connected_peers
        transport.attach(self._endpoint)
        if transport.boards is not None:
            transport.boards.watch(self._endpoint.has_changed)
        engine.relaying.relay = transport.use_relay(functools.partial(_make_relay, engine, self._endpoint))
        let_go_in_children(transport)
        name = f"totalreduce-{engine.rank}"
        self._threads = [threading.Thread(target=self._communicate, name=f"{name}-comm", daemon=True)]
        if with_thread:
            self._threads.append(threading.Thread(target=self._compute, name=f"{name}-compute", daemon=True))
        for thread in self._threads:
            thread.start()

    # -------------------------------------------------------------------------------------------------- application

    def submit(self, submission: Submission, end: End | None = None) -> Handle:
        """Submit an operation; return its handle at once.

        Args:
            submission: The operation.
            end: Is called once at its end (``Handle``), and not if this method raises an exception.

        Raises what ``Engine.submit`` does. The caller has called ``home.check()``.
        """
        if self.gate.reason:
            self.gate.check()
        endpoint = self._endpoint
        try:
            carriage = self.engine.carrying.find(submission)
            if isinstance(carriage, LaneCarriage):
                now = time.monotonic()
                begun = self._moving_alone(endpoint.begin, submission, carriage, end)
                if begun is endpoint.ended:
                    self._turns.rest(now, resting=now < self._next_tick)
                    try:
                        if end is not None:
                            end(well=True)
                    except Exception as failure:
                        begun = Handle()
                        begun.complete(failure)
                    return begun
                if begun is not None:
                    self._look_again(now, wake=self._sleepers > 0 and carriage.has_begun)
                    return begun
            handle = Handle(end)
            with self._lock:
                self._check_alive()
                now = time.monotonic()
                endpoint.adopt(now)
                operation = handle.operation = self.engine.submit(submission, now, owner=handle)
                if submission.name is None and not submission.once:
                    endpoint.callers.note(operation.key[0])
                wake = self._wakes_after_submission()
            if operation.carriage is not None and self._moving_alone(endpoint.announce, operation):
                wake = wake and not operation.finished and operation.state is not State.WAITING
            endpoint.complete_ended()
            if not handle.done:
                self._look_again(now, wake=wake)
        except BaseException as failure:
            self._before_raising(failure)
            raise
        return handle

    def _before_raising(self, failure: BaseException) -> None:
        """Do what must be done before an exception leaves a call of the program.

        An exception from outside of this library, above all Ctrl-C, may have cut a message or a change of the engine in
        two. No other thread can go on with that, so the group ends.
        """
        if isinstance(failure, PeerLost):
            self._await_telling()
        elif not isinstance(failure, TotalReduceError) or self._failure is failure:
            self._fail(failure)

    def _await_telling(self) -> None:
        """Wait until the frames that tell other ranks of an error have left (``engine.telling``).

        Another thread moves them. If a callback comes here in that very thread, it waits in vain, for a short time.
        """
        told = Handle()
        with self._lock:
            self.engine.telling.then(lambda _: told.complete(None), time.monotonic())
        if not told.done:
            self._look_again(time.monotonic(), wake=self._sleepers > 0)
            told.wait(_TELLING_S)

    def _moving_alone(self, move: Callable[[Unpack[_Arguments]], _Result], *arguments: *_Arguments) -> _Result | None:
        """Call a function that moves operations of carriers; ``None`` if another thread moves messages now.

        After an exception in the function nothing moves any more.
        """
        # Not ``acquire(blocking=False)``: Ctrl-C between the call and ``try`` would leave the lock held for ever.
        if self._moving.locked():
            return None
        with self._moving:
            try:
                return None if self._failure is not None or self._stop else move(*arguments)
            except BaseException as failure:
                self._failure = failure
                raise

    def receive_any(self, receive: AnyReceive) -> None:
        """Receive from the rank that sends first (see ``Engine.receive_any``).

        The owner of the receive is a handle, which gets its operation when a message has come.
        """
        self.home.check()
        self.gate.check()
        try:
            with self._lock:
                self._check_alive()
                now = time.monotonic()
                self._endpoint.adopt(now)
                self.engine.receive_any(receive, now)
                wake = self._wakes_after_submission()
            self._endpoint.complete_ended()
            self._look_again(now, wake=wake)
        except BaseException as failure:
            self._before_raising(failure)
            raise

    def act(self, action: Callable[[float], bool]) -> None:
        """Call ``action(now)`` under the lock, for a part of the group that lives beside the engine.

        The action returns whether there is something to send now, or something to do sooner than before.
        """
        self.home.check()
        try:
            with self._lock:
                self._check_alive()
                now = time.monotonic()
                if not action(now):
                    return
                wake = self._sleepers > 0
            self._look_again(now, wake=wake)
        except BaseException as failure:
            self._before_raising(failure)
            raise

    def let_messages_leave(self) -> None:
        """Wait until the thread that moves messages at the moment has moved those that are there, for a short time.

        A thread that was woken by a message waits here before it computes for long: otherwise it gets Python's
        interpreter lock as soon as the other thread wakes a peer, and the other messages leave only afterwards.
        """
        if self._moving.acquire(timeout=_LEAVE_S):
            self._moving.release()

    def _look_again(self, now: float, *, wake: bool) -> None:
        """Have a thread send what was submitted. ``wake``: a thread waits for the network."""
        if wake:
            self.transport.wake()
        elif self._turns.parked:
            self._turns.unpark_for_submission(now)

    def _wakes_after_submission(self) -> bool:
        """Return whether a thread waits for the network, under the lock; have additions carried out that can begin."""
        if self.engine.computations.peek() is not None:  # of a floating message that waited for this operation
            self._endpoint.work.notify()
        return self._sleepers > 0

    def wait(
        self, handle: Handle, timeout_s: float, *, explain: Callable[[float], tuple[str, str]] | None = None
    ) -> None:
        """Wait for an operation, and let its messages overtake those of operations that no caller waits for.

        Raises ``DeadlineExceededError``.

        Args:
            handle: The handle of the operation, or of something else whose messages move through this runner.
            timeout_s: The deadline, in seconds.
            explain: For a handle without an operation: returns its name and why it is pending. Called with the time,
                under the lock.
        """
        if handle.done:
            return
        self.home.check()
        begin, begun, endpoint = time.monotonic(), handle.begun, self._endpoint
        try:
            if begun is not None:
                if self._turns.driver is None and self._moving_alone(endpoint.hurry_unlisted, begun):
                    self._turns.rest(begin, resting=begin < self._next_tick)
                    handle.complete(None)
                    self._waited(time.monotonic() - begin)
                    return
                with self._lock:
                    endpoint.adopt(begin)
            deadline = begin + timeout_s
            # The peers are asked late enough not to disturb them, and early enough for answers before the deadline.
            ask_at = max(begin + 0.5 * timeout_s, deadline - 1.0)
            if not self._drive(handle, begin, deadline, ask_at):
                self._look_on(handle, deadline, ask_at)
        except BaseException as failure:
            self._before_raising(failure)
            raise
        now = time.monotonic()
        with self._lock:
            operation = handle.operation
            self._waited(now - begin)
            if operation is not None:
                for observer in self.engine.observers:
                    observer.waited(operation.name, operation.key[1], begin, now)
            if handle.wait(0.0):
                return
            if explain is not None:
                name, explanation = explain(now)
            elif operation is not None:
                name, explanation = operation.name, self.engine.stalls.explain(operation, now)
                advice = endpoint.callers.advice(operation.key[0])
                explanation += f". {advice}" if advice else ""
            else:
                name, explanation = handle.waits_for, "no rank has sent one"
        raise DeadlineExceededError(f"rank {self.engine.rank} waited {timeout_s:g} s for {name!r}: {explanation}")

    def _waited(self, seconds: float) -> None:
        self.engine.counters.waited_s += seconds
        self.meter.blocked(seconds)

    def complete(self, handles: Iterable[Handle], error: BaseException | None) -> None:
        """Complete handles of something else than the engine's operations, and wake the threads that wait for them."""
        for handle in handles:
            try:
                handle.complete(error)
            except Exception:  # of a callback: the other handles must be completed all the same
                _log.exception("rank %d: a callback of a finished operation failed", self.engine.rank)
        if self._turns.is_driven():
            self.transport.wake()

    def close(self, timeout_s: float, reason: str = "") -> None:
        """Fail what is pending, tell the peers, end the threads and the connections, within about ``timeout_s``.

        In a forked child this does nothing.
        """
        if not self.home.is_here:
            return
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._endpoint.adopt(time.monotonic())
            self.engine.close(time.monotonic(), tell=self.transport.connected_peers(), reason=reason)
            ended = self._endpoint.take_ended()
            self._deadline = deadline
            self._stop = True  # last: the communication thread looks at both without the lock
            self._endpoint.work.notify_all()
        complete_owners(ended)
        self._turns.unpark()
        self.transport.wake()
        for thread in tuple(self._threads):
            thread.join(max(0.1, deadline - time.monotonic()) + 1.0)

    def carry_out_apart(self, closing: Callable[[], None]) -> None:
        """Call a function that closes the group in a thread of its own, for which the end of the interpreter waits."""

        def carry_out() -> None:
            try:
                closing()
            except BaseException:
                _log.exception("rank %d: closing the group has failed", self.engine.rank)

        self._is_closing = True
        threading.Thread(target=carry_out, name=f"totalreduce-{self.engine.rank}-close").start()

    def join_at_close(self, thread: threading.Thread) -> None:
        """Have ``close`` wait for a thread that was started, and that ends when the engine is closed.

        A thread that is still in a function of torch when the interpreter ends aborts the process.
        """
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]

    def locked(self) -> threading.Lock:
        """Return the lock under which the engine may be read. Raises ``GroupClosed``: in a forked child."""
        self.home.check()
        return self._lock

    # ------------------------------------------------------------------------------------------------------ threads

    def _communicate(self) -> None:
        for part in (self._move, self._hang_up, self._complete_leaving):  # each also if one before it fails
            try:
                part()
            except BaseException as failure:
                self._fail(failure)

    def _move(self) -> None:
        """Move messages while no caller drives, until everything has left after ``close``, or something fails."""
        while not self._stop:
            if self._turns.is_driven() or self._turns.resting:
                self._turns.park()
            else:
                self._round(_TICK_S)
                if self._turns.is_driven():
                    self.transport.wake()  # an event that ended this thread's wait is for the driver now
        while self._failure is None and time.monotonic() < self._deadline:
            if not self._turns.is_driven() and self._drained():
                return
            self._round(0.02)

    def _hang_up(self) -> None:
        """End the connections when the driver has left. It will leave soon, but is waited for only a short time."""
        patience = time.monotonic() + 2 * _TICK_S
        while self._turns.is_driven() and time.monotonic() < patience:
            self._turns.pause()
        with self._moving:
            self._is_open = False
            self.transport.close(max(0.0, self._deadline - time.monotonic()))

    def _drive(self, handle: Handle, begin: float, deadline: float, ask_at: float) -> bool:
        """Move messages in the caller's thread until the operation has ended.

        Returns ``False`` if another caller drives already.
        """
        me, turns = object(), self._turns
        try:
            with self._lock:
                if turns.driver is None and not self._stop:
                    turns.driver = me
                if handle.operation is not None:
                    self.engine.promote(handle.operation, begin)
            if turns.driver is not me:
                return False
            if begin < self._next_tick:  # otherwise the engine and the transport want a round
                self._hurry(handle)
            if self._sleepers and not handle.done:
                self.transport.wake()  # or the communication thread would get the network's events
            while not handle.done and not self._stop:
                now = time.monotonic()
                if now >= deadline:
                    break
                if now >= ask_at:
                    ask_at = deadline
                    self._inquire(handle)
                self._round(min(_TICK_S, ask_at - now), handle)
            with self._lock:
                resting = self.engine.table.num_active == 0
                turns.leave(time.monotonic(), resting=resting)
            if not resting:
                turns.unpark()
        except BaseException as failure:
            if turns.driver is me:
                # In this order: no thread becomes the next driver, and the communication thread does not wait for this.
                self._failure, self._stop, turns.driver = failure, True, None
            raise
        if self._stop:
            handle.wait(max(0.0, deadline - time.monotonic()))
        return True

    def _hurry(self, handle: Handle) -> None:
        """Try to end an operation that a carrier has by looking for the other ranks for a moment."""
        operation = handle.operation
        if operation is None or operation.has_messages:
            return
        with self._moving:
            if self._failure is None and self._is_open:
                self._endpoint.advance(operation)
        self._endpoint.complete_ended()

    def _look_on(self, handle: Handle, deadline: float, ask_at: float) -> None:
        """Wait while another thread moves the messages."""
        if self._sleepers:
            self.transport.wake()
        if not handle.wait(max(0.0, ask_at - time.monotonic())):
            self._inquire(handle)
            handle.wait(max(0.0, deadline - time.monotonic()))

    def _inquire(self, handle: Handle) -> None:
        with self._lock:
            operation = handle.operation
            if operation is not None and not operation.finished:
                self.engine.stalls.inquire(operation, time.monotonic())
        self.transport.wake()

    def _round(self, timeout_s: float, handle: Handle | None = None) -> None:
        """Move and add what is there. If that was nothing, wait for the network, unless ``handle`` has ended."""
        with self._lock:
            now = time.monotonic()
            if now >= self._next_tick - _TICK_EARLY_S:
                self.engine.tick(now)
                self._next_tick = now + _TICK_S
            channels_due = self.engine.channels.next_due()
            self._next_tick = min(self._next_tick, math.inf if channels_due is None else channels_due)
            timeout_s = min(timeout_s, max(0.0, self._next_tick - now))
            reports = self.engine.reports.pop()
            self._sleepers += 1  # before looking for work, so that a thread that adds some wakes this one
        for report in reports:
            advice = self._endpoint.callers.advice(report.op_id) if isinstance(report, StallReport) else ""
            _log.warning("rank %d: stalled: %s", self.engine.rank, f"{report}. {advice}" if advice else report)
        progress = False
        with self._moving:
            try:
                if self._failure is None and self._is_open:
                    if self._endpoint.unlisted:
                        with self._lock:
                            self._endpoint.adopt(time.monotonic())
                    self._endpoint.advance_all(None if handle is None else handle.operation)
                    self._endpoint.compute()
                    progress = self.transport.progress()
            except BaseException as failure:
                self._failure = failure  # before another thread can move the rest of a message that was cut in two
                raise
        self._endpoint.complete_ended()
        if self._endpoint.leaving:
            self._keep_rests()
        if not progress and not (handle is not None and handle.done):
            try:
                self.transport.wait(timeout_s, eager=handle is not None)
            except (OSError, ValueError):  # of what is closed
                if self._is_open:
                    raise
        with self._lock:
            self._sleepers -= 1

    def _keep_rests(self) -> None:
        """Complete operations that have failed while messages were half-way out, when their memory is not read."""
        released: list[Operation] = []
        with self._moving:
            try:
                if self._failure is None and self._is_open:
                    released = self._endpoint.keep_rests(self.transport)
            except BaseException as failure:
                self._failure = failure
                raise
        complete_owners(released, self._endpoint.callers)

    def _complete_leaving(self) -> None:
        """Complete the operations in ``leaving``: the connections have ended, so nothing reads their memory."""
        with self._lock:
            leaving, self._endpoint.leaving = self._endpoint.leaving, []
        for operation, _ in leaving:
            operation.error = self._failure or operation.error
        complete_owners([operation for operation, _ in leaving], self._endpoint.callers)

    def _drained(self) -> bool:
        with self._lock:
            outbox = self.engine.outbox
            return not outbox.ready and not outbox.bulk_ready and self.transport.idle()

    def _compute(self) -> None:
        try:
            while True:
                with self._endpoint.work:
                    computation = self.engine.computations.take()
                    while computation is None:
                        if self._stop:
                            return
                        self._endpoint.work.wait(_TICK_S)
                        computation = self.engine.computations.take()
                self._endpoint.carry_out(computation)
                if self._sleepers:
                    self.transport.wake()
        except BaseException as failure:
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        """End everything: here at once, and for the peers by the end of the connections."""
        if self._failure is None:
            self._failure = failure
        self._stop = True
        try:
            with self._lock:
                self._endpoint.adopt(time.monotonic())
                self.engine.close(time.monotonic(), tell=())
                ended = self._endpoint.take_ended()
            for operation in ended:
                operation.owner.complete(failure)
        finally:
            self._turns.unpark()
            self.transport.wake()
            level = logging.DEBUG if self._is_closing else logging.ERROR
            # No trace of Ctrl-C or of ``sys.exit`` in a signal handler: the program itself gets these.
            trace = failure if isinstance(failure, Exception) else None
            _log.log(level, "rank %d: %r has ended the communication", self.engine.rank, failure, exc_info=trace)
        if not self._is_open:
            self._complete_leaving()
        elif threading.current_thread() is not self._threads[0]:  # the communication thread: it completes them
            for operation, _ in tuple(self._endpoint.leaving):
                operation.owner.wait(_TELLING_S)

    def _check_alive(self) -> None:
        if isinstance(self._failure, ConfigurationError):  # too few descriptors, for instance: the user can mend it
            raise ConfigurationError(str(self._failure)) from self._failure
        if self._failure is not None:
            raise GroupClosed(f"the communication thread has failed: {self._failure!r}") from self._failure


def _make_relay(engine: Engine, endpoint: EngineEndpoint, port: RelayPort) -> Relay:
    config = engine.config
    prologue = Header(Frame.DATA, engine.outbox.epoch).pack()[:8]
    settings = RelaySettings(prologue, config.bulk_bytes, config.scheduling == "fifo", config.starvation_limit)
    return Relay(port, settings, endpoint)
