"""Messages of ``torch.distributed``: point-to-point operations of a gloo process group.

For programs whose process group reaches every rank where a socket of our own may not. Everything happens on private
groups with the same members, so the program's own messages are not disturbed.

Gloo tells whether a receive is done only to those who block in ``Work.wait``, and it ends the connection of those who
wait with a time-out and lose patience. So nobody waits for what may not have come. Heads are received into *slots*
whose last eight bytes are a running number; when the number shows in memory, ``wait`` returns at once. Behind a body
comes a number of its own, received after it. A sender learns from counters in the other direction's slots which of
its slots have been read and how many messages are done with, and may reuse their memory::

    offset  size  field of a slot (little endian, all 64 bits)
    0       8     bytes of the slot; written first
    8       8     bytes of the head
    16      8     1: a body follows; 2: no head, the counters are the message
    24      8     how many slots the sender has read
    32      8     how many messages (heads with their bodies) the sender is done with
    40      n     the head, padded to a multiple of 8
    40+n    8     number of the slot, from 1; written last
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist

from totalreduce.foundation.config import TcpConfig
from totalreduce.transports.passing import HEAD_BYTES, PassingTransport, Wire, WireError
from totalreduce.transports.private_groups import ENDED, destroy, forming_a_group, reason

__all__ = ["TorchTransport"]

_SLOT_TAG, _BODY_TAG, _END_TAG = 1, 2, 3
_FIELDS = 5
_SLOT_BYTES = 8 * (_FIELDS + 1) + HEAD_BYTES
_PLAIN, _WITH_BODY, _COUNTERS = 0, 1, 2
#: Messages to one peer that it is not done with, at most; and slots that wait for messages of one peer. The surplus is
#: for counters; gloo itself holds what comes while no slot waits.
_WINDOW = 4
_SLOTS = _WINDOW + 4
#: Part of a body may be on its way still when its end shows; longer than this, and the connection has ended.
_PATIENCE = timedelta(seconds=20)


@final
class _Pair:
    """What is under way between this rank and one peer. Callers hold the wire's lock; all may raise ``ENDED``."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.group, self.peer = group, peer
        #: Arriving: slots in turn, their words, what gloo calls them.
        self.slots = [np.zeros(_SLOT_BYTES // 8, np.int64) for _ in range(_SLOTS)]
        self.receives: list[Any] = [self.post(slot, _SLOT_TAG) for slot in self.slots]
        self.slots_read = 0
        #: Heads that were read out of their slots, and whether a body follows: at most ``_WINDOW``.
        self.heads: deque[tuple[memoryview, bool]] = deque()
        self.body: Any = None
        self.end = np.zeros(1, np.int64)
        self.end_receive: Any = None
        self.bodies_begun = 0
        self.body_is_here = False
        self.released = 0  #: Messages this rank is done with.
        self.released_told = 0  #: As far as the peer was told.
        #: Leaving: what gloo must be able to read until the peer has read it.
        self.slots_sent = 0
        self.sent: deque[tuple[Any, np.ndarray[Any, Any]]] = deque()
        #: Messages the peer is not done with: their bodies' operations and memory, or nothing.
        self.messages: deque[list[Any]] = deque()
        self.messages_over = 0
        self.bodies_sent = 0
        self.bodies_left = 0
        self.failed = False

    def post(self, words: np.ndarray[Any, Any], tag: int) -> Any:
        """Be ready for a message of at most so many words."""
        return dist.irecv(torch.from_numpy(words.view(np.uint8)), self.peer, group=self.group, tag=tag)

    # ------------------------------------------------------------------------------------------------------ leaving

    def send_slot(self, head: bytes, kind: int) -> None:
        """Send a head, or counters alone."""
        padded = -(-len(head) // 8)
        words = np.zeros(_FIELDS + padded + 1, np.int64)
        self.slots_sent += 1
        words[:_FIELDS] = (8 * len(words), len(head), kind, self.slots_read, self.released)
        words.view(np.uint8)[8 * _FIELDS : 8 * _FIELDS + len(head)] = np.frombuffer(head, np.uint8)
        words[-1] = self.slots_sent
        self.released_told = self.released
        self.sent.append((self._send(words.view(np.uint8), _SLOT_TAG), words))

    def send_body(self, body: memoryview) -> list[Any]:
        """Send a body and what shows that it is complete; what to keep until the peer is done with it."""
        self.bodies_sent += 1
        # A body that cannot be written (none so far) would make torch warn about the tensor.
        data = np.frombuffer(bytearray(body) if body.readonly else body, np.uint8)
        end = np.full(1, self.bodies_sent, np.int64)
        return [self._send(data, _BODY_TAG), self._send(end.view(np.uint8), _END_TAG), data, end]

    def _send(self, data: np.ndarray[Any, Any], tag: int) -> Any:
        return dist.isend(torch.from_numpy(data), self.peer, group=self.group, tag=tag)

    # ----------------------------------------------------------------------------------------------------- arriving

    def poll(self) -> bool:
        """Read what has come; whether anything has."""
        moved = False
        while self._read_slot():
            moved = True
        if self.body is not None and self.end[0] == self.bodies_begun:
            self.body.wait(_PATIENCE)
            self.end_receive.wait(_PATIENCE)
            self.body = self.end_receive = None
            self.body_is_here = moved = True
        if self.released - self.released_told >= _WINDOW // 2:
            self.send_slot(b"", _COUNTERS)
        return moved

    def _read_slot(self) -> bool:
        place = self.slots_read % _SLOTS
        slot = self.slots[place]
        size = int(slot[0])
        if not size:
            return False
        # Until the slot is complete there may be anything in it, so no field is believed before ``wait``.
        last = size // 8 - 1
        if not _FIELDS <= last < len(slot) or slot[last] != self.slots_read + 1:
            return False
        self.receives[place].wait(_PATIENCE)
        length, kind, read, released = (int(word) for word in slot[1:_FIELDS])
        if not 0 <= length <= 8 * (last - _FIELDS) or not _PLAIN <= kind <= _COUNTERS:
            raise WireError(f"rank {self.peer} sends what no correct peer sends: {slot[:_FIELDS].tolist()}")
        self.slots_read += 1
        if kind != _COUNTERS:
            if len(self.heads) >= _WINDOW:
                raise WireError(f"rank {self.peer} sends more messages than it may")
            content = slot.view(np.uint8)[8 * _FIELDS : 8 * _FIELDS + length].tobytes()
            self.heads.append((memoryview(content), kind == _WITH_BODY))
        slot[: last + 1] = 0
        self.receives[place] = self.post(slot, _SLOT_TAG)
        self._told(read, released)
        return True

    def _told(self, slots_read: int, released: int) -> None:
        """The peer says how much of what was sent it has read and is done with."""
        while self.sent and self.slots_sent - len(self.sent) < slots_read:
            self.sent.popleft()[0].wait(_PATIENCE)
        while self.messages and self.messages_over < released:
            kept = self.messages.popleft()
            self.messages_over += 1
            for operation in kept[:2]:
                operation.wait(_PATIENCE)
            self.bodies_left += bool(kept)

    def receive(self, view: memoryview) -> None:
        """Begin to receive a body."""
        self.bodies_begun += 1
        data = torch.from_numpy(np.frombuffer(view, np.uint8))
        self.body = dist.irecv(data, self.peer, group=self.group, tag=_BODY_TAG)
        # In this order: gloo sends to who is ready, so the end comes behind the body.
        self.end_receive = self.post(self.end, _END_TAG)

    def flush(self, timeout_s: float) -> None:
        """Have what was sent handed to the kernel."""
        for operation, _ in self.sent:
            operation.wait(timedelta(seconds=timeout_s))

    def release(self) -> None:
        """The oldest message is done with; who waits for its body's memory is told at once."""
        _, with_body = self.heads.popleft()
        self.body_is_here = False
        self.released += 1
        if with_body:
            self.send_slot(b"", _COUNTERS)


@final
class _GlooWire(Wire):
    """See ``Wire``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Be ready for heads from every peer."""
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._group: dist.ProcessGroup | None = group
        self._lock = threading.Lock()
        self._pairs = {peer: _Pair(group, peer) for peer in range(self.world_size) if peer != self.rank}
        self._failures: list[tuple[int, str]] = []

    def usable(self) -> bool:
        """From every thread."""
        return True

    def poll(self) -> bool:
        """Look at every peer's next slot."""
        moved = False
        with self._lock:
            for pair in self._pairs.values():
                if pair.failed:
                    continue
                try:
                    moved = pair.poll() or moved
                except (*ENDED, WireError) as error:
                    pair.failed = moved = True
                    self._failures.append((pair.peer, reason(error)))
        return moved

    def failures(self) -> list[tuple[int, str]]:
        """Peers whose connection has ended."""
        with self._lock:
            failures, self._failures = self._failures, []
        return failures

    def may_send(self, peer: int) -> bool:
        """Whether the peer is done with enough of what it was sent."""
        return len(self._pairs[peer].messages) < _WINDOW

    def send(self, peer: int, head: bytes, body: memoryview | None) -> None:
        """Begin to send."""
        pair = self._pairs[peer]
        with self._lock:
            try:
                pair.send_slot(head, _PLAIN if body is None else _WITH_BODY)
                pair.messages.append([] if body is None else pair.send_body(body))
            except ENDED as error:
                raise WireError(reason(error)) from error

    def beat(self, peer: int, head: bytes) -> None:
        """Send a heartbeat; while the peer is not done with earlier messages, counters: gloo tells only who sends."""
        if self.may_send(peer):
            self.send(peer, head, None)
            return
        with self._lock:
            try:
                self._pairs[peer].send_slot(b"", _COUNTERS)
            except ENDED as error:
                raise WireError(reason(error)) from error

    def bodies_left(self, peer: int) -> int:
        """How many bodies the peer has received since the last call."""
        pair = self._pairs[peer]
        with self._lock:
            left, pair.bodies_left = pair.bodies_left, 0
        return left

    def busy(self, peer: int) -> bool:
        """Whether a body has not left; heads are gloo's business (see ``close``)."""
        return any(self._pairs[peer].messages)

    def head(self, peer: int) -> memoryview | None:
        """The oldest head."""
        heads = self._pairs[peer].heads
        return heads[0][0] if heads else None

    def receive(self, peer: int, view: memoryview) -> None:
        """Begin to receive a body, straight into ``view``."""
        with self._lock:
            try:
                self._pairs[peer].receive(view)
            except ENDED as error:
                raise WireError(reason(error)) from error

    def received(self, peer: int) -> bool:
        """Whether the body is complete."""
        return self._pairs[peer].body_is_here

    def release(self, peer: int) -> None:
        """The oldest message is done with."""
        with self._lock:
            try:
                self._pairs[peer].release()
            except ENDED as error:
                raise WireError(reason(error)) from error

    def close(self, timeout_s: float) -> None:
        """End the private group's connections, and with them what is posted on them."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            for pair in self._pairs.values():
                with contextlib.suppress(*ENDED):
                    pair.flush(max(0.01, deadline - time.monotonic()))
            self._pairs.clear()
            group, self._group = self._group, None
            if group is not None:
                destroy(group)


@final
class TorchTransport(PassingTransport):
    """Messages of ``torch.distributed``.

    Gloo cannot be told to put the rest of a body elsewhere: where an operation fails while one of its bodies arrives,
    that body still lands in the operation's tensor, but never after ``close``.
    """

    def __init__(self, config: TcpConfig, timeout_s: float) -> None:
        """Make a private group with the members of the default process group. Collective.

        Raises:
            RendezvousError: Somebody did not come in time.
        """
        with forming_a_group():
            messages = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            super().__init__(_GlooWire(messages), config)
