"""What leaves next for one peer: always the most urgent message that is ready, across all operations.

Preemption needs no more than this: a transport takes one message at a time, so whatever became urgent while a segment
was leaving is next. Anti-starvation: after ``starvation_limit`` messages that overtook the oldest one, the oldest one
leaves (oneCCL does the same every 4,096 polls).
"""

from __future__ import annotations

import heapq
from collections import deque

from totalreduce.engine.layout import Place
from totalreduce.engine.operation import Operation
from totalreduce.schedules.actions import Send

__all__ = ["QueuedMessage", "SendQueue"]


#: So many stale entries are tolerated, beside as many as there are live ones.
_STALE_MAX = 256


class QueuedMessage:
    """A data message that may leave: a slot of an operation. The body is read when it leaves."""

    __slots__ = ("action", "lane", "operation", "place", "taken")

    def __init__(self, operation: Operation, lane: int, action: Send, place: Place) -> None:
        """Remember the slot."""
        self.operation, self.lane, self.action, self.place = operation, lane, action, place
        self.taken = False


class SendQueue:
    """Priority queue of one peer. Stale entries are skipped, so promotion is a second push."""

    def __init__(self, *, fifo: bool, starvation_limit: int) -> None:
        """Make an empty queue; ``fifo`` ignores priority and promotion."""
        self._heap: list[tuple[tuple[int, ...], int, QueuedMessage]] = []
        self._by_age: deque[QueuedMessage] = deque()
        self._fifo, self._starvation_limit = fifo, starvation_limit
        self._overtakes = 0
        self._pushes = 0
        self._length = 0

    def __len__(self) -> int:
        """Messages waiting."""
        return self._length

    def push(self, message: QueuedMessage) -> None:
        """Add a message that is ready to leave."""
        self._length += 1
        self._by_age.append(message)
        self._rank(message)

    def push_back(self, messages: list[QueuedMessage]) -> None:
        """Add messages that were taken before, oldest first: they are older than everything that waits.

        The order by age must stay the order of steps within a lane: a receiver that gets a later step first has to keep
        it, and with all its scratch memory full of those it could never read the one that it needs.
        """
        self._length += len(messages)
        self._by_age.extendleft(reversed(messages))
        for message in messages:
            message.taken = False
            self._rank(message)

    def rerank(self, message: QueuedMessage) -> None:
        """Its operation was promoted: give it a better place."""
        if not message.taken and not self._fifo:
            self._rank(message)

    def pop(self) -> QueuedMessage | None:
        """Take the next message, or ``None``."""
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
        # Stale entries hold on to operations that are done, tensors included. One sweep pays for many pushes.
        if not self._length:
            self._heap.clear()
            self._by_age.clear()
        elif len(self._heap) > 2 * self._length + _STALE_MAX:
            self._heap = [entry for entry in self._heap if not entry[2].taken]
            heapq.heapify(self._heap)

    def _rank(self, message: QueuedMessage) -> None:
        operation = message.operation
        # Earlier steps first: all lanes advance together, which keeps the neighbour supplied.
        place = (operation.sequence, message.action.step, message.lane)
        key = place if self._fifo else (not operation.promoted, operation.priority, *place)
        self._pushes += 1  # decides ties before Python would compare messages
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
