"""The one file with threads: drives an engine over a transport.

Two threads, as in the Total Reduce design. The *communication thread* moves messages. The *computation thread* carries
out the computation list. Where there are fewer than two cores per rank the second thread would only take turns
with the first, so the communication thread then adds by itself, while the segment is still in its cache (measured: 2
ranks on 2 cores, 64 MiB: 20 ms against 26 ms).

A caller who blocks in ``wait`` has nothing better to do, so he *drives*: he moves messages himself, and the
communication thread steps aside. A blocking operation then costs no change of threads at all, where waking one is
dearer than sending a small message.

Locking: every call into the engine holds ``_lock``, for microseconds; who moves messages holds ``_moving``, but not
while waiting for the network. Bytes are moved and added outside ``_lock``, and the kernel, NumPy and torch release the
GIL while they do.

Ctrl-C may strike the main thread between any two lines. Whoever moves messages then leaves with the exception, and the
group fails: a message may be cut in two, so nobody moves anything after that (``_failure`` is set before ``_moving`` is
free again), and the communication thread ends the connections at once, which is how the other ranks learn of it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, final

import numpy as np

from totalreduce import kernels
from totalreduce.engine.any_receives import AnyReceive
from totalreduce.engine.computations import Computation
from totalreduce.engine.engine import Engine
from totalreduce.engine.operation import Operation
from totalreduce.engine.outbox import OutgoingMessage
from totalreduce.engine.reception import Delivery
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, GroupClosed
from totalreduce.foundation.forking import HomeProcess, let_go_in_children
from totalreduce.foundation.header import Header
from totalreduce.foundation.types import Signature
from totalreduce.schedules.actions import Mode
from totalreduce.transports.base import Lease, Outgoing, Transport

__all__ = ["ComputeMode", "Handle", "Runner", "carry_out"]

_log = logging.getLogger(__name__)

ComputeMode = Literal["auto", "thread", "inline"]

#: Below this a hand-over to the computation thread costs more than the addition.
_INLINE_BYTES = 64 * 1024
_TICK_S = 0.1
#: How long the communication thread leaves the network alone while somebody drives, and at most after he has left with
#: nothing in flight. Data waits in the kernel meanwhile.
_PARKED_S = 0.01
#: A submission so soon after a driver has left is taken for the next blocking operation: the submitter will drive.
_NEXT_BLOCKING_S = 0.001


@final
class Handle:
    """A submitted operation as the submitter sees it.

    Attributes:
        done: Whether it has finished, well or not.
        error: Why it failed.
        operation: What the engine knows of it; ``None`` for a receive from anybody, until somebody has sent.
    """

    __slots__ = ("_callbacks", "_finish", "_gate", "_release", "done", "error", "operation")

    def __init__(self, finish: Callable[[], None] | None = None, release: Callable[[], None] | None = None) -> None:
        """What runs when the operation has ended, before anybody is told, in the thread that finds that.

        ``finish`` runs if the operation went well; an error of it becomes the operation's. ``release`` runs always.
        """
        self.done = False
        self.error: BaseException | None = None
        self.operation: Operation | None = None
        self._finish, self._release = finish, release
        self._callbacks: list[Callable[[], None]] = []
        # Locked until the operation is done: one lock, where an event has three objects, and one per operation counts.
        self._gate = threading.Lock()
        self._gate.acquire()

    def complete(self, error: BaseException | None) -> None:
        """Called once by the runner."""
        finish, release = self._finish, self._release
        self._finish = self._release = None
        if error is None and finish is not None:
            try:
                finish()
            except Exception as failure:
                error = failure
        if release is not None:
            release()
        self.error = error
        self.done = True
        self._gate.release()
        while self._callbacks:
            self._callbacks.pop(0)()

    def wait(self, timeout_s: float) -> bool:
        """Block until it is done; returns whether it is."""
        if not self.done and self._gate.acquire(timeout=max(0.0, timeout_s)):
            self._gate.release()
        return self.done

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when the operation is done, by the thread that finds that; at once if it is."""
        self._callbacks.append(callback)
        if self.done:
            try:
                self._callbacks.remove(callback)
            except ValueError:
                return  # the other thread has it
            callback()


