"""Tensors of accelerators in the operations of the engine, which reads and writes host memory only.

Each tensor of an operation has a *slot*: pinned host memory, which lies in the shared memory of the rank where that is
possible, so that other ranks of the host read it in place. Pinned memory is made once and used again, by the same
operation if its slot is free, so that an operation that is repeated finds its tensors at the same address.

No call waits for a kernel, and no kernel waits for the network:

* The call of a collective enqueues the copies to the host on a stream of their own, behind the kernels that the
  program has enqueued so far on its current stream. Then it returns.
* A thread, the *stager*, waits until these copies have ended, and then submits the operation to the engine.
* At the end of the operation the copies of the results are enqueued on a second stream. ``Work.wait`` returns when they
  are enqueued, after it has made the current stream wait for them.

Each of the following waits is there because memory would otherwise be read or written too early:

====================================  ================================================================
the stream of copies to the host      for the kernels of the program, for copies of earlier results into
                                      the same tensor, and for copies out of the same slot
the stager                            for the copies to the host
the current stream of ``Work.wait``   for the copies of the results
====================================  ================================================================

Any accelerator of torch will do that has streams. Memory that exists already can be pinned only by the runtime of CUDA;
with other accelerators the slots are torch's pinned memory.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch

from totalreduce.engine.operation import Operation
from totalreduce.foundation.errors import DeadlineExceededError, TotalReduceError, UnsupportedError
from totalreduce.runner.handle import End, Handle
from totalreduce.tensors.modes import unseen, writing
from totalreduce.tensors.streams import current_stream, entered, is_on_accelerator, new_stream, record

__all__ = ["StagedHandle", "StagedTensors", "Staging"]

_log = logging.getLogger(__name__)

_PAGE: Final = 4096
#: A slot that was not taken for so many takes is given up when another one has to be made.
_TAKES_MAX: Final = 4096


@dataclass(slots=True, eq=False)
class _Slot:
    """Pinned host memory for one tensor of one operation at a time."""

    memory: torch.Tensor
    owner: Hashable  #: The tensor of which operation it was made or taken for last.
    device: torch.device  #: The device of that tensor.
    read: torch.Event | None = None  #: The end of the last copy out of it.
    taken: int = 0  #: The number of the take.


@final
class _Slots:
    """The slots of one rank. Any thread may call it.

    Args:
        allocate: Returns shared memory of a number of bytes as an array of uint8; ``None`` if there is none.
    """

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self._free: dict[int, list[_Slot]] = {}
        self._lock = threading.Lock()
        self._takes = 0
        self._has_warned = False

    def take(self, num_bytes: int, owner: Hashable, device: torch.device) -> _Slot:
        """Return a slot of at least ``num_bytes``: the owner's last one if it is free."""
        size = _slot_bytes(num_bytes)
        with self._lock:
            self._takes += 1
            free = self._free.get(size)
            slot: _Slot | None = None
            if free:
                slot = free.pop(next((index for index, each in enumerate(free) if each.owner == owner), 0))
            else:
                self._give_up_idle()
        if slot is None:
            slot = _Slot(self._make(size, device), owner, device)
        slot.owner, slot.taken, slot.device = owner, self._takes, device
        return slot

    def give_back(self, slot: _Slot) -> None:
        """Take a slot back. A copy out of it may still be in flight: ``_Slot.read`` is its end."""
        with self._lock:
            self._free.setdefault(slot.memory.numel(), []).append(slot)

    def _give_up_idle(self) -> None:
        oldest = self._takes - _TAKES_MAX
        for size, slots in self._free.items():
            self._free[size] = [slot for slot in slots if slot.taken >= oldest]

    def _make(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        try:
            shared = self._allocate(num_bytes) if _runtime(device) is not None else None
            if shared is not None:
                return _registered(shared, device)
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        except RuntimeError as error:  # also torch.OutOfMemoryError
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "%s refuses to pin %d bytes of host memory (%s): copies of its tensors use memory that is not "
                    "pinned, and are slower. Raise the limit of locked memory (ulimit -l), or use smaller buckets",
                    device,
                    num_bytes,
                    error,
                )
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def _slot_bytes(num_bytes: int) -> int:
    """Return the size of the slot for a tensor: at most an eighth larger, and at least a page."""
    step = max(_PAGE, 1 << max(0, num_bytes.bit_length() - 4))
    return max(1, math.ceil(num_bytes / step)) * step


