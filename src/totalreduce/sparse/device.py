"""Buckets in the memory of an accelerator: tensors as large as the bucket are computed there and stay there.

Only the selected elements are copied to the host, a few bytes for each hundredth element, and the sums that all ranks
apply are copied back. Triton's kernels do it where it is installed; otherwise torch's own operations do it, in more
passes and with the same result.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from totalreduce.kernels import device as plain
from totalreduce.kernels import merging, selection
from totalreduce.kernels.arrays import Array
from totalreduce.kernels.device import DeviceKernels
from totalreduce.sparse.accumulator import Accumulator, HostAccumulator
from totalreduce.sparse.candidates import Candidates
from totalreduce.tensors.streams import SideStreams, current_stream, is_on_accelerator, record

__all__ = ["DeviceAccumulator", "accumulator_of"]


def accumulator_of(tensors: Sequence[Tensor], streams: SideStreams, *, settled: bool = False) -> Accumulator:
    """Return the accumulator over float32 tensors, contiguous, one-dimensional, on any device; nothing is copied.

    On a GPU it works on the side stream.

    Args:
        tensors: The segments.
        streams: The side streams.
        settled: Whether all kernels that write to the tensors have ended. Otherwise the side stream waits for those
            that are queued on the current stream now, so this is called by the thread that queued them. In another
            thread it would wait for kernels that have nothing to do with the tensors, such as the rest of backward.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return HostAccumulator([tensor.numpy() for tensor in tensors])
    return DeviceAccumulator(tensors, streams, kernels_for(tensors[0].device), settled=settled)


def kernels_for(device: torch.device) -> DeviceKernels:
    """Return the fastest kernels for a device."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from totalreduce.kernels import device_triton

        return device_triton
    return plain


@final
class DeviceAccumulator(Accumulator):
    """In the memory of one or several devices."""

    def __init__(
        self, tensors: Sequence[Tensor], streams: SideStreams, kernels: DeviceKernels, *, settled: bool = False
    ) -> None:
        """Called on the stream that writes to the tensors, unless they are settled; see ``accumulator_of``."""
        super().__init__([tensor.numel() for tensor in tensors])
        self._tensors, self._streams, self._kernels = list(tensors), streams, kernels
        devices = {tensor.device for tensor in tensors if is_on_accelerator(tensor) and not settled}
        self._ready = {device: record(current_stream(device), device) for device in devices}

    def accumulate(self, residuals: Accumulator, scale: float, bound: int, found: Candidates) -> None:
        assert isinstance(residuals, DeviceAccumulator), "residuals lie where the gradients do"
        for device, ready in residuals._ready.items():
            self._streams.of(device).wait_event(ready)
        for (number, tensor), residual in zip(self._each(), residuals._tensors, strict=True):
            room = found.room if found.complete else 0
            self._list(number, self._kernels.accumulate(tensor, residual, scale, bound, room), found)

    def find(self, bound: int, found: Candidates) -> None:
        for number, tensor in self._each():
            self._list(number, self._kernels.select(tensor, bound, found.room), found)
            if not found.complete:
                return

    def kth_magnitude(self, k: int) -> selection.Kth:

        def histogram(*digit: int) -> Array:
            return sum((plain.histogram(tensor, *digit) for _, tensor in self._each()), start=np.zeros(1, np.int64))

        return selection.radix_select(histogram, k)

    def sample(self, stride: int) -> Array:
        return np.concatenate([tensor[::stride].cpu().numpy() for _, tensor in self._each()])

    def moments(self) -> tuple[float, float]:
        mean = sum(self._numbers(lambda tensor: tensor.sum(dtype=torch.float64))) / self.num_elements
        return mean, max(0.0, self.norm() ** 2 / self.num_elements - mean**2)

    def norm(self) -> float:
        return math.hypot(*self._numbers(lambda tensor: torch.linalg.vector_norm(tensor, dtype=torch.float64)))

    def present(self) -> list[bool]:
        return self._numbers(torch.any)

    def put(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        for tensor, places, [chosen] in self._places(indices, values * np.float32(factor)):
            tensor[places] = chosen

    def add(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        for tensor, places, [chosen] in self._places(indices, values * np.float32(factor)):
            tensor[places] += chosen

    def keep_rest(self, indices: Array, values: Array, sent: Array, applied: Array) -> None:
        common = merging.found_in(indices, applied)
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

    def _runs(self) -> Iterator[list[tuple[int, Tensor]]]:
        """Yield number and memory of the segments, device by device; the caller's work runs on the side stream."""
        for device, run in itertools.groupby(enumerate(self._tensors), lambda each: each[1].device):
            with self._streams.beside(device, self._ready.get(device)):
                yield list(run)

    def _each(self) -> Iterator[tuple[int, Tensor]]:
        """Yield number and memory of each segment; the caller's work with it runs on the side stream."""
        for run in self._runs():
            yield from run

    def _numbers(self, function: Callable[[Tensor], Tensor]) -> list[Any]:
        """Return one number of each segment. They are copied to the host together."""
        return [number for run in self._runs() for number in torch.stack([function(each) for _, each in run]).tolist()]

    def _places(self, indices: Array, *arrays: Array) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Yield the memory of each segment that has some of the indices, their positions, and their part of the arrays.

        The caller's work runs on the side stream. Indices and arrays are copied to a device once, not for each segment.
        """
        host = [torch.from_numpy(array) for array in (indices.astype(np.int64), *arrays)]
        for device, run in itertools.groupby(self._split(indices), lambda each: self._tensors[each[0]].device):
            with self._streams.beside(device, self._ready.get(device)):
                places, *others = (each.to(device) for each in host)
                for number, start, stretch in run:
                    yield self._tensors[number], places[stretch] - start, [other[stretch] for other in others]

    def _list(self, number: int, listed: plain.Found, found: Candidates) -> None:
        indices = (listed.indices + self._starts[number]).cpu().numpy()
        found.append(indices, listed.values.cpu().numpy(), complete=listed.complete)

    def _part(self, values: Array, number: int) -> Tensor:
        start, end = self._starts[number : number + 2]
        return torch.from_numpy(np.ascontiguousarray(values[start:end]))
