"""Packs the operations of a batch, calls the native library, and unpacks the results."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import _utils  # torch itself packs gradients with it

from totalreduce.coordination.requests import Request, Response
from totalreduce.foundation.errors import MismatchError, UnsupportedError
from totalreduce.foundation.types import OpKind, ReduceOp
from totalreduce.kernels import divide
from totalreduce.native.collectives import NativeCollectives, NativeWork
from totalreduce.native.operation import NativeOperation
from totalreduce.tensors.memory import is_plain
from totalreduce.tensors.modes import write, writing
from totalreduce.tensors.streams import SideStreams, current_stream, is_on_accelerator

__all__ = ["Batch", "Devices", "Packer"]

#: The elements that a rank without data contributes; zeros for other reductions.
_NEUTRAL: dict[str, Callable[[torch.dtype], float]] = {
    "min": lambda dtype: _extreme(dtype, largest=True),
    "max": lambda dtype: _extreme(dtype, largest=False),
    "product": lambda _: 1,
    "band": lambda dtype: -1 if dtype.is_signed else _extreme(dtype, largest=True),
}


@dataclass(slots=True, eq=False)
class Batch:
    """The operations that one call of the library carries out."""

    number: int  #: How many batches came before.
    responses: list[Response]  #: The agreement's responses, one for each operation.
    #: This rank's operations; ``None`` where this rank has joined and lends data that changes nothing.
    operations: list[NativeOperation | None]
    agreed: float  #: Time when the ranks had agreed on them, like the other times on the engine's clock, in seconds.
    begun: float  #: Time when packing began.
    packed: float = 0.0  #: Time when the library was called.
    ended: float = 0.0  #: Time when the library had ended.
    unpacked: float = 0.0  #: Time when the results were in the tensors of the program.
    work: NativeWork | None = None  #: The library's handle; ``None`` if there is nothing to do.
    buffer: torch.Tensor | None = None  #: The fusion buffer.
    finish: Callable[[], None] = lambda: None  #: Unpacks the results.
    error: BaseException | None = None  #: The reason of the failure.

    @property
    def mine(self) -> list[NativeOperation]:
        """The operations that this rank has submitted."""
        return [operation for operation in self.operations if operation is not None]


@final
class Devices:
    """The devices of this rank, one of each kind ("cuda").

    Ranks compare the kinds only, because the indices of devices differ between the ranks of one host. The index is that
    of this rank's tensors. A rank that has joined submits no tensors, so the index of its earlier tensors counts.

    Args:
        default: The device of the library, for a rank that has submitted no tensor of its kind.
    """

    def __init__(self, default: torch.device) -> None:
        self._by_kind = {default.type: default}

    def note(self, device: torch.device) -> None:
        """Note that a tensor of this rank is on ``device``."""
        self._by_kind[device.type] = device

    def of(self, kind: str) -> torch.device:
        """Return this rank's device of a kind."""
        return self._by_kind.get(kind) or torch.device(kind)


