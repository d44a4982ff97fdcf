"""The memory of the tensors of operations in flight.

``Operands`` holds the memory of one operation's tensors. ``MemoryInFlight`` knows the memory of all operations of a
group and its subgroups: two operations in flight never use the same memory, unless both of them only read it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch

from totalreduce.foundation.errors import (
    ConfigurationError,
    DeadlineExceededError,
    TotalReduceError,
    UnsupportedError,
)
from totalreduce.tensors.modes import write
from totalreduce.tensors.staging import StagedTensors, Staging
from totalreduce.tensors.storage import StorageHold

__all__ = ["MemoryInFlight", "Operands", "Place", "is_plain"]

#: One array type for tensors of all sizes, of which only the first bytes are used. ctypes takes 70 µs and more to make
#: a type for a size, and the messages of sparse methods have new sizes all the time.
_MEMORY: Final = ctypes.c_char * sys.maxsize
#: Bounds NumPy's search for an element that two strided tensors share. If NumPy gives up, the tensors count as
#: overlapping.
_OVERLAP_WORK_MAX: Final = 100_000


class Span(NamedTuple):
    """Memory that an operation uses."""

    start: int  #: Address of its first byte.
    stop: int  #: Address after its last byte.
    tensor: torch.Tensor | None = None  #: The tensor, if it does not use all bytes of the span; else ``None``.


class Operands:
    """The tensors of one operation.

    A contiguous tensor is used in place. Another tensor is copied into contiguous memory before the operation begins.
    If the operation writes it, it is copied back at the end. So is a tensor of an accelerator (``tensors.staging``).
    """

    __slots__ = (
        "_copies_back",
        "_holds",
        "_memories",
        "_results",
        "_staging",
        "claimed_in",
        "first_reads",
        "inputs",
        "kept_in",
        "name",
        "preparations",
        "reads",
        "repeats",
        "staged",
        "writes",
    )

    def __init__(self, name: str, *, repeats: bool = False, staging: Staging | None = None) -> None:
        """``staging``: for tensors of accelerators; without it there must be none."""
        self.name = name  #: The name of the operation, for messages.
        #: Whether the operation is carried out again and again with these tensors: then their memory is held until this
        #: object is deleted.
        self.repeats = repeats
        self._staging = staging
        self.staged: StagedTensors | None = None  #: The tensors on accelerators; ``None``: there are none.
        self.reads: list[Span] = []  #: Memory that is read while the operation is in flight.
        self.writes: list[Span] = []  #: Memory that is written while the operation is in flight, or at its end.
        self.first_reads: list[Span] = []  #: Memory that only ``prepare`` reads.
        #: Memory that is read before the operation writes its results. So it may be the memory of a result.
        self.inputs: list[Span] = []
        self.preparations: list[Callable[[], object]] = []  #: What ``prepare`` calls.
        self._copies_back: list[Callable[[], object]] = []
        #: A table in which something is kept for the next operation of the name. If the operation fails, ``end``
        #: removes it: a transport may still hold the memory.
        self.kept_in: MutableMapping[str, Any] | None = None
        #: The record in which ``MemoryInFlight.claim`` has noted the memory, until ``end``.
        self.claimed_in: MemoryInFlight | None = None
        self._holds: list[StorageHold] = []
        self._memories: list[Any] = []  #: What ``add`` has returned views of.
        self._results: list[tuple[torch.Tensor, int, int]] = []

    @classmethod
    def again(cls, place: Place, tensor: torch.Tensor) -> Operands:
        """Return the operands of a further operation on a tensor that lies in a place; it uses the same view of it.

        ``prepare`` holds the memory.
        """
        made, start = cls(place.name), place.span.start
        made.writes.append(place.span)
        made._results.append((tensor, start, place.span.stop - start))
        made._memories.append(place.memory)
        made.preparations.append(functools.partial(made._hold, tensor, place.memory))
        return made

    def add(self, tensor: torch.Tensor, *, writes: bool = False, reads: bool = True) -> memoryview:
        """Add a tensor; return the bytes that the operation uses for it.

        Args:
            tensor: A strided tensor.
            writes: Whether a result is written into the tensor.
            reads: Whether the operation uses the elements that the tensor has before.

        Raises:
            UnsupportedError: The tensor has no memory; or it is to take a result, and its elements share memory.
        """
        if not tensor.is_cpu:
            return self._stage(tensor, writes=writes, reads=reads)
        if is_plain(tensor):
            view, start = self._bytes(tensor), tensor.data_ptr()
            num_bytes = len(view)
            if num_bytes:
                (self.writes if writes else self.reads).append(Span(start, start + num_bytes))
                if writes:
                    self._results.append((tensor, start, num_bytes))
            return view
        plain = tensor.detach()
        if writes:
            self._check_place(plain)
        dense = torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
        if reads:
            self.preparations.append(lambda: write(dense, plain))
        if plain.numel():
            span = _strided_span(plain)
            if writes:
                self._copies_back.append(lambda: write(plain, dense))
                self._results.append((tensor, span.start, tensor.nbytes))
                self.writes.append(span)
            else:
                self.first_reads.append(span)
        return self._bytes(dense)

    def copy(self, source: torch.Tensor, target: memoryview) -> None:
        """Have ``prepare`` copy a tensor to bytes that ``add`` has returned. The tensor is not used afterwards."""
        if not source.numel():
            return
        row = torch.frombuffer(target, dtype=source.dtype)
        if source.is_cpu and self.staged is None:
            self._copy_in(source, row)
            return
        plain = source.detach()
        row, span = row.view(plain.shape), _strided_span(plain)
        self.reads.append(span)
        if source.is_cpu:  # the target may be a slot, out of which an earlier result is still being copied
            self._staged().then(functools.partial(write, row, plain))
        else:
            self._staged().uses(plain, span[:2])
            self.preparations.append(functools.partial(self._staged().copy, row, plain))
            self._holds.append(StorageHold(source.untyped_storage()))

    def watch(self, tensor: torch.Tensor) -> None:
        """Have ``finish`` check that a tensor has the same memory. Its parts were added for writing."""
        if tensor.numel():
            self._results.append((tensor, tensor.data_ptr(), tensor.nbytes))

    def hold(self, tensor: torch.Tensor, *, writes: bool) -> None:
        """Add a tensor that a native library uses in place.

        Args:
            tensor: A strided tensor on any device.
            writes: Whether a result is written into the tensor. If not, a result may still be written into its memory.

        Raises:
            UnsupportedError: The tensor has no memory; or it is to take a result, and its elements share memory.
        """
        if not tensor.numel():
            return
        start = tensor.data_ptr()
        if not start:
            raise self._without_memory()
        if tensor.is_contiguous():
            span = Span(start, start + tensor.nbytes)
        else:
            plain = tensor.detach()
            if writes:
                self._check_place(plain)
            span = _strided_span(plain)
        if writes:
            self._results.append((tensor, start, tensor.nbytes))
        (self.writes if writes else self.inputs).append(span)
        self._holds.append(StorageHold(tensor.untyped_storage()))

    def fill(self, target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Have ``prepare`` copy tensors, one after the other, into a contiguous tensor.

        Raises:
            ConfigurationError: The parts have another dtype than the target, or another number of elements in all.
        """
        rest = target.detach().view(-1)
        if any(part.dtype is not target.dtype for part in parts) or sum(map(torch.numel, parts)) != rest.numel():
            raise ConfigurationError(
                f"{self.name!r}: the parts are {[(part.numel(), part.dtype) for part in parts]}, but the tensor that "
                f"they fill has {rest.numel()} elements of {target.dtype}"
            )
        for part in parts:
            if part.numel():
                self._copy_in(part, rest[: part.numel()])
                rest = rest[part.numel() :]

    @property
    def place(self) -> Place | None:
        """Where the operation's only tensor lies, if it is written and used in place."""
        is_one = len(self.writes) == len(self._memories) == 1 and not self.preparations
        if not is_one or self.writes[0].tensor is not None or self.staged is not None:
            return None
        return Place(self.name, self.writes[0], self._memories[0])

    @property
    def in_flight(self) -> list[Span]:
        """All memory that is read or written while the operation is in flight."""
        return [*self.writes, *self.reads, *self.inputs]

    @property
    def copies_back(self) -> bool:
        """Whether ``finish`` copies a result."""
        return bool(self._copies_back)

    def prepare(self) -> None:
        """Make the copies that the operation needs before it begins, and hold what is not held yet.

        Copies of tensors on accelerators are only enqueued (``StagedTensors.await_copies``).
        """
        if self.staged is not None:
            self.staged.begin()
        for prepare in self.preparations:
            prepare()
        if self.staged is not None:
            self.staged.end_copies()
        if not self.repeats:
            self.preparations.clear()

    def end(self, *, well: bool) -> None:
        """Release the memory that was claimed, at the end of the operation; before, ``finish`` if it went well.

        A second call does nothing.

        Raises:
            TotalReduceError: See ``finish``.
        """
        claimed_in = self.claimed_in
        if claimed_in is None:
            return
        self.claimed_in = None
        try:
            if well:
                self.finish()
            elif self.kept_in is not None:
                self.kept_in.pop(self.name, None)
        finally:
            claimed_in.release(self)

    def finish(self) -> None:
        """Copy results back after an operation that went well. Raises ``TotalReduceError``."""
        for copy in self._copies_back:
            copy()
        if self.staged is not None:
            self.staged.end_results()
        has_moved = self.has_moved
        if not self.repeats:
            for hold in self._holds:
                hold.release()
            for memory in self._memories:  # nothing reads or writes it any more
                memory.hold = None
            if self.staged is not None:
                self.staged.release()
        if has_moved:
            raise TotalReduceError(
                f"tensor {self.name!r} was given other memory while the operation was in flight (by .data = …, "
                "set_ or resize_), so the result is not in it. Wait for the operation first"
            )

    @property
    def has_moved(self) -> bool:
        """Whether a tensor that takes a result has other memory than when it was added."""
        for tensor, address, num_bytes in self._results:
            # torch raises where a storage cannot be resized, but has given the tensor its new shape by then.
            if tensor.data_ptr() != address or tensor.nbytes > num_bytes:
                return True
        return False

    def _stage(self, tensor: torch.Tensor, *, writes: bool, reads: bool) -> memoryview:
        """Return host memory for a tensor of an accelerator."""
        plain = tensor.detach()
        if writes:
            self._check_place(plain)
        if not plain.numel():
            return memoryview(bytearray(0))
        if not plain.data_ptr():
            raise self._without_memory()
        span, staged = _strided_span(plain), self._staged()
        dense = staged.host(plain, span[:2], writes=writes)
        self._holds.append(StorageHold(tensor.untyped_storage()))
        if reads:
            self.preparations.append(functools.partial(staged.copy, dense, plain))
        if writes:
            self._copies_back.append(functools.partial(staged.copy, plain, dense))
            self._results.append((tensor, span.start, tensor.nbytes))
        (self.writes if writes else self.reads).append(span)
        return self._bytes(dense)

    def _staged(self) -> StagedTensors:
        if self.staged is None:
            if self._staging is None:
                raise UnsupportedError(f"tensor {self.name!r} is not in host memory; copy it with .cpu() first")
            self.staged = self._staging.tensors(self.name)
        return self.staged

    def _copy_in(self, source: torch.Tensor, row: torch.Tensor) -> None:
        plain = source.detach()
        if plain.data_ptr():  # a tensor that is known to be zero has no memory
            self.first_reads.append(_strided_span(plain))
        self.preparations.append(functools.partial(write, row.view(plain.shape), plain))

    def _bytes(self, tensor: torch.Tensor) -> memoryview:
        """Return the bytes of a contiguous tensor, without NumPy, which would cost an operation some 10 µs."""
        num_bytes = tensor.nbytes
        if num_bytes == 0:
            return memoryview(bytearray(0))
        address = tensor.data_ptr()
        if not address:
            raise self._without_memory()
        memory = _MEMORY.from_address(address)
        self._memories.append(memory)
        self._hold(tensor, memory)
        return memoryview(memory).cast("B")[:num_bytes]

    def _hold(self, tensor: torch.Tensor, memory: Any) -> None:
        # A transport may still send from the memory of an operation that has failed, so the view keeps the hold.
        memory.hold = hold = StorageHold(tensor.untyped_storage())
        self._holds.append(hold)

    def _without_memory(self) -> UnsupportedError:
        return UnsupportedError(
            f"tensor {self.name!r} has no memory (it is fake, or known to be zero); use .clone() first"
        )

    def _check_place(self, plain: torch.Tensor) -> None:
        if any(s == 0 and extent > 1 for s, extent in zip(plain.stride(), plain.shape, strict=True)):
            raise UnsupportedError(
                f"tensor {self.name!r} is expanded: several elements share memory. Use .contiguous()"
            )


