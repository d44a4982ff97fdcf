"""The engine as a transport and several threads use it: every call holds one lock.

The lock is held for microseconds. Bytes are moved and added outside it, and the kernel, NumPy and torch release
Python's interpreter lock meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from typing import Any, final

import numpy as np

from totalreduce import kernels
from totalreduce.engine.any_receives import AnyReceive
from totalreduce.engine.computations import Computation
from totalreduce.engine.engine import Engine
from totalreduce.engine.operation import Operation
from totalreduce.engine.outbox import OutgoingMessage
from totalreduce.engine.reception import Delivery
from totalreduce.foundation.header import Header
from totalreduce.runner.handle import Handle
from totalreduce.schedules.actions import Mode
from totalreduce.transports.base import Lease, Outgoing

__all__ = ["EngineEndpoint", "carry_out", "complete_owners"]

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


def complete_owners(ended: list[Operation | AnyReceive]) -> None:
    """Complete the handles of operations that have ended. Called without the lock: it runs callbacks."""
    for operation in ended:
        handle: Handle = operation.owner
        if isinstance(operation, Operation):
            handle.operation = operation  # a receive from anybody has become this operation
            operation.buffers = ()  # the handle may live long, and must not keep the memory of the tensors as long
        handle.complete(operation.error)


@final
class EngineEndpoint:
    """Implements ``transports.base.Endpoint`` over an engine.

    Attributes:
        engine: The engine; use it under ``lock`` only.
        lock: Held by every call into the engine.
        work: Notified when the computation thread has something to do.
        inline: Whether the thread that moves messages also carries out every computation.
    """

    def __init__(self, engine: Engine, *, inline: bool) -> None:
        self.engine, self.inline = engine, inline
        self.lock = threading.Lock()
        self.work = threading.Condition(self.lock)

    def complete_ended(self) -> None:
        """Complete the handles of operations that have ended."""
        if not self.engine.table.completed:  # what another thread adds meanwhile is completed by that thread
            return
        with self.lock:
            ended = self.engine.table.pop_completed()
        complete_owners(ended)

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

    def ready_peers(self) -> Collection[int]:
        """Return the peers for which there may be a message; a copy, because other threads submit meanwhile."""
        return tuple(self.engine.outbox.ready)

    def next_message(self, peer: int) -> OutgoingMessage | None:
        """Return the next message for ``peer``, if there is one."""
        with self.lock:
            return self.engine.next_message(peer, time.monotonic())

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

    def peer_lost(self, peer: int, reason: str) -> None:
        """Note that a peer is lost."""
        with self.lock:
            self.engine.peer_lost(peer, reason, time.monotonic())
        self.complete_ended()
