"""Carries out what the ranks have agreed on: packs, calls the native library, unpacks. One thread per coordinator.

Batches are started in the agreed order; while one is on the wire the next one is packed. Fusion buffers are reused.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import _utils  # what torch itself packs gradients with

from totalreduce.coordination.fusion import fuse
from totalreduce.coordination.requests import Request, Response
from totalreduce.foundation.errors import ConfigurationError, MismatchError, TotalReduceError, UnsupportedError
from totalreduce.foundation.types import OpKind, ReduceOp
from totalreduce.kernels import divide
from totalreduce.native.collectives import NativeCollectives, NativeWork
from totalreduce.native.devices import Devices
from totalreduce.native.failures import LOOK_S, find_culprit
from totalreduce.runner.handle import Handle
from totalreduce.tensors.memory import Operands, is_plain

__all__ = ["Entry", "Executor", "Reporter"]


#: Batches on the wire at the same time: one, and the one that is packed meanwhile.
_IN_FLIGHT = 2
#: What a rank without data contributes.
_NEUTRAL: dict[str, Callable[[torch.dtype], float]] = {
    "min": lambda dtype: _extreme(dtype, largest=True),
    "max": lambda dtype: _extreme(dtype, largest=False),
    "product": lambda _: 1,
    "band": lambda dtype: -1 if dtype.is_signed else _extreme(dtype, largest=True),
}


@dataclass(slots=True, eq=False)
class Entry:
    """An operation that was submitted here.

    Attributes:
        request: As the others were told.
        submitted_tensor: The program's tensor.
        tensor: The contribution, in the memory that the program's tensor had when it was submitted; the result too,
            where it is as large.
        operands: The memory that the operation uses.
        outputs: Where an allgather's or alltoall's parts go, by rank; without them ``result`` is made.
        handle: Who waits.
        submitted: When, on the engine's clock.
        iteration: How often the name was used before.
        ready: On an accelerator: an event after which ``tensor`` has its values.
        result: What the operation returns.
        rows: Filled, at the end of an alltoall, with the rows that came from each rank.
    """

    request: Request
    submitted_tensor: torch.Tensor
    tensor: torch.Tensor
    operands: Operands
    outputs: Sequence[torch.Tensor] | None = None
    ready: Any = None
    handle: Handle = field(default_factory=Handle)
    submitted: float = 0.0
    iteration: int = 0
    result: torch.Tensor | None = None
    rows: list[int] = field(default_factory=list)


class Reporter(Protocol):
    """Who is told how an operation went: times on the engine's clock (see ``Observer.coordinated``)."""

    def __call__(
        self,
        entries: Sequence[Entry],
        times: tuple[float, float, float, float, float],
        batch: int,
        fused: int,
        error: BaseException | None,
    ) -> None:
        """Times: agreed, begun, packed, ended, unpacked."""


@dataclass(slots=True, eq=False)
class _Batch:
    """One native operation under way."""

    number: int
    responses: list[Response]
    entries: list[Entry | None]
    agreed: float
    begun: float
    packed: float = 0.0
    work: NativeWork | None = None
    buffer: torch.Tensor | None = None
    finish: Callable[[], None] = lambda: None
    error: BaseException | None = None


