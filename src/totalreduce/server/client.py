"""One worker: calls and answers in, requests out. A plain object without thread, socket and clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final, Literal, final

import numpy as np

from totalreduce.codecs.codec import seed_of
from totalreduce.foundation.errors import ConfigurationError, ProtocolError, RefusedError, TotalReduceError
from totalreduce.kernels import updates
from totalreduce.kernels.arrays import Array
from totalreduce.server.clocks import FINISHED
from totalreduce.server.filters import Filter, selected_by
from totalreduce.server.layout import Layout
from totalreduce.server.messages import (
    NO_DIGEST,
    NO_RATE,
    WINDOW,
    Form,
    Header,
    Kind,
    Message,
    Spec,
    digest_of,
    mark_of,
)
from totalreduce.server.pieces import Places, cut_parts, cut_positions
from totalreduce.server.requests import Call, Content, PushOptions, Request, RequestQueue
from totalreduce.server.residual import Residual
from totalreduce.server.shard import read_waiting

__all__ = ["Client"]

#: About the bytes of values that a worker's unanswered requests push or pull, to all servers together. Shards with such
#: requests have equal shares of it: with one budget for all of them, the first ones took all that became free, and the
#: last ones were waited for at the end. Each shard may have one request in any case, so that none waits for another.
#: Measured with 4 workers and 4 servers at 250 Mbit/s and 64 MiB pushed and pulled: 2.6 s; with one budget of 6 MiB
#: 3.2 s, with 12 MiB 2.7 s, with one request for each shard 3.4 s. Requests of 512 KiB and 6 MiB in all: 2.5 s, but at
#: 1 Gbit/s, where two cores limit these eight processes, a quarter slower than this.
_UNANSWERED_BYTES_MAX: Final = 8 * 1024 * 1024
_PLAIN: Final = PushOptions()
_NO_CONTENT: Final = Content()


@final
class Client:
    """The requests of one worker.

    Attributes:
        clock: The number of steps that the worker has ended.
        staleness: How often each staleness was observed, by answer to a pull.
        lists: How often keys travelled as a ``"list"``, as a ``"digest"``, and how often a server did not know a digest
            (``"unknown"``).
        withheld: How many keys the filter has withheld; a key counts each time.
        is_worker: Whether this rank is a worker.
    """

    def __init__(
        self,
        rank: int,
        layout: Layout,
        spec: Spec,
        servers: Mapping[int, int],
        *,
        steps_are_atomic: bool = False,
        filter_: Filter | None = None,
    ) -> None:
        """Begin with clock 0.

        Args:
            rank: Of the worker.
            layout: The shards.
            spec: Of the table.
            servers: By shard: the rank that serves it. Empty: this rank is no worker, and makes no calls.
            steps_are_atomic: A worker that is lost is run again. So a step ends when all earlier requests were
                answered, and not before: if one shard knows that a step has ended, all shards have all of its pushes.
                And the filter has no part in the first step of a process (see ``_may_filter``).
            filter_: Says which keys of a push are sent now; ``None``: all are.
        """
        self.clock = 0
        self.staleness: Counter[int] = Counter()
        self.lists: Counter[str] = Counter()
        self._rank, self._layout, self._spec = rank, layout, spec
        self._queues = {int(s): RequestQueue(servers[int(s)]) for s in np.unique(layout.owners) if servers}
        self.is_worker = bool(servers)
        self._steps_are_atomic = steps_are_atomic
        self._next = 0  # the number of the next request
        #: In this step: how many marks were used (``"mark"``), of these how many for pushes (``"push"``), and how many
        #: pushes are held (``"held"``). A request of which the filter has withheld all keys uses a mark, too.
        self._made: Counter[str] = Counter()
        self._stage: Literal["before steps", "in steps", "retired"] = "before steps"
        self._again: list[tuple[int, Message]] = []
        #: Calls that servers have refused. At most ``WINDOW`` of those whose errors the program was not told are kept.
        self._failed: list[Call] = []
        self._filter, self.withheld = filter_, 0
        self._has_ended_a_step = False
        self._residual: Residual | None = None
        if spec.codec is not None or filter_ is not None:
            self._residual = Residual(layout.num_keys, spec.width, spec.dtype, spec.codec)

    # --------------------------------------------------------------------------------------------------------- calls

    def on_keys(
        self, kind: Kind, keys: Array, values: Array | None, out: Array | None, options: PushOptions = _PLAIN
    ) -> Call:
        """Push to or pull listed keys. The arrays are as for ``Connection.push``, and must not change before the end.

        Raises:
            ConfigurationError: The arrays are not like that, or have values that the codec cannot encode; or the filter
                does not return what it must. Nothing is sent.
        """
        keys, spec = np.asarray(keys), self._spec
        if keys.ndim != 1 or keys.dtype.kind not in "iu":
            raise ConfigurationError(f"keys are a one-dimensional array of integers, not {keys.dtype} of {keys.shape}")
        keys = keys.astype(keys.dtype.newbyteorder("="), copy=False)
        wrong = updates.first_wrong(keys, 0, spec.num_keys)
        if wrong >= 0:
            raise ConfigurationError(
                f"keys[{wrong}] is {keys[wrong]}: keys are ascending, each comes once, and they are from 0 to "
                f"{spec.num_keys - 1}. numpy.unique sorts them; add what is pushed for one key twice"
            )
        values, out = self._rows("values", values, keys.size), self._rows("out", out, keys.size)
        self._check_push(kind, values, options)
        wire = np.ascontiguousarray(keys, spec.key_dtype)
        content = Content(wire, values, out, options=options)
        if values is not None and self._may_filter(kind, options):
            return self._push_selected(wire, self._pieces_of(wire), content)
        return self._call(kind, self._pieces_of(wire), content)

    def on_range(
        self, kind: Kind, begin: int, end: int, values: Array | None, out: Array | None, options: PushOptions = _PLAIN
    ) -> Call:
        """Push to or pull all keys of ``[begin, end)``; other arguments and errors as for ``on_keys``."""
        if not 0 <= begin <= end <= self._spec.num_keys:
            raise ConfigurationError(f"keys from {begin} to {end} are no range of {self._spec.num_keys} keys")
        values, out = self._rows("values", values, end - begin), self._rows("out", out, end - begin)
        self._check_push(kind, values, options)
        pieces, content = self._pieces_of_range(begin, end), Content(None, values, out, options=options)
        if values is not None and self._may_filter(kind, options):
            keys = np.arange(begin, end, dtype=self._spec.key_dtype)
            return self._push_selected(keys, pieces, content)
        return self._call(kind, pieces, content)

    def _pieces_of(self, keys: Array) -> Iterable[tuple[int, Places]]:
        """Return the shards and the pieces of a list of keys."""
        if not keys.size:
            return ()
        return (
            (shard, places)
            for shard, positions in self._layout.split_keys(keys)
            for places in cut_positions(positions, self._spec.keys_max)
        )

    def _pieces_of_range(self, begin: int, end: int) -> Iterable[tuple[int, Places]]:
        """Return the shards and the pieces of a range."""
        return (
            (shard, places)
            for shard, parts in self._layout.split_range(begin, end)
            for places in cut_parts(parts, begin, self._spec.keys_max)
        )

    def _may_filter(self, kind: Kind, options: PushOptions) -> bool:
        """Return whether the filter has a part in a request.

        A worker that is run again knows nothing of what the lost process has withheld. Of the step in which that was
        lost, servers may have applied some pushes, and ignore them when they come again. If the filter withheld keys of
        these pushes now, the next step would send them although they were applied.
        """
        may_repeat = self._steps_are_atomic and not self._has_ended_a_step
        return self._filter is not None and not may_repeat and options.may_change(kind)

    def _check_push(self, kind: Kind, values: Array | None, options: PushOptions) -> None:
        """Raise ``ConfigurationError`` if values cannot be pushed like that."""
        if values is None:
            return
        if options.is_held and self._filter is not None and options.may_change(kind):
            raise ConfigurationError("held=True needs exact=True where a filter may withhold what is pushed")
        if self._spec.codec is not None and options.may_change(kind):
            assert self._residual is not None
            self._residual.check(values)
            if self._made["held"] and not options.is_held:
                raise ConfigurationError(
                    "with a codec, pushes behind one with held=True have held=True, too, until clock() or withdraw()"
                )
        self._made["held"] += options.is_held

    def _push_selected(self, keys: Array, pieces: Iterable[tuple[int, Places]], content: Content) -> Call:
        """Push those of some keys, all in ``pieces``, that the filter selects; pull all of them if there is ``out``."""
        assert self._filter is not None
        assert self._residual is not None
        listed, out, options = content.keys, content.out, content.options
        if self._has_finished:
            return self._call(Kind.PUSH if out is None else Kind.PUSH_PULL, pieces, content)
        residual, pieces = self._residual.values, list(pieces)
        added = residual[keys]
        total = added + content.values
        selected = selected_by(self._filter, keys, total, self.clock)
        self.withheld += keys.size - int(np.count_nonzero(selected))
        residual[keys] = np.where(selected[:, None], 0, total)
        if selected.all():
            call = self._call(Kind.PUSH, pieces, Content(listed, total, added=added, options=options))
        else:
            sent = np.ascontiguousarray(keys[selected])
            chosen = ((shard, places.among(sent, listed)) for shard, places in pieces)
            selection = Content(sent, total[selected], added=added[selected], options=options)
            call = self._call(Kind.PUSH, chosen, selection)
        return call if out is None else self._call(Kind.PULL, pieces, Content(listed, out=out), call=call)

    def push_withheld(self, options: PushOptions = _PLAIN) -> Call:
        """Push everything that codes have not expressed and the filter has withheld, as it is.

        Earlier pushes were sent: what is not sent yet may leave something behind again.

        Raises:
            ConfigurationError: There is a codec, and pushes are held: ``withdraw`` would restore the residual that this
                call has pushed. Nothing is sent.
        """
        if self._residual is None or self._has_finished:
            return Call(self.clock)
        if self._spec.codec is not None and self._made["held"]:
            raise ConfigurationError(
                "push_withheld() belongs behind clock() or withdraw() where pushes with held=True have a codec: "
                "withdraw() restores the residual of such pushes"
            )
        keys, values = self._residual.withheld()
        self._residual.values[keys] = 0
        keys = keys.astype(self._spec.key_dtype)
        options = replace(options, is_exact=True)
        pieces = self._pieces_of_range(0, self._spec.num_keys)
        chosen = ((shard, places.among(keys, None)) for shard, places in pieces)
        return self._call(Kind.PUSH, chosen, Content(keys, values, added=values, options=options))

    def withdraw(self) -> Call:
        """Take back what was pushed to be held in this step; the call is done when all servers know it."""
        call = Call(self.clock, self._next)
        if self._has_finished:
            return call
        self._made["held"] = 0
        for queue in self._queues.values():
            queue.drop_held(self.clock)
        return self._call(Kind.WITHDRAW, call=call)

    def prepare_save(self) -> None:
        """Note that the program has come to its steps; raise what ``save`` raises if it cannot be called now."""
        self.begin_steps()
        if self._stage == "retired":
            raise ConfigurationError("save() belongs before retire() and finish()")
        if self._made["push"]:
            raise ConfigurationError(
                "save() belongs between two steps: call clock() behind the pushes of a step, then save()"
            )

    def save(self, describe: Callable[[int], Array]) -> Call:
        """Have all shards be written to disk; the call is done when they are.

        Args:
            describe: Returns the description of the snapshot, uint8, which servers read, from the mark of the request.

        Raises:
            ConfigurationError: This worker has pushed something in this step, or has finished.
        """
        self.prepare_save()
        if self._has_finished:
            return Call(self.clock)
        mark = mark_of(self.clock, self._made["mark"])
        note = describe(mark)
        self._made["mark"] += 1
        return self._call(Kind.SAVE, content=Content(values=note), mark=mark)

    def advance(self) -> Call:
        """End a step: the clock advances by one. The call is done when all servers know it."""
        if self._has_finished:
            return Call(self.clock)
        self.begin_steps()
        self.clock += 1
        self._made.clear()
        self._has_ended_a_step = True
        return self._call(Kind.CLOCK, mark=mark_of(self.clock, -1))

    def begin_steps(self) -> None:
        """Note that the program comes to its steps: to the one where the worker was lost that this one replaces.

        What it has pushed before was pushed by that worker, too, before its first step.
        """
        if self._stage == "before steps":
            self._stage = "in steps"
            if self.clock > 0:
                self._made.clear()

    @property
    def _has_finished(self) -> bool:
        """Whether this worker takes the place of one that had finished: it may pull, and changes nothing."""
        return self.clock == FINISHED

    def meet(self) -> Call:
        """Wait for all workers: the call is done when their clocks are not below this one's."""
        return self._call(Kind.MEET)

    def finish(self) -> Call:
        """End all: other workers do not wait for this one any more. It may still pull."""
        call = self._call(Kind.FINISH, mark=FINISHED)
        self.clock, self._stage = FINISHED, "retired"
        return call

    def _call(
        self,
        kind: Kind,
        pieces: Iterable[tuple[int, Places | None]] | None = None,
        content: Content = _NO_CONTENT,
        *,
        mark: int | None = None,
        call: Call | None = None,
    ) -> Call:
        """Make the requests of a call, or further requests of ``call``.

        Without ``pieces``, each shard gets a request that is about no key.

        A piece without keys makes no request, but has a mark: the marks of a push and of those behind it do not depend
        on what the filter selects, so that servers know them again when a worker is run again.
        """
        call = Call(self.clock, self._next) if call is None else call
        if self._has_finished and kind.pushes:
            if not kind.pulls:
                return call
            kind, content = Kind.PULL, replace(content, values=None)
        for shard, places in ((shard, None) for shard in self._queues) if pieces is None else pieces:
            num_bytes = 0 if places is None else places.count * self._spec.width * self._spec.dtype.itemsize
            mine = self._next_mark(kind) if mark is None else mark
            if places is not None and not places.count:
                continue
            request = Request(call, kind, self._next, mine, num_bytes, places, content)
            self._queues[shard].unsent.append(request)
            self._next += 1
            call.pending += 1
        return call

    def _next_mark(self, kind: Kind) -> int:
        """Return the next mark of this step for a request that changes something; -1 for others."""
        if not (kind.pushes or kind is Kind.WITHDRAW):
            return -1
        self._made["push"] += 1
        self._made["mark"] += 1
        return mark_of(0 if self._stage == "before steps" else self.clock, self._made["mark"] - 1)

    def _rows(self, name: str, array: Array | None, count: int) -> Array | None:
        """Check an array of the caller; return it with shape (n, width)."""
        if array is None:
            return None
        spec = self._spec
        if array.dtype != spec.dtype:
            raise ConfigurationError(f"{name} are {array.dtype}; the table's values are {spec.dtype}")
        if array.shape != (count, spec.width) and (spec.width > 1 or array.shape != (count,)):
            raise ConfigurationError(
                f"{name} have shape {array.shape}; expected is ({count}, {spec.width}), one row for each key"
            )
        if not array.flags.c_contiguous or (name == "out" and not array.flags.writeable):
            raise ConfigurationError(f"{name} must be contiguous, and out must be writable")
        return array.reshape(count, spec.width)

    # ------------------------------------------------------------------------------------------------------ messages

    def outgoing(self) -> list[tuple[int, Message]]:
        """Return the servers and requests that are to be sent now."""
        messages, self._again = self._again, []
        share = _UNANSWERED_BYTES_MAX // max(1, sum(queue.has_values for queue in self._queues.values()))
        # Each worker sends to another shard first, so that not all of them fill the link of one server.
        queues = list(self._queues.items())
        first = self._rank % max(1, len(queues))
        for shard, queue in queues[first:] + queues[:first]:
            while queue.may_send(share):
                request = queue.unsent[0]
                is_end = request.kind in (Kind.CLOCK, Kind.FINISH)
                if is_end and self._steps_are_atomic and self._awaits_before(request.call):
                    break
                queue.unsent.popleft()
                messages.append((queue.server, self._send(shard, queue, request)))
        return messages

    def _awaits_before(self, call: Call) -> bool:
        """Return whether a request before those of this call was not answered."""
        oldest = (queue.oldest for queue in self._queues.values())
        return any(request is not None and request.number < call.first for request in oldest)

    def begin_epoch(self, servers: Mapping[int, int], clock: int, *, is_restored: bool = False) -> None:
        """Go on with other servers, or with ones that were restored: everything that was not answered is sent again.

        Args:
            servers: By shard: the rank that serves it.
            clock: That of a worker with this rank, as all shards know it. A worker that has made no call goes on there.
            is_restored: Whether the job began with a snapshot. Then what a program pushes before its first step is no
                repetition of what it pushed when the values were new.
        """
        if self._next == 0:
            self.clock = clock
            if is_restored:
                self._stage = "in steps"
        self._again = []
        for shard, queue in self._queues.items():
            queue.begin_epoch(servers[shard])
            self.resend(shard)

    def unreported(self) -> Call | None:
        """Return the first failed call whose error the program was not told."""
        return next((call for call in self._failed if not call.is_reported), None)

    def has_finished(self, server: int) -> bool:
        """Return whether a rank serves no shard, or has answered that this worker has finished."""
        return all(queue.is_finished for queue in self._queues.values() if queue.server == server)

    def resend(self, shard: int) -> None:
        """Have all unanswered requests to a shard sent again, in order."""
        self._again += self._queues[shard].messages(self.lists)

    def answer(self, server: int, message: Message) -> bool:
        """Take in an answer of a server. One to a request that was answered before is ignored.

        Returns:
            Whether a call is done with it.

        Raises:
            ProtocolError: No correct server sends this answer.
        """
        header = message.header
        queue = self._queues.get(header.shard)
        if queue is None or queue.server != server or header.kind.is_request:
            raise ProtocolError(
                f"rank {server} sends a message of kind {header.kind.name} about shard {header.shard} to a worker"
            )
        request = queue.unanswered.get(header.number)
        if request is None:
            return False
        match header.kind:
            case Kind.UNKNOWN_LIST:
                self.lists["unknown"] += 1
                queue.forget_lists()
                self.resend(header.shard)
                return False
            case Kind.WAITING:
                queue.slow = {} if message.values is None else read_waiting(message.values)
                queue.waits = header.number
                return False
            case Kind.DONE:
                self._take_values(server, request, message)
                queue.is_finished = queue.is_finished or request.kind is Kind.FINISH
            case Kind.REFUSED:
                text = "" if message.values is None else message.values.tobytes().decode(errors="replace")
                self._refused(request, RefusedError(f"rank {server}, a server: {text}"))
            case _:
                raise ProtocolError(f"rank {server} answers with a message of kind {header.kind.name}")
        queue.answered(request)
        return request.call.is_done

    @property
    def awaited_servers(self) -> list[int]:
        """The servers that have not answered all requests."""
        return sorted({queue.server for queue in self._queues.values() if queue.oldest is not None})

    def slow_workers(self) -> dict[int, int]:
        """Return the workers for which requests wait, with their smallest clocks, as servers have told last."""
        slow: dict[int, int] = {}
        for queue in self._queues.values():
            for worker, clock in queue.slow.items():
                slow[worker] = min(clock, slow.get(worker, clock))
        return slow

    def fail(self, error: TotalReduceError) -> None:
        """Fail all calls that are not done."""
        for queue in self._queues.values():
            queue.fail(error)

    def release(self) -> None:
        """Drop the memory that only later calls would need. There are none any more."""
        self._residual = None
        self._queues.clear()

    # ------------------------------------------------------------------------------------------------------- details

    def _send(self, shard: int, queue: RequestQueue, request: Request) -> Message:
        """Make the message of a request that is sent for the first time."""
        places, values, keys, options = request.places, None, None, request.content.options
        if request.content.values is not None:
            values = request.content.values if places is None else places.take(request.content.values).reshape(-1)
        is_coded = self._spec.codec is not None and options.may_change(request.kind)
        if is_coded and values is not None:
            values = self._encode(queue, request, values)
        if request.kind in (Kind.CLOCK, Kind.FINISH, Kind.WITHDRAW):
            queue.forget_held(request, self._residual)
        form, begin, end = Form.NOTHING, 0, 0
        if places is not None and request.content.keys is None:
            form, begin, end = Form.RANGE, places.begin, places.end
        elif places is not None and request.content.keys is not None:
            keys = places.take(request.content.keys)
            form, end = Form.LIST, places.count
        header = Header(
            *(request.kind, form, shard),
            number=request.number,
            previous=queue.last,
            mark=request.mark,
            clock=request.call.clock,
            begin=begin,
            end=end,
            value_bytes=0 if values is None else values.nbytes,
            digest=NO_DIGEST if keys is None else digest_of(keys),
            lr=NO_RATE if options.lr is None else options.lr,
            is_coded=is_coded,
            is_held=options.is_held,
        )
        queue.sent(request, Message(header, keys, values))
        return queue.as_sent(request, self.lists)

    def _encode(self, queue: RequestQueue, request: Request, values: Array) -> Array:
        """Return the code of what a request pushes. If it is held, keep what the residual was before."""
        assert self._residual is not None
        places = request.in_table
        if request.content.options.is_held:
            queue.held.append((places, places.take(self._residual.values).copy()))
        return self._residual.encode(places, values, seed_of(request.number, self._rank))

    def _refused(self, request: Request, error: RefusedError) -> None:
        call, message = request.call, request.message
        if call.error is None:
            call.error = error
            self._failed = [*[each for each in self._failed if not each.is_reported][: WINDOW - 1], call]
        assert message is not None
        if self._residual is None or request.content.values is None or request.places is None:
            return
        if message.header.is_coded and not request.is_withdrawn:
            assert message.values is not None
            values = request.places.take(request.content.values).reshape(-1)
            self._residual.take_back(request.in_table, values, message.values)
        if request.content.added is not None:
            self._residual.add(request.in_table, request.places.take(request.content.added))

    def _take_values(self, server: int, request: Request, message: Message) -> None:
        expected = 0
        if request.content.out is not None:
            assert request.places is not None
            expected = request.places.count * self._spec.width
        values = message.values
        if expected != (0 if values is None else values.size):
            raise ProtocolError(f"rank {server} answers request {request.number} with another number of values")
        if values is None or request.content.out is None or request.places is None:
            return
        memory = request.places.memory(request.content.out)
        if memory is None or memory.ctypes.data != values.ctypes.data:  # else they were received in place
            request.places.put(request.content.out, values.reshape(-1, self._spec.width))
        if self._filter is not None and self._filter.watches_pulls:
            self._filter.pulled(request.listed, values.reshape(-1, self._spec.width))
        if request.call.clock == FINISHED:
            return
        staleness = max(0, request.call.clock - message.header.clock)
        request.call.staleness = max(request.call.staleness, staleness)
        self.staleness[staleness] += 1
