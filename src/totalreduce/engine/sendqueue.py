"""The order in which data messages leave for one peer: the most urgent one first, across all operations.

Preemption needs nothing else: the transport takes one message at a time, so an operation that becomes urgent while a
segment is leaving has the next one. Against starvation, the oldest message leaves after ``starvation_limit`` messages
that have overtaken it (oneCCL does the same every 4,096 polls).
"""

from __future__ import annotations

import heapq
from collections import deque

from totalreduce.engine.layout import Region
from totalreduce.engine.operation import Operation
from totalreduce.schedules.actions import Send

__all__ = ["QueuedMessage", "SendQueue"]


#: The heap may hold as many entries of messages that have left as of messages that wait, and this number more.
_STALE_MAX = 256


class QueuedMessage:
    """A data message of an operation that is ready to leave. Its body is read when it leaves."""

    __slots__ = ("action", "lane", "operation", "region", "taken")

    def __init__(self, operation: Operation, lane: int, action: Send, region: Region) -> None:
        """Begin as a message that waits."""
        self.operation, self.lane, self.action, self.region = operation, lane, action, region
        self.taken = False


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
