"""One worker: calls and answers in, requests out. A plain object without thread, socket and clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
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
    LISTS_BYTES_MAX,
    NO_DIGEST,
    NO_RATE,
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
from totalreduce.server.pieces import Places, cut_parts, cut_positions
from totalreduce.server.residual import Residual
from totalreduce.server.shard import read_waiting

__all__ = ["PLAIN", "Call", "Client", "Manner"]

#: About the bytes of values that a worker's unanswered requests push or pull, to all servers together. Shards with such
#: requests have equal shares of it: with one budget for all of them, the first ones took all that became free, and the
#: last ones were waited for at the end. Each shard may have one request in any case, so that none waits for another.
#: Measured with 4 workers and 4 servers at 250 Mbit/s and 64 MiB pushed and pulled: 2.6 s; with one budget of 6 MiB
#: 3.2 s, with 12 MiB 2.7 s, with one request for each shard 3.4 s. Requests of 512 KiB and 6 MiB in all: 2.5 s, but at
#: 1 Gbit/s, where two cores limit these eight processes, a quarter slower than this.
_UNANSWERED_BYTES_MAX: Final = 8 * 1024 * 1024


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
class Manner:
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


PLAIN: Final = Manner()


@final
@dataclass(slots=True, eq=False)
class _Request:
    """A request of a call to one shard. The arrays are those of the call, of shape (n, width)."""

    call: Call
    kind: Kind
    number: int
    mark: int
    num_bytes: int  #: Of the values that it pushes or pulls.
    manner: Manner = PLAIN
    places: Places | None = None
    keys: Array | None = None
    values: Array | None = None
    added: Array | None = None  #: The part of the values that the filter has withheld of earlier pushes.
    out: Array | None = None
    #: The message with its list of keys. It is made at the first send. When the server knows the list, a copy with the
    #: digest alone is sent.
    message: Message | None = None
    is_lent: bool = False  #: Whether an answer may be received into ``out``. A second one must not be.
    is_withdrawn: bool = False  #: Whether ``withdraw`` has undone what its code has changed in the residual.

    @property
    def in_table(self) -> Places:
        """The rows of its keys in an array with a row for each key of the table."""
        assert self.places is not None
        return self.places.in_table(self.keys)

    @property
    def listed(self) -> Array:
        """Its keys."""
        assert self.places is not None
        return self.places.listed if self.keys is None else self.places.take(self.keys)


@final
@dataclass(slots=True)
class _Lane:
    """The requests to one shard.

    Attributes:
        server: The rank that serves the shard.
        unsent: Those that were not sent yet.
        unanswered: Those that were sent, by number, in this order.
        last: The number of the last one that was sent.
        lists: The digests of lists that the server knows.
        slow: What the server has told last: workers for which a request waits, with their clocks.
        waits: The number of this request.
        is_finished: Whether the server has answered ``FINISH``.
        held: Of each coded push that is held in this step: its rows of the residual, and what they were before.
    """

    server: int
    unsent: deque[_Request] = field(default_factory=deque)
    unanswered: dict[int, _Request] = field(default_factory=dict)
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
        self._lanes = {int(s): _Lane(servers[int(s)]) for s in np.unique(layout.owners) if servers}
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

    def on_keys(self, kind: Kind, keys: Array, values: Array | None, out: Array | None, manner: Manner = PLAIN) -> Call:
        """Push to or pull listed keys. Arrays must not change before the call is done.

        Args:
            kind: ``PUSH``, ``PULL`` or ``PUSH_PULL``.
            keys: Integers, one-dimensional, ascending, each once.
            values: What is pushed, of shape (n, width), or (n,) if the width is 1; contiguous.
            out: Takes what is pulled; likewise, and writable.
            manner: How it is pushed.

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
        self._check_push(kind, values, manner)
        wire = np.ascontiguousarray(keys, spec.key_dtype)
        if values is not None and self._may_filter(kind, manner):
            return self._push_selected(wire, values, self._pieces_of(wire), wire, out, manner)
        return self._call(kind, self._pieces_of(wire), wire, values, out, manner)

    def on_range(
        self, kind: Kind, begin: int, end: int, values: Array | None, out: Array | None, manner: Manner = PLAIN
    ) -> Call:
        """Push to or pull all keys of ``[begin, end)``; other arguments and errors as for ``on_keys``."""
        if not 0 <= begin <= end <= self._spec.num_keys:
            raise ConfigurationError(f"keys from {begin} to {end} are no range of {self._spec.num_keys} keys")
        values, out = self._rows("values", values, end - begin), self._rows("out", out, end - begin)
        self._check_push(kind, values, manner)
        pieces = self._pieces_of_range(begin, end)
        if values is not None and self._may_filter(kind, manner):
            keys = np.arange(begin, end, dtype=self._spec.key_dtype)
            return self._push_selected(keys, values, pieces, None, out, manner)
        return self._call(kind, pieces, None, values, out, manner)

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

    def _may_filter(self, kind: Kind, manner: Manner) -> bool:
        """Return whether the filter has a part in a request.

        A worker that is run again knows nothing of what the lost process has withheld. Of the step in which that was
        lost, servers may have applied some pushes, and ignore them when they come again. If the filter withheld keys of
        these pushes now, the next step would send them although they were applied.
        """
        may_repeat = self._steps_are_atomic and not self._has_ended_a_step
        return self._filter is not None and not may_repeat and manner.may_change(kind)

    def _check_push(self, kind: Kind, values: Array | None, manner: Manner) -> None:
        """Raise ``ConfigurationError`` if values cannot be pushed like that."""
        if values is None:
            return
        if manner.is_held and self._filter is not None and manner.may_change(kind):
            raise ConfigurationError("held=True needs exact=True where a filter may withhold what is pushed")
        if self._spec.codec is not None and manner.may_change(kind):
            assert self._residual is not None
            self._residual.check(values)
            if self._made["held"] and not manner.is_held:
                raise ConfigurationError(
                    "with a codec, pushes behind one with held=True have held=True, too, until clock() or withdraw()"
                )
        self._made["held"] += manner.is_held

    def _push_selected(
        self,
        keys: Array,
        values: Array,
        pieces: Iterable[tuple[int, Places]],
        listed: Array | None,
        out: Array | None,
        manner: Manner,
    ) -> Call:
        """Push those of some keys that the filter selects, and pull all of them if there is ``out``.

        Args:
            keys: The keys.
            values: What the program pushes.
            pieces: Of all the keys.
            listed: ``keys``, if ``pieces`` are of a list.
            out: Takes what is pulled.
            manner: How it is pushed.
        """
        assert self._filter is not None
        assert self._residual is not None
        if self._has_finished:
            return self._call(Kind.PUSH if out is None else Kind.PUSH_PULL, pieces, listed, values, out, manner)
        residual, pieces = self._residual.values, list(pieces)
        added = residual[keys]
        total = added + values
        selected = selected_by(self._filter, keys, total, self.clock)
        self.withheld += keys.size - int(np.count_nonzero(selected))
        residual[keys] = np.where(selected[:, None], 0, total)
        if selected.all():
            call = self._call(Kind.PUSH, pieces, listed, total, None, manner, added=added)
        else:
            sent = np.ascontiguousarray(keys[selected])
            chosen = ((shard, places.among(sent, listed)) for shard, places in pieces)
            call = self._call(Kind.PUSH, chosen, sent, total[selected], None, manner, added=added[selected])
        return call if out is None else self._call(Kind.PULL, pieces, listed, None, out, call=call)

    def push_withheld(self, manner: Manner = PLAIN) -> Call:
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
        manner = replace(manner, is_exact=True)
        pieces = self._pieces_of_range(0, self._spec.num_keys)
        chosen = ((shard, places.among(keys, None)) for shard, places in pieces)
        return self._call(Kind.PUSH, chosen, keys, values, None, manner, added=values)

    def withdraw(self) -> Call:
        """Take back what was pushed to be held in this step; the call is done when all servers know it."""
        call = Call(self.clock, self._next)
        if self._has_finished:
            return call
        self._made["held"] = 0
        for lane in self._lanes.values():
            unsent, lane.unsent = lane.unsent, deque()
            for request in unsent:
                if request.manner.is_held and request.call.clock == self.clock:
                    request.call.pending -= 1
                else:
                    lane.unsent.append(request)
        return self._call(Kind.WITHDRAW, ((shard, None) for shard in self._lanes), None, None, None, call=call)

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
        return self._call(Kind.SAVE, ((shard, None) for shard in self._lanes), None, note, None, mark=mark)

    def advance(self) -> Call:
        """End a step: the clock advances by one. The call is done when all servers know it."""
        if self._has_finished:
            return Call(self.clock)
        self.begin_steps()
        self.clock += 1
        self._made.clear()
        self._has_ended_a_step = True
        return self._call(Kind.CLOCK, ((shard, None) for shard in self._lanes), None, None, None)

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
        return self._call(Kind.MEET, ((shard, None) for shard in self._lanes), None, None, None)

    def finish(self) -> Call:
        """End all: other workers do not wait for this one any more. It may still pull."""
        call = self._call(Kind.FINISH, ((shard, None) for shard in self._lanes), None, None, None)
        self.clock, self._stage = FINISHED, "retired"
        return call

    def _call(
        self,
        kind: Kind,
        pieces: Iterable[tuple[int, Places | None]],
        keys: Array | None,
        values: Array | None,
        out: Array | None,
        manner: Manner = PLAIN,
        *,
        added: Array | None = None,
        mark: int | None = None,
        call: Call | None = None,
    ) -> Call:
        """Make the requests of a call, or further requests of ``call``.

        A piece without keys makes no request, but has a mark: the marks of a push and of those behind it do not depend
        on what the filter selects, so that servers know them again when a worker is run again.
        """
        call = Call(self.clock, self._next) if call is None else call
        if self._has_finished and kind.pushes:
            if not kind.pulls:
                return call
            kind, values = Kind.PULL, None
        for shard, places in pieces:
            num_bytes = 0 if places is None else places.count * self._spec.width * self._spec.dtype.itemsize
            mine = self._mark(kind) if mark is None else mark
            if places is not None and not places.count:
                continue
            request = _Request(call, kind, self._next, mine, num_bytes, manner, places, keys, values, added, out)
            self._lanes[shard].unsent.append(request)
            self._next += 1
            call.pending += 1
        return call

    def _mark(self, kind: Kind) -> int:
        """Return the mark of a request that is made now."""
        if kind is Kind.FINISH:
            return FINISHED
        if kind is Kind.CLOCK:
            return mark_of(self.clock, -1)
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
        share = _UNANSWERED_BYTES_MAX // max(1, sum(lane.has_values for lane in self._lanes.values()))
        # Each worker sends to another shard first, so that not all of them fill the link of one server.
        lanes = list(self._lanes.items())
        first = self._rank % max(1, len(lanes))
        for shard, lane in lanes[first:] + lanes[:first]:
            while lane.unsent and len(lane.unanswered) < WINDOW:
                request = lane.unsent[0]
                if lane.unanswered and lane.unanswered_bytes + request.num_bytes > share:
                    break
                is_end = request.kind in (Kind.CLOCK, Kind.FINISH)
                if is_end and self._steps_are_atomic and self._awaits_before(request.call):
                    break
                lane.unsent.popleft()
                messages.append((lane.server, self._send(shard, lane, request)))
        return messages

    def _awaits_before(self, call: Call) -> bool:
        """Return whether a request before those of this call was not answered."""
        for lane in self._lanes.values():
            oldest = next(iter(lane.unanswered.values()), lane.unsent[0] if lane.unsent else None)
            if oldest is not None and oldest.number < call.first:
                return True
        return False

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
        for shard, lane in self._lanes.items():
            lane.server, lane.last, lane.waits = servers[shard], -1, -1
            lane.lists = Lru(LISTS_BYTES_MAX)
            lane.slow = {}
            for request in lane.unanswered.values():
                assert request.message is not None
                header = replace(request.message.header, previous=lane.last)
                request.message, request.is_lent = replace(request.message, header=header), False
                lane.last = request.number
            self.resend(shard)

    def unreported(self) -> Call | None:
        """Return the first failed call whose error the program was not told."""
        return next((call for call in self._failed if not call.is_reported), None)

    def has_finished(self, server: int) -> bool:
        """Return whether a rank serves no shard, or has answered that this worker has finished."""
        return all(lane.is_finished for lane in self._lanes.values() if lane.server == server)

    def resend(self, shard: int) -> None:
        """Have all unanswered requests to a shard sent again, in order."""
        lane = self._lanes[shard]
        self._again += [(lane.server, self._as_sent(lane, request)) for request in lane.unanswered.values()]

    def answer(self, server: int, message: Message) -> bool:
        """Take in an answer of a server. One to a request that was answered before is ignored.

        Returns:
            Whether a call is done with it.

        Raises:
            ProtocolError: No correct server sends this answer.
        """
        header = message.header
        lane = self._lane(server, header)
        if lane is None or header.kind.is_request:
            raise ProtocolError(
                f"rank {server} sends a message of kind {header.kind.name} about shard {header.shard} to a worker"
            )
        request = lane.unanswered.get(header.number)
        if request is None:
            return False
        match header.kind:
            case Kind.UNKNOWN_LIST:
                self.lists["unknown"] += 1
                # The server may have forgotten other lists, too. To ask about each would send the later ones each time.
                for each in lane.unanswered.values():
                    assert each.message is not None
                    lane.lists.drop(each.message.header.digest)
                self.resend(header.shard)
                return False
            case Kind.WAITING:
                lane.slow = {} if message.values is None else read_waiting(message.values)
                lane.waits = header.number
                return False
            case Kind.DONE:
                self._take_values(server, request, message)
                lane.is_finished = lane.is_finished or request.kind is Kind.FINISH
            case Kind.REFUSED:
                text = "" if message.values is None else message.values.tobytes().decode(errors="replace")
                self._refused(request, RefusedError(f"rank {server}, a server: {text}"))
            case _:
                raise ProtocolError(f"rank {server} answers with a message of kind {header.kind.name}")
        del lane.unanswered[header.number]
        lane.unanswered_bytes -= request.num_bytes
        if header.number == lane.waits:
            lane.slow = {}
        request.call.pending -= 1
        return request.call.is_done

    def _lane(self, server: int, header: Header) -> _Lane | None:
        """Return the lane that an answer of a server belongs to."""
        lane = self._lanes.get(header.shard)
        return None if lane is None or lane.server != server else lane

    @property
    def is_idle(self) -> bool:
        """Whether all requests were answered."""
        return not any(lane.unsent or lane.unanswered for lane in self._lanes.values())

    def slow_workers(self) -> dict[int, int]:
        """Return the workers for which requests wait, with their smallest clocks, as servers have told last."""
        slow: dict[int, int] = {}
        for lane in self._lanes.values():
            for worker, clock in lane.slow.items():
                slow[worker] = min(clock, slow.get(worker, clock))
        return slow

    def fail(self, error: TotalReduceError) -> None:
        """Fail all calls that are not done."""
        for lane in self._lanes.values():
            for request in [*lane.unanswered.values(), *lane.unsent]:
                request.call.error = request.call.error or error
                request.call.pending = 0
            lane.unanswered.clear()
            lane.unsent.clear()

    def release(self) -> None:
        """Drop the memory that only later calls would need. There are none any more."""
        self._residual = None
        self._lanes.clear()

    # ------------------------------------------------------------------------------------------------------- details

    def _send(self, shard: int, lane: _Lane, request: _Request) -> Message:
        """Make the message of a request that is sent for the first time."""
        places, values, keys, manner = request.places, None, None, request.manner
        if request.values is not None:
            values = request.values if places is None else places.take(request.values).reshape(-1)
        is_coded = self._spec.codec is not None and manner.may_change(request.kind)
        if is_coded and values is not None:
            values = self._encode(lane, request, values)
        if request.kind in (Kind.CLOCK, Kind.FINISH, Kind.WITHDRAW):
            self._forget_held(lane, request)
        form, begin, end = Form.NOTHING, 0, 0
        if places is not None and request.keys is None:
            form, begin, end = Form.RANGE, places.begin, places.end
        elif places is not None and request.keys is not None:
            keys = places.take(request.keys)
            form, end = Form.LIST, places.count
        header = Header(
            *(request.kind, form, shard),
            number=request.number,
            previous=lane.last,
            mark=request.mark,
            clock=request.call.clock,
            begin=begin,
            end=end,
            value_bytes=0 if values is None else values.nbytes,
            digest=NO_DIGEST if keys is None else digest_of(keys),
            lr=NO_RATE if manner.lr is None else manner.lr,
            is_coded=is_coded,
            is_held=manner.is_held,
        )
        request.message = Message(header, keys, values)
        lane.last = request.number
        lane.unanswered[request.number] = request
        lane.unanswered_bytes += request.num_bytes
        return self._as_sent(lane, request)

    def _encode(self, lane: _Lane, request: _Request, values: Array) -> Array:
        """Return the code of what a request pushes. If it is held, keep what the residual was before."""
        assert self._residual is not None
        places = request.in_table
        if request.manner.is_held:
            lane.held.append((places, places.take(self._residual.values).copy()))
        return self._residual.encode(places, values, seed_of(request.number, self._rank))

    def _forget_held(self, lane: _Lane, end: _Request) -> None:
        """Note that a step ends, or that what was held in it is withdrawn: the residual is then as it was before."""
        if end.kind is Kind.WITHDRAW and self._residual is not None:
            for places, before in reversed(lane.held):
                places.put(self._residual.values, before)
            for request in lane.unanswered.values():  # one that is refused later must not change the residual again
                is_of_step = request.call.clock == end.call.clock
                request.is_withdrawn = request.is_withdrawn or (is_of_step and request.manner.is_held)
        lane.held.clear()

    def _as_sent(self, lane: _Lane, request: _Request) -> Message:
        """Return the message of a request: with a digest for a list of keys that the server knows."""
        message, room = request.message, None
        assert message is not None
        if request.out is not None and not request.is_lent:
            assert request.places is not None
            room, request.is_lent = request.places.memory(request.out), True
        header, keys = message.header, message.keys
        if header.form is Form.LIST and lane.lists.get(header.digest):
            self.lists["digest"] += 1
            header, keys = replace(header, form=Form.DIGEST), None
        elif header.form is Form.LIST:
            self.lists["list"] += 1
            lane.lists.put(header.digest, True, list_bytes(header.end))
        return Message(header, keys, message.values, room)

    def _refused(self, request: _Request, error: RefusedError) -> None:
        call, message = request.call, request.message
        if call.error is None:
            call.error = error
            self._failed = [*[each for each in self._failed if not each.is_reported][: WINDOW - 1], call]
        assert message is not None
        if self._residual is None or request.values is None or request.places is None:
            return
        if message.header.is_coded and not request.is_withdrawn:
            assert message.values is not None
            values = request.places.take(request.values).reshape(-1)
            self._residual.take_back(request.in_table, values, message.values)
        if request.added is not None:
            self._residual.add(request.in_table, request.places.take(request.added))

    def _take_values(self, server: int, request: _Request, message: Message) -> None:
        expected = 0
        if request.out is not None:
            assert request.places is not None
            expected = request.places.count * self._spec.width
        values = message.values
        if expected != (0 if values is None else values.size):
            raise ProtocolError(f"rank {server} answers request {request.number} with another number of values")
        if values is None or request.out is None or request.places is None:
            return
        memory = request.places.memory(request.out)
        if memory is None or memory.ctypes.data != values.ctypes.data:  # else they were received in place
            request.places.put(request.out, values.reshape(-1, self._spec.width))
        if self._filter is not None and self._filter.watches_pulls:
            self._filter.pulled(request.listed, values.reshape(-1, self._spec.width))
        if request.call.clock == FINISHED:
            return
        staleness = max(0, request.call.clock - message.header.clock)
        request.call.staleness = max(request.call.staleness, staleness)
        self.staleness[staleness] += 1
