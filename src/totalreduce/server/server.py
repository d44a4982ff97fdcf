"""One server: messages of workers in, answers out. A plain object without thread, socket and clock."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final, final

import numpy as np

from totalreduce.foundation.errors import ProtocolError
from totalreduce.kernels.arrays import Array
from totalreduce.server.clocks import FINISHED, Consistency, RangeClocks, Sequential
from totalreduce.server.messages import (
    LISTS_BYTES_MAX,
    WINDOW,
    Form,
    Header,
    Kind,
    Lru,
    Message,
    Spec,
    digest_of,
    list_bytes,
)
from totalreduce.server.table import Rows, Table

__all__ = ["Server", "read_waiting"]

#: A worker and its clock, in an answer of kind ``WAITING``.
_WAITING = struct.Struct("<qq")
_WAITING_MAX: Final = 32
_TEXT_MAX: Final = 1000


def read_waiting(note: Array) -> dict[int, int]:
    """Return workers and their clocks from the list in an answer of kind ``WAITING``.

    Raises:
        ProtocolError: The list has a length that no server sends.
    """
    if note.nbytes % _WAITING.size:
        raise ProtocolError(f"a list of workers of {note.nbytes} bytes")
    return dict(_WAITING.iter_unpack(note.tobytes()))


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A request whose keys have been found in the table; ``values`` are decoded."""

    header: Header
    rows: Rows | None
    values: Array | None


@final
@dataclass(slots=True)
class _Stream:
    """The requests of one worker.

    Attributes:
        last: The number of the last one that was taken in.
        queue: Those that wait: the first one for other workers, the others for the first one.
        kept_bytes: What the worker has pushed in this step and is kept until the step ends.
        told: The slowest clock of which the worker was told that it waits for it.
        refused: The numbers of the last pushes for which there was no room.
    """

    last: int = -1
    queue: deque[_Request] = field(default_factory=deque)
    kept_bytes: int = 0
    told: int | None = None
    refused: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))


