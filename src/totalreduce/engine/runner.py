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
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, final

import numpy as np

from totalreduce import kernels
from totalreduce.engine.engine import Computation, Delivery, Engine, OutgoingMessage
from totalreduce.engine.operation import AnyReceive, Operation
from totalreduce.foundation.errors import DeadlineExceededError, GroupClosed
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
    """A submitted operation as the submitter sees it."""

    __slots__ = ("_callbacks", "_finalise", "_lock", "error", "event", "operation")

    def __init__(self, finalise: Callable[[], None] | None) -> None:
        """``finalise`` runs in the communication thread when the operation is done and before anybody is told."""
        self.event = threading.Event()
        self.error: BaseException | None = None
        self.operation: Operation | None = None
        self._finalise = finalise
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def complete(self, error: BaseException | None) -> None:
        """Called once by the runner."""
        if error is None and self._finalise is not None:
            try:
                self._finalise()
            except Exception as failure:
                error = failure
        self.error = error
        self._finalise = None
        with self._lock:
            self.event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when the operation is done, by the thread that finds that; at once if it is."""
        with self._lock:
            if not self.event.is_set():
                self._callbacks.append(callback)
                return
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
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._moving = threading.Lock()
        self._driver: int | None = None
        self._resume = threading.Event()
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
        name = f"totalreduce-{engine.rank}"
        self._threads = [threading.Thread(target=self._communicate, name=f"{name}-comm", daemon=True)]
        if with_thread and engine.world_size > 1:
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
        finalise: Callable[[], None] | None = None,
    ) -> Handle:
        """Submit an operation; returns at once. Takes and raises what ``Engine.submit`` does."""

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

        return self._start(submit, finalise)

    def receive_any(
        self,
        candidates: dict[int, str],
        signature: Signature,
        buffer: memoryview,
        *,
        scope: str = "",
        priority: int = 0,
        finalise: Callable[[], None] | None = None,
    ) -> Handle:
        """Receive from whoever sends first (see ``Engine.receive_any``); the handle gets its operation then."""

        def submit(handle: Handle) -> None:
            receive = AnyReceive(candidates, signature, buffer, scope, priority, owner=handle)
            self.engine.receive_any(receive, time.monotonic())

        return self._start(submit, finalise)

    def _start(self, submit: Callable[[Handle], None], finalise: Callable[[], None] | None) -> Handle:
        handle = Handle(finalise)
        with self._lock:
            self._check_alive()
            submit(handle)
            if self.engine.peek_computation() is not None:  # a floating message was waiting for this operation
                self._work.notify()
            completed = self.engine.pop_completed()
            wake = self._sleepers > 0
            now = time.monotonic()
        self._tell(completed)
        if wake:
            self.transport.wake()
        elif self._parked and self._driver is None and now > self._left_at + _NEXT_BLOCKING_S:
            self._resume.set()
        return handle

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for an operation, and let its messages overtake everything nobody waits for.

        Raises:
            DeadlineExceededError: It is still pending; the message says on whom it waits.
        """
        if handle.event.is_set():
            return
        begin = time.monotonic()
        deadline = begin + timeout_s
        with self._lock:
            if handle.operation is not None:
                self.engine.promote(handle.operation, begin)
            drives = self._driver is None and not self._stop
            if drives:
                self._driver = threading.get_ident()
        # Asked late enough not to disturb, early enough for the answers to be here when the deadline comes.
        ask_at = max(begin + 0.5 * timeout_s, deadline - 1.0)
        if drives:
            self._drive(handle, deadline, ask_at)
        else:
            self._look_on(handle, deadline, ask_at)
        now = time.monotonic()
        with self._lock:
            operation = handle.operation
            if operation is not None:
                for observer in self.engine.observers:
                    observer.waited(operation.name, operation.key[1], begin, now)
            if handle.event.is_set():
                return
            name = operation.name if operation is not None else "a message from any rank"
            explanation = self.engine.explain(operation, now) if operation is not None else "nobody has sent one"
        raise DeadlineExceededError(f"rank {self.engine.rank} waited {timeout_s:g} s for {name!r}: {explanation}")

    def close(self, timeout_s: float) -> None:
        """Fail what is pending, tell the peers, end the threads and the connections, within about ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self.engine.close(time.monotonic(), tell=self.transport.connected_peers())
            completed = self.engine.pop_completed()
            self._stop = True
            self._deadline = deadline
            self._work.notify_all()
        self._tell(completed)
        self._resume.set()
        self.transport.wake()
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()) + 1.0)

    def locked(self) -> threading.Lock:
        """The lock under which the engine may be read."""
        return self._lock

    # ------------------------------------------------------------------------------------------------------ threads

    def _communicate(self) -> None:
        try:
            while not self._stop:
                if self._driven() or self._rest:
                    self._rest = False
                    self._parked = True
                    self._resume.wait(_PARKED_S)
                    self._resume.clear()
                    self._parked = False
                else:
                    self._round(_TICK_S)
                    if self._driven():
                        self.transport.wake()  # what the network told this thread is the driver's business now
            while (self._driven() or not self._drained()) and time.monotonic() < self._deadline:
                self._round(0.02)
            with self._moving:
                self.transport.close(min(1.0, max(0.0, self._deadline - time.monotonic())))
        except BaseException as failure:
            self._fail(failure)

    def _driven(self) -> bool:
        """Whether a caller moves the messages at the moment."""
        return self._driver is not None

    def _drive(self, handle: Handle, deadline: float, ask_at: float) -> None:
        """Move messages in the caller's thread until the operation is done."""
        if self._sleepers:
            self.transport.wake()  # or the communication thread would be told what the network has for us
        try:
            while not handle.event.is_set() and not self._stop:
                now = time.monotonic()
                if now >= deadline:
                    break
                if now >= ask_at:
                    ask_at = deadline
                    self._inquire(handle)
                self._round(min(_TICK_S, deadline - now), handle)
        except BaseException as failure:
            # An exception here (Ctrl-C above all) may have cut a message in two: nothing can be trusted any more.
            self._fail(failure)
            raise
        finally:
            with self._lock:
                self._driver = None
                self._left_at = time.monotonic()
                self._rest = self.engine.num_active == 0
                rest = self._rest
            if not rest:
                self._resume.set()
        if self._stop:
            handle.event.wait(max(0.0, deadline - time.monotonic()))

    def _look_on(self, handle: Handle, deadline: float, ask_at: float) -> None:
        """Wait while somebody else moves the messages."""
        if self._sleepers:
            self.transport.wake()
        if not handle.event.wait(max(0.0, ask_at - time.monotonic())):
            self._inquire(handle)
            handle.event.wait(max(0.0, deadline - time.monotonic()))

    def _inquire(self, handle: Handle) -> None:
        with self._lock:
            operation = handle.operation
            if operation is not None and not operation.finished:
                self.engine.inquire(operation, time.monotonic())
        self.transport.wake()

    def _round(self, timeout_s: float, handle: Handle | None = None) -> None:
        """Move and add what is there; if that was nothing, wait, unless ``handle`` is done."""
        with self._lock:
            now = time.monotonic()
            if now >= self._next_tick:
                self._next_tick = now + _TICK_S
                self.engine.tick(now)
            reports = self.engine.pop_reports()
            self._sleepers += 1  # before looking for work, so that whoever adds some wakes us
        for report in reports:
            _log.warning("rank %d: stalled: %s", self.engine.rank, report)
        with self._moving:
            self._compute_inline(everything=self._inline)
            progress = self.transport.progress()
        self._settle()
        if not progress and not (handle is not None and handle.event.is_set()):
            self.transport.wait(timeout_s)
        with self._lock:
            self._sleepers -= 1

    def _drained(self) -> bool:
        with self._lock:
            return not self.engine.ready_peers() and self.transport.idle()

    def _compute(self) -> None:
        try:
            while True:
                with self._work:
                    computation = self.engine.next_computation()
                    while computation is None:
                        if self._stop:
                            return
                        self._work.wait(_TICK_S)
                        computation = self.engine.next_computation()
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
                head = self.engine.peek_computation()
                if head is None or (not everything and len(head.destination) > _INLINE_BYTES):
                    if head is not None:
                        self._work.notify()
                    return
                computation = self.engine.next_computation()
            assert computation is not None
            self._carry_out(computation)

    def _fail(self, failure: BaseException) -> None:
        _log.error("rank %d: the communication stopped", self.engine.rank, exc_info=failure)
        with self._lock:
            self._failure = failure
            self._stop = True
            self.engine.close(time.monotonic(), tell=())
            completed = self.engine.pop_completed()
        for operation in completed:
            operation.owner.complete(failure)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise GroupClosed(f"the communication thread has failed: {self._failure!r}") from self._failure

    def _settle(self) -> None:
        """Tell the owners of what has finished."""
        with self._lock:
            completed = self.engine.pop_completed()
        self._tell(completed)

    @staticmethod
    def _tell(completed: list[Operation | AnyReceive]) -> None:
        for operation in completed:
            owner: Handle = operation.owner
            if isinstance(operation, Operation):
                owner.operation = operation  # a receive from anybody learns only now whose it was
            owner.complete(operation.error)

    # ----------------------------------------------------------------------------------------------------- endpoint

    def ready_peers(self) -> Collection[int]:
        """Peers for which there may be a message; a copy, because other threads submit meanwhile."""
        return tuple(self.engine.ready_peers())

    def next_message(self, peer: int) -> OutgoingMessage | None:
        """The next message for ``peer``."""
        with self._lock:
            return self.engine.next_message(peer, time.monotonic())

    def message_sent(self, message: Outgoing) -> None:
        """The message has left."""
        assert isinstance(message, OutgoingMessage)
        with self._lock:
            self.engine.message_sent(message, time.monotonic())
            completed = self.engine.pop_completed()
        self._tell(completed)

    def may_receive(self) -> bool:
        """Whether there is scratch memory."""
        return self.engine.may_receive()

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
            completed = self.engine.pop_completed()
        self._tell(completed)