@final
class Executor:
    """See the module docstring.

    Args:
        rank: Index in the group.
        natives: The library.
        fusion_bytes: Bound of a batch.
        divide_by_active: Averages are divided by the ranks that have data.
        empty: Makes buffers.
        complete: Told when an operation has finished, from the executor's thread.
        report: Told of each operation.
        lost: Who was lost, if somebody was.
    """

    def __init__(
        self,
        rank: int,
        natives: NativeCollectives,
        *,
        fusion_bytes: int,
        divide_by_active: bool,
        empty: Callable[[int, torch.dtype], torch.Tensor],
        complete: Callable[[Sequence[Entry], BaseException | None], None],
        report: Reporter,
        lost: Callable[[], TotalReduceError | None],
    ) -> None:
        self._rank, self._natives, self._fusion_bytes = rank, natives, fusion_bytes
        self._divide_by_active, self._empty, self._complete, self._report = divide_by_active, empty, complete, report
        self._lost = lost
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._under_way: deque[_Batch] = deque()
        self._buffers: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._devices = Devices(natives.device)
        self._number = 0
        self._last_fused: tuple[list[Response], list[list[Response]]] = ([], [])
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"totalreduce-{rank}-native", daemon=True)
        self._thread.start()

    def put(self, responses: list[Response], entries: list[Entry | None], now: float) -> None:
        """Have these carried out, in this order; an entry is ``None`` where this rank has joined."""
        self._inbox.put(lambda: self._carry_out(responses, entries, now))

    def finish(self, action: Callable[[], None]) -> None:
        """Have something done in the executor's thread, where nobody holds a lock."""
        self._inbox.put(action)

    def give_up(self, entries: list[Entry], error: BaseException) -> None:
        """Fail operations that will not be carried out."""
        self._inbox.put(lambda: self._complete(entries, error))

    def end(self) -> None:
        """Have the thread end when it has done what it was given; nothing more comes."""
        self._inbox.put(None)

    def close(self, timeout_s: float) -> None:
        """Wait for that."""
        self.end()
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------------------------------------------ thread

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            try:
                item = self._inbox.get_nowait() if self._under_way else self._inbox.get()
            except queue.Empty:
                self._finish_oldest()
                continue
            if item is None:
                while self._under_way:
                    self._finish_oldest()
                return
            item()
            del item  # it holds the operations and their tensors

    def _carry_out(self, responses: list[Response], entries: list[Entry | None], agreed: float) -> None:
        if responses is not self._last_fused[0]:  # steps of training come with the very same list
            self._last_fused = responses, fuse(responses, self._fusion_bytes)
        by_name = {response.name: entry for response, entry in zip(responses, entries, strict=True)}
        for batch in self._last_fused[1]:
            while len(self._under_way) >= _IN_FLIGHT:
                self._finish_oldest()
            self._start(batch, [by_name[response.name] for response in batch], agreed)

    def _start(self, responses: list[Response], entries: list[Entry | None], agreed: float) -> None:
        begun = time.monotonic()
        batch = _Batch(self._number, responses, entries, agreed, begun)
        self._number += 1
        first = responses[0]
        if first.error is not None:
            batch.error = first.error.error()
        elif self._failed() is not None:
            batch.error = self._failure
        else:
            try:
                for entry in entries:
                    if entry is not None:
                        self._devices.note(entry.tensor.device)
                        if entry.ready is not None:
                            entry.ready.wait(torch.cuda.current_stream(entry.tensor.device))
                self._pack(batch, first)
            except ConfigurationError as error:
                batch.error = error  # the library cannot do this, which is so on every rank
            except Exception as error:
                batch.error = self._failure = error
        batch.packed = time.monotonic()
        self._under_way.append(batch)

    def _finish_oldest(self) -> None:
        batch = self._under_way.popleft()
        if batch.error is None and batch.work is not None:
            batch.error = self._wait(batch.work)
        ended = time.monotonic()
        if batch.error is None:
            try:
                batch.finish()
                if batch.responses[0].request.device == "cuda":
                    torch.cuda.current_stream(self._devices.of("cuda")).synchronize()
            except Exception as error:
                batch.error = error
        if batch.buffer is not None:
            self._buffers.setdefault((batch.buffer.dtype, batch.buffer.device), []).append(batch.buffer)
        unpacked = time.monotonic()
        times = batch.agreed, batch.begun, batch.packed or ended, ended, unpacked
        mine = [entry for entry in batch.entries if entry is not None]
        self._report(mine, times, batch.number, len(batch.entries), batch.error)
        self._complete(mine, batch.error)

    def _wait(self, work: NativeWork) -> BaseException | None:
        """Wait for the library, but not for a rank that is gone; returns why it failed."""
        try:
            while not work.wait(LOOK_S):
                if self._failed() is not None:
                    return self._failure
        except TotalReduceError as error:
            self._failure = find_culprit(error, self._lost)
        return self._failure

    def _failed(self) -> BaseException | None:
        if self._failure is None:
            self._failure = self._lost()
        return self._failure

    # --------------------------------------------------------------------------------------------------- operations

    def _pack(self, batch: _Batch, first: Response) -> None:
        entry = batch.entries[0]
        match first.request.kind:
            case OpKind.ALLREDUCE:
                self._allreduce(batch, first)
            case OpKind.BARRIER:
                pass
            case OpKind.BROADCAST if entry is not None:
                flat = _flat(entry.tensor)
                batch.work = self._natives.broadcast(flat, first.request.root)
                if self._rank != first.request.root:
                    batch.finish = _copy_back(flat, entry.tensor)
            case OpKind.ALLGATHER if entry is not None:
                self._allgather(batch, first, entry)
            case OpKind.REDUCE_SCATTER if entry is not None:
                self._reduce_scatter(batch, first, entry)
            case OpKind.ALLTOALL if entry is not None:
                self._alltoall(batch, first, entry)
            case kind:
                raise AssertionError(f"{kind.name} is not negotiated")

    def _allreduce(self, batch: _Batch, first: Response) -> None:
        request = first.request
        dtype: torch.dtype = getattr(torch, request.dtype)
        scale, unscale = self._scales(request, first.joined)
        only = batch.entries[0]
        if len(batch.entries) == 1 and only is not None and is_plain(only.tensor):
            tensor = only.tensor.detach()
            scale(tensor)
            batch.work = self._natives.allreduce(tensor.view(-1), _native_op(request.reduction))
            batch.finish = lambda: unscale(tensor)
            return
        counts = [response.request.num_elements for response in batch.responses]
        buffer = self._buffer(sum(counts), dtype, self._devices.of(request.device))
        batch.buffer, flat = buffer, buffer[: sum(counts)]
        # Many small tensors: one call instead of one each.
        parts: Sequence[torch.Tensor]
        if None not in batch.entries:
            tensors = [entry.tensor for entry in batch.entries if entry is not None]
            parts = _utils._unflatten_dense_tensors(flat, tensors)  # type: ignore[no-untyped-call]
            mine = parts
        else:
            shapes = [response.request.shape for response in batch.responses]
            slices = torch.split_with_sizes(flat, counts)
            parts = [part.view(shape) for part, shape in zip(slices, shapes, strict=True)]
            pairs = [
                (part, entry.tensor) for part, entry in zip(parts, batch.entries, strict=True) if entry is not None
            ]
            mine, tensors = [part for part, _ in pairs], [tensor for _, tensor in pairs]
        _copy_all(mine, tensors)
        if len(mine) == len(parts):
            scale(flat)
        else:  # what is lent must stay neutral
            neutral = _NEUTRAL.get(request.reduction)
            for part, entry in zip(parts, batch.entries, strict=True):
                if entry is not None:
                    scale(part)
                else:
                    part.fill_(neutral(dtype) if neutral is not None else 0)
        batch.work = self._natives.allreduce(flat, _native_op(request.reduction))

        def finish() -> None:
            unscale(flat)
            _copy_all(tensors, mine)

        batch.finish = finish

    def _scales(
        self, request: Request, joined: Sequence[int]
    ) -> tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]]:
        """What is done before and after a reduction."""
        divisor = 1
        if request.reduction == "avg":
            if request.dtype == "bool":
                raise UnsupportedError(f"tensor {request.name!r}: AVG of bool is not defined")
            divisor = self._natives.world_size - (len(joined) if self._divide_by_active else 0)

        def before(tensor: torch.Tensor) -> None:
            _multiply(tensor, request.prescale)

        def after(tensor: torch.Tensor) -> None:
            if divisor > 1:
                divide(tensor, divisor)
            _multiply(tensor, request.postscale)

        return before, after

    def _allgather(self, batch: _Batch, response: Response, entry: Entry) -> None:
        tensor = entry.tensor.detach()
        rows = [part[0] for part in response.rows]
        width = tensor[0].numel() if len(tensor) else math.prod(tensor.shape[1:])
        longest = max(rows)
        part = tensor.new_zeros(longest * width)
        part[: tensor.numel()] = tensor.reshape(-1)
        whole = tensor.new_empty(len(rows) * longest * width)
        batch.work = self._natives.allgather(whole, part) if len(whole) else None

        def finish() -> None:
            pieces = [
                whole[rank * longest * width : rank * longest * width + count * width]
                for rank, count in enumerate(rows)
            ]
            self._deliver(entry, pieces, (sum(rows), *tensor.shape[1:]))

        batch.finish = finish

    def _alltoall(self, batch: _Batch, response: Response, entry: Entry) -> None:
        tensor = _flat(entry.tensor).view(entry.tensor.shape)
        width = math.prod(tensor.shape[1:])
        received = [rows[self._rank] for rows in response.rows]
        sent = [rows * width for rows in entry.request.splits]
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        counts = [rows * width for rows in received]
        batch.work = self._natives.alltoall(output.view(-1), tensor.view(-1), counts, sent)
        entry.rows[:] = received
        batch.finish = lambda: self._deliver(
            entry, torch.split_with_sizes(output.view(-1), counts), tuple(output.shape)
        )

    def _reduce_scatter(self, batch: _Batch, response: Response, entry: Entry) -> None:
        """The first ranks have one row more where the rows do not divide evenly."""
        tensor = entry.tensor.detach()
        size = self._natives.world_size
        width, count = math.prod(tensor.shape[1:]), len(tensor)
        rows = [count // size + (rank < count % size) for rank in range(size)]
        longest = max(rows)
        padded = tensor.new_zeros((size, longest, *tensor.shape[1:]))
        for rank, part in enumerate(torch.split_with_sizes(tensor, rows)):
            padded[rank, : len(part)] = part
        scale, unscale = self._scales(response.request, response.joined)
        scale(padded)
        output = tensor.new_empty(longest * width)
        if len(output):
            op = _native_op(response.request.reduction)
            batch.work = self._natives.reduce_scatter(output, padded.view(-1), op)

        def finish() -> None:
            unscale(output)
            mine = output[: rows[self._rank] * width]
            self._deliver(entry, [mine], (rows[self._rank], *tensor.shape[1:]))

        batch.finish = finish

    @staticmethod
    def _deliver(entry: Entry, pieces: Sequence[torch.Tensor], shape: tuple[int, ...]) -> None:
        """Put the parts where they belong, or make one tensor of them."""
        if entry.outputs is None:
            entry.result = torch.cat(list(pieces)).view(shape) if len(pieces) > 1 else pieces[0].clone().view(shape)
            return
        for output, piece in zip(entry.outputs, pieces, strict=True):
            if output.numel() != piece.numel():
                raise MismatchError(
                    entry.request.name,
                    (0, 1),
                    (f"{piece.numel()} elements", f"a place for {output.numel()}"),
                )
            output.detach().copy_(piece.view(output.shape))

    def _buffer(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A fusion buffer that is at least so long, reused if possible."""
        free = self._buffers.setdefault((dtype, device), [])
        for index, buffer in enumerate(free):
            if len(buffer) >= num_elements:
                return free.pop(index)
        free.clear()  # too small: larger ones take their place
        if device.type == "cpu":
            return self._empty(num_elements, dtype)
        return torch.empty(num_elements, dtype=dtype, device=device)


def _native_op(reduction: str) -> ReduceOp:
    return ReduceOp.SUM if reduction == "avg" else ReduceOp[reduction.upper()]


def _multiply(tensor: torch.Tensor, factor: float) -> None:
    """In place; integers are multiplied as float64 and cut off, half types as float32 and rounded once."""
    if factor == 1.0:
        return
    if tensor.is_floating_point():
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).to(tensor.dtype))


def _extreme(dtype: torch.dtype, *, largest: bool) -> float:
    if dtype is torch.bool:
        return largest
    if dtype.is_floating_point or dtype.is_complex:
        return float("inf") if largest else float("-inf")
    return torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements one after the other: the tensor's own memory, if that is so there."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _copy_back(flat: torch.Tensor, tensor: torch.Tensor) -> Callable[[], None]:
    def finish() -> None:
        if not is_plain(tensor):
            tensor.detach().copy_(flat.view(tensor.shape))

    return finish


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if any(tensor.is_neg() or tensor.is_conj() for tensor in (*targets, *sources)):  # torch has no fused copy of those
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    elif targets:
        torch._foreach_copy_(list(targets), list(sources))
