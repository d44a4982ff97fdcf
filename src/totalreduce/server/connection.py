"""A rank's end of a parameter server: its thread, and what programs call.

The thread handles messages, one after the other, and alone touches the server. What a rank asks its own server needs no
message. If ranks can be replaced, the thread also forms the next group when a rank is lost (``renewal``): calls that
are under way go on in it, and the program notices nothing but a delay.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, final

import numpy as np

from totalreduce.foundation import checks
from totalreduce.foundation.errors import (
    ConfigurationError,
    DeadlineExceededError,
    GroupClosed,
    PeerLost,
    ProtocolError,
    SlowWorkersError,
    TotalReduceError,
)
from totalreduce.foundation.forking import HomeProcess
from totalreduce.recovery.epochs import ended_early
from totalreduce.server.arguments import Keys, Values, array_of, keys_of, readable
from totalreduce.server.client import Client
from totalreduce.server.messages import Kind, Message, Spec
from totalreduce.server.messenger import Messenger
from totalreduce.server.renewal import Epoch, Renewal
from totalreduce.server.requests import Call, PushOptions
from totalreduce.server.saving import Origin, describe_snapshot
from totalreduce.server.server import Server
from totalreduce.tensors.compilation import never_compiled

__all__ = ["Connection", "ServerStatistics", "Ticket"]

#: The seconds for which the end of the thread is waited for after an error.
_END_S = 5.0
_PLAIN = PushOptions()


@final
@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """Numbers of one rank since it has connected.

    Attributes:
        bytes_sent: The bytes of messages to other ranks, as a worker and as a server.
        bytes_received: The bytes of messages from other ranks.
        staleness: How often the slowest worker was so many steps behind when a pull was answered.
        waiting_s: The seconds for which the program has waited for tickets.
        lists: How often a request to a server had a list of keys. Requests to the own server count, too.
        digests: How often the digest of a list was enough; likewise.
        unknown_lists: How often a server did not know the list of a digest.
        updates: The number of requests whose pushes this rank's server has applied; under ``Sequential`` they are
            applied when the step ends.
        withheld: How often the filter has withheld a key.
    """

    bytes_sent: int
    bytes_received: int
    staleness: Counter[int]
    waiting_s: float
    lists: int
    digests: int
    unknown_lists: int
    updates: int
    withheld: int = 0


@final
@never_compiled
class Ticket:
    """The handle of a call. The program must not change keys, values or ``out`` of the call before it is done."""

    __slots__ = ("_call", "_connection")

    def __init__(self, connection: Connection, call: Call) -> None:
        self._connection, self._call = connection, call

    def done(self) -> bool:
        """Return whether the call has ended, with or without an error. Never blocks."""
        return self._call.is_done

    @property
    def staleness(self) -> int:
        """Of a pull that is done: by how many steps the slowest worker was behind this one."""
        return self._call.staleness

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all servers have answered. A call that has failed is done then, too, and its memory is free.

        Args:
            timeout_s: Seconds; ``None``: those of the connection.

        Raises:
            SlowWorkersError: The call waits for workers that are behind. It goes on, and ``wait`` may be called again.
            DeadlineExceededError: A server does not answer; likewise.
            RefusedError: A server has refused a request of the call, and has applied nothing of this request.
            PeerLost: A rank is lost.
            GroupClosed: The connection or the group was closed.
        """
        self._connection.await_call(self._call, timeout_s)


