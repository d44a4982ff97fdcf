"""Messages of ``torch.distributed``: point-to-point operations of a gloo process group.

They are for programs whose process group reaches every rank where the library's own sockets may not. All messages use
private groups with the same members, so the program's own messages are not disturbed.

Gloo reports the end of a receive only to a thread that blocks in ``Work.wait``, and it ends the connection if such a
wait exceeds its time-out. So no thread waits for a message that may not have come. Heads are received into *slots*
whose last eight bytes are a running number; when the number shows in memory, ``wait`` returns at once. Behind a body
comes a number of its own, received after it. Every slot also has two counters for the other direction: how many slots
the sender of this slot has read, and how many messages it has *released*, whose memory may then be reused::

    offset  size  field of a slot (little endian, all 64 bits)
    0       8     bytes of the slot; written first
    8       8     bytes of the head
    16      8     1: a body follows; 2: no head, the counters are the message
    24      8     how many slots the sender has read
    32      8     how many messages (heads with their bodies) the sender has released
    40      n     the head, padded to a multiple of 8
    40+n    8     number of the slot, from 1; written last
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, final

import numpy as np
import torch
import torch.distributed as dist

from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.errors import RendezvousError
from totalreduce.transports.passing import HEAD_BYTES, PassingTransport, Wire, WireError

__all__ = ["ENDED", "TorchTransport", "destroy", "forming_a_group", "reason"]

#: Gloo raises one of these when a connection has ended, and torch when the program has destroyed its process group.
ENDED: Final = (RuntimeError, ValueError)

_SLOT_TAG, _BODY_TAG, _END_TAG = 1, 2, 3
_FIELDS = 5
_SLOT_BYTES = 8 * (_FIELDS + 1) + HEAD_BYTES
_PLAIN, _WITH_BODY, _COUNTERS = 0, 1, 2
#: The largest number of messages that a peer has not released, and the number of slots for messages of one peer. The
#: surplus is for counters; gloo itself keeps messages for which no slot waits.
_WINDOW = 4
_SLOTS = _WINDOW + 4
#: A part of a body may still be on its way when the number behind it shows. After this time the connection has ended.
_PATIENCE = timedelta(seconds=20)


def _send(group: dist.ProcessGroup, peer: int, data: np.ndarray[Any, Any], tag: int) -> Any:
    return dist.isend(torch.from_numpy(data), peer, group=group, tag=tag)


def _receive(group: dist.ProcessGroup, peer: int, data: np.ndarray[Any, Any], tag: int) -> Any:
    return dist.irecv(torch.from_numpy(data), peer, group=group, tag=tag)


@final
class _Sender:
    """Slots and bodies on their way to one peer, kept until the peer has read them."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self._slots_sent = 0
        self._slots: deque[tuple[Any, np.ndarray[Any, Any]]] = deque()
        #: Messages that the peer has not released: the operations and memory of a body, or an empty list.
        self.messages: deque[list[Any]] = deque()
        self._messages_over = self._bodies_sent = 0
        self.bodies_left = 0  #: Bodies that the peer has received and that were not reported yet.

    def send_slot(self, head: bytes, kind: int, slots_read: int, released: int) -> None:
        """Send a head with the counters of the other direction, or the counters alone."""
        padded = -(-len(head) // 8)
        words = np.zeros(_FIELDS + padded + 1, np.int64)
        self._slots_sent += 1
        words[:_FIELDS] = (8 * len(words), len(head), kind, slots_read, released)
        words.view(np.uint8)[8 * _FIELDS : 8 * _FIELDS + len(head)] = np.frombuffer(head, np.uint8)
        words[-1] = self._slots_sent
        self._slots.append((_send(self._group, self._peer, words.view(np.uint8), _SLOT_TAG), words))

    def send_body(self, body: memoryview | None) -> None:
        """Send the body of the head that was sent last, and the number that shows that it is complete."""
        if body is None:
            self.messages.append([])
            return
        self._bodies_sent += 1
        # A body that cannot be written (none so far) would make torch warn about the tensor.
        data = np.frombuffer(bytearray(body) if body.readonly else body, np.uint8)
        end = np.full(1, self._bodies_sent, np.int64)
        operations = [
            _send(self._group, self._peer, data, _BODY_TAG),
            _send(self._group, self._peer, end.view(np.uint8), _END_TAG),
        ]
        self.messages.append([*operations, data, end])

    def forget(self, slots_read: int, released: int) -> None:
        """Forget the slots that the peer has read and the messages that it has released."""
        while self._slots and self._slots_sent - len(self._slots) < slots_read:
            self._slots.popleft()[0].wait(_PATIENCE)
        while self.messages and self._messages_over < released:
            kept = self.messages.popleft()
            self._messages_over += 1
            for operation in kept[:2]:
                operation.wait(_PATIENCE)
            self.bodies_left += bool(kept)

    def flush(self, timeout_s: float) -> None:
        """Wait until the slots that were sent have been handed to the kernel."""
        for operation, _ in self._slots:
            operation.wait(timedelta(seconds=timeout_s))


@final
class _Pair:
    """All that is on its way between this rank and one peer. Callers hold the wire's lock; all may raise ``ENDED``."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.peer = peer  #: Rank of the peer.
        self._group = group
        self.failed = False  #: Whether the connection has failed.
        self.sender = _Sender(group, peer)  #: The direction to the peer.
        self._slots = [np.zeros(_SLOT_BYTES // 8, np.int64) for _ in range(_SLOTS)]
        self._receives = [_receive(group, peer, slot.view(np.uint8), _SLOT_TAG) for slot in self._slots]
        self._slots_read = 0
        self._ended: Exception | None = None  #: Why nothing more can be received.
        #: Heads that were taken out of their slots, and whether a body follows: at most ``_WINDOW``.
        self.heads: deque[tuple[memoryview, bool]] = deque()
        #: The operations that receive a body and the number behind it.
        self._body: tuple[Any, Any] | None = None
        self._end = np.zeros(1, np.int64)
        self._bodies_begun = 0
        self.body_is_here = False  #: Whether the body of the oldest head is complete.
        self._released = 0  #: Number of messages that this rank has released.
        self._reported = 0  #: How many of them the peer knows to be released.

    def send(self, head: bytes, body: memoryview | None) -> None:
        """Send a message."""
        self._send_slot(head, _PLAIN if body is None else _WITH_BODY)
        self.sender.send_body(body)

    def send_counters(self) -> None:
        """Report to the peer what this rank has read and released."""
        self._send_slot(b"", _COUNTERS)

    def _send_slot(self, head: bytes, kind: int) -> None:
        self._reported = self._released
        self.sender.send_slot(head, kind, self._slots_read, self._released)

    def poll(self) -> bool:
        """Read the slots that have arrived; returns whether anything has arrived."""
        moved = False
        while self._read_slot():
            moved = True
        if self._ended is not None:
            raise self._ended
        if self._body is not None and self._end[0] == self._bodies_begun:
            for operation in self._body:
                operation.wait(_PATIENCE)
            self._body = None
            self.body_is_here = moved = True
        if self._released - self._reported >= _WINDOW // 2:
            self.send_counters()
        return moved

    def _read_slot(self) -> bool:
        index = self._slots_read % _SLOTS
        slot = self._slots[index]
        size = int(slot[0])
        if not size:
            return False
        # Until the slot is complete there may be anything in it, so no field is trusted before ``wait``.
        last = size // 8 - 1
        if not _FIELDS <= last < len(slot) or slot[last] != self._slots_read + 1:
            return False
        self._receives[index].wait(_PATIENCE)
        length, kind, read, released = (int(word) for word in slot[1:_FIELDS])
        if not 0 <= length <= 8 * (last - _FIELDS) or not _PLAIN <= kind <= _COUNTERS:
            raise WireError(f"rank {self.peer} sends what no correct peer sends: {slot[:_FIELDS].tolist()}")
        self._slots_read += 1
        if kind != _COUNTERS:
            if len(self.heads) >= _WINDOW:
                raise WireError(f"rank {self.peer} sends more messages than it may")
            content = slot.view(np.uint8)[8 * _FIELDS : 8 * _FIELDS + length].tobytes()
            self.heads.append((memoryview(content), kind == _WITH_BODY))
        slot[: last + 1] = 0
        try:
            self._receives[index] = _receive(self._group, self.peer, slot.view(np.uint8), _SLOT_TAG)
        except ENDED as error:
            self._ended = error  # ``poll`` raises it when all slots that have arrived are read
        self.sender.forget(read, released)
        return True

    def receive(self, view: memoryview) -> None:
        """Begin to receive a body."""
        self._bodies_begun += 1
        # In this order: gloo sends to receives that wait, so the number comes behind the body.
        self._body = (
            _receive(self._group, self.peer, np.frombuffer(view, np.uint8), _BODY_TAG),
            _receive(self._group, self.peer, self._end.view(np.uint8), _END_TAG),
        )

    def release(self) -> None:
        """Release the oldest message. A sender that waits for the memory of a body is told at once."""
        _, with_body = self.heads.popleft()
        self.body_is_here = False
        self._released += 1
        if with_body:
            self.send_counters()


@final
class _GlooWire(Wire):
    """A ``Wire`` of a gloo process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._group: dist.ProcessGroup | None = group
        self._lock = threading.Lock()
        self._pairs = {peer: _Pair(group, peer) for peer in range(self.world_size) if peer != self.rank}
        self._failures: list[tuple[int, str]] = []

    def poll(self) -> bool:
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
        with self._lock:
            failures, self._failures = self._failures, []
        return failures

    def may_send(self, peer: int) -> bool:
        return len(self._pairs[peer].sender.messages) < _WINDOW

    def send(self, peer: int, head: bytes, body: memoryview | None) -> None:
        self._call(peer, _Pair.send, head, body)

    def beat(self, peer: int, head: bytes) -> None:
        """Send a heartbeat, or counters if the peer has not released enough: gloo reports an end only to a sender."""
        if self.may_send(peer):
            self.send(peer, head, None)
        else:
            self._call(peer, _Pair.send_counters)

    def _call(self, peer: int, method: Callable[..., None], *arguments: Any) -> None:
        with self._lock:
            try:
                method(self._pairs[peer], *arguments)
            except ENDED as error:
                raise WireError(reason(error)) from error

    def bodies_left(self, peer: int) -> int:
        sender = self._pairs[peer].sender
        with self._lock:
            left, sender.bodies_left = sender.bodies_left, 0
        return left

    def busy(self, peer: int) -> bool:
        """Whether a body has not left; gloo sends the heads by itself (see ``close``)."""
        return any(self._pairs[peer].sender.messages)

    def head(self, peer: int) -> memoryview | None:
        heads = self._pairs[peer].heads
        return heads[0][0] if heads else None

    def receive(self, peer: int, view: memoryview) -> None:
        self._call(peer, _Pair.receive, view)

    def received(self, peer: int) -> bool:
        return self._pairs[peer].body_is_here

    def release(self, peer: int) -> None:
        self._call(peer, _Pair.release)

    def close(self, timeout_s: float) -> None:
        """End the private group's connections, and with them what is posted on them."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            for pair in self._pairs.values():
                with contextlib.suppress(*ENDED):
                    pair.sender.flush(max(0.01, deadline - time.monotonic()))
            self._pairs.clear()
            group, self._group = self._group, None
            if group is not None:
                destroy(group)


@final
class TorchTransport(PassingTransport):
    """Messages of ``torch.distributed``.

    Gloo cannot redirect a body that has begun to arrive: if its operation fails meanwhile, the body is still written
    into the operation's tensor, but never after ``close``.
    """

    def __init__(self, config: TcpConfig, timeout_s: float) -> None:
        """Make a private group with the members of the default process group. Collective.

        Raises:
            RendezvousError: A rank did not come in time.
        """
        with forming_a_group():
            messages = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            super().__init__(_GlooWire(messages), config)


@contextlib.contextmanager
def forming_a_group() -> Iterator[None]:
    """Turn torch's error into the library's while a private group is made. Raises ``RendezvousError``."""
    try:
        yield
    except RuntimeError as error:
        raise RendezvousError(f"torch.distributed cannot make a private group: {reason(error)}") from error


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a private group, unless the program has destroyed its own process group, and the private one with it."""
    with contextlib.suppress(*ENDED):
        if dist.is_initialized():
            dist.destroy_process_group(group)


def reason(error: Exception) -> str:
    """Return the first line of torch's error, without the position in gloo's source and the usual advice."""
    line = (str(error).splitlines() or [""])[0]
    return line.split("] ", 1)[-1].split(" This is typically caused", 1)[0][:300]