@final
class Packer:
    """Starts batches. Fusion buffers are reused.

    Args:
        rank: Index in the group.
        natives: The library.
        divide_by_active: Averages are divided by the number of ranks that have data.
        empty: Makes buffers on the CPU.
    """

    def __init__(
        self,
        rank: int,
        natives: NativeCollectives,
        *,
        divide_by_active: bool,
        empty: Callable[[int, torch.dtype], torch.Tensor],
    ) -> None:
        self._rank, self._natives, self._divide_by_active, self._empty = rank, natives, divide_by_active, empty
        self._buffers: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._devices = Devices(natives.device)
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and torch.get_device_module(accelerator).is_initialized():
            # The current device of the thread that makes the coordinator; the executor's thread has another one.
            self._devices.note(torch.device(accelerator.type, torch.accelerator.current_device_index()))
        self._streams = SideStreams()

    @contextlib.contextmanager
    def beside(self, batch: Batch) -> Iterator[None]:
        """Run the block's kernels, and what the library queues, on the side stream of the device of a batch.

        On the current stream of the executor's thread, which is the default stream, they would wait for all kernels
        that the program has queued there, such as the rest of backward.
        """
        for operation in batch.mine:
            self._devices.note(operation.tensor.device)
        with self._streams.on(self._devices.of(batch.responses[0].request.device)):
            yield

    def start(self, batch: Batch) -> None:
        """Pack a batch and call the library: sets ``work``, ``buffer`` and ``finish`` of the batch. In ``beside``.

        Raises:
            UnsupportedError: The library does not have this operation or element type, which is so on every rank.
        """
        for operation in batch.mine:
            if operation.ready is not None:
                operation.ready.wait(current_stream(operation.tensor.device))
        self._pack(batch, batch.responses[0])

    def synchronise(self, batch: Batch) -> None:
        """Wait until an accelerator has written the results of a batch. In ``beside``."""
        for device in {operation.tensor.device for operation in batch.mine if is_on_accelerator(operation.tensor)}:
            current_stream(device).synchronize()

    def release(self, batch: Batch) -> None:
        """Take a batch's fusion buffer back."""
        if batch.buffer is not None:
            self._buffers.setdefault((batch.buffer.dtype, batch.buffer.device), []).append(batch.buffer)

    def _pack(self, batch: Batch, first: Response) -> None:
        operation = batch.operations[0]
        match first.request.kind:
            case OpKind.ALLREDUCE:
                self._allreduce(batch, first)
            case OpKind.BARRIER:
                pass
            case OpKind.BROADCAST if operation is not None:
                flat = _flat(operation.tensor)
                batch.work = self._natives.broadcast(flat, first.request.root)
                if self._rank != first.request.root:
                    batch.finish = _copy_back(flat, operation.tensor)
            case OpKind.REDUCE if operation is not None:
                self._reduce(batch, first, operation)
            case OpKind.ALLGATHER:
                self._allgather(batch)
            case OpKind.REDUCE_SCATTER if operation is not None:
                self._reduce_scatter(batch, first, operation)
            case OpKind.ALLTOALL | OpKind.GATHER | OpKind.SCATTER if operation is not None:
                self._exchange(batch, first, operation)
            case kind:
                raise AssertionError(f"{kind.name} is not negotiated")

    def _allreduce(self, batch: Batch, first: Response) -> None:
        request = first.request
        dtype: torch.dtype = getattr(torch, request.dtype)
        scale, unscale = self._scales(request, first.joined)
        only = batch.operations[0]
        # The library may refuse the reduction, and must not find the tensor changed. So a factor is applied to a copy.
        if len(batch.operations) == 1 and only is not None and is_plain(only.tensor) and request.prescale == 1.0:
            tensor = only.tensor.detach()
            batch.work = self._natives.allreduce(tensor.view(-1), _native_op(request.reduction))
            batch.finish = lambda: unscale(tensor)
            return
        counts = [response.request.num_elements for response in batch.responses]
        buffer = self._buffer(sum(counts), dtype, self._devices.of(request.device))
        batch.buffer, flat = buffer, buffer[: sum(counts)]
        tensors = [operation.tensor for operation in batch.mine]
        parts: Sequence[torch.Tensor]
        if len(tensors) == len(batch.operations):  # many small tensors: one call of torch instead of one for each
            parts = mine = _utils._unflatten_dense_tensors(flat, tensors)  # type: ignore[no-untyped-call]
        else:
            shapes = [response.request.shape for response in batch.responses]
            slices = torch.split_with_sizes(flat, counts)
            parts = [part.view(shape) for part, shape in zip(slices, shapes, strict=True)]
            mine = [part for part, operation in zip(parts, batch.operations, strict=True) if operation is not None]
        _copy_all(mine, tensors)
        if len(mine) == len(parts):
            scale(flat)
        else:  # the parts that a joined rank lends must stay neutral
            neutral = _NEUTRAL.get(request.reduction)
            for part, operation in zip(parts, batch.operations, strict=True):
                if operation is not None:
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
        """Return functions that scale a tensor in place before and after a reduction."""
        divisor = 1
        if request.reduction == "avg":
            if request.dtype == "bool":
                raise UnsupportedError(f"tensor {request.name!r}: AVG of bool is not defined")
            divisor = self._natives.world_size - (len(joined) if self._divide_by_active else 0)

        def before(tensor: torch.Tensor) -> None:
            _multiply(tensor, request.prescale)

        def after(tensor: torch.Tensor) -> None:
            if divisor > 1:
                with writing(tensor):
                    divide(tensor, divisor)
            _multiply(tensor, request.postscale)

        return before, after

    def _reduce(self, batch: Batch, response: Response, operation: NativeOperation) -> None:
        is_root = self._rank == response.request.root
        # The library may write to the tensors of other ranks, which are to stay as they are.
        flat = _flat(operation.tensor) if is_root else _flat(operation.tensor).clone()
        scale, unscale = self._scales(response.request, response.joined)
        scale(flat)
        batch.work = self._natives.reduce(flat, response.request.root, _native_op(response.request.reduction))

        def finish() -> None:
            unscale(flat)
            _copy_back(flat, operation.tensor)()

        if is_root:
            batch.finish = finish

    def _allgather(self, batch: Batch) -> None:
        """Each rank sends its parts of all operations one after the other, padded to the length of the longest rank."""
        tensors = [operation.tensor.detach() for operation in batch.mine]
        counts = [  # by rank: the number of elements of each operation
            [
                response.rows[rank][0] * math.prod(tensor.shape[1:])
                for response, tensor in zip(batch.responses, tensors, strict=True)
            ]
            for rank in range(self._natives.world_size)
        ]
        longest = max(map(sum, counts))
        part = tensors[0].new_zeros(longest)
        slices = part[: sum(counts[self._rank])].split_with_sizes(counts[self._rank])
        _copy_all([piece.view(tensor.shape) for piece, tensor in zip(slices, tensors, strict=True)], tensors)
        gathered = tensors[0].new_empty(len(counts) * longest)
        batch.work = self._natives.allgather(gathered, part) if len(gathered) else None

        def finish() -> None:
            blocks = [
                gathered[rank * longest : rank * longest + sum(sizes)].split_with_sizes(sizes)
                for rank, sizes in enumerate(counts)
            ]
            for operation, response, pieces in zip(batch.mine, batch.responses, zip(*blocks, strict=True), strict=True):
                rows = sum(rows for (rows,) in response.rows)
                self._deliver(operation, pieces, (rows, *operation.tensor.shape[1:]))

        batch.finish = finish

    def _exchange(self, batch: Batch, response: Response, operation: NativeOperation) -> None:
        """Alltoall. In a gather only the root receives rows, and in a scatter only the root sends rows."""
        tensor = _flat(operation.tensor).view(operation.tensor.shape)
        size, root = self._natives.world_size, response.request.root
        match response.request.kind:
            case OpKind.GATHER:
                sent = [len(tensor) * (rank == root) for rank in range(size)]
                received = [rows * (self._rank == root) for (rows,) in response.rows]
            case OpKind.SCATTER:
                sent = [rows * (self._rank == root) for (rows,) in response.rows]
                received = [response.rows[self._rank][0] * (rank == root) for rank in range(size)]
            case _:
                sent, received = list(operation.request.splits), [rows[self._rank] for rows in response.rows]
        width = math.prod(tensor.shape[1:])
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        counts = [rows * width for rows in received]
        batch.work = self._natives.alltoall(output.view(-1), tensor.view(-1), counts, [rows * width for rows in sent])
        operation.rows[:] = received
        pieces = torch.split_with_sizes(output.view(-1), counts)
        source = None
        if response.request.kind is OpKind.SCATTER:
            pieces, source = pieces[root : root + 1], root
        batch.finish = lambda: self._deliver(operation, pieces, tuple(output.shape), source)

    def _reduce_scatter(self, batch: Batch, response: Response, operation: NativeOperation) -> None:
        """Reduce blocks of equal length: the blocks of the last ranks are padded if the rows do not divide evenly."""
        tensor = operation.tensor.detach()
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
            self._deliver(operation, [mine], (rows[self._rank], *tensor.shape[1:]), self._rank)

        batch.finish = finish

    def _deliver(
        self,
        operation: NativeOperation,
        pieces: Sequence[torch.Tensor],
        shape: tuple[int, ...],
        source: int | None = None,
    ) -> None:
        """Copy the parts to the outputs, or make one tensor of them."""
        if operation.outputs is None:
            result = torch.cat(list(pieces)).view(shape) if len(pieces) > 1 else pieces[0].clone().view(shape)
            if operation.stream is not None:  # the program will use what was allocated on the side stream
                result.record_stream(operation.stream)
            operation.result = result
            return
        for rank, (output, piece) in enumerate(zip(operation.outputs, pieces, strict=True)):
            if output.numel() != piece.numel():  # an error of this operation, and not of those fused with it
                ranks = rank if source is None else source, self._rank
                values = f"{piece.numel()} elements", f"a place for {output.numel()}"
                operation.error = MismatchError(operation.request.name, ranks, values)
                return
            write(output.detach(), piece.view(output.shape))

    def _buffer(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a fusion buffer of at least ``num_elements``, reused if possible."""
        free = self._buffers.setdefault((dtype, device), [])
        for index, buffer in enumerate(free):
            if len(buffer) >= num_elements:
                return free.pop(index)
        free.clear()  # all are too small, so they are replaced by larger ones
        if device.type == "cpu":
            return self._empty(num_elements, dtype)
        return torch.empty(num_elements, dtype=dtype, device=device)


def _native_op(reduction: str) -> ReduceOp:
    return ReduceOp.SUM if reduction == "avg" else ReduceOp[reduction.upper()]


def _multiply(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place. Integers are multiplied as float64 and cut off, half types as float32 and rounded once."""
    if factor == 1.0:
        return
    with writing(tensor):
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
    """Return the elements in one dimension: in the tensor's own memory if it is contiguous, else in a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _copy_back(flat: torch.Tensor, tensor: torch.Tensor) -> Callable[[], None]:
    def finish() -> None:
        if not is_plain(tensor):
            write(tensor.detach(), flat.view(tensor.shape))

    return finish


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    with writing(*targets):
        if any(tensor.is_neg() or tensor.is_conj() for tensor in (*targets, *sources)):
            for target, source in zip(targets, sources, strict=True):  # torch cannot copy these at once
                target.copy_(source)
        elif targets:
            torch._foreach_copy_(list(targets), list(sources))
