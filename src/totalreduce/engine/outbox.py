"""Everything that waits to leave this rank, by peer: control frames, answers to the peer's frames, and data messages.

A transport asks for one message at a time. Control frames leave first, then answers, then data messages, the most
urgent one first across all operations (``SendQueue``). Channel messages with bodies are a stream for each peer, whose
frames leave in order, behind answers: a message before data messages, and a body in turn with them.

Preemption needs nothing else: an operation that becomes urgent while a segment is leaving has the next message. Against
starvation, the oldest message leaves after ``starvation_limit`` messages that have overtaken it (oneCCL does the same
every 4,096 polls).

The number of control frames follows from what this rank does itself, and so does that of most answers. Replies about
the status of operations and messages in channels are what a peer can make this rank queue, so their number is bounded.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from totalreduce.engine.layout import Region
from totalreduce.engine.operation import Operation
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import Flag, Frame, Header
from totalreduce.schedules.actions import Send

__all__ = ["BODY_BYTES", "NO_KEY", "PIECE_BYTES", "Outbox", "OutgoingMessage", "QueuedMessage", "SendQueue", "pieces"]

#: The key of control frames that are about no operation.
NO_KEY = (0, 0)
#: At so many answers that wait for a peer, no STATUS_REPLY is added: each takes some 250 bytes until it leaves.
_ANSWERS_MAX = 65_536
#: Frames of channel messages that may wait for a peer that goes on sending channel messages (at most 16 MiB).
_CHANNEL_FRAMES_MAX = 1024
#: The same for messages in streams, where they wait behind bodies. The sender of bodies bounds their size.
_STREAM_FRAMES_MAX = 65_536

#: A longer channel message travels in several frames.
PIECE_BYTES: Final = 16 * 1024
#: A longer body of a channel message travels in several frames. As long as the longest segments of operations.
BODY_BYTES: Final = 1024 * 1024
_CHANNEL, _CHANNEL_BODY = int(Frame.CHANNEL), int(Frame.CHANNEL_BODY)
#: The heap may hold as many entries of messages that have left as of messages that wait, and this number more.
_STALE_MAX = 256

_Key = tuple[int, int]


class QueuedMessage:
    """A data message of an operation that is ready to leave. Its body is read when it leaves."""

    __slots__ = ("action", "lane", "operation", "region", "sent", "taken")

    def __init__(self, operation: Operation, lane: int, action: Send, region: Region) -> None:
        """Begin as a message that waits."""
        self.operation, self.lane, self.action, self.region = operation, lane, action, region
        self.taken = self.sent = False


class SendQueue:
    """The data messages for one peer.

    A promoted message gets a second entry in the heap; entries of messages that have left are passed over.
    """

    def __init__(self, *, fifo: bool, starvation_limit: int) -> None:
        """Make an empty queue; ``fifo`` ignores priority and promotion."""
        self._heap: list[tuple[tuple[int, ...], int, QueuedMessage]] = []
        self._by_age: deque[QueuedMessage] = deque()
        self._fifo, self._starvation_limit = fifo, starvation_limit
        self._overtakes = 0
        self._pushes = 0
        self._length = 0

    def __len__(self) -> int:
        """Return the number of messages that wait."""
        return self._length

    def push(self, message: QueuedMessage) -> None:
        """Add a message that is ready to leave."""
        self._length += 1
        self._by_age.append(message)
        self._rank(message)

    def push_back(self, messages: list[QueuedMessage]) -> None:
        """Add messages that were taken before, oldest first; they are older than all messages that wait.

        Within a lane, the order by age must be the order of steps. A receiver keeps a message that arrives before an
        earlier step. If such messages filled its scratch memory, it could never read the earlier one.
        """
        self._length += len(messages)
        self._by_age.extendleft(reversed(messages))
        for message in messages:
            message.taken = False
            self._rank(message)

    def rerank(self, message: QueuedMessage) -> None:
        """Give a message whose operation was promoted a better position."""
        if not message.taken and not self._fifo:
            self._rank(message)

    def pop(self) -> QueuedMessage | None:
        """Take the next message; ``None`` if no message waits."""
        oldest = self._oldest()
        if oldest is None:
            return None
        starving = self._overtakes >= self._starvation_limit and not self._fifo
        message = oldest if starving else self._most_urgent()
        self._overtakes = 0 if message is oldest else self._overtakes + 1
        self._take(message)
        return message

    def peek(self) -> QueuedMessage | None:
        """Return the most urgent message; ``None`` if no message waits."""
        while self._heap and self._heap[0][2].taken:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def discard(self, message: QueuedMessage) -> None:
        """Forget a message whose operation failed."""
        if not message.taken:
            self._take(message)

    def _take(self, message: QueuedMessage) -> None:
        message.taken = True
        self._length -= 1
        # Entries of messages that have left keep their operations, and so tensors, in memory: remove them in sweeps.
        if not self._length:
            self._heap.clear()
            self._by_age.clear()
        elif len(self._heap) > 2 * self._length + _STALE_MAX:
            self._heap = [entry for entry in self._heap if not entry[2].taken]
            heapq.heapify(self._heap)

    def _rank(self, message: QueuedMessage) -> None:
        operation = message.operation
        # Earlier steps first, so that all lanes advance together and the neighbour always has work.
        by_age = (operation.sequence, message.action.step, message.lane)
        key = by_age if self._fifo else (not operation.promoted, operation.priority, *by_age)
        self._pushes += 1  # decides between equal keys, so that Python does not compare messages
        heapq.heappush(self._heap, (key, self._pushes, message))

    def _oldest(self) -> QueuedMessage | None:
        while self._by_age and self._by_age[0].taken:
            self._by_age.popleft()
        return self._by_age[0] if self._by_age else None

    def _most_urgent(self) -> QueuedMessage:
        while True:
            message = heapq.heappop(self._heap)[2]
            if not message.taken:
                return message


@dataclass(slots=True, eq=False)
class OutgoingMessage:
    """One message on its way out.

    Attributes:
        peer: The rank that receives it.
        header: The packed header.
        body: The bytes of the body, or ``None`` for a frame without one.
        queued: The data message, or ``None`` for a control frame.
        share_key: Equal for messages that carry the same bytes to several peers.
        on_sent: Called under the engine's lock when the message has left and its memory is free.
    """

    peer: int
    header: bytes
    body: memoryview | None
    queued: QueuedMessage | None = None
    share_key: Hashable = None
    on_sent: Callable[[], None] | None = None


#: Takes a peer and the key of an operation, at the moment at which the answer leaves; returns its key and its body.
AnswerWriter = Callable[[int, _Key], tuple[_Key, bytes]]


def _is_body(frame: OutgoingMessage) -> bool:
    """Return whether this is a part of a body that follows a message of a channel."""
    return frame.header[3] == _CHANNEL_BODY


def pieces(message: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the bodies of the frames of a channel message, and whether each is the last one."""
    for begin in range(0, max(1, len(message)), PIECE_BYTES):
        end = begin + PIECE_BYTES
        yield message[begin:end], end >= len(message)