@final
class Server:
    """The server of a table.

    Attributes:
        table: The values.
        clocks: The clocks of the workers.
    """

    def __init__(self, rank: int, table: Table, spec: Spec, rule: Consistency, num_workers: int) -> None:
        """Begin. ``rank``: that of the server; the memory of a message from a worker of this rank is the program's."""
        self.table, self.clocks = table, RangeClocks(len(table.ranges), num_workers)
        self._rank, self._spec, self._rule = rank, spec, rule
        self._streams = [_Stream() for _ in range(num_workers)]
        #: By range and worker: the number of the last push that was applied.
        self._applied: Array = np.full((len(table.ranges), num_workers), -1, np.int64)
        self._lists: Lru[Rows] = Lru(LISTS_BYTES_MAX)
        #: What was pushed in this step, with the worker.
        self._kept: list[tuple[int, Rows, Array]] = []
        self._step = 0

    @property
    def is_finished(self) -> bool:
        """Whether all workers have finished."""
        return self.clocks.slowest() == FINISHED

    def has_finished(self, worker: int) -> bool:
        """Return whether a worker has finished."""
        return self.clocks.of(worker) == FINISHED

    def take(self, worker: int, message: Message) -> list[tuple[int, Message]]:
        """Take in a request of a worker; return the answers that go to workers now.

        A request that was answered before is answered again, and not applied again. It is ignored if the previous one
        has not come: the worker sends both again.

        Raises:
            ProtocolError: No correct worker sends this request. Nothing has changed.
        """
        header, stream = message.header, self._streams[worker]
        if not header.kind.is_request:
            raise ProtocolError(f"worker {worker} sends a message of kind {header.kind.name} to a server")
        is_known = header.number <= stream.last
        if not is_known and header.previous != stream.last:
            return []
        if stream.queue and stream.queue[0].header.number <= header.number <= stream.last:
            return []  # it waits, and will be answered
        if len(stream.queue) >= WINDOW:
            raise ProtocolError(f"worker {worker} has sent more than {WINDOW} requests that wait")
        try:
            request = self._find(message)
        except ProtocolError as error:
            stream.last = max(stream.last, header.number)
            return [(worker, self._refusal(header, str(error)))]
        if request is None:
            return [(worker, Message(replace(self._answer(header), kind=Kind.UNKNOWN_LIST)))]
        if is_known:
            return [(worker, self._carry_out(worker, request))]
        stream.last = header.number
        stream.queue.append(request)
        return self._run(worker)

    def _find(self, message: Message) -> _Request | None:
        """Find the keys of a request; ``None``: the list is not known."""
        header, spec, rows, values = message.header, self._spec, None, message.values
        if header.form is Form.RANGE:
            rows = self.table.find_range(header.begin, header.end)
            if not 1 <= rows.count <= spec.keys_max:
                raise ProtocolError(f"of the keys from {header.begin} to {header.end}, this server has {rows.count}")
        elif header.form is Form.DIGEST:
            rows = self._lists.get(header.digest)
            if rows is None:
                return None
        elif header.form is Form.LIST:
            assert message.keys is not None
            if digest_of(message.keys) != header.digest:
                raise ProtocolError(f"the digest of a list of {header.end} keys is that of another list")
            rows = self.table.find_keys(message.keys)
            self._lists.put(header.digest, rows, list_bytes(rows.count))
        if rows is not None and header.form is not Form.RANGE and rows.count != header.end:
            raise ProtocolError(f"a list of {rows.count} keys is said to have {header.end}")
        if header.kind.pushes:
            assert rows is not None
            count, values = rows.count * spec.width, np.empty(0, spec.dtype) if values is None else values
            if header.form is Form.RANGE and spec.codec is not None:
                coded, values = values, np.empty(count, np.float32)
                spec.codec.decode(coded, values)
            if values.size != count:
                raise ProtocolError(f"{values.size} values were pushed for {rows.count} keys of width {spec.width}")
        return _Request(header, rows, values)

    def _run(self, first: int) -> list[tuple[int, Message]]:
        """Carry out what need not wait, of one worker, and of others if a clock advances."""
        answers: list[tuple[int, Message]] = []
        workers = deque([first])
        while workers:
            worker = workers.popleft()
            stream, slowest = self._streams[worker], self.clocks.slowest()
            while stream.queue:
                note = self._waits(worker, stream)
                if note is not None:
                    answers += [(worker, each) for each in note]
                    break
                answers.append((worker, self._carry_out(worker, stream.queue.popleft())))
            if self.clocks.slowest() != slowest:
                workers.extend(each for each, other in enumerate(self._streams) if other.queue and each != worker)
        return answers

    def _waits(self, worker: int, stream: _Stream) -> list[Message] | None:
        """Return ``None`` if the first request of a worker does not wait; else what the worker is told."""
        request = stream.queue[0]
        if request.rows is None:
            return None
        clock, slowest = self.clocks.of(worker), self.clocks.slowest(request.rows.ranges)
        if self._rule.admits(clock, slowest):
            stream.told = None
            return None
        if stream.told == slowest:
            return []
        stream.told = slowest
        behind = self.clocks.below(clock - (self._rule.bound or 0), request.rows.ranges)[:_WAITING_MAX]
        note = np.frombuffer(bytearray(b"".join(_WAITING.pack(*each) for each in behind)), np.uint8)
        header = replace(self._answer(request.header), kind=Kind.WAITING, value_bytes=note.nbytes)
        return [Message(header, None, note)]

    def _carry_out(self, worker: int, request: _Request) -> Message:
        header, rows = request.header, request.rows
        if rows is None:
            return self._advance(worker, header)
        if header.kind.pushes:
            assert request.values is not None
            refused = self._streams[worker].refused
            if (self._applied[rows.ranges, worker] < header.number).all():
                self._applied[rows.ranges, worker] = header.number
                if not self._push(worker, rows, request.values):
                    refused.append(header.number)
            if header.number in refused:
                limit = "the rule's buffer_bytes: raise it, or push less in a step"
                return self._refusal(header, f"worker {worker} pushes more in step {header.clock} than {limit}")
        answer = self._answer(header, self.clocks.slowest(rows.ranges))
        if not header.kind.pulls:
            return Message(answer)
        values = self.table.pull(rows)
        return Message(replace(answer, value_bytes=values.nbytes), None, values)

    def _push(self, worker: int, rows: Rows, values: Array) -> bool:
        """Apply or keep what a worker has pushed; return whether there is room to keep it."""
        if not isinstance(self._rule, Sequential):
            self.table.push(rows, values)
            return True
        stream = self._streams[worker]
        num_bytes = values.nbytes + (0 if rows.listed is None else rows.listed.nbytes)
        if stream.kept_bytes + num_bytes > self._rule.buffer_bytes:
            return False
        stream.kept_bytes += num_bytes
        self._kept.append((worker, rows, values.copy() if worker == self._rank else values))
        return True

    def _advance(self, worker: int, header: Header) -> Message:
        clock = FINISHED if header.kind is Kind.FINISH else header.clock
        try:
            self.clocks.advance(worker, clock)
        except ProtocolError as error:
            return self._refusal(header, str(error))
        slowest = self.clocks.slowest()
        if slowest > self._step:  # the step has ended: its pushes are applied in the order of ranks
            self._step = slowest
            for _, rows, values in sorted(self._kept, key=lambda kept: kept[0]):
                self.table.push(rows, values)
            self._kept.clear()
            for stream in self._streams:
                stream.kept_bytes = 0
        return Message(self._answer(header, slowest))

    def _answer(self, header: Header, slowest: int = 0) -> Header:
        return Header(Kind.DONE, number=header.number, clock=slowest, begin=self.table.version)

    def _refusal(self, header: Header, text: str) -> Message:
        note = np.frombuffer(bytearray(text.encode()[:_TEXT_MAX]), np.uint8)
        return Message(replace(self._answer(header), kind=Kind.REFUSED, value_bytes=note.nbytes), None, note)