def carry_out(computation: Computation) -> None:
    """Do one entry of the computation list."""
    operation = computation.operation
    if computation.mode is Mode.REPLACE:
        np.copyto(np.frombuffer(computation.destination, np.uint8), np.frombuffer(computation.incoming, np.uint8))
        return
    unfinished = computation.mode is Mode.COMBINE
    kernels.combine(
        operation.signature.reduction,
        computation.local,
        computation.incoming,
        computation.destination,
        local_dtype=operation.wire_dtype(partial=computation.local_partial),
        incoming_dtype=operation.wire_dtype(partial=computation.incoming_partial),
        destination_dtype=operation.wire_dtype(partial=unfinished),
        divisor=computation.divisor,
    )


@final
class Runner:
    """Engine + transport + threads. Implements ``transports.base.Endpoint``."""

    def __init__(self, engine: Engine, transport: Transport, *, compute: ComputeMode = "auto") -> None:
        """Start the threads."""
        self.engine, self.transport = engine, transport
        self.home = HomeProcess(f"the group of rank {engine.rank}")
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._moving = threading.Lock()
        self._driver: object | None = None  #: What the thread that drives has put here.
        self._resume = threading.Lock()  #: Free: the communication thread is to look again. See ``_unpark``.
        self._resume.acquire()
        self._parked = False
        self._left_at = 0.0
        self._stop = False
        self._sleepers = 0  #: Threads that wait for the network, or are about to: they must be woken.
        self._next_tick = 0.0
        self._failure: BaseException | None = None
        self._deadline = 0.0
        #: A driver has left with nothing in flight: the communication thread may stay away a little.
        self._rest = False
        cores = len(os.sched_getaffinity(0))
        with_thread = compute == "thread" or (compute == "auto" and cores >= 2 * transport.ranks_per_host)
        transport.attach(self)
        let_go_in_children(transport)
        name = f"totalreduce-{engine.rank}"
        self._threads = [threading.Thread(target=self._communicate, name=f"{name}-comm", daemon=True)]
        if with_thread and engine.members.world_size > 1:
            self._threads.append(threading.Thread(target=self._compute, name=f"{name}-compute", daemon=True))
        self._inline = len(self._threads) == 1
        for thread in self._threads:
            thread.start()

    # -------------------------------------------------------------------------------------------------- application

    def submit(
        self,
        name: str | None,
        signature: Signature,
        buffers: Sequence[memoryview | None],
        *,
        ranks: tuple[int, ...] | None = None,
        scope: str = "",
        repeats: bool = False,
        priority: int = 0,
        finish: Callable[[], None] | None = None,
        release: Callable[[], None] | None = None,
    ) -> Handle:
        """Submit an operation; returns at once. Takes and raises what ``Engine.submit`` does.

        ``finish`` and ``release``: see ``Handle``; neither is called if this raises.
        """

        def submit(handle: Handle) -> None:
            handle.operation = self.engine.submit(
                name,
                signature,
                buffers,
                ranks=ranks,
                scope=scope,
                repeats=repeats,
                priority=priority,
                now=time.monotonic(),
                owner=handle,
            )

        return self._start(submit, Handle(finish, release))

    def receive_any(
        self,
        candidates: dict[int, str],
        signature: Signature,
        buffer: memoryview,
        *,
        scope: str = "",
        priority: int = 0,
        finish: Callable[[], None] | None = None,
        release: Callable[[], None] | None = None,
    ) -> Handle:
        """Receive from whoever sends first (see ``Engine.receive_any``); the handle gets its operation then."""

        def submit(handle: Handle) -> None:
            receive = AnyReceive(candidates, signature, buffer, scope, priority, owner=handle)
            self.engine.receive_any(receive, time.monotonic())

        return self._start(submit, Handle(finish, release))

    def act(self, action: Callable[[float], bool]) -> None:
        """Call ``action(now)`` on what lives beside the engine, under the lock.

        It returns whether there is something to send now, or sooner to be done than before.
        """
        self.home.check()
        with self._lock:
            self._check_alive()
            now = time.monotonic()
            if not action(now):
                return
            wake = self._sleepers > 0
        self._look_again(now, wake=wake)

    def _channels_due(self) -> float:
        due = self.engine.channels.next_due()
        return math.inf if due is None else due

    def _look_again(self, now: float, *, wake: bool) -> None:
        """There is something to send: have somebody do it."""
        if wake:
            self.transport.wake()
        elif self._parked and self._driver is None and now > self._left_at + _NEXT_BLOCKING_S:
            self._unpark()

    def _start(self, submit: Callable[[Handle], None], handle: Handle) -> Handle:
        self.home.check()
        with self._lock:
            self._check_alive()
            submit(handle)
            if self.engine.computations.peek() is not None:  # a floating message was waiting for this operation
                self._work.notify()
            completed = self.engine.table.pop_completed()
            wake = self._sleepers > 0
            now = time.monotonic()
        self._tell(completed)
        self._look_again(now, wake=wake)
        return handle

    def wait(
        self, handle: Handle, timeout_s: float, *, explain: Callable[[float], tuple[str, str]] | None = None
    ) -> None:
        """Wait for an operation, and let its messages overtake everything nobody waits for.

        Args:
            handle: The operation's, or that of something else whose messages move here.
            timeout_s: In seconds.
            explain: Of something else: its name, and why it is pending; called with the time, under the lock.

        Raises:
            DeadlineExceededError: It is still pending; the message says on whom it waits.
        """
        if handle.done:
            return
        self.home.check()
        begin = time.monotonic()
        deadline = begin + timeout_s
        # Asked late enough not to disturb, early enough for the answers to be here when the deadline comes.
        ask_at = max(begin + 0.5 * timeout_s, deadline - 1.0)
        if not self._drive(handle, begin, deadline, ask_at):
            self._look_on(handle, deadline, ask_at)
        now = time.monotonic()
        with self._lock:
            operation = handle.operation
            self.engine.counters.waited_s += now - begin
            if operation is not None:
                for observer in self.engine.observers:
                    observer.waited(operation.name, operation.key[1], begin, now)
            if handle.wait(0.0):
                return
            if explain is not None:
                name, explanation = explain(now)
            elif operation is not None:
                name, explanation = operation.name, self.engine.stalls.explain(operation, now)
            else:
                name, explanation = "a message from any rank", "nobody has sent one"
        raise DeadlineExceededError(f"rank {self.engine.rank} waited {timeout_s:g} s for {name!r}: {explanation}")

    def complete(self, handles: Iterable[Handle], error: BaseException | None) -> None:
        """Something else than the engine has finished: tell who waits for it, and whoever moves messages for him."""
        for handle in handles:
            try:
                handle.complete(error)
            except Exception:  # of a callback; the others must not wait in vain
                _log.exception("rank %d: a callback of a finished operation failed", self.engine.rank)
        if self._driver is not None:
            self.transport.wake()

    def close(self, timeout_s: float, reason: str = "") -> None:
        """Fail what is pending, tell the peers, end the threads and the connections, within about ``timeout_s``.

        In a forked child this does nothing.
        """
        if not self.home.is_here:
            return
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self.engine.close(time.monotonic(), tell=self.transport.connected_peers(), reason=reason)
            completed = self.engine.table.pop_completed()
            self._deadline = deadline
            self._stop = True  # last: the communication thread looks at both without the lock
            self._work.notify_all()
        self._tell(completed)
        self._unpark()
        self.transport.wake()
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()) + 1.0)

    def locked(self) -> threading.Lock:
        """The lock under which the engine may be read.

        Raises:
            GroupClosed: In a forked child.
        """
        self.home.check()
        return self._lock

    # ------------------------------------------------------------------------------------------------------ threads

    def _communicate(self) -> None:
        for part in (self._move, self._hang_up):  # the second also if the first fails: the peers are to see that
            try:
                part()
            except BaseException as failure:
                self._fail(failure)

    def _move(self) -> None:
        """Move messages while nobody else does, until everything has left after ``close``, or something fails."""
        while not self._stop:
            if self._driven() or self._rest:
                self._rest = False
                self._parked = True
                self._resume.acquire(timeout=_PARKED_S)
                self._parked = False
            else:
                self._round(_TICK_S)
                if self._driven():
                    self.transport.wake()  # what the network told this thread is the driver's business now
        while self._failure is None and (self._driven() or not self._drained()) and time.monotonic() < self._deadline:
            self._round(0.02)

    def _hang_up(self) -> None:
        """End the connections, as soon as a driver has left (he will, but is not waited for longer than a round)."""
        patience = time.monotonic() + 2 * _TICK_S
        while self._driven() and time.monotonic() < patience:
            self._resume.acquire(timeout=_PARKED_S)
        with self._moving:
            self.transport.close(max(0.0, self._deadline - time.monotonic()))

    def _unpark(self) -> None:
        """Let the communication thread look again. No event: Ctrl-C within its ``set`` can leave it locked for ever."""
        with contextlib.suppress(RuntimeError):  # it has been told already
            self._resume.release()

    def _driven(self) -> bool:
        """Whether a caller moves the messages at the moment."""
        return self._driver is not None

    def _drive(self, handle: Handle, begin: float, deadline: float, ask_at: float) -> bool:
        """Move messages in the caller's thread until the operation is done; ``False`` if somebody else does already."""
        me = object()
        try:
            with self._lock:
                if self._driver is None and not self._stop:
                    self._driver = me
                if handle.operation is not None:
                    self.engine.promote(handle.operation, begin)
            if self._driver is not me:
                return False
            if self._sleepers:
                self.transport.wake()  # or the communication thread would be told what the network has for us
            while not handle.done and not self._stop:
                now = time.monotonic()
                if now >= deadline:
                    break
                if now >= ask_at:
                    ask_at = deadline
                    self._inquire(handle)
                self._round(min(_TICK_S, deadline - now), handle)
            with self._lock:
                self._left_at = time.monotonic()
                self._rest = rest = self.engine.table.num_active == 0
                self._driver = None
            if not rest:
                self._unpark()
        except BaseException as failure:
            # An exception here (Ctrl-C above all) may have cut a message in two: nothing can be trusted any more.
            if self._driver is me:
                # In this order: nobody can become the next driver, and the communication thread need not wait for us.
                self._failure, self._stop, self._driver = failure, True, None
                self._fail(failure)
            raise
        if self._stop:
            handle.wait(max(0.0, deadline - time.monotonic()))
        return True

    def _look_on(self, handle: Handle, deadline: float, ask_at: float) -> None:
        """Wait while somebody else moves the messages."""
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
        """Move and add what is there; if that was nothing, wait, unless ``handle`` is done."""
        with self._lock:
            now = time.monotonic()
            if now >= self._next_tick:
                self.engine.tick(now)
                self._next_tick = now + _TICK_S
            self._next_tick = min(self._next_tick, self._channels_due())
            timeout_s = min(timeout_s, max(0.0, self._next_tick - now))
            reports = self.engine.reports.pop()
            self._sleepers += 1  # before looking for work, so that whoever adds some wakes us
        for report in reports:
            _log.warning("rank %d: stalled: %s", self.engine.rank, report)
        progress = False
        with self._moving:
            try:
                if self._failure is None:
                    self._compute_inline(everything=self._inline)
                    progress = self.transport.progress()
            except BaseException as failure:
                self._failure = failure  # before anybody else can move the rest of a message that was cut in two
                raise
        self._settle()
        if not progress and not (handle is not None and handle.done):
            self.transport.wait(timeout_s, eager=handle is not None)
        with self._lock:
            self._sleepers -= 1

    def _drained(self) -> bool:
        with self._lock:
            return not self.engine.outbox.ready and self.transport.idle()

    def _compute(self) -> None:
        try:
            while True:
                with self._work:
                    computation = self.engine.computations.take()
                    while computation is None:
                        if self._stop:
                            return
                        self._work.wait(_TICK_S)
                        computation = self.engine.computations.take()
                self._carry_out(computation)
                if self._sleepers:
                    self.transport.wake()
        except BaseException as failure:
            self._fail(failure)

    def _carry_out(self, computation: Computation) -> None:
        begin = time.monotonic()
        carry_out(computation)
        end = time.monotonic()
        with self._lock:
            self.engine.computed(computation, end - begin, end)

    def _compute_inline(self, *, everything: bool) -> None:
        while True:
            with self._lock:
                head = self.engine.computations.peek()
                if head is None or (not everything and len(head.destination) > _INLINE_BYTES):
                    if head is not None:
                        self._work.notify()
                    return
                computation = self.engine.computations.take()
            assert computation is not None
            self._carry_out(computation)

    def _fail(self, failure: BaseException) -> None:
        """End everything, here and (by the end of the connections) for the peers."""
        if self._failure is None:
            self._failure = failure
        self._stop = True
        try:
            with self._lock:
                self.engine.close(time.monotonic(), tell=())
                completed = self.engine.table.pop_completed()
            for operation in completed:
                operation.owner.complete(failure)
        finally:
            self._unpark()
            self.transport.wake()
            _log.error("rank %d: the communication stopped", self.engine.rank, exc_info=failure)

    def _check_alive(self) -> None:
        if isinstance(self._failure, ConfigurationError):  # too few descriptors, for instance: the user can mend it
            raise ConfigurationError(str(self._failure)) from self._failure
        if self._failure is not None:
            raise GroupClosed(f"the communication thread has failed: {self._failure!r}") from self._failure

    def _settle(self) -> None:
        """Tell the owners of what has finished."""
        with self._lock:
            completed = self.engine.table.pop_completed()
        self._tell(completed)

    @staticmethod
    def _tell(completed: list[Operation | AnyReceive]) -> None:
        for operation in completed:
            owner: Handle = operation.owner
            if isinstance(operation, Operation):
                owner.operation = operation  # a receive from anybody learns only now whose it was
                operation.buffers = ()  # the handle may live long, and must not keep the tensors' memory as long
            owner.complete(operation.error)

    # ----------------------------------------------------------------------------------------------------- endpoint

    def ready_peers(self) -> Collection[int]:
        """Peers for which there may be a message; a copy, because other threads submit meanwhile."""
        return tuple(self.engine.outbox.ready)

    def next_message(self, peer: int) -> OutgoingMessage | None:
        """The next message for ``peer``."""
        with self._lock:
            return self.engine.next_message(peer, time.monotonic())

    def message_sent(self, message: Outgoing) -> None:
        """The message has left."""
        assert isinstance(message, OutgoingMessage)
        with self._lock:
            self.engine.message_sent(message, time.monotonic())
            completed = self.engine.table.pop_completed()
        self._tell(completed)

    def may_receive(self) -> bool:
        """Whether there is scratch memory."""
        return self.engine.reception.scratch.available

    def accept(self, peer: int, header: Header, lease: Lease | None = None) -> Delivery:
        """Where the body goes."""
        with self._lock:
            return self.engine.accept(peer, header, time.monotonic(), lease)

    def delivered(self, delivery: Any) -> None:
        """The body is here; small additions are done at once."""
        with self._lock:
            self.engine.delivered(delivery, time.monotonic())
        self._compute_inline(everything=self._inline)
        self._settle()

    def peer_lost(self, peer: int, reason: str) -> None:
        """A peer is gone."""
        with self._lock:
            self.engine.peer_lost(peer, reason, time.monotonic())
            completed = self.engine.table.pop_completed()
        self._tell(completed)
