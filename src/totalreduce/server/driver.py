"""Drives the worker and the server of one rank: the thread, the messages of its group, and the next group after a loss.

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
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, final

from totalreduce.foundation.errors import (
    DeadlineExceededError,
    GroupClosed,
    PeerLost,
    ProtocolError,
    TotalReduceError,
)
from totalreduce.foundation.forking import HomeProcess
from totalreduce.recovery.epochs import ended_early
from totalreduce.server.client import Client
from totalreduce.server.messages import Kind, Message
from totalreduce.server.messenger import Messenger
from totalreduce.server.renewal import Epoch, Renewal
from totalreduce.server.server import Server

__all__ = ["Driver"]

#: The seconds for which the end of the thread is waited for after an error.
_END_S = 5.0


@final
class Driver:
    """The thread of one rank. Any thread may call the public methods.

    Attributes:
        client: The worker; used under ``lock``.
        server: What this rank serves; the thread alone uses it.
        lock: Its waiters are woken when a call is done.
        home: The process that has the thread.
        messenger: The messages of the present group.
        state: ``"closing"``: the worker has finished. ``"silent"``: this rank has said goodbye.
        error: The error with which all has ended.
    """

    def __init__(
        self,
        place: Epoch,
        client: Client,
        server: Server,
        open_messenger: Callable[..., Messenger],
        renewal: Renewal | None = None,
    ) -> None:
        """Meet the other ranks, and start the thread. Collective. ``renewal`` is ``None``: a loss ends everything."""
        self.client, self.server, self._renewal = client, server, renewal
        self._open_messenger = open_messenger
        self.home = HomeProcess("the connection to a parameter server")
        self.lock = threading.Condition()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.error: TotalReduceError | None = None
        self.state: Literal["open", "closing", "silent", "ended"] = "open"
        #: How often the group was formed anew; whether that is going on now.
        self._renewals, self._is_between = 0, False
        self._num_bytes: Counter[str] = Counter()  # of groups that have ended
        self.messenger = self._meet(place)
        self._thread = threading.Thread(target=self._run, name="totalreduce-ps", daemon=True)
        self._thread.start()
        atexit.register(self._end_with_the_process)

    def _meet(self, place: Epoch) -> Messenger:
        """Return a messenger for a group. What it posts is dropped when the next one takes its place."""
        messenger = self._open_messenger(
            *(place.group, place.seats),
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

    @property
    def num_bytes(self) -> dict[str, int]:
        """The bytes ``"sent"`` and ``"received"``, in all groups."""
        return {way: self._num_bytes[way] + self.messenger.num_bytes[way] for way in ("sent", "received")}

    def finish(self) -> None:
        """Have other workers not wait for this one any more, and end when all have finished."""
        with self.lock:
            if self.state == "open":
                self.state = "closing"
                self.client.finish()
                self.flush()
                self._events.put(lambda: None)  # all others may have finished before, so that nothing wakes the thread

    def has_ended(self, timeout_s: float | None) -> bool:
        """Wait so many seconds for the end of the thread; ``None``: without a deadline. Return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def end(self) -> None:
        """End without waiting for other ranks."""
        self._events.put(partial(self._end, GroupClosed("this rank has closed its connection to the servers")))
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _end_with_the_process(self) -> None:
        """End before Python does: a thread that waits in torch's store then would abort the process."""
        if not self.home.is_here:
            return
        if self.state in ("closing", "silent"):  # the others may need a moment, too
            self._thread.join(_END_S)
        self.end()

    # ------------------------------------------------------------------------------------------------------ messages

    def flush(self) -> None:
        """Send what the client has to send. Under the lock. An error ends the connection, because requests are lost.

        If a rank is lost, they are sent in the next group.
        """
        if self._is_between:
            return
        try:
            remote = []
            for target, message in self.client.outgoing():
                if target == self.server.rank:
                    self._post(self._renewals, partial(self._handle, target, message))
                else:
                    remote.append((target, message))
            if remote:
                self.messenger.send(remote)
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
        with self.lock:
            return self.client.has_finished(source) and self.server.has_finished(source)

    def _handle(self, source: int, message: Message) -> None:
        """Handle a complete message of a rank, or of this one."""
        kind = message.header.kind
        if not kind.is_request and kind is not Kind.REPLICATED:
            with self.lock:
                is_done = self.client.answer(source, message)
                self.flush()
                if is_done:
                    self.lock.notify_all()
            return
        self._send(self.server.take(source, message, time.monotonic()))

    def _tick(self) -> None:
        """Have the server do what is due."""
        self._send(self.server.tick(time.monotonic()))

    def _send(self, messages: Iterable[tuple[int, Message]]) -> None:
        """Send what the server has to send; handle what is for this rank."""
        remote = []
        for target, message in messages:
            if target == self.server.rank:
                self._handle(target, message)
            else:
                remote.append((target, message))
        if remote:
            self.messenger.send(remote)

    # ---------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            patience_s = None if self._renewal is None else self._renewal.patience_s
            while self.state != "ended":
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
        """Wait for the next event; now and then, it is a look for processes that want to join, or the server is due."""
        if self._renewal is not None and self.state != "ended" and self._renewal.has_newcomers():
            return partial(self._renew, "other processes join")
        due = self.server.due()
        if due is not None:
            left_s = due - time.monotonic()
            if left_s <= 0:
                return self._tick
            patience_s = left_s if patience_s is None else min(patience_s, left_s)
        try:
            return self._events.get(timeout=patience_s)
        except queue.Empty:
            return lambda: None

    def _leave(self) -> None:
        """Tell the others that this rank has ended, unless they know; drop the table."""
        atexit.unregister(self._end_with_the_process)
        with contextlib.suppress(TotalReduceError):  # the group may be closed already
            # All ranks hear of a loss by themselves. If this rank's message came first, they would think it lost.
            if self.error is not None and not isinstance(self.error, PeerLost):
                self.messenger.say_goodbye()
        with contextlib.suppress(TotalReduceError):
            self.messenger.close()
        if self._renewal is not None:
            with contextlib.suppress(TotalReduceError):
                self._renewal.end(is_complete=self.error is None)
        with self.lock:
            self.server.release()
            self.client.release()

    def _end_if_all_is_done(self) -> None:
        """Say goodbye when this worker has finished, and so have all workers of this server; end when all have."""
        with self.lock:
            if self.state == "closing" and not self.client.awaited_servers and self.server.is_finished:
                self.state = "silent"
                self.messenger.say_goodbye()
            if self.state == "silent" and not self.messenger.talking:
                self.state = "ended"

    def _fail(self, error: TotalReduceError) -> None:
        """After the loss of a rank go on in the next group, if ranks can be replaced; else end. In the thread."""
        is_of_group = isinstance(error, PeerLost | DeadlineExceededError | GroupClosed)
        if self._renewal is None or not is_of_group or self.state == "ended":
            self._end(error)
            return
        try:
            self._renew(error if isinstance(error, PeerLost) else str(error))
        except TotalReduceError as failure:
            self._end(failure)

    def _renew(self, reason: PeerLost | str) -> None:
        """Form the next group, and send everything again that was not answered."""
        assert self._renewal is not None
        with self.lock:
            self._is_between = True
            self._renewals += 1  # nothing of the last group is handled any more
        with contextlib.suppress(TotalReduceError):
            self.messenger.close()
        place = self._renewal.renew(reason)
        if place is None:
            if self.state == "open" or self.client.awaited_servers:
                raise ended_early()
            self.state = "ended"
            return
        messenger = self._meet(place)
        with self.lock:
            if self.state == "silent":
                self.state = "closing"
            self.client.begin_epoch(place.servers, place.clock_of(self.server.rank))
            self._num_bytes += self.messenger.num_bytes
            self.messenger = messenger
            self._is_between = False
            self.flush()
        self._end_if_all_is_done()

    def _end(self, error: TotalReduceError) -> None:
        with self.lock:
            if self.error is None and self.state != "ended":
                self.error = error
                with contextlib.suppress(TotalReduceError):  # nothing is received into the memory of failed calls
                    self.messenger.close()
                self.client.fail(error)
            self.state = "ended"
            self.lock.notify_all()