@final
@never_compiled
class Connection:
    """A rank that is connected to a parameter server. Made by ``tr.ps.connect``; any thread may call it.

    Calls with keys return a ``Ticket`` at once, and several may be under way. What a worker asks of one server is
    carried out in the order of its calls. As a context manager a connection calls ``close`` at its end, and ``end``
    after an exception, by which ranks that still need this one get ``PeerLost``.
    """

    def __init__(
        self,
        place: Epoch,
        name: str,
        client: Client,
        server: Server,
        spec: Spec,
        *,
        rank: int,
        incoming_max: int,
        timeout_s: float,
        origin: Origin,
        check_rate: Callable[[float], None],
        renewal: Renewal | None = None,
    ) -> None:
        """Connect.

        Args:
            place: The group, and who serves what; nothing else uses the group.
            name: No other parameter server of the job has it.
            client: The worker of this rank. If it has a shard there, it has made no call yet.
            server: What this rank serves.
            spec: Of the table.
            rank: This rank.
            incoming_max: The largest number of messages of one rank that are not handled.
            timeout_s: Deadline of waits that name none.
            origin: Where the values come from.
            check_rate: Raises ``ConfigurationError`` if a push cannot have a learning rate.
            renewal: Forms the next group when a rank is lost; ``None``: a loss ends the connection.
        """
        self._rank, self._client, self._timeout_s, self._renewal = rank, client, timeout_s, renewal
        self._server: Server | None = server
        self._name, self._spec, self._incoming_max = name, spec, incoming_max
        self._home = HomeProcess("the connection to a parameter server")
        self._lock = threading.Condition()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waited_s, self._updates, self._check_rate = 0.0, 0, check_rate
        self._error: TotalReduceError | None = None
        self._origin = origin
        self._saving: tuple[Path, Call] | None = None  # the last call of ``save`` that was not done in time
        self._is_over = False  # whether this rank has ended the connection, and knows what has failed
        self._state: Literal["open", "closing", "silent", "ended"] = "open"
        #: How often the group was formed anew; whether that is going on now.
        self._renewals, self._is_between = 0, False
        self._num_bytes: Counter[str] = Counter()  # of groups that have ended
        self._messenger = self._meet(place)
        self._thread = threading.Thread(target=self._run, name="totalreduce-ps", daemon=True)
        self._thread.start()
        atexit.register(self._end_with_the_process)

    def _meet(self, place: Epoch) -> Messenger:
        """Return a messenger for a group. What it posts is dropped when the next one takes its place."""
        messenger = Messenger(
            *(place.group, place.seats, self._name, self._spec),
            incoming_max=self._incoming_max,
            is_renewed=self._renewal is not None,
            post=partial(self._post, self._renewals),
            handle=self._handle,
            may_leave=self._may_leave,
            fail=self._fail,
        )
        try:
            messenger.open()
            # From here on no message comes before its receiver has opened the channel.
            place.group.control.barrier()
        except PeerLost as error:
            if self._renewal is None:
                raise
            self._post(self._renewals, partial(self._fail, error))
        return messenger

    def _post(self, renewals: int, event: Callable[[], None]) -> None:
        def call() -> None:
            if renewals == self._renewals:
                event()

        self._events.put(call)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.end()

    # --------------------------------------------------------------------------------------------------------- calls

    def push(
        self, keys: Keys, values: Values, *, lr: float | None = None, held: bool = False, exact: bool = False
    ) -> Ticket:
        """Push updates of keys to their servers; return at once.

        Args:
            keys: Integers, ascending, each once; or ``slice(a, b)``.
            values: A NumPy array or a torch tensor on the CPU, of shape (n, width), or (n,) if the width is 1, in the
                type of the table. A contiguous array that can be written is not copied, unless it has keys of several
                servers. Keys are copied.
            lr: The learning rate of this update; ``None``: that of the optimizer. Where a rule takes the mean
                of a step, that of the first rank counts.
            held: Servers keep the update until this worker's step ends (``clock``); until then ``withdraw`` takes it
                back, and no pull sees it. A server keeps as many bytes of a worker as it has values, or the
                ``buffer_bytes`` of ``Sequential``; it refuses more. With a codec, all pushes behind it in the step are
                held, too.
            exact: Neither the codec nor the filter has a part in it.

        Raises:
            ConfigurationError: The arrays are not like that, or have values that the codec cannot encode; or the filter
                would have a part in what is held. Nothing is sent. So with all calls.
            PeerLost: A rank was lost.
            GroupClosed: The connection or the group was closed.
        """
        return self._start(Kind.PUSH, keys, values, None, PushOptions(lr, held, exact))

    def pull(self, keys: Keys, out: Values) -> Ticket:
        """Copy the values of keys into ``out``, which is contiguous; return at once. Arguments as for ``push``."""
        return self._start(Kind.PULL, keys, None, out)

    def push_pull(self, keys: Keys, values: Values, out: Values) -> Ticket:
        """Push, and pull what the values are afterwards, in one message for each server.

        Under ``Sequential`` the pull does not see the push, but the values at the beginning of the step. ``values`` and
        ``out`` must not share memory.
        """
        if np.may_share_memory(array_of("values", values), array_of("out", out)):
            raise ConfigurationError("values and out of push_pull share memory")
        return self._start(Kind.PUSH_PULL, keys, values, out)

    def push_range(
        self,
        begin: int,
        end: int,
        values: Values,
        *,
        lr: float | None = None,
        held: bool = False,
        exact: bool = False,
    ) -> Ticket:
        """Push updates of all keys from ``begin`` to ``end`` - 1; other arguments as for ``push``."""
        return self.push(slice(begin, end), values, lr=lr, held=held, exact=exact)

    def pull_range(self, begin: int, end: int, out: Values) -> Ticket:
        """Pull all keys from ``begin`` to ``end`` - 1."""
        return self.pull(slice(begin, end), out)

    def push_pull_range(self, begin: int, end: int, values: Values, out: Values) -> Ticket:
        """Push and pull all keys from ``begin`` to ``end`` - 1."""
        return self.push_pull(slice(begin, end), values, out)

    def withdraw(self) -> Ticket:
        """Take back what this worker has pushed with ``held=True`` in this step; return at once.

        Servers drop it, and with a codec the residuals of these keys are as they were before. What was not sent yet is
        not sent. The memory of the values is free when the tickets of their pushes are done.
        """
        with self._lock:
            self._check_open()
            ticket = self._submit(self._client.withdraw())
            self._lock.notify_all()  # a push of which nothing was sent is done with this
            return ticket

    def push_withheld(self, *, lr: float | None = None) -> Ticket:
        """Push all that the codec has not expressed and the filter has withheld, exactly; return at once.

        Wait for the tickets of earlier pushes and of ``withdraw`` before, because what was not sent yet may leave
        something behind again. ``lr``: as for ``push``.

        Raises:
            ConfigurationError: With a codec, and behind a push with ``held=True``: call ``clock`` or ``withdraw``
                first.
        """
        if lr is not None:
            self._check_rate(lr)
        with self._lock:
            self._check_open()
            return self._submit(self._client.push_withheld(PushOptions(lr)))

    def assign(self, keys: Keys, values: Values) -> Ticket:
        """Set the values of keys; return at once. Arguments as for ``push``.

        The optimizer, the codec and the filter have no part in it, and the optimizer's state stays. Under
        ``Sequential`` the values are set when the step ends, before what was pushed in it is applied if the rule takes
        means.
        """
        return self._start(Kind.ASSIGN, keys, values, None)

    def save(self, folder: str | Path, timeout_s: float | None = None) -> None:
        """Write a snapshot of values, optimizer state and clock. Collective among the workers, between two steps.

        Each server writes its shards, as they are when all workers have called this: with all pushes of earlier calls,
        and none of later ones. When this returns, the snapshot is complete. ``tr.ps.connect(restore=folder)`` reads the
        last complete snapshot; the last two stay on disk. Directly after a restore from this folder, the snapshot is
        there already, and nothing is written.

        Args:
            folder: A file system that all ranks see, the same on all workers. It is made if it does not exist. It
                belongs to one run, and to those that are restored from it.
            timeout_s: Seconds; ``None``: those of the connection.

        Raises:
            ConfigurationError: This worker has pushed something since its last ``clock()``, has finished, or repeats a
                call that was not done with another folder. Nothing is sent.
            RefusedError: A shard could not be written, workers save after different steps or into different folders, or
                the folder has a snapshot of another run that is not earlier; on all workers. The snapshot before stays.
            SlowWorkersError: Other workers have not called this; DeadlineExceededError: a server takes longer. Repeat
                the call before the next ``clock()``: it waits on, and asks for no second snapshot.
            PeerLost: A rank is lost.
        """
        path = Path(folder).absolute()
        with self._lock:
            self._check_open()
            call = self._unfinished_save(path)
            if call is None:
                self._client.prepare_save()
                if self._origin.is_saved(path, self._client.clock):
                    return
                run = self._origin.run
                call = self._client.save(lambda mark: describe_snapshot(path, run, mark))
                self._saving = path, call
            ticket = self._submit(call)
        try:
            ticket.wait(timeout_s)
        except (SlowWorkersError, DeadlineExceededError):
            raise
        except BaseException:
            self._saving = None
            raise
        self._saving = None

    def _unfinished_save(self, path: Path) -> Call | None:
        """Return the call of a ``save`` in this step that was not done in time; ``None``: there is none."""
        if self._saving is None:
            return None
        folder, call = self._saving
        if call.clock != self._client.clock or (call.is_done and folder != path):
            return None
        if folder != path:
            raise ConfigurationError(f"save({str(folder)!r}) was not done in time: repeat it until it returns")
        return call

    @property
    def step(self) -> int:
        """The number of steps that this worker has ended, in this job and before the snapshot that was restored."""
        return self._client.clock

    def retire(self) -> Ticket:
        """Have other workers not wait for this one any more. It may pull, and what it pushes is dropped."""
        with self._lock:
            self._check_open()
            return self._submit(self._client.finish())

    def clock(self) -> Ticket:
        """End a step of this worker. The ticket is done when all servers know it; nobody needs to wait for it."""
        with self._lock:
            self._check_open()
            return self._submit(self._client.advance())

    def steps(self, count: int) -> Iterator[int]:
        """Yield the numbers of the steps that this worker has not ended, of ``count``, and end each of them.

        A worker that takes the place of a lost one goes on where that one was.
        """
        count = checks.integer("count", count)
        self.begin_steps()
        while (step := self._client.clock) < count:
            yield step
            self.clock()

    def begin_steps(self) -> None:
        """Note that the program comes to its steps, as ``steps`` does. A program with a loop of its own calls it.

        Otherwise the first step of a worker that takes the place of a lost one would count as what comes before the
        steps, which the lost worker has pushed, too, so that it is ignored.
        """
        with self._lock:
            self._client.begin_steps()

    def meet(self, timeout_s: float | None = None) -> None:
        """Wait until all workers have ended as many steps as this one, or have finished.

        What they have pushed in these steps was then applied. Errors as of ``Ticket.wait``.
        """
        with self._lock:
            self._check_open()
            ticket = self._submit(self._client.meet())
        ticket.wait(timeout_s)

    def statistics(self) -> ServerStatistics:
        """Return numbers of this rank since it has connected."""
        with self._lock:
            lists = self._client.lists
            return ServerStatistics(
                bytes_sent=self._num_bytes["sent"] + self._messenger.num_bytes["sent"],
                bytes_received=self._num_bytes["received"] + self._messenger.num_bytes["received"],
                staleness=Counter(self._client.staleness),
                waiting_s=self._waited_s,
                lists=lists["list"],
                digests=lists["digest"],
                unknown_lists=lists["unknown"],
                updates=self._updates if self._server is None else self._server.version,
                withheld=self._client.withheld,
            )

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks have closed their connections. Collective.

        Other workers do not wait for this one any more as soon as it has called this. A call after this has returned or
        raised does nothing.

        Raises:
            DeadlineExceededError: A rank has not called this in time. The connection is closed nevertheless; memory of
                calls that are not done may still be sent or received.
            PeerLost: A rank is lost, or has ended its connection.
            RefusedError: A server has refused a request of a call whose ticket nobody has waited for.
            TotalReduceError: The connection has failed before. A call has raised the same error, if there was one.
        """
        timeout_s = self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s)
        if not self._home.is_here or self._is_over:
            return
        self.finish()
        self._thread.join(timeout_s)
        with self._lock:
            is_late, late = self._thread.is_alive(), sorted(self._messenger.talking)
            error, failed = self._error, self._client.unreported()
        self.end()
        if error is not None:
            raise error.with_traceback(None)
        if is_late:
            who = f"rank(s) {late} have" if late else "a lost rank has not come back, and"
            what = "not closed their connections" if late else "has not closed its connection"
            raise DeadlineExceededError(f"{who} {what} to the parameter server within {timeout_s:g} s")
        if failed is not None and failed.error is not None:
            raise failed.error.with_traceback(None)

    def finish(self) -> None:
        """Have other workers not wait for this one any more, and return at once; ``close`` waits for their end."""
        with self._lock:
            if self._state == "open":
                self._state = "closing"
                self._submit(self._client.finish())
                self._events.put(lambda: None)  # all others may have finished before, so that nothing wakes the thread

    def has_ended(self, timeout_s: float | None = None) -> bool:
        """Return whether all ranks have closed their connections, or this one has failed; wait so long for it.

        Args:
            timeout_s: Seconds; ``None``: there is no deadline, because the loss of a rank ends the connection, too.
        """
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def end(self) -> None:
        """End without waiting for other ranks, after an error. They cannot go on with the parameter server.

        Memory of calls that were not done may still be sent or received until the group is closed.
        """
        if self._home.is_here:
            self._is_over = True
            self._events.put(partial(self._end, GroupClosed("this rank has closed its connection to the servers")))
            if self._thread is not threading.current_thread():
                self._thread.join(_END_S)

    def _end_with_the_process(self) -> None:
        """End before Python does: a thread that waits in torch's store then would abort the process."""
        if self._home.is_here and self._state in ("closing", "silent"):  # the others may need a moment, too
            self._thread.join(_END_S)
        self.end()

    def await_call(self, call: Call, timeout_s: float | None) -> None:
        """Wait for a call; see ``Ticket.wait``."""
        self._home.check()
        patience_s = self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s, or_zero=True)
        begin = time.monotonic()
        with self._lock:
            self._lock.wait_for(lambda: call.is_done, patience_s)
            self._waited_s += time.monotonic() - begin
            if call.is_done:
                call.is_reported = True
                if call.error is not None:
                    raise call.error.with_traceback(None)
                return
            slow = self._client.slow_workers()
            if slow:
                raise SlowWorkersError(call.clock, slow, patience_s)
        raise DeadlineExceededError(f"servers have not answered a call within {patience_s:g} s")

    def _start(
        self, kind: Kind, keys: Keys, values: Values | None, out: Values | None, options: PushOptions = _PLAIN
    ) -> Ticket:
        if options.lr is not None:
            self._check_rate(options.lr)
        pushed = None if values is None else readable(array_of("values", values))
        pulled = None if out is None else array_of("out", out)
        with self._lock:
            self._check_open()
            if isinstance(keys, slice):
                if keys.step not in (None, 1) or keys.stop is None:
                    raise ConfigurationError(f"keys are slice(begin, end), not {keys}")
                begin = 0 if keys.start is None else checks.integer("begin", keys.start)
                end = checks.integer("end", keys.stop)
                return self._submit(self._client.on_range(kind, begin, end, pushed, pulled, options))
            return self._submit(self._client.on_keys(kind, readable(keys_of(keys)), pushed, pulled, options))

    def _submit(self, call: Call) -> Ticket:
        self._flush()
        return Ticket(self, call)

    def _check_open(self) -> None:
        self._home.check()
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._state != "open":
            raise GroupClosed("this rank has closed its connection to the parameter server")
        if not self._client.is_worker:
            raise ConfigurationError(f"rank {self._rank} only serves: it is not one of the workers of tr.ps.connect")

    # ------------------------------------------------------------------------------------------------------ messages

    def _flush(self) -> None:
        """Send what the client has to send. Under the lock. An error ends the connection, because requests are lost.

        If a rank is lost, they are sent in the next group.
        """
        if self._is_between:
            return
        try:
            remote = []
            for target, message in self._client.outgoing():
                if target == self._rank:
                    self._post(self._renewals, partial(self._handle, target, message))
                else:
                    remote.append((target, message))
            if remote:
                self._messenger.send(remote)
        except PeerLost as error:
            self._post(self._renewals, partial(self._fail, error))
            if self._renewal is None:
                self._end(error)
                raise
        except BaseException as error:
            failure = (
                error
                if isinstance(error, TotalReduceError)
                else ProtocolError(f"a request could not be sent: {error!r}")
            )
            self._events.put(partial(self._end, failure))  # wakes the thread
            self._end(failure)
            raise

    def _may_leave(self, source: int) -> bool:
        with self._lock:
            return self._client.has_finished(source) and (self._server is None or self._server.has_finished(source))

    def _handle(self, source: int, message: Message) -> None:
        """Handle a complete message of a rank, or of this one."""
        kind = message.header.kind
        if not kind.is_request and kind is not Kind.REPLICATED:
            with self._lock:
                is_done = self._client.answer(source, message)
                self._flush()
                if is_done:
                    self._lock.notify_all()
            return
        assert self._server is not None
        remote = []
        for target, answer in self._server.take(source, message):
            if target == self._rank:
                self._handle(target, answer)
            else:
                remote.append((target, answer))
        if remote:
            self._messenger.send(remote)

    # ---------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            patience_s = None if self._renewal is None else self._renewal.patience_s
            while self._state != "ended":
                try:
                    self._next_event(patience_s)()
                    self._end_if_all_is_done()
                except TotalReduceError as error:
                    self._fail(error)
        except BaseException as error:
            self._end(ProtocolError(f"the thread of the parameter server has failed: {error!r}"))
            raise
        finally:
            self._leave()

    def _next_event(self, patience_s: float | None) -> Callable[[], None]:
        """Wait for the next event; now and then, it is a look for processes that want to join."""
        if self._renewal is not None and self._state != "ended" and self._renewal.has_newcomers():
            return partial(self._renew, "other processes join")
        try:
            return self._events.get(timeout=patience_s)
        except queue.Empty:
            return lambda: None

    def _leave(self) -> None:
        """Tell the others that this rank has ended, unless they know; drop the table."""
        atexit.unregister(self._end_with_the_process)
        with contextlib.suppress(TotalReduceError):  # the group may be closed already
            # All ranks hear of a loss by themselves. If this rank's message came first, they would think it lost.
            if self._error is not None and not isinstance(self._error, PeerLost):
                self._messenger.say_goodbye()
        with contextlib.suppress(TotalReduceError):
            self._messenger.close()
        if self._renewal is not None:
            with contextlib.suppress(TotalReduceError):
                self._renewal.end(is_complete=self._error is None)
        with self._lock:
            if self._server is not None:
                self._updates, self._server = self._server.version, None
            self._client.release()

    def _end_if_all_is_done(self) -> None:
        """Say goodbye when this worker has finished, and so have all workers of this server; end when all have."""
        with self._lock:
            if self._state == "closing" and self._client.is_idle and (self._server is None or self._server.is_finished):
                self._state = "silent"
                self._messenger.say_goodbye()
            if self._state == "silent" and not self._messenger.talking:
                self._state = "ended"

    def _fail(self, error: TotalReduceError) -> None:
        """After the loss of a rank go on in the next group, if ranks can be replaced; else end. In the thread."""
        is_of_group = isinstance(error, PeerLost | DeadlineExceededError | GroupClosed)
        if self._renewal is None or not is_of_group or self._state == "ended":
            self._end(error)
            return
        try:
            self._renew(error if isinstance(error, PeerLost) else str(error))
        except TotalReduceError as failure:
            self._end(failure)

    def _renew(self, reason: PeerLost | str) -> None:
        """Form the next group, and send everything again that was not answered."""
        assert self._renewal is not None
        with self._lock:
            self._is_between = True
            self._renewals += 1  # nothing of the last group is handled any more
        with contextlib.suppress(TotalReduceError):
            self._messenger.close()
        place = self._renewal.renew(reason)
        if place is None:
            if self._state == "open" or not self._client.is_idle:
                raise ended_early()
            self._state = "ended"
            return
        messenger = self._meet(place)
        with self._lock:
            if self._state == "silent":
                self._state = "closing"
            self._client.begin_epoch(place.servers, place.clock_of(self._rank))
            self._num_bytes += self._messenger.num_bytes
            self._messenger = messenger
            self._is_between = False
            self._flush()
        self._end_if_all_is_done()

    def _end(self, error: TotalReduceError) -> None:
        with self._lock:
            if self._error is None and self._state != "ended":
                self._error = error
                with contextlib.suppress(TotalReduceError):  # nothing is received into the memory of failed calls
                    self._messenger.close()
                self._client.fail(error)
            self._state = "ended"
            self._lock.notify_all()
