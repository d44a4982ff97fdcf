"""Buckets in the memory of an accelerator: tensors as large as the bucket are computed there and stay there.

Only the selected elements are copied to the host, a few bytes for each hundredth element, and the sums that all ranks
apply are copied back. Triton's kernels do it where it is installed; otherwise torch's own operations do it, in more
passes and with the same result.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Iterator, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from totalreduce.kernels import device as plain
from totalreduce.kernels.arrays import Array
from totalreduce.kernels.device import DeviceKernels
from totalreduce.kernels.selection import Kth, radix_select
from totalreduce.sparse.accumulator import Accumulator, HostAccumulator
from totalreduce.sparse.candidates import Candidates

__all__ = ["DeviceAccumulator", "SideStreams", "accumulator_of"]


@final
class SideStreams:
    """One CUDA stream per device, on which the exchange computes and copies beside the kernels of the model."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def beside(self, device: torch.device, ready: torch.cuda.Event | None = None) -> Iterator[None]:
        """Run the block's kernels on the side stream after the event ``ready``, and wait until they have ended."""
        if device.type != "cuda":
            yield
            return
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.cuda.stream(stream):
            if ready is not None:
                stream.wait_event(ready)
            yield
        stream.synchronize()


def accumulator_of(tensors: Sequence[Tensor], streams: SideStreams) -> Accumulator:
    """Return the accumulator over float32 tensors, contiguous, one-dimensional, on any device; nothing is copied.

    On a GPU it works on the side stream, after the kernels that are queued on the current stream.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return HostAccumulator([tensor.numpy() for tensor in tensors])
    return DeviceAccumulator(tensors, streams, kernels_for(tensors[0].device))


def kernels_for(device: torch.device) -> DeviceKernels:
    """Return the fastest kernels for a device."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from totalreduce.kernels import device_triton

        return device_triton
    return plain


@final
class DeviceAccumulator(Accumulator):
    """In the memory of one or several devices."""

    def __init__(self, tensors: Sequence[Tensor], streams: SideStreams, kernels: DeviceKernels) -> None:
        """Called on the stream that writes to the tensors."""
        super().__init__([tensor.numel() for tensor in tensors])
        self._tensors, self._streams, self._kernels = list(tensors), streams, kernels
        self._ready = {
            device: torch.cuda.current_stream(device).record_event()
            for device in {tensor.device for tensor in tensors if tensor.is_cuda}
        }

    def accumulate(self, residuals: Accumulator, scale: float, bound: int, found: Candidates) -> None:
        assert isinstance(residuals, DeviceAccumulator), "residuals lie where the gradients do"
        for (number, tensor), residual in zip(self._each(), residuals._tensors, strict=True):
            room = found.room if found.complete else 0
            self._list(number, self._kernels.accumulate(tensor, residual, scale, bound, room), found)

    def find(self, bound: int, found: Candidates) -> None:
        for number, tensor in self._each():
            self._list(number, self._kernels.select(tensor, bound, found.room), found)
            if not found.complete:
                return

    def kth_magnitude(self, k: int) -> Kth:

        def histogram(*digit: int) -> Array:
            return sum((plain.histogram(tensor, *digit) for _, tensor in self._each()), start=np.zeros(1, np.int64))

        return radix_select(histogram, k)

    def sample(self, stride: int) -> Array:
        return np.concatenate([tensor[::stride].cpu().numpy() for _, tensor in self._each()])

    def moments(self) -> tuple[float, float]:
        mean = sum(float(tensor.sum(dtype=torch.float64)) for _, tensor in self._each()) / self.num_elements
        return mean, max(0.0, self.norm() ** 2 / self.num_elements - mean**2)

    def norm(self) -> float:
        norms = [float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for _, tensor in self._each()]
        return math.hypot(*norms)

    def present(self) -> list[bool]:
        return [bool(tensor.any()) for _, tensor in self._each()]

    def put(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        for tensor, places, chosen in self._places(indices):
            tensor[places] = torch.from_numpy(values[chosen] * np.float32(factor)).to(tensor.device)

    def add(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        for tensor, places, chosen in self._places(indices):
            tensor[places] += torch.from_numpy(values[chosen] * np.float32(factor)).to(tensor.device)

    def keep_rest(self, indices: Array, values: Array, sent: Array, applied: Array) -> None:
        if applied.size:
            nearest = np.minimum(np.searchsorted(applied, indices), applied.size - 1)
            common = applied[nearest] == indices
            self.put(indices[common], (values - sent)[common])

    def take(self, indices: Array) -> Array:
        parts = [tensor[places].cpu().numpy() for tensor, places, _ in self._places(indices)]
        return np.concatenate([np.empty(0, np.float32), *parts])

    def clear(self) -> None:
        for _, tensor in self._each():
            tensor.zero_()

    def assign(self, values: Array, factor: float) -> None:
        for number, tensor in self._each():
            tensor.copy_(self._part(values, number)).mul_(factor)

    def add_all(self, values: Array, factor: float) -> None:
        for number, tensor in self._each():
            tensor.add_(self._part(values, number).to(tensor.device), alpha=factor)

    def flat(self) -> Array:
        return np.concatenate([np.empty(0, np.float32), *(tensor.cpu().numpy() for _, tensor in self._each())])

    @contextlib.contextmanager
    def on_host(self) -> Iterator[list[Array]]:
        copies = [tensor.cpu() for _, tensor in self._each()]
        yield [copy.numpy() for copy in copies]
        for number, tensor in self._each():
            tensor.copy_(copies[number])

    def _each(self) -> Iterator[tuple[int, Tensor]]:
        """Yield number and memory of each segment; the caller's work with it runs on the side stream."""
        for number, tensor in enumerate(self._tensors):
            with self._streams.beside(tensor.device, self._ready.get(tensor.device)):
                yield number, tensor

    def _places(self, indices: Array) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """Yield, on the side stream, memory, positions and slice of the indices for each segment that has some."""
        for number, start, chosen in self._split(indices):
            tensor = self._tensors[number]
            with self._streams.beside(tensor.device, self._ready.get(tensor.device)):
                yield tensor, torch.from_numpy(indices[chosen].astype(np.int64) - start).to(tensor.device), chosen

    def _list(self, number: int, listed: plain.Found, found: Candidates) -> None:
        indices = (listed.indices + self._starts[number]).cpu().numpy()
        found.append(indices, listed.values.cpu().numpy(), complete=listed.complete)

    def _part(self, values: Array, number: int) -> Tensor:
        start, end = self._starts[number : number + 2]
        return torch.from_numpy(np.ascontiguousarray(values[start:end]))
