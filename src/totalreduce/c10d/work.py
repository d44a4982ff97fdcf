"""Work handles: what torch's collectives return with ``async_op=True``, and what they wait for without.

A handle has two faces. ``wait`` is the fast one: the waiting thread moves the messages itself. ``get_future`` is what
DistributedDataParallel and its hooks use: it completes without anybody waiting, and runs callbacks in a thread of
their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch._C._distributed_c10d import Work

from totalreduce.c10d.callbacks import Callbacks
from totalreduce.c10d.errors import as_torch_error
from totalreduce.foundation.checks import SECONDS_MAX
from totalreduce.foundation.errors import DeadlineExceededError
from totalreduce.tensors.compilation import never_compiled

if TYPE_CHECKING:
    from totalreduce.c10d.profiling import Record
    from totalreduce.tensors.work import Work as GroupWork

__all__ = ["Finish", "OperationWork", "seconds_of"]

#: What torch says in place of the number of a backward pass where there is none.
_NO_BACKWARD = -1


class Finish(Protocol):
    """The last part of an operation, which happens on this rank only."""

    def finish(self, *, blocking: bool) -> None:
        """Do it, unless it is done; with ``blocking=False`` the current CUDA stream may be left waiting for it."""


@final
@never_compiled
class OperationWork(Work):
    """One collective or message of c10d: one operation of a group, or several (coalesced ones)."""

    def __init__(
        self,
        works: Sequence[GroupWork],
        result: Any,
        *,
        title: str,
        timeout_s: float,
        callbacks: Callbacks,
        record: Record | None = None,
        staged: Finish | None = None,
    ) -> None:
        """Watch over operations that have been submitted.

        Args:
            works: The operations.
            result: What the future holds: the outputs, in the nesting that gloo uses.
            title: For messages.
            timeout_s: Deadline in seconds from now.
            callbacks: Where futures are completed.
            record: The profiler's event, ended when the operation is done.
            staged: What is left to be done here when the operations are done.
        """
        super().__init__()
        self._works, self._result, self._title = works, result, title
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._callbacks = callbacks
        self._record = record
        self._staged = staged
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._future: Any = None
        if record is not None:
            self._when_done(lambda: callbacks.run(record.end))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is done.

        Args:
            timeout: Gives up earlier than the operation's own deadline does; zero and ``None`` mean that one.

        Raises:
            torch.distributed.DistBackendError: It failed, or is not done in time; the message names the ranks.
        """
        end = self._deadline
        if timeout is not None and timeout:
            end = min(end, time.monotonic() + seconds_of(timeout))
        failure: BaseException | None = None
        try:
            for work in self._works:
                work.wait(max(0.0, end - time.monotonic()))
        except DeadlineExceededError as error:
            failure = self._late(error)
            if end == self._deadline:
                self._error = failure
        except Exception as error:
            failure = self._error = as_torch_error(error, self._title)
        if failure is not None:
            raise failure
        if self._record is not None:
            self._record.ended.wait(max(0.0, end - time.monotonic()))
        self.synchronize()
        return True

    def is_completed(self) -> bool:
        """Whether the operation is done, well or not."""
        return self._error is not None or all(work.done() for work in self._works)

    def is_success(self) -> bool:
        """Whether it is done and well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of an operation that failed."""
        if self._error is None:
            for work in self._works:
                error = work.exception()
                if error is not None:
                    self._error = as_torch_error(error, self._title)
                    break
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The outputs, flat."""
        return list(_flat(self._result))

    def synchronize(self) -> None:
        """For a work that is done: with CUDA tensors, have the current stream wait for the copies of the results."""
        if self._staged is not None:
            self._staged.finish(blocking=False)

    def block_current_stream(self) -> None:
        """As ``wait``."""
        self.wait()

    def source_rank(self) -> int:
        """The rank in the group that a received message came from."""
        source = self._works[0].source
        if source is None:
            raise RuntimeError(f"{self._title} has no source rank, or is not done")
        return source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the outputs; completes, at the deadline at the latest, though nobody waits.

        Within a backward pass it is DistributedDataParallel that asks, to wait in C++ when the pass ends; an error of a
        future is a bare ``RuntimeError`` there. A wait of ours, ahead of that one, raises what it really is.
        """
        if torch._C._current_graph_task_id() != _NO_BACKWARD:
            torch.autograd.Variable._execution_engine.queue_callback(self.block_current_stream)
        with self._lock:
            if self._future is None:
                # An error can only be put into a future by a callback that raises it.
                gate: torch.futures.Future[None] = torch.futures.Future()
                self._future = gate.then(lambda _: self._outcome())
                if all(work.done() for work in self._works):
                    gate.set_result(None)
                else:
                    self._complete_later(gate)
            return self._future

    def _complete_later(self, gate: Any) -> None:
        once = threading.Lock()

        def complete() -> None:
            if once.acquire(blocking=False):
                self._callbacks.forget(id(self))
                self._callbacks.run(lambda: gate.set_result(None))

        def expire() -> None:
            self._error = self._late(None)
            complete()

        self._callbacks.watch(id(self), self._deadline, expire)
        self._when_done(complete)

    def _when_done(self, function: Callable[[], None]) -> None:
        """Have ``function`` called when the last operation is done, in the thread that finishes it."""
        lock, missing = threading.Lock(), len(self._works)

        def one_done(_: GroupWork) -> None:
            nonlocal missing
            with lock:
                missing -= 1
                last = missing == 0
            if last:
                function()

        for work in self._works:
            work.on_done(one_done)
        if not self._works:
            function()

    def _outcome(self) -> Any:
        error = self.exception()
        if error is not None:
            raise error
        if self._staged is not None:
            self._staged.finish(blocking=True)
        return self._result

    def _late(self, cause: DeadlineExceededError | None) -> BaseException:
        text = str(cause) if cause is not None else f"after {self._timeout_s:g} s"
        return as_torch_error(DeadlineExceededError(text), self._title)


def seconds_of(timeout: timedelta) -> float:
    """A time-out of torch's in seconds. One without end, such as ``timedelta.max``, becomes the longest there is."""
    return min(timeout.total_seconds(), SECONDS_MAX)


def _flat(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        yield result
    else:
        for part in result:
            yield from _flat(part)
