"""What programs call of a parameter server. The thread behind it is in ``driver``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, final

from totalreduce.foundation import checks
from totalreduce.foundation.errors import (
    ConfigurationError,
    DeadlineExceededError,
    GroupClosed,
    SlowWorkersError,
)
from totalreduce.server.arguments import Keys, Values, array_of, destination_of, keys_of, readable, share_memory
from totalreduce.server.driver import Driver
from totalreduce.server.messages import Kind
from totalreduce.server.requests import Call, PushOptions
from totalreduce.server.saving import Origin, describe_snapshot
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
    """The handle of a call. The program must not change keys, values or ``out`` of the call before it is done.

    An ``out`` on an accelerator is written by the current stream of the first thread that learns that the call is done.
    """

    __slots__ = ("_arrive", "_call", "_connection")

    def __init__(self, connection: Connection, call: Call, arrive: Callable[[], object] | None = None) -> None:
        """``arrive``: brings the values to an accelerator when the call has ended well."""
        self._connection, self._call, self._arrive = connection, call, arrive

    def done(self) -> bool:
        """Return whether the call has ended, with or without an error. Never blocks."""
        is_done = self._call.is_done
        if is_done and self._arrive is not None:
            arrive, self._arrive = self._arrive, None
            if self._call.error is None:
                arrive()
        return is_done

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
        self.done()


@final
@never_compiled
class Connection:
    """A rank that is connected to a parameter server. Made by ``tr.ps.connect``; any thread may call it.

    Calls with keys return a ``Ticket`` at once, and several may be under way. What a worker asks of one server is
    carried out in the order of its calls. As a context manager a connection calls ``close`` at its end, and ``end``
    after an exception, by which ranks that still need this one get ``PeerLost``.
    """

    def __init__(
        self, driver: Driver, *, timeout_s: float, origin: Origin, check_rate: Callable[[float], None]
    ) -> None:
        """Connect the program. ``check_rate`` raises ``ConfigurationError`` if a push cannot have a learning rate."""
        self._driver, self._client, self._lock = driver, driver.client, driver.lock
        self._timeout_s, self._origin, self._check_rate = timeout_s, origin, check_rate
        self._waited_s = 0.0
        self._saving: tuple[Path, Call] | None = None  # the last call of ``save`` that was not done in time
        self._is_over = False  # whether this rank has ended the connection, and knows what has failed

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
            values: A NumPy array or a torch tensor, of shape (n, width), or (n,) if the width is 1, in the
                type of the table. A contiguous array that can be written is not copied, unless it has keys of several
                servers. A tensor of an accelerator is copied before the call returns, which waits for its kernels. Keys
                are copied.
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
        if share_memory(values, out):
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
            lists, num_bytes = self._client.lists, self._driver.num_bytes
            return ServerStatistics(
                bytes_sent=num_bytes["sent"],
                bytes_received=num_bytes["received"],
                staleness=Counter(self._client.staleness),
                waiting_s=self._waited_s,
                lists=lists["list"],
                digests=lists["digest"],
                unknown_lists=lists["unknown"],
                updates=self._driver.server.version,
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
        driver = self._driver
        if not driver.home.is_here or self._is_over:
            return
        self.finish()
        is_late = not driver.has_ended(timeout_s)
        with self._lock:
            late, error, failed = sorted(driver.messenger.talking), driver.error, self._client.unreported()
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
        self._driver.finish()

    def has_ended(self, timeout_s: float | None = None) -> bool:
        """Return whether all ranks have closed their connections, or this one has failed; wait so long for it.

        Args:
            timeout_s: Seconds; ``None``: there is no deadline, because the loss of a rank ends the connection, too.
        """
        return self._driver.has_ended(timeout_s)

    def end(self) -> None:
        """End without waiting for other ranks, after an error. They cannot go on with the parameter server.

        Memory of calls that were not done may still be sent or received until the group is closed.
        """
        if self._driver.home.is_here:
            self._is_over = True
            self._driver.end()

    def await_call(self, call: Call, timeout_s: float | None) -> None:
        """Wait for a call; see ``Ticket.wait``."""
        self._driver.home.check()
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
            servers = self._client.awaited_servers
        raise DeadlineExceededError(f"rank(s) {servers}, servers, have not answered a call within {patience_s:g} s")

    def _start(
        self, kind: Kind, keys: Keys, values: Values | None, out: Values | None, options: PushOptions = _PLAIN
    ) -> Ticket:
        if options.lr is not None:
            self._check_rate(options.lr)
        pushed = None if values is None else readable(array_of("values", values))
        pulled, arrive = (None, None) if out is None else destination_of(out)
        with self._lock:
            self._check_open()
            if isinstance(keys, slice):
                if keys.step not in (None, 1) or keys.stop is None:
                    raise ConfigurationError(f"keys are slice(begin, end), not {keys}")
                begin = 0 if keys.start is None else checks.integer("begin", keys.start)
                end = checks.integer("end", keys.stop)
                return self._submit(self._client.on_range(kind, begin, end, pushed, pulled, options), arrive)
            return self._submit(self._client.on_keys(kind, readable(keys_of(keys)), pushed, pulled, options), arrive)

    def _submit(self, call: Call, arrive: Callable[[], object] | None = None) -> Ticket:
        self._driver.flush()
        return Ticket(self, call, arrive)

    def _check_open(self) -> None:
        driver = self._driver
        driver.home.check()
        if driver.error is not None:
            raise driver.error.with_traceback(None)
        if driver.state != "open":
            raise GroupClosed("this rank has closed its connection to the parameter server")
        if not self._client.is_worker:
            raise ConfigurationError(
                f"rank {driver.server.rank} only serves: it is not one of the workers of tr.ps.connect"
            )
