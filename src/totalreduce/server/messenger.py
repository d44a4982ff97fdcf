"""Carries the messages of a parameter server between ranks.

Headers travel in a channel of the engine, and so do keys and values that are small. With an operation of the engine for
each of them, a step with small requests took seven times the processor time. Large keys and values follow as messages
of the group, from the program's memory and into it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, final

import numpy as np
import torch

from totalreduce.foundation.errors import ConfigurationError, PeerLost, ProtocolError, TotalReduceError
from totalreduce.foundation.types import operation_id
from totalreduce.groups.group import Group
from totalreduce.kernels.arrays import Array
from totalreduce.server.messages import HEADER, Header, Kind, Message, Spec
from totalreduce.tensors.work import Work

__all__ = ["Messenger"]

#: Keys and values of so many bytes together travel in the channel. 32 such requests, which may arrive before this rank
#: opens the channel, are well below what the engine keeps of them.
_INLINE_BYTES_MAX: Final = 16 * 1024
#: The bytes of large answers to one rank that have not left: ten times those of a worker's unanswered requests.
_UNSENT_BYTES_MAX: Final = 64 * 1024 * 1024


@final
@dataclass(slots=True, eq=False)
class _Incoming:
    """A message whose keys and values may not have come yet."""

    message: Message
    pending: int


@final
class _Unsent:
    """Counts the bytes of large answers that have not left; their memory is kept. Any thread may call it.

    Answers alone are counted: the memory of requests is the program's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes: Counter[int] = Counter()

    def begin(self, rank: int, message: Message) -> None:
        """Count a message to a rank; raise ``ProtocolError`` if this is too much."""
        if message.header.kind.is_request:
            return
        with self._lock:
            self._num_bytes[rank] += message.num_bytes
            if self._num_bytes[rank] > _UNSENT_BYTES_MAX:
                raise ProtocolError(
                    f"rank {rank} asks for values and does not receive them: more than {_UNSENT_BYTES_MAX} bytes of "
                    "answers wait"
                )

    def end(self, rank: int, message: Message) -> None:
        """Note that a message has left."""
        if not message.header.kind.is_request:
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
        room_for: Callable[[int, Header], Array | None],
        may_leave: Callable[[int], bool],
        fail: Callable[[TotalReduceError], None],
    ) -> None:
        """Begin without a channel.

        Args:
            group: The ranks; nothing else uses the group.
            seats: By rank of the group: its seat, by which servers and workers are named.
            name: A name that no other parameter server of the job has.
            spec: Of the table.
            incoming_max: The largest number of messages of one rank of which a part has not come.
            is_renewed: Whether another group follows if a rank leaves before all have said goodbye.
            post: Has a function called soon, by the thread. May be called under the engine's lock.
            handle: Handles a complete message of a rank.
            room_for: Returns memory for large values that will come; ``None``: there is none.
            may_leave: Returns whether neither this worker nor this server needs a rank any more.
            fail: Is told that a rank is lost.
        """
        self._group, self._spec, self._runner = group, spec, group.operations.runner
        self._incoming_max, self._is_renewed = incoming_max, is_renewed
        self._post, self._handle, self._room_for = post, handle, room_for
        self._may_leave, self._fail = may_leave, fail
        self._number = operation_id(f"parameter server {group.operations.scope!r} {name!r}")
        #: By seat: the rank in the group. By rank of the engine: the seat.
        self._ranks = {seat: rank for rank, seat in enumerate(seats)}
        self._seats = dict(zip(group.ranks, seats, strict=True))
        self._incoming: dict[int, deque[_Incoming]] = {s: deque() for s in seats if s != seats[group.rank]}
        self._lock = threading.Lock()  # a header and what follows it leave together
        self._unsent = _Unsent()
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
        """Send messages to other seats, in this order. Any thread may call it.

        Raises:
            ProtocolError: A rank does not receive the answers to its requests.
            TotalReduceError: The group takes no more messages, or the memory of a message is in use. Then no header was
                sent, but large keys and values may have been: nothing more can be sent.
        """
        channel: list[tuple[int, bytes]] = []
        large: list[tuple[int, Message, Array]] = []
        for seat, message in messages:
            target = self._ranks.get(seat)
            if target is None:
                raise ProtocolError(f"rank {seat} is no member of the group")
            bodies = [body for body in (message.keys, message.values) if body is not None and body.size]
            data = self._spec.encode(message.header)
            if sum(body.nbytes for body in bodies) <= _INLINE_BYTES_MAX:
                data = b"".join([data, *(body.tobytes() for body in bodies)])
            else:
                large += [(target, message, body) for body in bodies]
                self._unsent.begin(self._group.ranks[target], message)
            channel.append((self._group.ranks[target], data))

        def post(_now: float) -> bool:
            for rank, data in channel:
                self._runner.engine.channels.post(rank, self._number, data)
            return True

        with self._lock:
            # A header without its body would have the next body taken for it, so bodies come first.
            works = [(t, m, self._group.send(torch.from_numpy(body), dst=t)) for t, m, body in large]
            self._runner.act(post)
            self.num_bytes["sent"] += sum(message.num_bytes for _, message in messages)
        for target, message, work in works:
            work.on_done(partial(self._sent, self._group.ranks[target], message))

    def _sent(self, rank: int, message: Message, work: Work) -> None:
        """Note that a part of a message, whose memory was kept for this, has left."""
        self._unsent.end(rank, message)
        error = work.exception()
        if isinstance(error, TotalReduceError):
            self._post(partial(self._fail, error))

    # -------------------------------------------------------------------------- the channel: under the engine's lock

    def receive(self, peer: int, message: bytes, now: float) -> None:
        """See ``Channel``."""
        del now
        if peer not in self._seats:
            raise ProtocolError(f"rank {peer} sends to a parameter server of a group that it is no member of")
        self._post(partial(self._arrived, self._seats[peer], message))

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

    def _arrived(self, source: int, data: bytes) -> None:
        spec = self._spec
        header = spec.decode(data[: HEADER.size])
        key_bytes, value_bytes = spec.key_bytes(header), header.value_bytes
        is_inline = key_bytes + value_bytes <= _INLINE_BYTES_MAX
        expected = HEADER.size + (key_bytes + value_bytes if is_inline else 0)
        if len(data) != expected:
            raise ProtocolError(f"rank {source} sends a message of {len(data)} bytes where {expected} are expected")
        if len(self._incoming[source]) >= self._incoming_max:
            raise ProtocolError(f"rank {source} has announced more than {self._incoming_max} messages that do not come")
        keys = values = None
        works: list[Work] = []
        dtype = spec.value_dtype(header)
        if is_inline:
            if key_bytes:
                keys = np.frombuffer(data, spec.key_dtype, header.end, HEADER.size).copy()
            if value_bytes:
                values = np.frombuffer(data[HEADER.size + key_bytes :], dtype).copy()
        else:
            if key_bytes:
                keys = self._receive(source, np.empty(header.end, spec.key_dtype), works)
            if value_bytes:
                room = self._room_for(source, header)
                memory = np.empty(value_bytes // dtype.itemsize, dtype) if room is None else room
                values = self._receive(source, memory, works)
        incoming = _Incoming(Message(header, keys, values), len(works))
        self.num_bytes["received"] += incoming.message.num_bytes
        self._incoming[source].append(incoming)
        for work in works:
            work.on_done(partial(self._received, source, incoming))
        self._handle_complete(source)

    def _receive(self, source: int, memory: Array, works: list[Work]) -> Array:
        """Receive keys or values into this memory, or into other memory if another operation uses this one."""
        try:
            works.append(self._group.recv(torch.from_numpy(memory), src=self._ranks[source]))
        except ConfigurationError:  # for instance an earlier pull into the same array
            memory = np.empty_like(memory)
            works.append(self._group.recv(torch.from_numpy(memory), src=self._ranks[source]))
        return memory

    def _received(self, source: int, incoming: _Incoming, work: Work) -> None:
        self._post(partial(self._followed, source, incoming, work))

    def _followed(self, source: int, incoming: _Incoming, work: Work) -> None:
        error = work.exception()
        if error is not None:
            raise error.with_traceback(None)
        incoming.pending -= 1
        self._handle_complete(source)

    def _handle_complete(self, source: int) -> None:
        incoming = self._incoming[source]
        while incoming and incoming[0].pending == 0:
            message = incoming.popleft().message
            if message.header.kind is Kind.GOODBYE:
                self.talking.discard(source)
                if not self._may_leave(source):
                    reason = "it has ended its connection to the parameter server"
                    self._fail(PeerLost(self._group.ranks[self._ranks[source]], reason))
            else:
                self._handle(source, message)
