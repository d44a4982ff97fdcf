"""The engine as a transport and several threads use it: every call holds one lock.

The lock is held for microseconds. Bytes are moved and added outside it, and the kernel, NumPy and torch release
Python's interpreter lock meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, final

import numpy as np

from totalreduce import kernels
from totalreduce.engine.any_receives import AnyReceive
from totalreduce.engine.carrying import Carrier
from totalreduce.engine.computations import Computation
from totalreduce.engine.engine import Engine
from totalreduce.engine.operation import Operation, Progress, State
from totalreduce.engine.outbox import OutgoingMessage
from totalreduce.engine.reception import Delivery
from totalreduce.engine.relaying import Order, RelayedTraffic, RelayTask
from totalreduce.engine.submission import Submission
from totalreduce.fastlane.lane import LaneCarriage
from totalreduce.foundation.errors import MismatchError
from totalreduce.foundation.header import Header
from totalreduce.kernels import exchange
from totalreduce.runner.callers import Callers
from totalreduce.runner.handle import Begun, End, Handle
from totalreduce.schedules.actions import Mode
from totalreduce.transports.base import Lease, Outgoing, Transport

__all__ = ["EngineEndpoint", "carry_out", "complete_owners"]

#: How long an error waits for the transport to let go of the memory of messages that are half-way out, in seconds. A
#: silent rank counts as lost before that, and its messages are let go.
_LEAVING_S = 5.0
#: Below this size a hand-over to the computation thread takes longer than the addition.
_INLINE_BYTES = 64 * 1024


def carry_out(computation: Computation) -> None:
    """Carry out one entry of the computation list."""
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


def complete_owners(ended: Sequence[Operation | AnyReceive], callers: Callers | None = None) -> None:
    """Complete the handles of operations that have ended. Called without the lock: it runs callbacks.

    ``callers``: add advice to mismatches.
    """
    for index, operation in enumerate(ended):
        handle: Handle = operation.owner
        try:
            if isinstance(operation, Operation):
                if isinstance(operation.error, MismatchError) and callers is not None:
                    advice = callers.advice(operation.key[0])
                    if advice:
                        operation.error.add_note(advice)
                handle.operation = operation  # a receive from anybody has become this operation
                operation.buffers = ()  # the handle may live long, and must not keep the memory of the tensors as long
            handle.complete(operation.error)
        except BaseException:  # of a callback, or Ctrl-C: threads may wait for the other operations
            complete_owners(ended[index + 1 :], callers)
            raise


def _is_withdrawn(message: Outgoing) -> bool:
    """Return whether the operation of a message that is half-way out has failed."""
    queued = message.queued if isinstance(message, OutgoingMessage) else None
    return queued is not None and queued.operation.finished


def _urgency(operation: Operation) -> tuple[bool, int, int]:
    return not operation.promoted, operation.priority, operation.sequence


def _age(operation: Operation) -> int:
    return operation.sequence


@final
class EngineEndpoint:
    """Implements ``transports.base.Endpoint`` over an engine."""

    def __init__(self, engine: Engine, carriers: Iterable[Carrier] = (), *, inline: bool) -> None:
        """``carriers``: are asked before the relay. The thread that moves messages advances their operations."""
        self.engine = engine  #: The engine; use it under ``lock`` only.
        self.inline = inline  #: Whether the thread that moves messages also carries out every computation.
        engine.carrying.carriers[:0] = carriers
        #: Operations that have begun in the fast lane without a record in the engine.
        self.unlisted: dict[LaneCarriage, Begun] = {}
        #: The handle of all operations that had ended well when they were submitted.
        self.ended = Handle()
        self.ended.complete(None)
        self.callers = Callers()  #: The threads that submit operations without a name.
        #: Operations that have failed while messages of them were half-way out. They complete when the transport reads
        #: their memory no more (``keep_rests``), at the latest at the time that is noted with them.
        self.leaving: list[tuple[Operation, float]] = []
        self.lock = threading.Lock()  #: Held by every call into the engine.
        self.work = threading.Condition(self.lock)  #: Notified when the computation thread has something to do.

    def complete_ended(self) -> None:
        """Complete the handles of operations that have ended."""
        if not self.engine.table.completed:  # what another thread adds meanwhile is completed by that thread
            return
        with self.lock:
            ended = self.take_ended()
        complete_owners(ended, self.callers)

    def take_ended(self) -> list[Operation | AnyReceive]:
        """Return the operations that have ended and can be completed; note those in ``leaving``. Under the lock."""
        ended = self.engine.table.pop_completed()
        leaving = [operation for operation in ended if isinstance(operation, Operation) and operation.is_leaving]
        if not leaving:
            return ended
        until = time.monotonic() + _LEAVING_S
        self.leaving += [(operation, until) for operation in leaving]
        return [operation for operation in ended if operation not in leaving]

    def keep_rests(self, transport: Transport) -> list[Operation]:
        """Have the transport let go of the memory of operations in ``leaving``; return those that can be completed.

        Called by the thread that moves messages.
        """
        with self.lock:
            failed = tuple(self.leaving)
        is_done, now = transport.keep_rests(_is_withdrawn), time.monotonic()
        due = [entry for entry in failed if is_done or now >= entry[1]]
        with self.lock:
            self.leaving = [entry for entry in self.leaving if entry not in due]
        return [operation for operation, _ in due]

    def begin(self, submission: Submission, carriage: LaneCarriage, end: End | None) -> Handle | None:
        """Begin an operation in the fast lane without a record in the engine; end it at once if it is small.

        Returns the handle; ``None``, and nothing has changed, if the operation must be submitted to the engine. The
        handle is ``ended`` if the operation has ended: then the caller calls ``end``, which may run code of the
        program.
        """
        lane, buffers = carriage.lane, submission.buffers
        with self.lock:
            place = lane.place_of_next(carriage, buffers)
            if place is None:
                return None
            key = self.engine.carrying.begin_again(carriage.layout, carriage.operation.key[0])
            if key is None:
                return None
            lane.repeat(carriage, key, buffers, place)
            begun = self.unlisted[carriage] = Begun(submission, key, carriage, end)
        if lane.restart(carriage) == exchange.DONE and self._end_unlisted(carriage):
            return self.ended
        with self.lock:
            return begun.handle()

    def hurry_unlisted(self, begun: Begun) -> bool:
        """Try to end an operation that the engine does not know; if it has ended, the caller completes its handle."""
        carriage = begun.carriage
        if self.unlisted.get(carriage) is not begun:
            return False
        return carriage.lane.advance(carriage, patient=True) == exchange.DONE and self._end_unlisted(carriage)

    def _end_unlisted(self, carriage: LaneCarriage) -> bool:
        """Note that an operation has ended that the engine does not know; ``False`` if the engine knows it by now."""
        with self.lock:
            if self.unlisted.pop(carriage, None) is None:
                return False  # the engine has adopted it meanwhile, and finds its end
            carriage.ended, carriage.buffers = True, ()
            self.engine.carrying.count(carriage)
        return True

    def adopt(self, now: float) -> None:
        """Have the engine adopt all operations that it does not know. Called under the lock."""
        while self.unlisted:
            carriage, begun = next(iter(self.unlisted.items()))
            handle = begun.handle()
            carriage.operation = self.engine.carrying.adopt(begun.submission, begun.key, carriage, now, owner=handle)
            handle.operation = carriage.operation
            handle.begun = None
            del self.unlisted[carriage]  # last, so that Ctrl-C anywhere here leaves no handle behind

    def announce(self, operation: Operation) -> bool:
        """Let the other ranks know of an operation that a carrier has taken; false if none has it any more."""
        carriage = self.engine.carrying.carried.get(operation)
        if carriage is not None:
            self._note(operation, carriage.announce())
        return carriage is not None

    def advance(self, operation: Operation) -> None:
        """Move one operation that a carrier has, for which this thread waits."""
        carriage = self.engine.carrying.carried.get(operation)
        if carriage is not None:
            self._note(operation, carriage.advance(patient=True))

    def advance_all(self, wanted: Operation | None = None) -> None:
        """Move the operations that carriers have, the most urgent one first.

        ``wanted``: the operation for which this thread waits, and may look again for a while.
        """
        carried = self.engine.carrying.carried
        if not carried:
            return
        urgency = _urgency if self.engine.config.scheduling == "priority" else _age
        for operation in sorted(carried, key=urgency):
            carriage = carried.get(operation)
            if carriage is not None:
                self._note(operation, carriage.advance(patient=operation is wanted))

    def has_changed(self) -> bool:
        """Return whether a carrier can do something for an operation. Any thread."""
        return any(carriage.has_changed() for carriage in tuple(self.engine.carrying.carried.values()))

    def _note(self, operation: Operation, progress: Progress) -> None:
        """Tell the engine how far a carrier has come with an operation, if that is news."""
        if progress > Progress.MOVING or (progress is Progress.MOVING and operation.state is State.WAITING):
            with self.lock:
                self.engine.carrying.advanced(operation, progress, time.monotonic())

    def compute(self) -> None:
        """Carry out computations in this thread: all of them, or small ones if there is a computation thread."""
        while True:
            with self.lock:
                head = self.engine.computations.peek()
                if head is None or (not self.inline and len(head.destination) > _INLINE_BYTES):
                    if head is not None:
                        self.work.notify()
                    return
                computation = self.engine.computations.take()
            assert computation is not None
            self.carry_out(computation)

    def carry_out(self, computation: Computation) -> None:
        """Carry out a computation that was taken, and tell the engine."""
        begin = time.monotonic()
        carry_out(computation)
        end = time.monotonic()
        with self.lock:
            self.engine.computed(computation, end - begin, end)

    def ready_peers(self, *, bulk: bool = False) -> Collection[int]:
        """Return the peers for which there may be a message; a copy, because other threads submit meanwhile."""
        outbox = self.engine.outbox
        return tuple(outbox.bulk_ready if bulk else outbox.ready)

    def next_message(self, peer: int, *, bulk: bool = False) -> OutgoingMessage | None:
        """Return the next message for ``peer``, if there is one."""
        with self.lock:
            return self.engine.next_message(peer, time.monotonic(), bulk=bulk)

    def message_sent(self, message: Outgoing) -> None:
        """Note that the transport has taken a message completely."""
        assert isinstance(message, OutgoingMessage)
        with self.lock:
            self.engine.message_sent(message, time.monotonic())
        self.complete_ended()

    def may_receive(self) -> bool:
        """Return whether there is scratch memory for a message."""
        return self.engine.reception.scratch.available

    def accept(self, peer: int, header: Header, lease: Lease | None = None) -> Delivery:
        """Decide where the body of a message goes."""
        with self.lock:
            return self.engine.accept(peer, header, time.monotonic(), lease)

    def delivered(self, delivery: Any) -> None:
        """Note that a body has arrived; small additions are carried out at once."""
        with self.lock:
            self.engine.delivered(delivery, time.monotonic())
        self.compute()
        self.complete_ended()

    @property
    def has_candidates(self) -> bool:
        """Whether there are operations that ``hand_over`` may hand over now or later."""
        return bool(self.engine.relaying.candidates)

    def hand_over(self) -> None:
        """Hand operations over to the relay."""
        with self.lock:
            self.engine.relaying.hand_over(time.monotonic())

    def order_of_bulk(self, peer: int) -> Order | None:
        """Return the place of the most urgent message of bulk that waits for a peer."""
        with self.lock:
            return self.engine.relaying.order_of_bulk(peer)

    def relayed(self, peer: int, traffic: RelayedTraffic) -> None:
        """Count what the relay has exchanged with a peer."""
        with self.lock:
            self.engine.relaying.count(peer, traffic)

    def relay_moved(self, task: RelayTask, used: Sequence[tuple[int, int]], reached: Sequence[tuple[int, int]]) -> None:
        """Release bodies that the relay has used, and send messages that are the engine's."""
        with self.lock:
            self.engine.relaying.moved(task.owner, used, reached)

    def relay_ended(self, task: RelayTask) -> None:
        """Note that the relay has exchanged all messages of an operation."""
        with self.lock:
            self.engine.carrying.advanced(task.owner, Progress.DONE, time.monotonic())
        self.complete_ended()

    def peer_lost(self, peer: int, reason: str) -> None:
        """Note that a peer is lost. What it has left with carriers still counts."""
        self.advance_all()
        with self.lock:
            now = time.monotonic()
            self.adopt(now)
            self.engine.peer_lost(peer, reason, now)
        self.complete_ended()
