"""One shard: requests of workers in, answers out. A plain object without thread, socket and clock."""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from totalreduce.foundation.errors import ProtocolError, TotalReduceError
from totalreduce.kernels.arrays import Array
from totalreduce.server.clocks import ABSENT, FINISHED, Consistency, Sequential, VectorClock
from totalreduce.server.combining import means_of
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
    mark_of,
)
from totalreduce.server.table import Rows, Table

if TYPE_CHECKING:
    from totalreduce.server.gathering import Gathering

__all__ = ["Reply", "Shard", "read_waiting"]

#: A worker and its clock, in an answer of kind ``WAITING``.
_WAITING = struct.Struct("<qq")
_WAITING_MAX: Final = 32
_TEXT_MAX: Final = 1000
#: The number of refused requests to save of a worker that are known.
_UNSAVED_MAX: Final = 4


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
class Request:
    """A request whose keys have been found in the table.

    Attributes:
        message: As it came.
        rows: Of its keys; ``None``: it has none.
        values: What is pushed, decoded; ``None``: nothing is.
    """

    message: Message
    rows: Rows | None
    values: Array | None

    @property
    def header(self) -> Header:
        """The header."""
        return self.message.header


@final
@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """An answer to a worker.

    Attributes:
        worker: The worker.
        message: The answer.
        mark: The mark of the request.
        change: The request, if it was carried out now and has changed the shard, so that replicas must carry it out,
            too; ``None``: it has changed nothing.
    """

    worker: int
    message: Message
    mark: int = -1
    change: Request | None = None


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What a worker has pushed in this step, for the end of the step: of its own one, or of that of all workers.

    Attributes:
        worker: The worker.
        rows: Of its keys.
        values: What it has pushed.
        assigns: Whether the values are set, without the optimizer.
        lr: The learning rate, or ``NO_RATE``.
        is_held: Whether it counts only when the worker ends its step, and can be withdrawn until then.
    """

    worker: int
    rows: Rows
    values: Array
    assigns: bool
    lr: float
    is_held: bool = False

    def num_bytes(self, rule: Consistency) -> int:
        """Return what counts of it in bytes: where the bound is that of the rule, also its list of keys."""
        listed = self.rows.listed if isinstance(rule, Sequential) else None
        return int(self.values.nbytes + (0 if listed is None else listed.nbytes))


@final
@dataclass(slots=True)
class _Stream:
    """The requests of one worker.

    Attributes:
        last: The number of the last one that was taken in.
        queue: Those that wait: the first one for other workers, the others for the first one.
        kept_bytes: What the worker has pushed in this step and is kept until the step ends.
        num_held: The number of its pushes that are held.
        told: The slowest clock of which the worker was told that it waits for it.
        refused: The marks of the last pushes for which there was no room.
        unsaved: The marks of the last requests to save that were refused, and why.
    """

    last: int = -1
    queue: deque[Request] = field(default_factory=deque)
    kept_bytes: int = 0
    num_held: int = 0
    told: int | None = None
    refused: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    unsaved: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=_UNSAVED_MAX))


@final
class Shard:
    """Some keys: their table, the clocks of the workers, and their requests.

    Attributes:
        table: The values.
        clocks: The clocks of the workers.
        gathering: What workers have pushed, if a strategy says when it is applied, and when a pull is answered.
    """

    def __init__(
        self,
        rank: int,
        table: Table,
        spec: Spec,
        rule: Consistency,
        num_workers: int,
        *,
        clock: int = 0,
        gathering: Gathering | None = None,
        write: Callable[[str, int, Table], None] | None = None,
    ) -> None:
        """Begin at a clock of all workers.

        The memory of a message from a worker of the same ``rank`` is the program's. ``gathering`` has what workers
        push, until a strategy applies it; ``None``: ``rule`` says when it is applied. ``write`` writes the table of a
        snapshot, from its description and the workers' clock; ``None``: snapshots are refused.
        """
        self.table, self.clocks = table, VectorClock([clock] * num_workers)
        self._write, self.gathering = write, gathering
        self._rank, self._spec, self._rule = rank, spec, rule
        self._streams = [_Stream() for _ in range(num_workers)]
        #: By worker: the mark of the last push that was carried out.
        self._applied = [mark_of(clock, -1)] * num_workers
        #: By worker: the mark of the last request to save that has come to this server.
        self._noted = [-1] * num_workers
        self._lists: Lru[Rows] = Lru(LISTS_BYTES_MAX)
        self._kept: list[_Kept] = []
        self._step = clock

    @property
    def all_clocks(self) -> list[int]:
        """The clocks of the workers."""
        return [self.clocks.of(worker) for worker in range(len(self._streams))]

    @property
    def is_finished(self) -> bool:
        """Whether all workers have finished."""
        return self.clocks.slowest() == FINISHED

    def has_finished(self, worker: int) -> bool:
        """Return whether a rank has finished as a worker; also if it is none, or has not come yet."""
        return worker >= len(self._streams) or self.clocks.of(worker) in (FINISHED, ABSENT)

    def take(self, worker: int, message: Message, now: float = 0.0) -> list[Reply]:
        """Take in a request of a worker; return the answers to this worker and to others. ``now``: the time in seconds.

        A request that was answered before is answered again, and not applied again. It is ignored if the previous one
        has not come: the worker sends both again.

        Raises:
            ProtocolError: No correct worker sends this request. Nothing has changed.
        """
        header = message.header
        if not header.kind.is_request or not 0 <= worker < len(self._streams):
            raise ProtocolError(f"worker {worker} of {len(self._streams)} sends a message of kind {header.kind.name}")
        stream = self._streams[worker]
        is_known = header.number <= stream.last
        if not is_known and header.previous != stream.last:
            return []
        if stream.queue and stream.queue[0].header.number <= header.number <= stream.last:
            return []  # it waits, and will be answered
        if len(stream.queue) >= WINDOW:
            raise ProtocolError(f"worker {worker} has sent more than {WINDOW} requests that wait")
        try:
            request = self._find(message)
            if request is not None and self.gathering is not None and not is_known:
                self.gathering.take(worker, header.kind, request.values, now, is_lent=worker == self._rank)
        except ProtocolError as error:
            stream.last = max(stream.last, header.number)
            return [Reply(worker, _refusal(self._answer(header), str(error)))]
        if request is None:
            return [Reply(worker, Message(replace(self._answer(header), kind=Kind.UNKNOWN_LIST)))]
        if is_known:
            return [self._carry_out(worker, request)]
        stream.last = header.number
        stream.queue.append(request)
        return self._run(worker)

    def tick(self, now: float) -> list[Reply]:
        """Do what the rule of a strategy has planned for this time; return the answers."""
        assert self.gathering is not None
        self.gathering.tick(now)
        return [reply for worker in self.gathering.take_answered() for reply in self._run(worker)]

    def replicate(self, worker: int, message: Message) -> Request | None:
        """Carry out a request of a worker that the head of the chain has carried out; ``None``: it was already.

        Raises:
            ProtocolError: No correct head passes this on.
        """
        request = self._find(message) if 0 <= worker < len(self._streams) else None
        if request is None or message.header.mark < 0:
            raise ProtocolError(
                f"a request of worker {worker} of {len(self._streams)} that was passed on cannot be carried out"
            )
        return self._carry_out(worker, request).change

    def settle(self, clocks: Sequence[int]) -> None:
        """End the steps of workers that another shard knows to have ended, and place workers that come.

        Args:
            clocks: By worker: its largest clock in any shard. Workers have ended steps in all shards or in none
                (``Client``, ``steps_are_atomic``), so this shard has all pushes of these steps. A worker that comes has
                the clock with which it begins; one that has not come yet is ``ABSENT``.
        """
        for worker, clock in enumerate(clocks):
            if ABSENT in (clock, self.clocks.of(worker)):
                self.clocks.place(worker, clock)
                # What the program pushes before its first step belongs to the begin of the job, which is over.
                if 0 < clock < FINISHED:
                    self._applied[worker] = max(self._applied[worker], mark_of(clock, -1))
            elif clock > self.clocks.of(worker):
                kind = Kind.FINISH if clock == FINISHED else Kind.CLOCK
                self._advance(worker, Request(Message(Header(kind, clock=clock)), None, None))

    def list_of(self, rows: Rows) -> Array:
        """Return the keys of listed rows, in the type that they have in messages."""
        assert rows.listed is not None
        return self.table.keys_at(rows.listed).astype(self._spec.key_dtype)

    def begin_epoch(self) -> None:
        """Forget requests that wait, and what depends on their numbers: workers send all of them again."""
        for stream in self._streams:
            stream.last, stream.told = -1, None
            stream.queue.clear()
        self._lists = Lru(LISTS_BYTES_MAX)

    def state(self) -> dict[str, Any]:
        """Return everything that another server needs to go on with this shard. Nothing is copied."""
        return {
            "values": self.table.values,
            "states": list(self.table.states),
            "version": self.table.version,
            "clocks": self.all_clocks,
            "applied": self._applied,
            "refused": [list(stream.refused) for stream in self._streams],
            "unsaved": [list(stream.unsaved) for stream in self._streams],
            "step": self._step,
            "kept": [
                (
                    *(each.worker, each.assigns, each.is_held, each.lr, each.values),
                    *(each.rows.count, each.rows.begin, each.rows.listed),
                )
                for each in self._kept
            ],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Begin with what ``state`` has returned on another server. The arrays are used, and not copied."""
        self.table.load(state["values"], state["states"], state["version"])
        self.clocks = VectorClock(state["clocks"])
        self._applied, self._step = list(state["applied"]), state["step"]
        self._kept = [
            _Kept(worker, Rows(count, begin, listed), values, assigns, lr, is_held)
            for worker, assigns, is_held, lr, values, count, begin, listed in state["kept"]
        ]
        self._count_kept()
        for worker, stream in enumerate(self._streams):
            stream.refused.extend(state["refused"][worker])
            stream.unsaved.extend((mark, text) for mark, text in state["unsaved"][worker])

    def _find(self, message: Message) -> Request | None:
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
            if spec.codec is not None and header.is_coded:
                coded, values = values, np.empty(count, np.float32)
                spec.codec.decode(coded, values)
            if values.size != count:
                raise ProtocolError(f"{values.size} values were pushed for {rows.count} keys of width {spec.width}")
        return Request(message, rows, values)

    def _run(self, first: int) -> list[Reply]:
        """Carry out what need not wait, of one worker, and of others if a clock advances."""
        answers: list[Reply] = []
        workers = deque([first])
        while workers:
            worker = workers.popleft()
            stream, slowest, clock = self._streams[worker], self.clocks.slowest(), self.clocks.of(worker)
            while stream.queue:
                note = self._waits(worker, stream)
                if note is not None:
                    answers += [Reply(worker, each) for each in note]
                    break
                if stream.queue[0].header.kind is Kind.SAVE and stream.queue[0].header.mark > self._applied[worker]:
                    answers += self._save()
                    workers.extend(range(len(self._streams)))
                else:
                    answers.append(self._carry_out(worker, stream.queue.popleft()))
            has_finished = clock != FINISHED and self.clocks.of(worker) == FINISHED  # those who save wait for it
            if self.clocks.slowest() != slowest or has_finished:
                workers.extend(each for each, other in enumerate(self._streams) if other.queue and each != worker)
            if self.gathering is not None:
                workers.extend(self.gathering.take_answered())
        return answers

    def _save(self) -> list[Reply]:
        """Write the shard: the first requests of all workers that have not finished ask for it. Return the answers."""
        asking = {worker: stream.queue.popleft() for worker, stream in enumerate(self._streams) if stream.queue}
        refusal, is_of_all = self._write_for(asking)
        replies = []
        for worker, request in asking.items():
            message = request.message
            if refusal:
                note = np.frombuffer(bytearray(_refused_note(refusal, is_of_all).encode()), np.uint8)
                message = Message(replace(message.header, value_bytes=note.nbytes), None, note)
            replies.append(self._note_save(worker, replace(request, message=message)))
        return replies

    def _write_for(self, asking: Mapping[int, Request]) -> tuple[str, bool]:
        """Write the shard; return why not, or "", and whether the requests of all workers belong together."""
        clocks = {worker: self.clocks.of(worker) for worker in asking}
        texts = {worker: _text_of(request.message.values) for worker, request in asking.items()}
        marks = {request.header.mark for request in asking.values()}
        if len(set(clocks.values())) > 1 or len(marks) > 1:
            refusal = (
                f"workers save after different steps, by worker: {clocks}, or not equally often after this one: all "
                "call save() after the same steps"
            )
            return refusal, False
        if len(set(texts.values())) > 1:
            return f"workers save into different folders, by worker: {texts}", True
        if self._write is None:
            return "this server writes no snapshots", True
        try:
            self._write(texts[min(texts)], min(clocks.values()), self.table)
        except (TotalReduceError, OSError) as error:
            return str(error) or repr(error), True
        return "", True

    def _waits(self, worker: int, stream: _Stream) -> list[Message] | None:
        """Return ``None`` if the first request of a worker does not wait; else what the worker is told."""
        request = stream.queue[0]
        if request.header.kind is Kind.SAVE:
            return self._waits_to_save(worker, stream)
        meets = request.header.kind is Kind.MEET
        if request.rows is None and not meets:
            return None
        if self.gathering is not None and request.header.kind.pulls and not self.gathering.has_answered(worker):
            return []
        clock, slowest = self.clocks.of(worker), self.clocks.slowest()
        if clock == FINISHED:  # a process that has taken the place of a worker which had finished
            return None
        if slowest >= clock if meets else self._rule.admits(clock, slowest):
            stream.told = None
            return None
        if stream.told == slowest:
            return []
        stream.told = slowest
        bound = 0 if meets else self._rule.bound or 0
        return [self._waiting_for(request, self.clocks.below(clock - bound))]

    def _waits_to_save(self, worker: int, stream: _Stream) -> list[Message] | None:
        """Do what ``_waits`` does for a request to save, which waits for those of all workers."""
        request = stream.queue[0]
        absent = [
            (other, self.clocks.of(other))
            for other, its in enumerate(self._streams)
            if not self.has_finished(other) and not (its.queue and its.queue[0].header.kind is Kind.SAVE)
        ]
        if request.header.mark <= self._applied[worker] or not absent:
            stream.told = None
            return None
        if stream.told == -len(absent):
            return []
        stream.told = -len(absent)  # no clock is negative
        return [self._waiting_for(request, absent)]

    def _waiting_for(self, request: Request, workers: list[tuple[int, int]]) -> Message:
        """Return the message that a request waits for workers with these clocks."""
        note = np.frombuffer(bytearray(b"".join(_WAITING.pack(*each) for each in workers[:_WAITING_MAX])), np.uint8)
        header = replace(self._answer(request.header), kind=Kind.WAITING, value_bytes=note.nbytes)
        return Message(header, None, note)

    def _carry_out(self, worker: int, request: Request) -> Reply:
        header, rows = request.header, request.rows
        if header.kind is Kind.SAVE:
            return self._note_save(worker, request)
        if header.kind is Kind.MEET:
            return Reply(worker, Message(self._answer(header, self.clocks.slowest())))
        if header.kind is Kind.WITHDRAW:
            return self._withdraw(worker, request)
        if rows is None:
            return self._advance(worker, request)
        change = None
        if header.kind.pushes:
            assert request.values is not None
            refused = self._streams[worker].refused
            if header.mark > self._applied[worker]:
                self._applied[worker], change = header.mark, request
                assigns = header.kind is Kind.ASSIGN
                if not self._push(_Kept(worker, rows, request.values, assigns, header.lr, header.is_held)):
                    refused.append(header.mark)
            if header.mark in refused:
                text = f"worker {worker} pushes more in step {header.clock} than {self._limit[1]}"
                return Reply(worker, _refusal(self._answer(header), text), header.mark, change)
        answer = self._answer(header, self.clocks.slowest())
        if not header.kind.pulls:
            return Reply(worker, Message(answer), header.mark, change)
        values = self.table.pull(rows) if self.gathering is None else self.gathering.pull(worker)
        return Reply(worker, Message(replace(answer, value_bytes=values.nbytes), None, values), header.mark, change)

    def _push(self, pushed: _Kept) -> bool:
        """Apply or keep what a worker has pushed; return whether there is room to keep it."""
        if self.gathering is not None:  # which has the gradient since it came
            return True
        if not (isinstance(self._rule, Sequential) or pushed.is_held):
            self._apply(pushed)
            return True
        stream = self._streams[pushed.worker]
        num_bytes = pushed.num_bytes(self._rule)
        if stream.kept_bytes + num_bytes > self._limit[0]:
            return False
        stream.kept_bytes += num_bytes
        stream.num_held += pushed.is_held
        self._kept.append(replace(pushed, values=pushed.values.copy()) if pushed.worker == self._rank else pushed)
        return True

    @property
    def _limit(self) -> tuple[int, str]:
        """The number of bytes of one worker that are kept, and what to do about it.

        Without the rule's bound, each key may be held once.
        """
        if isinstance(self._rule, Sequential):
            return self._rule.buffer_bytes, "the rule's buffer_bytes: raise it, or push less in a step"
        size = self.table.values.nbytes
        return size, f"the {size} bytes of this server's values, with held=True: push each key once"

    def _apply(self, pushed: _Kept) -> None:
        if pushed.assigns:
            self.table.assign(pushed.rows, pushed.values)
        else:
            self.table.push(pushed.rows, pushed.values, pushed.lr)

    def _withdraw(self, worker: int, request: Request) -> Reply:
        """Drop what a worker has pushed to be held in this step."""
        header, change = request.header, None
        if header.mark > self._applied[worker]:
            self._applied[worker], change = header.mark, request
            self._release_held(worker, counts=False)
        return Reply(worker, Message(self._answer(header, self.clocks.slowest())), header.mark, change)

    def _release_held(self, worker: int, *, counts: bool) -> None:
        """Have what is held of a worker count as what it has pushed now; otherwise drop it."""
        if not self._streams[worker].num_held:
            return  # each end of a step comes here, and others may have pushed much
        kept = []
        for each in self._kept:
            if not (each.is_held and each.worker == worker):
                kept.append(each)
            elif counts and isinstance(self._rule, Sequential):
                kept.append(replace(each, is_held=False))
            elif counts:
                self._apply(each)
        self._kept = kept
        self._count_kept()

    def _count_kept(self) -> None:
        """Count the bytes that are kept of each worker, and the pushes that are held."""
        for stream in self._streams:
            stream.kept_bytes = stream.num_held = 0
        for each in self._kept:
            stream = self._streams[each.worker]
            stream.kept_bytes += each.num_bytes(self._rule)
            stream.num_held += each.is_held

    def _end_step(self) -> None:
        """Apply what was kept, in the order of ranks, and of the calls of each of them. What is held stays."""
        kept = sorted((each for each in self._kept if not each.is_held), key=lambda each: each.worker)
        self._kept = [each for each in self._kept if each.is_held]
        self._count_kept()
        if isinstance(self._rule, Sequential) and self._rule.combine == "mean":
            pushed = [(each.rows, each.values, each.lr) for each in kept if not each.assigns]
            kept = [each for each in kept if each.assigns]
            means = means_of(pushed, self._spec.width, self.clocks.num_present)
        else:
            means = []
        for each in kept:
            self._apply(each)
        for rows, mean, lr in means:
            self.table.push(rows, mean, lr)

    def _note_save(self, worker: int, request: Request) -> Reply:
        """Note that the shard was written, or why not. From then on, no worker that was to ask for it waits for others.

        If the head is lost, a worker that was answered has gone on, and the others ask again: the next head must know
        all of it. Therefore each worker's request goes through the chain, behind the first one, which says it for all.
        """
        header, change = request.header, None
        if header.mark > self._noted[worker]:
            self._noted[worker], change = header.mark, request
            refusal, is_of_all = _refusal_in(_text_of(request.message.values))
            for other, stream in enumerate(self._streams):
                belongs = is_of_all and self.clocks.of(other) == self.clocks.of(worker)
                if other == worker or belongs:
                    self._applied[other] = max(self._applied[other], header.mark)
                    if refusal and all(mark != header.mark for mark, _ in stream.unsaved):
                        stream.unsaved.append((header.mark, refusal))
        for mark, text in self._streams[worker].unsaved:
            if mark == header.mark:
                return Reply(worker, _refusal(self._answer(header), text), header.mark, change)
        return Reply(worker, Message(self._answer(header, self.clocks.slowest())), header.mark, change)

    def _advance(self, worker: int, request: Request) -> Reply:
        header = request.header
        clock = FINISHED if header.kind is Kind.FINISH else header.clock
        change = request if clock > self.clocks.of(worker) else None
        try:
            self.clocks.advance(worker, clock)
        except ProtocolError as error:
            return Reply(worker, _refusal(self._answer(header), str(error)))
        if change is not None:
            self._release_held(worker, counts=clock != FINISHED)
        slowest = self.clocks.slowest()
        if slowest > self._step:  # the step has ended: its pushes are applied in the order of ranks
            self._step = slowest
            self._end_step()
        return Reply(worker, Message(self._answer(header, slowest)), header.mark, change)

    def _answer(self, header: Header, slowest: int = 0) -> Header:
        return Header(Kind.DONE, shard=header.shard, number=header.number, clock=slowest, begin=self.table.version)


def _refusal(answer: Header, text: str) -> Message:
    note = np.frombuffer(bytearray(text.encode()[:_TEXT_MAX]), np.uint8)
    return Message(replace(answer, kind=Kind.REFUSED, value_bytes=note.nbytes), None, note)


def _refused_note(refusal: str, is_of_all: bool) -> str:
    """Return the description that a refused request to save has in the chain, in place of the worker's."""
    text = refusal.encode()[:_TEXT_MAX].decode(errors="ignore")
    return json.dumps({"refused": text, "of_all": is_of_all})


def _refusal_in(note: str) -> tuple[str, bool]:
    """Return what ``_refused_note`` was given; ("", True): the note is a worker's, which nobody has refused."""
    try:
        found = json.loads(note)
        return str(found["refused"]), bool(found["of_all"])
    except (ValueError, TypeError, KeyError):
        return "", True


def _text_of(note: Array | None) -> str:
    return "" if note is None else note.tobytes().decode(errors="replace")