class Outbox:
    """What waits to leave, by peer.

    Attributes:
        epoch: The epoch of the group, which every header names.
        bulk_peers: Peers to which the messages of large operations leave by a connection of their own, and are
            therefore queued apart.
        ready: Peers for which something may wait besides bulk that is queued apart. It may name too many peers, never
            too few.
        bulk_ready: The same for bulk that is queued apart.
        control_waits: Peers for which a control frame or an answer waits.
        writers: By frame: the function that writes an answer of this frame. Without one an answer has no body.
        queues: The data messages of each peer to which some have been sent, besides bulk that is queued apart.
        bulk_queues: The bulk that is queued apart, by peer.
    """

    __slots__ = (
        "_answers",
        "_channel_frames",
        "_config",
        "_controls",
        "_gives_way",
        "_streams",
        "bulk_peers",
        "bulk_queues",
        "bulk_ready",
        "control_waits",
        "epoch",
        "queues",
        "ready",
        "writers",
    )

    def __init__(self, config: EngineConfig, epoch: int) -> None:
        """Begin with nothing to send."""
        self._config, self.epoch = config, epoch
        self.writers: dict[Frame, AnswerWriter] = {}
        self._controls: dict[int, deque[OutgoingMessage]] = {}
        self._channel_frames: dict[int, int] = {}  #: By peer: how many of its control frames carry channel messages.
        self._streams: dict[int, deque[OutgoingMessage]] = {}  #: By peer: channel messages that have bodies.
        self._gives_way: set[int] = set()  #: Peers for which it is the turn of a data message, not of a body.
        self._answers: dict[int, OrderedDict[tuple[Frame, _Key], None]] = {}
        self.bulk_peers: frozenset[int] = frozenset()
        self.queues: dict[int, SendQueue] = {}
        self.bulk_queues: dict[int, SendQueue] = {}
        self.ready: set[int] = set()
        self.bulk_ready: set[int] = set()
        self.control_waits: set[int] = set()

    def control(
        self,
        peer: int,
        frame: Frame,
        *,
        key: _Key = NO_KEY,
        body: bytes = b"",
        signature: bytes = bytes(24),
        step: int = 0,
        flags: int = Flag.NONE,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a control frame; for ``on_sent`` see ``OutgoingMessage``."""
        message = self._frame(peer, frame, key, body, signature, step, flags)
        message.on_sent = on_sent
        self._controls.setdefault(peer, deque()).append(message)
        self.control_waits.add(peer)
        self.ready.add(peer)

    def channel_message(self, peer: int, channel: int, message: bytes) -> None:
        """Queue a message of a channel, in pieces."""
        for piece, last in pieces(message):
            self.control(peer, Frame.CHANNEL, key=(channel, 0), body=piece, step=int(last))
            self._channel_frames[peer] = self._channel_frames.get(peer, 0) + 1

    def channel_stream(
        self,
        peer: int,
        channel: int,
        message: bytes,
        bodies: Sequence[memoryview],
        on_sent: Callable[[], None] | None,
    ) -> None:
        """Queue a message of a channel and the bodies that follow it. Such messages leave in the order of these calls.

        Args:
            peer: The rank that receives it.
            channel: The number of the channel.
            message: At most ``PIECE_BYTES`` long, so that no other channel's message can come between two pieces of it.
            bodies: Of bytes. They are read when they leave.
            on_sent: See ``OutgoingMessage``; of the last body.
        """
        assert len(message) <= PIECE_BYTES
        stream = self._streams.setdefault(peer, deque())
        stream.append(self._frame(peer, Frame.CHANNEL, (channel, 0), message, step=1))
        for body in bodies:
            for begin in range(0, len(body), BODY_BYTES):
                part = body[begin : begin + BODY_BYTES]
                stream.append(self._frame(peer, Frame.CHANNEL_BODY, (channel, 0), part))
        stream[-1].on_sent = on_sent
        self.ready.add(peer)

    def take_stream(self, peer: int, *, competes: bool) -> OutgoingMessage | None:
        """Take the next frame of channel messages that have bodies; ``None``: there is none, or data goes first.

        Args:
            peer: The rank that receives it.
            competes: Whether a data message waits for the peer. It takes turns with bodies.
        """
        stream = self._streams.get(peer)
        if not stream:
            return None
        if _is_body(stream[0]):
            if competes and peer in self._gives_way:
                self._gives_way.discard(peer)
                return None
            self._gives_way.add(peer)
        return stream.popleft()

    def streaming(self) -> list[int]:
        """Return the peers for which a stream waits."""
        return [peer for peer, stream in self._streams.items() if stream]

    def drop_streams(self) -> None:
        """Forget the streams: a rank is lost, or the group is closed."""
        self._streams.clear()
        self._gives_way.clear()

    def check_reads(self, peer: int) -> None:
        """Refuse a peer that sends channel messages and does not read those that are sent to it.

        Raises:
            ProtocolError: Too many frames wait for the peer.
        """
        in_stream = len(self._streams.get(peer, ()))
        if self._channel_frames.get(peer, 0) > _CHANNEL_FRAMES_MAX or in_stream > _STREAM_FRAMES_MAX:
            raise ProtocolError(f"rank {peer} goes on sending messages and reads none of those sent to it")

    def answer(self, peer: int, frame: Frame, key: _Key) -> None:
        """Queue an answer to a frame of the peer. Equal answers leave once, and are written when they leave.

        A peer may ask for the status of any operation. If too many answers wait for it, such a question is forgotten.
        Other answers are about operations that were submitted here, or about none.
        """
        answers = self._answers.setdefault(peer, OrderedDict())
        if frame is Frame.STATUS_REPLY and len(answers) >= _ANSWERS_MAX:
            return
        answers[frame, key] = None
        self.control_waits.add(peer)
        self.ready.add(peer)

    def write_answers(self, peer: int) -> None:
        """Turn answers and the stream of a peer into control frames, so that a farewell can follow them.

        Of the stream, only the messages before the first body are sent: like the data of operations, bodies are not
        waited for at the end.
        """
        controls = self._controls.setdefault(peer, deque())
        stream = self._streams.pop(peer, deque())
        while stream and not any(map(_is_body, itertools.islice(stream, 2))):  # neither a body nor its message
            controls.append(stream.popleft())
            self._channel_frames[peer] = self._channel_frames.get(peer, 0) + 1
            self.control_waits.add(peer)
        while self._answers.get(peer):
            controls.append(self._next_answer(peer))

    def take_control(self, peer: int) -> OutgoingMessage:
        """Take the next control frame or answer for a peer of ``control_waits``."""
        controls, answers = self._controls.get(peer), self._answers.get(peer)
        if controls:
            message = controls.popleft()
            if message.header[3] == _CHANNEL:
                self._channel_frames[peer] -= 1
        else:
            message = self._next_answer(peer)
        if not controls and not answers:
            self.control_waits.discard(peer)
        return message

    def num_answers(self, peer: int) -> int:
        """How many answers wait for a peer."""
        return len(self._answers.get(peer, ()))

    def push(self, message: QueuedMessage) -> None:
        """Queue a data message."""
        operation, peer = message.operation, message.action.peer
        operation.queued.setdefault(peer, []).append(message)
        self._queue(peer, operation).push(message)
        self._note_ready(peer, operation)

    def push_back(self, peer: int, messages: list[QueuedMessage]) -> None:
        """Queue data messages that were taken before and held back, oldest first: they leave before younger ones."""
        operation = messages[0].operation
        operation.queued.setdefault(peer, []).extend(messages)
        self._queue(peer, operation).push_back(messages)
        self._note_ready(peer, operation)

    def promote(self, operation: Operation) -> None:
        """Give the queued messages of an operation that was promoted a better position."""
        for peer, messages in operation.queued.items():
            messages[:] = [message for message in messages if not message.sent]
            queue = self._queue(peer, operation)
            for message in messages:
                queue.rerank(message)

    def discard(self, operation: Operation) -> None:
        """Forget the data messages of an operation that has failed, or that the relay has taken.

        Those that are half-way out, which the transport sends to their end, stay in ``Operation.queued``.
        """
        held = {message for messages in operation.held.values() for message in messages}
        for peer, messages in operation.queued.items():
            queue = self._queue(peer, operation)
            # Messages that were held back are listed twice.
            leaving = [m for m in dict.fromkeys(messages) if m.taken and not m.sent and m not in held]
            for message in messages:
                queue.discard(message)
            operation.queued[peer] = leaving

    def data_message(self, queued: QueuedMessage, flags: int) -> OutgoingMessage:
        """Return a data message as it leaves now, with these flags in its header."""
        operation, action = queued.operation, queued.action
        body = operation.segment(queued.region, queued.lane, partial=action.partial)
        if operation.promoted:
            flags |= Flag.URGENT
        signature = operation.layout.signature_to(action.peer)
        header = Header.pack_data(
            self.epoch, operation.key, queued.lane, action.step, flags, len(body), signature, operation.priority
        )
        share_key = (operation.key, queued.lane, action.step, action.chunk)
        return OutgoingMessage(action.peer, header, body, queued, share_key)

    def _queue(self, peer: int, operation: Operation) -> SendQueue:
        """Return the queue of the messages of an operation to a peer."""
        queues = self.bulk_queues if self._is_apart(peer, operation) else self.queues
        queue = queues.get(peer)
        if queue is None:
            queue = queues[peer] = SendQueue(
                fifo=self._config.scheduling == "fifo", starvation_limit=self._config.starvation_limit
            )
        return queue

    def _note_ready(self, peer: int, operation: Operation) -> None:
        (self.bulk_ready if self._is_apart(peer, operation) else self.ready).add(peer)

    def _is_apart(self, peer: int, operation: Operation) -> bool:
        """Return whether the messages of an operation to a peer leave by the connection for bulk."""
        return operation.layout.is_bulk and peer in self.bulk_peers

    def _next_answer(self, peer: int) -> OutgoingMessage:
        (frame, key), _ = self._answers[peer].popitem(last=False)
        writer = self.writers.get(frame)
        key, body = writer(peer, key) if writer is not None else (key, b"")
        return self._frame(peer, frame, key, body)

    def _frame(
        self,
        peer: int,
        frame: Frame,
        key: _Key,
        body: bytes | memoryview,
        signature: bytes = bytes(24),
        step: int = 0,
        flags: int = Flag.NONE,
    ) -> OutgoingMessage:
        header = Header(frame, self.epoch, *key, step=step, flags=flags, body_bytes=len(body), signature=signature)
        return OutgoingMessage(peer, header.pack(), memoryview(body) if body else None)
