"""Carries the messages of a parameter server between ranks.

They travel in a channel of the engine: headers as its messages, together with keys and values that are small. Large
keys and values follow as bodies, from the program's memory and into it. With an operation of the engine for each
message, a step with small requests took seven times the processor time; and large requests took nearly twice the time,
because their values arrived before their receiver knew of them, and were copied twice.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, final

import numpy as np

from totalreduce.engine.channels import Bodies
from totalreduce.engine.outbox import PIECE_BYTES
from totalreduce.foundation.errors import PeerLost, ProtocolError, TotalReduceError
from totalreduce.foundation.types import operation_id
from totalreduce.groups.group import Group
from totalreduce.kernels.arrays import Array
from totalreduce.server.messages import HEADER, Header, Kind, Message, Spec

__all__ = ["Messenger"]

#: Keys and values of so many bytes together travel with their header, in one frame.
_INLINE_BYTES_MAX: Final = PIECE_BYTES - HEADER.size
#: The bytes of large answers to one rank that have not left: ten times those of a worker's unanswered requests.
_UNSENT_BYTES_MAX: Final = 64 * 1024 * 1024


@final
class _Unsent:
    """Counts the bytes of large answers that have not left; their memory is kept. Any thread may call it.

    Answers alone are counted: the memory of requests is the program's.
    """

    def __init__(self, answer_bytes_max: int) -> None:
        """``answer_bytes_max``: the largest size of the values of an answer."""
        self._max = max(_UNSENT_BYTES_MAX, 2 * answer_bytes_max)
        self._lock = threading.Lock()
        self._num_bytes: Counter[int] = Counter()

    def begin(self, rank: int, message: Message) -> None:
        """Count a message to a rank; raise ``ProtocolError`` if this is too much."""
        with self._lock:
            self._num_bytes[rank] += message.num_bytes
            if self._num_bytes[rank] > self._max:
                raise ProtocolError(
                    f"rank {rank} asks for values and does not receive them: more than {self._max} bytes of "
                    "answers wait"
                )

    def end(self, rank: int, message: Message) -> None:
        """Note that a message has left."""
        with self._lock:
            self._num_bytes[rank] -= message.num_bytes


@final
class Messenger:
    """The messages of one rank. It implements ``engine.channels.Channel``.

    What arrives is handled in the thread that calls the functions given to ``post``, one after the other.

    Attributes:
        talking: The seats of other ranks that have not said goodbye.
        num_bytes: The bytes ``"sent"`` and ``"received"``.
    """

    def __init__(
        self,
        group: Group,
        seats: Sequence[int],
        name: str,
        spec: Spec,
        *,
        incoming_max: int,
        is_renewed: bool,
        post: Callable[[Callable[[], None]], object],
        handle: Callable[[int, Message], None],
        may_leave: Callable[[int], bool],
        fail: Callable[[TotalReduceError], None],
    ) -> None:
        """Begin without a channel.

        Args:
            group: Nothing else uses it.
            seats: By rank of the group: its seat, by which servers and workers are named.
            name: No other parameter server of the job has it.
            spec: Of the table.
            incoming_max: The largest number of messages of one rank that are not handled.
            is_renewed: Whether another group follows if a rank leaves before all have said goodbye.
            post: Has a function called soon, by the thread. May be called under the engine's lock.
            handle: Handles a complete message of a rank.
            may_leave: Returns whether neither this worker nor this server needs a rank any more.
            fail: Is told that a rank is lost.
        """
        self._spec, self._runner = spec, group.operations.runner
        self._incoming_max, self._is_renewed = incoming_max, is_renewed
        self._post, self._handle, self._may_leave, self._fail = post, handle, may_leave, fail
        self._number = operation_id(f"parameter server {group.operations.scope!r} {name!r}")
        #: By seat: the rank of the engine. And the other way round.
        self._ranks = dict(zip(seats, group.ranks, strict=True))
        self._seats = dict(zip(group.ranks, seats, strict=True))
        #: By seat of another rank: its messages that were not handled, also such that have not come as a whole.
        self._incoming: dict[int, deque[Message]] = {s: deque() for s in seats if s != seats[group.rank]}
        #: By seat of a server, and shard: what requests wait for, as told last. Earlier ones do not count any more.
        self._waiting: dict[int, dict[int, Message]] = {seat: {} for seat in self._incoming}
        self._waiting_lock = threading.Lock()
        #: By seat and number of a request: the memory for the values of its answer.
        self._rooms: dict[tuple[int, int], Array] = {}
        self._unsent = _Unsent(spec.value_bytes_max)
        self.talking = set(self._incoming)
        self.num_bytes: Counter[str] = Counter()

    def say_goodbye(self) -> None:
        """Tell all other ranks that nothing more will come."""
        self.send([(seat, Message(Header(Kind.GOODBYE))) for seat in self._incoming])

    def open(self) -> None:
        """Open the channel."""

        def begin(now: float) -> bool:
            self._runner.engine.channels.open(self._number, self, now)
            return True

        self._runner.act(begin)

    def close(self) -> None:
        """Close the channel; what arrives later is dropped."""

        def end(_now: float) -> bool:
            self._runner.engine.channels.close(self._number)
            return False

        self._runner.act(end)

    def send(self, messages: Sequence[tuple[int, Message]]) -> None:
        """Send messages to other seats, in this order. Any thread may call it. Keys and values must not change.

        Raises:
            ProtocolError: A rank does not receive the answers to its requests. Nothing was sent.
            TotalReduceError: The group takes no more messages. Nothing was sent.
        """
        leaving: list[tuple[int, bytes, list[memoryview], Callable[[], None] | None]] = []
        for seat, message in messages:
            rank = self._ranks.get(seat)
            if rank is None:
                raise ProtocolError(f"rank {seat} is no member of the group")
            arrays = [array for array in (message.keys, message.values) if array is not None and array.size]
            data, bodies, on_sent = self._spec.encode(message.header), [], None
            if sum(array.nbytes for array in arrays) <= _INLINE_BYTES_MAX:
                data = b"".join([data, *(array.tobytes() for array in arrays)])
            else:
                bodies = [_bytes_of(array) for array in arrays]
                if not message.header.kind.is_request:
                    self._unsent.begin(rank, message)
                    on_sent = partial(self._unsent.end, rank, message)
            if message.room is not None:
                self._rooms[seat, message.header.number] = message.room
            leaving.append((rank, data, bodies, on_sent))

        def post(_now: float) -> bool:
            for rank, data, bodies, on_sent in leaving:
                self._runner.engine.channels.post_with_bodies(rank, self._number, data, bodies, on_sent)
            self.num_bytes["sent"] += sum(message.num_bytes for _, message in messages)
            return True

        self._runner.act(post)

    # -------------------------------------------------------------------------- the channel: under the engine's lock

    def receive(self, peer: int, message: bytes, now: float) -> Bodies | None:
        """See ``Channel``."""
        del now
        source = self._seats.get(peer)
        if source is None:
            raise ProtocolError(f"rank {peer} sends to a parameter server of a group that it is no member of")
        spec, incoming = self._spec, self._incoming[source]
        header = spec.decode(message[: HEADER.size])
        key_bytes, value_bytes = spec.key_bytes(header), header.value_bytes
        is_inline = key_bytes + value_bytes <= _INLINE_BYTES_MAX
        expected = HEADER.size + (key_bytes + value_bytes if is_inline else 0)
        if len(message) != expected:
            raise ProtocolError(f"rank {source} sends a message of {len(message)} bytes where {expected} are expected")
        if max(len(incoming), len(self._waiting[source])) >= self._incoming_max:
            raise ProtocolError(f"rank {source} sends more than {self._incoming_max} messages that were not handled")
        room = self._rooms.pop((source, header.number), None) if header.kind in (Kind.DONE, Kind.REFUSED) else None
        if header.kind is Kind.REFUSED:
            room = None  # a text follows, and no values
        keys = np.empty(header.end, spec.key_dtype) if key_bytes else None
        values = _memory(room, value_bytes, spec.value_dtype(header)) if value_bytes else None
        views = [_bytes_of(array) for array in (keys, values) if array is not None]
        whole = Message(header, keys, values)
        self.num_bytes["received"] += whole.num_bytes
        arrived = partial(self._post, partial(self._arrived, source))
        if not is_inline:
            incoming.append(whole)
            return Bodies(views, arrived)
        begin = HEADER.size
        for view in views:
            view[:] = message[begin : begin + len(view)]
            begin += len(view)
        if header.kind is Kind.WAITING:
            with self._waiting_lock:
                is_posted = header.shard in self._waiting[source]
                self._waiting[source][header.shard] = whole
            if not is_posted:
                self._post(partial(self._told, source, header.shard))
            return None
        incoming.append(whole)
        arrived()
        return None

    def fail(self, error: TotalReduceError, now: float) -> None:
        """See ``Channel``."""
        del now
        self._post(partial(self._fail, error))

    def depart(self, peer: int, reason: str, now: float) -> None:
        """See ``Channel``."""
        del now
        if peer in self._seats:
            self._post(partial(self._departed, peer, reason))

    def next_due(self) -> None:
        """See ``Channel``."""
        return

    def tick(self, now: float) -> None:
        """See ``Channel``."""

    # --------------------------------------------------------------------------------------------------- in the thread

    def _departed(self, peer: int, reason: str) -> None:
        """A rank has closed its group, and everything that it has sent was handled."""
        # With ``is_renewed`` the leaver may go on in another group, although this rank needs nothing of it any more.
        if self._seats[peer] in self.talking or (self._is_renewed and self.talking):
            where = "before its connection to the parameter server"
            self._fail(PeerLost(peer, f"it has closed its group {where}; {reason}"))

    def _told(self, source: int, shard: int) -> None:
        """Handle the last message about what requests wait for, of which a server may send many."""
        with self._waiting_lock:
            message = self._waiting[source].pop(shard)
        self._handle(source, message)

    def _arrived(self, source: int) -> None:
        """Handle the first message of a rank that was not handled; it has come as a whole."""
        message = self._incoming[source].popleft()
        if message.header.kind is not Kind.GOODBYE:
            self._handle(source, message)
            return
        self.talking.discard(source)
        if not self._may_leave(source):
            self._fail(PeerLost(self._ranks[source], "it has ended its connection to the parameter server"))


def _memory(room: Array | None, num_bytes: int, dtype: np.dtype[Any]) -> Array:
    """Return memory for values: that of the program, if it has the right size."""
    return room if room is not None and room.nbytes == num_bytes else np.empty(num_bytes // dtype.itemsize, dtype)


def _bytes_of(array: Array) -> memoryview:
    """Return the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
