"""Tensors of accelerators as one flat array of the host, in a way in which no caller waits for a kernel.

A copy of tensors is made on their device, by a kernel of the program's stream, so that the program may change them at
once. Whoever needs its values, in whatever thread, has them copied to pinned memory on a side stream, and waits for
that. What is to be written takes the way back: a side stream fills memory of the device, and a kernel of the program's
stream, which waits for it, writes the tensors. So side streams touch no tensor of the program.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch

from totalreduce.kernels.arrays import Array
from totalreduce.tensors.modes import unseen, writing
from totalreduce.tensors.streams import SideStreams, is_on_accelerator, record

__all__ = ["FlatCopies", "FlatCopy", "fetch", "host_like", "pinned"]


@final
class _Flat(NamedTuple):
    """The elements of all tensors of one device and type."""

    elements: torch.Tensor
    spans: list[slice]  #: Where the elements of each tensor are in the array.
    ready: torch.Event | None  #: When the elements are there; ``None`` on the CPU.

    def here(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements for kernels of the current stream, which waits for them."""
        if self.ready is not None:
            current = torch.accelerator.current_stream(self.elements.device)
            current.wait_event(self.ready)
            self.elements.record_stream(current)
        return self.elements.to(dtype)


@final
class FlatCopy:
    """Elements of tensors, one tensor after the other, on the devices of the tensors. Made by ``FlatCopies``."""

    def __init__(self, copies: FlatCopies, flats: Sequence[_Flat], dtype: np.dtype[Any]) -> None:
        self._copies, self.flats, self.dtype = copies, flats, dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(flat.elements.numel() for flat in self.flats)

    def values(self) -> Array:
        """Return the elements as an array. Any thread; waits for kernels and copies."""
        hosts = [(self._copies.to_host(flat), flat.spans) for flat in self.flats]
        if len(hosts) == 1:
            return _array(hosts[0][0], self.dtype)
        values = np.empty(self.size, self.dtype)
        for host, spans in hosts:
            begin, array = 0, _array(host, self.dtype)
            for span in spans:
                size = span.stop - span.start
                values[span] = array[begin : begin + size]
                begin += size
        return values


@final
class FlatCopies:
    """Copies tensors to the host and back. Any thread may call it."""

    def __init__(self) -> None:
        self._side = SideStreams()

    @torch.no_grad()
    def copy(self, tensors: Sequence[torch.Tensor], dtype: np.dtype[Any]) -> FlatCopy:
        """Copy tensors as they are when the kernels of the current streams have run.

        Args:
            tensors: Of any shapes, types and devices.
            dtype: That of the array.
        """
        flats = []
        with unseen():
            for device, members, spans in _groups(tensors):
                flat = torch.cat([member.detach().reshape(-1) for member in members])
                flats.append(_Flat(flat, spans, _now(device)))
        return FlatCopy(self, flats, dtype)

    @torch.no_grad()
    def place(self, tensors: Sequence[torch.Tensor], values: Array) -> FlatCopy:
        """Copy an array to the devices of tensors, beside the kernels of the program."""
        flats = []
        with unseen():
            for device, members, spans in _groups(tensors):
                source = torch.from_numpy(values)
                if device.type == "cpu":
                    flats.append(_Flat(torch.cat([source[span] for span in spans]), spans, None))
                    continue
                host = pinned((sum(member.numel() for member in members),), source.dtype)
                torch.cat([source[span] for span in spans], out=host)
                with self._side.on(device):
                    flat = host.to(device, non_blocking=True)
                flats.append(_Flat(flat, spans, record(self._side.of(device), device)))
        return FlatCopy(self, flats, values.dtype)

    @torch.no_grad()
    def write(
        self,
        tensors: Sequence[torch.Tensor],
        placed: FlatCopy,
        compute: Callable[..., torch.Tensor] | None = None,
        operands: Sequence[Any] = (),
    ) -> None:
        """Write tensors, by kernels of the current streams.

        Args:
            tensors: Those for which ``placed`` was made.
            placed: What is written.
            compute: Returns what is written instead, of the present elements, those of ``placed``, and the operands.
            operands: Each a ``FlatCopy`` for the same tensors, or a number.
        """
        dtype = _torch_type(placed.dtype)
        with unseen(), writing(*tensors):
            for number, (device, members, _) in enumerate(_groups(tensors)):
                flat = placed.flats[number].here(dtype)
                if compute is not None:
                    own = torch.cat([member.detach().reshape(-1) for member in members]).to(dtype)
                    others = [
                        operand.flats[number].here(dtype)
                        if isinstance(operand, FlatCopy)
                        # Not a number: by a number CUDA's kernels do not divide, but multiply by its reciprocal.
                        else torch.full((), float(operand), dtype=dtype, device=device)
                        for operand in operands
                    ]
                    flat = compute(own, flat, *others)
                parts = torch.split(flat, [member.numel() for member in members])
                torch._foreach_copy_(
                    [member.detach() for member in members],
                    [part.view(member.shape) for part, member in zip(parts, members, strict=True)],
                )

    def to_host(self, flat: _Flat) -> torch.Tensor:
        """Return elements in host memory, which nobody else writes; wait for them."""
        if flat.ready is None:
            return flat.elements
        device = flat.elements.device
        host, stream = pinned(flat.elements.shape, flat.elements.dtype), self._side.of(device)
        with torch.no_grad(), unseen(), self._side.on(device):
            stream.wait_event(flat.ready)
            host.copy_(flat.elements, non_blocking=True)
            flat.elements.record_stream(stream)
        record(stream, device).synchronize()
        return host


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return pinned memory; where it is refused, memory that is not pinned, with a warning."""
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:  # also torch.OutOfMemoryError
        warnings.warn(
            f"the accelerator refuses to pin host memory ({error}): copies use memory that is not pinned, and are "
            "slower. Raise the limit of locked memory (ulimit -l)",
            RuntimeWarning,
            stacklevel=2,
        )
        return torch.empty(shape, dtype=dtype, device="cpu")


@torch.no_grad()
def fetch(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors into host memory, and wait once for each accelerator on which some of them are.

    Args:
        targets: As many tensors in host memory; ``host_like`` makes one.
        sources: On any devices.
    """
    plain = [source.detach() for source in sources]
    if plain:
        torch._foreach_copy_(list(targets), plain, non_blocking=True)
    for device in {source.device for source in plain if is_on_accelerator(source)}:
        record(torch.accelerator.current_stream(device), device).synchronize()


def host_like(source: torch.Tensor) -> torch.Tensor:
    """Return contiguous host memory for a copy of a tensor; pinned if the tensor is on an accelerator."""
    if is_on_accelerator(source):
        return pinned(source.shape, source.dtype)
    return torch.empty(source.shape, dtype=source.dtype, device="cpu")


def _array(host: torch.Tensor, dtype: np.dtype[Any]) -> Array:
    array: Array = host.to(_torch_type(dtype)).numpy()
    return array


def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _groups(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.device, list[torch.Tensor], list[slice]]]:
    """Return, for each device and type, the tensors and their places in the array."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[torch.device, list[torch.Tensor], list[slice]]] = {}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.numel()
        _, members, spans = groups.setdefault((tensor.device, tensor.dtype), (tensor.device, [], []))
        members.append(tensor)
        spans.append(slice(begin, end))
        begin = end
    return list(groups.values())


def _now(device: torch.device) -> torch.Event | None:
    return None if device.type == "cpu" else record(torch.accelerator.current_stream(device), device)