def _runtime(device: torch.device) -> Any:
    """Return the bindings of the runtime that pins memory which exists already; ``None`` if there are none."""
    cudart = getattr(torch.get_device_module(device), "cudart", None)
    return None if cudart is None else cudart()


def _registered(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Pin the memory of an array for as long as it exists; return it as a tensor."""
    runtime, address = _runtime(device), array.ctypes.data
    with torch.get_device_module(device).device(device):
        code = int(runtime.cudaHostRegister(address, array.nbytes, 0))
    if code:
        raise RuntimeError(f"cudaHostRegister: error {code}")
    finalizer = weakref.finalize(array, _unregister, runtime, address, os.getpid())
    finalizer.atexit = False
    return torch.from_numpy(array)


def _unregister(runtime: Any, address: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not call the runtime
        runtime.cudaHostUnregister(address)


# -------------------------------------------------------------------------------------------------------------- devices


@final
class _DeviceCopies:
    """The two streams of one device on which the library copies, and the copies of results that are in flight."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.outgoing, self.incoming = new_stream(device), new_stream(device)
        self._lock = threading.Lock()
        #: Memory of the device into which a result is copied, the end of the copy, and the slots that it reads, which
        #: are kept until then.
        self._arriving: list[tuple[int, int, torch.Event, Sequence[_Slot]]] = []

    @contextlib.contextmanager
    def on(self, stream: torch.Stream) -> Iterator[None]:
        """Enqueue the copies of the block on one of the streams."""
        with entered(stream, self.device), unseen():
            yield

    def record(self, stream: torch.Stream) -> torch.Event:
        """Return an event at the end of what a stream of this device has to do now."""
        return record(stream, self.device)

    def begin(self, spans: Sequence[tuple[int, int]], slots: Sequence[_Slot]) -> None:
        """Have copies to the host wait for all after which these tensors can be read and these slots be written."""
        current = current_stream(self.device)
        _check_not_captured(self.device)
        self.outgoing.wait_event(self.record(current))
        for slot in slots:
            if slot.read is not None:
                self.outgoing.wait_event(slot.read)
        self.await_results(self.outgoing, spans)

    def await_results(self, stream: torch.Stream, spans: Sequence[tuple[int, int]]) -> None:
        """Have a stream wait for copies of results into this memory of the device."""
        with self._lock:
            self._arriving = [entry for entry in self._arriving if not entry[2].query()]
            for start, stop, event, _ in self._arriving:
                if any(begin < stop and start < end for begin, end in spans):
                    stream.wait_event(event)

    def arrive(self, spans: Sequence[tuple[int, int]], slots: Sequence[_Slot]) -> torch.Event:
        """Return the end of the copies of results that are enqueued now; note what they write and read."""
        event = self.record(self.incoming)
        with self._lock:
            self._arriving += [(start, stop, event, slots) for start, stop in spans]
        return event


def _check_not_captured(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a collective of this library cannot be captured in a CUDA graph, because the network does not run on the "
            "GPU. Capture forward and backward, and call the collective outside of the capture"
        )


@final
class StagedTensors:
    """The tensors of one operation that are on accelerators, with their slots. Made by ``Staging``.

    In this order: ``host`` for each tensor; ``begin``, ``copy`` and ``end_copies`` in the thread that submits the
    operation; ``await_copies`` in the stager; ``copy`` and ``end_results`` in the thread that finds the end;
    ``let_stream_wait`` in each thread that waits. An operation that is repeated begins again with ``begin``.

    Attributes:
        first: The host memory of the first tensor.
    """

    def __init__(self, staging: Staging, name: str) -> None:
        self._staging, self._name = staging, name
        self.first: torch.Tensor | None = None
        self._slots: list[_Slot] = []
        self._spans: dict[torch.device, list[tuple[int, int]]] = {}
        self._written: dict[torch.device, list[tuple[int, int]]] = {}
        self._copied: list[torch.Event] = []
        self._later: list[Callable[[], object]] = []
        self._results: dict[torch.device, torch.Event] = {}

    @property
    def devices(self) -> str:
        """The devices, for messages."""
        return ", ".join(map(str, self._spans))

    def host(self, tensor: torch.Tensor, span: tuple[int, int], *, writes: bool) -> torch.Tensor:
        """Return contiguous host memory for a tensor that has elements.

        Args:
            tensor: The tensor.
            span: Its memory on the device: the first address, and the one after the last byte.
            writes: Whether a result is written into it.
        """
        device = tensor.device
        slot = self._staging.slots.take(tensor.nbytes, (self._name, len(self._slots)), device)
        self._slots.append(slot)
        self._spans.setdefault(device, []).append(span)
        if writes:
            self._written.setdefault(device, []).append(span)
        memory = slot.memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if self.first is None:
            self.first = memory
        return memory

    def uses(self, tensor: torch.Tensor, span: tuple[int, int]) -> None:
        """Note a tensor that is only copied, into host memory of another one."""
        self._spans.setdefault(tensor.device, []).append(span)

    def begin(self) -> None:
        """Have the copies that follow wait for the kernels of the program.

        Raises:
            UnsupportedError: The current stream is captured in a graph.
        """
        for device, spans in self._spans.items():
            self._staging.of(device).begin(spans, self._slots)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between a device and the host."""
        outwards = is_on_accelerator(source)
        side = self._staging.of(source.device if outwards else target.device)
        stream = side.outgoing if outwards else side.incoming
        with side.on(stream), writing(target):
            target.copy_(source, non_blocking=True)
        (source if outwards else target).record_stream(stream)

    def then(self, write: Callable[[], object]) -> None:
        """Have ``await_copies`` call a function that writes host memory of the operation, of which it reads none."""
        self._later.append(write)

    def end_copies(self) -> None:
        """Note that all copies to the host are enqueued."""
        sides = [self._staging.of(device) for device in self._spans]
        self._copied = [side.record(side.outgoing) for side in sides]

    def await_copies(self) -> None:
        """Block until the copies to the host have ended, and the slots may be written."""
        copied, self._copied = self._copied, []
        for event in copied:
            event.synchronize()
        for write in self._later:
            write()

    def end_results(self) -> None:
        """Note that all copies of results are enqueued."""
        for device, spans in self._written.items():
            event = self._results[device] = self._staging.of(device).arrive(spans, self._slots)
            for slot in self._slots:
                if slot.device == device:
                    slot.read = event

    def release(self) -> None:
        """Give the slots back. Nothing else writes them now."""
        slots, self._slots = self._slots, []
        for slot in slots:
            self._staging.slots.give_back(slot)

    def let_stream_wait(self) -> None:
        """Have the current stream of each device that has results wait for them."""
        for device, event in self._results.items():
            current_stream(device).wait_event(event)

    @property
    def has_arrived(self) -> bool:
        """Whether the results are in their tensors."""
        return all(event.query() for event in self._results.values())


# --------------------------------------------------------------------------------------------------------------- stager


@final
class StagedHandle:
    """An operation whose tensors are copied to the host before it is submitted (see ``work.PendingOperation``).

    Attributes:
        name: The name of the operation, for messages.
        tensors: Its tensors; ``None`` if it only keeps its place behind another operation.
        inner: The handle of the engine's operation; ``None`` before it is submitted.
        submitted: Completed when it was submitted, or could not be.
    """

    def __init__(self, name: str, tensors: StagedTensors | None) -> None:
        self.name, self.tensors = name, tensors
        self.inner: Handle | None = None
        self.submitted = Handle()

    @property
    def done(self) -> bool:
        """Whether the operation has ended, and results are in their tensors."""
        if not self.submitted.done:
            return False
        inner = self.inner
        if inner is None or not inner.done:
            return inner is None
        return inner.error is not None or self.tensors is None or self.tensors.has_arrived

    @property
    def error(self) -> BaseException | None:
        """The error of a failed operation."""
        return self.submitted.error or (None if self.inner is None else self.inner.error)

    @property
    def operation(self) -> Operation | None:
        """The engine's record of the operation, when it is known."""
        return None if self.inner is None else self.inner.operation

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when the operation has ended and the copies of its results are enqueued."""

        def submitted() -> None:
            if self.inner is None:
                callback()
            else:
                self.inner.on_done(callback)

        self.submitted.on_done(submitted)


@final
class Staging:
    """Pinned memory, streams and the stager of one rank. Any thread may call it. Without use it does nothing.

    Args:
        name: The name of the thread.
        allocate: Returns shared memory of a number of bytes as an array of uint8; ``None`` if there is none.
        wait: Waits for a handle of the engine, at most some seconds (``Runner.wait``).
    """

    def __init__(self, name: str, allocate: Callable[[int], Any], wait: Callable[[Handle, float], None]) -> None:
        self.slots = _Slots(allocate)  #: The pinned memory.
        #: The operations that are to be submitted; others only ask whether there are any.
        self.jobs: deque[_Job] = deque()
        self._name, self._wait = name, wait
        self._devices: dict[torch.device, _DeviceCopies] = {}
        self._places: Counter[Hashable] = Counter()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def of(self, device: torch.device) -> _DeviceCopies:
        """Return the streams of a device."""
        copies = self._devices.get(device)
        if copies is None:
            with self._changed:
                copies = self._devices.setdefault(device, self._devices.get(device) or _DeviceCopies(device))
        return copies

    def tensors(self, name: str) -> StagedTensors:
        """Return a record of the tensors of an operation."""
        return StagedTensors(self, name)

    def let_streams_wait(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the current streams wait for results that operations which have ended have for these tensors."""
        for tensor in tensors:
            if is_on_accelerator(tensor):
                storage, device = tensor.untyped_storage(), tensor.device
                span = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
                self.of(device).await_results(current_stream(device), [span])

    def holds(self, place: Hashable) -> bool:
        """Return whether an operation of this place waits to be submitted."""
        return place in self._places

    def submit(
        self,
        name: str,
        tensors: StagedTensors | None,
        place: Hashable,
        submit: Callable[[], Handle],
        end: End | None,
    ) -> StagedHandle:
        """Have the stager submit an operation, behind those that were given to it before.

        Args:
            name: The name of the operation.
            tensors: Its tensors.
            place: The scope and the name of the operation (see ``holds``).
            submit: Submits it.
            end: Ends what the operation uses, if it cannot be submitted; called with ``well=False``.
        """
        handle = StagedHandle(name, tensors)
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._places[place] += 1
            self.jobs.append(_Job(handle, place, submit, end))
            self._changed.notify()
        return handle

    def begun(self, name: str, tensors: StagedTensors, inner: Handle) -> StagedHandle:
        """Return the handle of an operation that was submitted."""
        handle = StagedHandle(name, tensors)
        handle.inner = inner
        handle.submitted.complete(None)
        return handle

    def wait(self, handle: StagedHandle, timeout_s: float) -> None:
        """Wait for an operation (see ``work.Waiter``); then the current streams wait for its results."""
        deadline = time.monotonic() + timeout_s
        if not handle.submitted.wait(timeout_s):
            devices = "" if handle.tensors is None else f" on {handle.tensors.devices}"
            raise DeadlineExceededError(
                f"waited {timeout_s:g} s for {handle.name!r}: it is not submitted yet, because kernels of the "
                f"program{devices} that compute its tensors, or those of an operation before it, have not ended"
            )
        if handle.inner is not None:
            self._wait(handle.inner, max(0.0, deadline - time.monotonic()))
            if handle.tensors is not None and handle.inner.error is None:
                handle.tensors.let_stream_wait()

    def close(self) -> None:
        """End the thread, when it has submitted what it has; the engine refuses it if it is closed."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self.jobs:
                    if self._closed:
                        return
                    self._changed.wait()
                job = self.jobs[0]
            _carry_out(job)
            with self._changed:  # only now: an operation that comes meanwhile keeps its place behind this one
                self.jobs.popleft()
                self._places[job.place] -= 1
                if not self._places[job.place]:
                    del self._places[job.place]
            del job  # not while the thread waits: it has the tensors


@final
class _Job(NamedTuple):
    """What the stager is to submit (see ``Staging.submit``)."""

    handle: StagedHandle
    place: Hashable
    submit: Callable[[], Handle]
    end: End | None


def _carry_out(job: _Job) -> None:
    handle = job.handle
    try:
        if handle.tensors is not None:
            handle.tensors.await_copies()
        handle.inner = job.submit()
    except BaseException as error:
        failure: BaseException = error
        if not isinstance(error, TotalReduceError):
            failure = TotalReduceError(f"{handle.name!r}: its tensors could not be copied to the host: {error}")
            failure.__cause__ = error
        if job.end is not None:
            job.end(well=False)
        handle.submitted.complete(failure)
    else:
        handle.submitted.complete(None)
