"""The requests of one worker: calls of the program, and the queue of requests to each shard."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import final

from totalreduce.foundation.errors import TotalReduceError
from totalreduce.kernels.arrays import Array
from totalreduce.server.messages import LISTS_BYTES_MAX, WINDOW, Form, Kind, Lru, Message, list_bytes
from totalreduce.server.pieces import Places
from totalreduce.server.residual import Residual

__all__ = ["Call", "Content", "PushOptions", "Request", "RequestQueue"]


@final
@dataclass(slots=True, eq=False)
class Call:
    """A call of the program.

    Attributes:
        clock: The worker's clock at the time of the call.
        first: The number of its first request.
        pending: The number of its requests that were not answered yet.
        error: Why it has failed.
        staleness: Of a pull: the largest number of steps by which the slowest worker was behind.
        is_reported: Whether the program was told the error.
    """

    clock: int
    first: int = 0
    pending: int = 0
    error: TotalReduceError | None = None
    staleness: int = 0
    is_reported: bool = False

    @property
    def is_done(self) -> bool:
        """Whether all requests were answered, so that the memory of the call is free; or the connection has failed."""
        return self.pending == 0


@final
@dataclass(frozen=True, slots=True)
class PushOptions:
    """How something is pushed.

    Attributes:
        lr: The learning rate of the push; ``None``: that of the optimizer.
        is_held: Whether the push counts only when the worker ends its step, and can be withdrawn until then.
        is_exact: Whether neither the codec nor the filter has a part in it.
    """

    lr: float | None = None
    is_held: bool = False
    is_exact: bool = False

    def may_change(self, kind: Kind) -> bool:
        """Whether codec and filter have a part in a request of this kind."""
        return kind in (Kind.PUSH, Kind.PUSH_PULL) and not self.is_exact


@final
@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """What the requests of a call push and pull. The arrays have a row for each key.

    Attributes:
        keys: The keys; ``None``: those of a range, or none.
        values: What is pushed.
        out: Takes what is pulled.
        added: The part of the values that the filter has withheld of earlier pushes.
        options: How it is pushed.
    """

    keys: Array | None = None
    values: Array | None = None
    out: Array | None = None
    added: Array | None = None
    options: PushOptions = PushOptions()


@final
@dataclass(slots=True, eq=False)
class Request:
    """A request of a call to one shard.

    Attributes:
        call: The call.
        kind: What is asked.
        number: The number among the requests of this worker.
        mark: By it, servers know a request again when a worker is run again.
        num_bytes: The bytes of the values that it pushes or pulls.
        places: Which rows of the content it has; ``None``: it is about no key.
        content: The arrays of the call.
        message: With the list of keys. It is made at the first send. When the server knows the list, a copy with the
            digest alone is sent.
        is_lent: Whether an answer may be received into ``out``. A second one must not be.
        is_withdrawn: Whether ``withdraw`` has undone what its code has changed in the residual.
    """

    call: Call
    kind: Kind
    number: int
    mark: int
    num_bytes: int
    places: Places | None
    content: Content
    message: Message | None = None
    is_lent: bool = False
    is_withdrawn: bool = False

    @property
    def in_table(self) -> Places:
        """The rows of its keys in an array with a row for each key of the table."""
        assert self.places is not None
        return self.places.in_table(self.content.keys)

    @property
    def listed(self) -> Array:
        """Its keys."""
        assert self.places is not None
        keys = self.content.keys
        return self.places.listed if keys is None else self.places.take(keys)


@final
@dataclass(slots=True)
class RequestQueue:
    """The requests to one shard.

    Attributes:
        server: The rank that serves the shard.
        unsent: Those that were not sent yet.
        unanswered: Those that were sent, by number, in this order.
        last: The number of the last one that was sent.
        lists: The digests of lists that the server knows.
        slow: What the server has told last: workers for which a request waits, with their clocks.
        waits: The number of this request.
        unanswered_bytes: The bytes of the values of those that were sent.
        is_finished: Whether the server has answered ``FINISH``.
        held: Of each coded push that is held in this step: its rows of the residual, and what they were before.
    """

    server: int
    unsent: deque[Request] = field(default_factory=deque)
    unanswered: dict[int, Request] = field(default_factory=dict)
    last: int = -1
    lists: Lru[bool] = field(default_factory=lambda: Lru(LISTS_BYTES_MAX))
    slow: dict[int, int] = field(default_factory=dict)
    waits: int = -1
    unanswered_bytes: int = 0
    is_finished: bool = False
    held: list[tuple[Places, Array]] = field(default_factory=list)

    @property
    def has_values(self) -> bool:
        """Whether a request with values is under way, or the next one has values: the end of a step has none."""
        return bool(self.unanswered_bytes or (self.unsent and self.unsent[0].num_bytes))

    @property
    def oldest(self) -> Request | None:
        """The first request that was not answered."""
        return next(iter(self.unanswered.values()), self.unsent[0] if self.unsent else None)

    def may_send(self, share: int) -> bool:
        """Return whether the next request may be sent, if ``share`` bytes of values may be unanswered."""
        if not self.unsent or len(self.unanswered) >= WINDOW:
            return False
        return not self.unanswered or self.unanswered_bytes + self.unsent[0].num_bytes <= share

    def sent(self, request: Request, message: Message) -> None:
        """Note that a request is sent for the first time, with this message."""
        request.message, self.last = message, request.number
        self.unanswered[request.number] = request
        self.unanswered_bytes += request.num_bytes

    def answered(self, request: Request) -> None:
        """Note that a request was answered."""
        del self.unanswered[request.number]
        self.unanswered_bytes -= request.num_bytes
        if request.number == self.waits:
            self.slow = {}
        request.call.pending -= 1

    def drop_held(self, clock: int) -> None:
        """Drop what was not sent of the pushes that are held in a step."""
        unsent, self.unsent = self.unsent, deque()
        for request in unsent:
            if request.content.options.is_held and request.call.clock == clock:
                request.call.pending -= 1
            else:
                self.unsent.append(request)

    def forget_held(self, end: Request, residual: Residual | None) -> None:
        """Note that a step ends, or that what was held in it is withdrawn: the residual is then as it was before."""
        if end.kind is Kind.WITHDRAW and residual is not None:
            for places, before in reversed(self.held):
                places.put(residual.values, before)
            for request in self.unanswered.values():  # one that is refused later must not change the residual again
                is_of_step = request.call.clock == end.call.clock
                request.is_withdrawn = request.is_withdrawn or (is_of_step and request.content.options.is_held)
        self.held.clear()

    def begin_epoch(self, server: int) -> None:
        """Go on with another server, which knows nothing of what was sent to the last one."""
        self.server, self.last, self.waits = server, -1, -1
        self.lists, self.slow = Lru(LISTS_BYTES_MAX), {}
        for request in self.unanswered.values():
            assert request.message is not None
            header = replace(request.message.header, previous=self.last)
            request.message, request.is_lent = replace(request.message, header=header), False
            self.last = request.number

    def forget_lists(self) -> None:
        """Note that the server has forgotten the lists of all unanswered requests.

        It did not know one of them. To ask about each of the others would send the later ones each time.
        """
        for request in self.unanswered.values():
            assert request.message is not None
            self.lists.drop(request.message.header.digest)

    def messages(self, counts: Counter[str]) -> Iterator[tuple[int, Message]]:
        """Yield the server and the message of each unanswered request, in order. ``counts``: see ``as_sent``."""
        for request in self.unanswered.values():
            yield self.server, self.as_sent(request, counts)

    def as_sent(self, request: Request, counts: Counter[str]) -> Message:
        """Return the message of a request: with a digest for a list of keys that the server knows.

        ``counts``: how often keys travelled as a ``"list"``, and as a ``"digest"``.
        """
        message, room, out = request.message, None, request.content.out
        assert message is not None
        if out is not None and not request.is_lent:
            assert request.places is not None
            room, request.is_lent = request.places.memory(out), True
        header, keys = message.header, message.keys
        if header.form is Form.LIST and self.lists.get(header.digest):
            counts["digest"] += 1
            header, keys = replace(header, form=Form.DIGEST), None
        elif header.form is Form.LIST:
            counts["list"] += 1
            self.lists.put(header.digest, True, list_bytes(header.end))
        return Message(header, keys, message.values, room)

    def fail(self, error: TotalReduceError) -> None:
        """Fail the calls of all requests."""
        for request in [*self.unanswered.values(), *self.unsent]:
            request.call.error = request.call.error or error
            request.call.pending = 0
        self.unanswered.clear()
        self.unsent.clear()