class Place(NamedTuple):
    """Where the tensor of an operation lies, without the tensor and without its memory."""

    name: str  #: The name of the operation, for messages.
    span: Span  #: The bytes of the tensor.
    memory: Any  #: What ``Operands.add`` has returned a view of.


@final
class _Ranges:
    """Ranges of addresses, sorted by start, with the operations that use them. ``disjoint``: no two ranges overlap."""

    __slots__ = ("_disjoint", "_longest", "entries")

    def __init__(self, *, disjoint: bool) -> None:
        self._disjoint = disjoint
        self.entries: list[tuple[int, int, int, Operands]] = []
        self._longest = 0

    def add(self, start: int, stop: int, owner: Operands) -> None:
        """Add a range."""
        self._longest = max(self._longest, stop - start)
        insort(self.entries, (start, stop, id(owner), owner))

    def remove(self, start: int, stop: int, owner: Operands) -> None:
        """Remove a range that was added."""
        entries = self.entries
        if len(entries) > 1:
            del entries[bisect_left(entries, (start, stop, id(owner)))]
        else:
            entries.clear()
            self._longest = 0

    def overlapping(self, start: int, stop: int) -> Iterator[Operands]:
        """Return the owners of ranges that have a byte in common with this one."""
        entries = self.entries
        index = bisect_left(entries, (stop,))
        while index:
            index -= 1
            begin, end, _, owner = entries[index]
            if end > start:
                yield owner
            elif self._disjoint or begin + self._longest <= start:
                return


