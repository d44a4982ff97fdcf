"""Work handles: torch's collectives return them with ``async_op=True``, and wait for them without.

There are two ways to wait. ``wait`` is the fast one: the waiting thread moves the messages itself. ``get_future`` is
for DistributedDataParallel and its hooks: the future completes although no thread waits, and its callbacks run in other
threads.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from totalreduce.c10d.advice import ddp_advice
from totalreduce.c10d.callbacks import Callbacks
from totalreduce.c10d.futures import follow, in_backward
from totalreduce.foundation.checks import SECONDS_MAX
from totalreduce.foundation.errors import (
    ConfigurationError,
    DeadlineExceededError,
    MismatchError,
    PeerLost,
    TotalReduceError,
)
from totalreduce.groups.calling import Origin, Unknown, surroundings
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.streams import is_on_accelerator
from totalreduce.tensors.work import operation_of, when_all_done

if TYPE_CHECKING:
    from totalreduce.tensors.streams import is_on_accelerator
from totalreduce.tensors.work import Work as GroupWork

__all__ = ["OperationWork", "as_torch_error", "begin_record", "seconds_of"]


@final
class Record:
    """One event of torch's profiler, from the submission of an operation to its end, which another thread reports."""

    def __init__(self, title: str, tensors: Sequence[torch.Tensor]) -> None:
        self.ended = threading.Event()  #: Set when the event has ended.
        handle = torch._C._autograd._record_function_with_args_enter(title, *tensors)
        # Through a future, because that alone carries the profiler's state over to the thread where the event ends.
        self._future: Any = torch.futures.Future()
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(handle, self._future)

    def end(self) -> None:
        """End the event; called once."""
        self._future.set_result(None)
        self.ended.set()


def begin_record(title: str, tensors: Sequence[torch.Tensor]) -> Record | None:
    """Begin an event of torch's profiler, if it is active, with name and shapes as gloo reports them."""
    return Record(title, tensors) if torch._C._autograd._profiler_enabled() else None


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
        finish: Callable[[], None] | None = None,
        value: Callable[[], Any] | None = None,
    ) -> None:
        """Make the handle of operations that have been submitted, with a deadline in seconds from now.

        ``result`` are the outputs, nested as gloo nests them, and the value of the future unless ``value`` returns
        another one. ``record`` ends with the operation; ``finish`` is its last part, on this rank, and does it once.
        """
        super().__init__()
        self._works, self._result, self._title, self._value = works, result, title, value
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._callbacks = callbacks
        self._record = record
        self._caller = surroundings.get()
        self._finish = finish
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._future: Any = None
        if record is not None:
            when_all_done(works, lambda: callbacks.run(record.end))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is done.

        Args:
            timeout: A deadline before that of the operation; with zero and ``None`` only that of the operation counts.

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
        if self._finish is not None:
            self._finish()
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, with or without an error."""
        return self._error is not None or all(work.done() for work in self._works)

    def is_success(self) -> bool:
        """Whether the operation has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of an operation that failed, otherwise ``None``."""
        if self._error is None:
            for work in self._works:
                error = work.exception()
                if error is not None:
                    self._error = as_torch_error(error, self._title)
                    break
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the outputs as a flat list."""
        return list(_flat(self._result))

    def synchronize(self) -> None:
        """Wait, as ``wait`` does: the network gives results to no stream before they are there."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait, as ``wait`` does."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank in the group that sent the received message."""
        source = self._works[0].source
        if source is None:
            raise RuntimeError(f"{self._title} has no source rank, or is not done")
        return source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a ``torch.futures.Future`` of the outputs, which completes at the deadline at the latest.

        Within a backward pass DistributedDataParallel asks for it and waits in C++ when the pass ends, where the error
        of a future is a bare ``RuntimeError``. A wait in Python, before that one, raises the error itself.
        """
        if in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self.block_current_stream)
        with self._lock:
            if self._future is None:
                # An error can only be put into a future by a callback that raises it. Given the devices of its tensors,
                # a future makes the streams of those that wait for it wait for the kernels of its callbacks.
                gate: torch.futures.Future[None] = torch.futures.Future(devices=self._devices())
                self._future = gate.then(lambda _: self._outcome())
                follow(self._future, functools.partial(_origin, self._works, self._caller))
                if all(work.done() for work in self._works):
                    gate.set_result(None)
                else:
                    self._complete_later(gate)
            return self._future

    def _devices(self) -> list[int | str | torch.device]:
        """Return the accelerators of the outputs."""
        return sorted({tensor.device for tensor in _flat(self._result) if is_on_accelerator(tensor)}, key=str)

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
        when_all_done(self._works, complete)

    def _outcome(self) -> Any:
        error = self.exception()
        if error is not None:
            raise error
        for work in self._works:  # they have ended: only the current streams wait, for results on accelerators
            work.wait(0.0)
        if self._finish is not None:
            self._finish()
        return self._result if self._value is None else self._value()

    def _late(self, cause: DeadlineExceededError | None) -> BaseException:
        text = str(cause) if cause is not None else f"after {self._timeout_s:g} s"
        return as_torch_error(DeadlineExceededError(text), self._title)


def seconds_of(timeout: timedelta) -> float:
    """Return a time-out of torch in seconds. A longer one, such as ``timedelta.max``, becomes ``SECONDS_MAX``."""
    return min(timeout.total_seconds(), SECONDS_MAX)


def _origin(works: Sequence[GroupWork], caller: Origin | Unknown | None) -> Origin | None:
    """Return the origin of what callbacks of a future start: the first operation; ``caller``: where it was submitted.

    It is no method of ``OperationWork``: what is known of a future must not refer to the future.
    """
    operation = operation_of(works[0]) if works else None
    if operation is None:
        return None
    return Origin.of_operation(operation.key, operation.ranks, operation.name, caller)


def _flat(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        yield result
    else:
        for part in result:
            yield from _flat(part)


def as_torch_error(error: BaseException, what: str = "") -> BaseException:
    """Return the ``torch.distributed`` error for an error of the library; other errors are returned unchanged.

    Faults of the network and of other ranks become a ``DistBackendError`` (a ``RuntimeError``) with the library's error
    as its cause; its attribute ``rank`` names a lost rank. Wrong arguments stay a ``ValueError``, as with gloo.
    ``what`` is the operation, for messages that do not name it.
    """
    if not isinstance(error, TotalReduceError) or isinstance(error, ConfigurationError):
        return error
    text = " ".join([str(error), *getattr(error, "__notes__", ())])
    if isinstance(error, DeadlineExceededError):
        text = f"{what}: Timed out ({text})" if what else text
    if isinstance(error, (DeadlineExceededError, MismatchError)) and (advice := ddp_advice(error)):
        text = f"{text} {advice}"
    translated = dist.DistBackendError(text)
    if isinstance(error, PeerLost):
        translated.rank = error.rank  # type: ignore[attr-defined]
    translated.__cause__ = error
    return translated