@final
class MemoryInFlight:
    """The memory that operations in flight use. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._waiting = 0
        #: The only operation in flight. Its memory is noted below when another one begins: most operations end first.
        self._alone: Operands | None = None
        self._writes, self._reads = _Ranges(disjoint=True), _Ranges(disjoint=False)
        #: Written tensors that do not use all bytes of their spans. They are rare, so they are compared one by one.
        self._strided: list[tuple[Span, Operands]] = []

    def claim(self, operands: Operands, *, wait_s: float | None = None, beside: Sequence[Operands] = ()) -> None:
        """Note that an operation uses this memory until ``release``.

        Args:
            operands: The tensors of the operation.
            wait_s: Seconds to wait for the end of operations that use the same memory. ``None``: raise an error.
            beside: Operations that begin together with this one, and have claimed their memory. They end only after
                this one has begun, so there is no wait for them.

        Raises:
            ConfigurationError: An operation in flight uses the same memory, and one of the two writes it; or tensors of
                this operation overlap, and one of them takes a result.
            DeadlineExceededError: The operation in flight has not ended in time.
        """
        if len(operands.writes) + len(operands.reads) > 1 and operands.writes:
            self._check_itself(operands)
        with self._lock:
            if not (self._alone or self._waiting or self._writes.entries or self._reads.entries or self._strided):
                self._alone = operands
                operands.claimed_in = self
                return
            if self._alone is not None:
                self._note(self._alone)
                self._alone = None
            other = self._conflict(operands)
            if other is not None:
                if any(other is each for each in beside):
                    raise ConfigurationError(
                        f"tensor {operands.name!r} shares memory with {other.name!r}, which begins together with it: "
                        "use a copy"
                    )
                if wait_s is None:
                    raise ConfigurationError(
                        f"tensor {operands.name!r} shares memory with {other.name!r}, which is in flight on this rank: "
                        "wait for that operation first, or use a copy"
                    )
                self._wait(operands, wait_s)
            self._note(operands)
            operands.claimed_in = self

    def release(self, operands: Operands) -> None:
        """Note that an operation has ended, or was not submitted after all."""
        with self._lock:
            if self._alone is operands:  # then no other operation waits for it
                self._alone = None
                return
            for spans in (operands.reads, operands.inputs):
                for start, stop, _ in spans:
                    self._reads.remove(start, stop, operands)
            for start, stop, strided in operands.writes:
                if strided is None:
                    self._writes.remove(start, stop, operands)
            if self._strided:
                self._strided = [entry for entry in self._strided if entry[1] is not operands]
            if self._waiting:
                self._released.notify_all()

    def _note(self, operands: Operands) -> None:
        for spans in (operands.reads, operands.inputs):
            for start, stop, _ in spans:
                self._reads.add(start, stop, operands)
        for span in operands.writes:
            start, stop, strided = span
            if strided is None:
                self._writes.add(start, stop, operands)
            else:
                self._strided.append((span, operands))

    def _wait(self, operands: Operands, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        self._waiting += 1
        try:
            while (other := self._conflict(operands)) is not None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceededError(
                        f"{operands.name!r} waited {wait_s:g} s for {other.name!r}, which uses the same memory"
                    )
                self._released.wait(left_s)
        finally:
            self._waiting -= 1

    def _conflict(self, operands: Operands) -> Operands | None:
        """Return an operation in flight that must end first, if there is one."""
        for span in operands.writes:
            for ranges in (self._writes, self._reads):
                for other in ranges.overlapping(span.start, span.stop):
                    # A tensor that does not use all bytes of its span may have none in common with the other one.
                    if span.tensor is None or any(_share(span, theirs) for theirs in other.in_flight):
                        return other
        for span in (*operands.reads, *operands.inputs, *operands.first_reads):
            for other in self._writes.overlapping(span.start, span.stop):
                if span.tensor is None or any(_share(span, theirs) for theirs in other.writes):
                    return other
        for theirs, other in self._strided:
            if any(_share(span, theirs) for span in (*operands.in_flight, *operands.first_reads)):
                return other
        return None

    @staticmethod
    def _check_itself(operands: Operands) -> None:
        """Check that tensors of one operation, of which it writes one, do not overlap."""
        ordered = sorted(
            [(span, True) for span in operands.writes] + [(span, False) for span in operands.reads],
            key=lambda entry: entry[0][:2],
        )
        reach: list[tuple[Span, bool]] = []
        for span, writes in ordered:
            reach = [entry for entry in reach if entry[0].stop > span.start]
            if any((writes or other_writes) and _share(span, other) for other, other_writes in reach):
                raise ConfigurationError(
                    f"{operands.name!r}: two of its tensors share memory, and one of them takes a result. "
                    "Use tensors that do not overlap"
                )
            reach.append((span, writes))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor are its elements in their order."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _strided_span(tensor: torch.Tensor) -> Span:
    """Return the memory of a tensor that has elements, from the first byte to the last one."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return Span(start, start + tensor.nbytes)
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Span(start, start + (last + 1) * tensor.element_size(), tensor)


def _share(one: Span, other: Span) -> bool:
    """Return whether two spans have a byte in common."""
    if one.stop <= other.start or other.stop <= one.start:
        return False
    if one.tensor is None and other.tensor is None:
        return True
    try:
        return bool(np.shares_memory(_as_array(one), _as_array(other), _OVERLAP_WORK_MAX))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _as_array(span: Span) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    """Return an array over the memory of a span, which is not read."""
    memory: Any = _MEMORY.from_address(span.start)
    if span.tensor is None:
        return np.ndarray((span.stop - span.start,), np.dtype("V1"), memory)
    width = span.tensor.element_size()
    strides = tuple(stride * width for stride in span.tensor.stride())
    return np.ndarray(tuple(span.tensor.shape), np.dtype(f"V{width}"), memory, strides=strides)
