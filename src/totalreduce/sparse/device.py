"""Buckets in the memory of an accelerator: what is as large as the bucket is worked on there and stays there.

Only what was chosen crosses to the host, some bytes for each hundredth element, and what all ranks apply comes back.
By Triton, where that is installed; else by torch's own operations, in more passes and with the same result.
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
from totalreduce.kernels.device import DeviceKernels
from totalreduce.kernels.selection import Kth, radix_select
from totalreduce.sparse.accumulator import Accumulator, Array, HostAccumulator
from totalreduce.sparse.candidates import Candidates

__all__ = ["DeviceAccumulator", "Lane", "accumulator_of"]


@final
class Lane:
    """Where accelerators work for the exchange: beside the kernels of the model."""

    def __init__(self) -> None:
        """Touch no device yet."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def beside(self, device: torch.device, ready: torch.cuda.Event | None = None) -> Iterator[None]:
        """What is done in here is done when it ends; on a GPU it begins when ``ready`` has come."""
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


def accumulator_of(tensors: Sequence[Tensor], lane: Lane) -> Accumulator:
    """A bucket of float32 tensors, contiguous, one-dimensional, on whatever device they are; nothing is copied.

    On a GPU its memory is touched when the current stream has come so far, and in the ``lane``.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return HostAccumulator([tensor.numpy() for tensor in tensors])
    return DeviceAccumulator(tensors, lane, kernels_for(tensors[0].device))


def kernels_for(device: torch.device) -> DeviceKernels:
    """The fastest there are."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from totalreduce.kernels import device_triton

        return device_triton
    return plain


@final
class DeviceAccumulator(Accumulator):
    """In the memory of one or several devices.

    Args:
        tensors: Its segments: float32, contiguous, one-dimensional.
        lane: Where the work is done.
        kernels: What does it.
    """

    def __init__(self, tensors: Sequence[Tensor], lane: Lane, kernels: DeviceKernels) -> None:
        """See the class; to be made on the stream that writes to the tensors."""
        super().__init__([tensor.numel() for tensor in tensors])
        self._tensors, self._lane, self._kernels = list(tensors), lane, kernels
        self._ready = {
            device: torch.cuda.current_stream(device).record_event()
            for device in {tensor.device for tensor in tensors if tensor.is_cuda}
        }

    def accumulate(self, residuals: Accumulator, scale: float, bound: int, found: Candidates) -> None:
        """See ``Accumulator``."""
        assert isinstance(residuals, DeviceAccumulator), "residuals lie where the gradients do"
        for (number, tensor), residual in zip(self._each(), residuals._tensors, strict=True):
            room = found.room if found.complete else 0
            self._list(number, self._kernels.accumulate(tensor, residual, scale, bound, room), found)

    def find(self, bound: int, found: Candidates) -> None:
        """See ``Accumulator``."""
        for number, tensor in self._each():
            self._list(number, self._kernels.select(tensor, bound, found.room), found)
            if not found.complete:
                return

    def kth_magnitude(self, k: int) -> Kth:
        """See ``Accumulator``."""

        def histogram(*digit: int) -> Array:
            return sum((plain.histogram(tensor, *digit) for _, tensor in self._each()), start=np.zeros(1, np.int64))

        return radix_select(histogram, k)

    def sample(self, stride: int) -> Array:
        """See ``Accumulator``."""
        return np.concatenate([tensor[::stride].cpu().numpy() for _, tensor in self._each()])

    def moments(self) -> tuple[float, float]:
        """See ``Accumulator``."""
        mean = sum(float(tensor.sum(dtype=torch.float64)) for _, tensor in self._each()) / self.num_elements
        return mean, max(0.0, self.norm() ** 2 / self.num_elements - mean**2)

    def norm(self) -> float:
        """See ``Accumulator``."""
        norms = [float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for _, tensor in self._each()]
        return math.hypot(*norms)

    def present(self) -> list[bool]:
        """See ``Accumulator``."""
        return [bool(tensor.any()) for _, tensor in self._each()]

    def put(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        """See ``Accumulator``."""
        for tensor, places, chosen in self._places(indices):
            tensor[places] = torch.from_numpy(values[chosen] * np.float32(factor)).to(tensor.device)

    def add(self, indices: Array, values: Array, factor: float = 1.0) -> None:
        """See ``Accumulator``."""
        for tensor, places, chosen in self._places(indices):
            tensor[places] += torch.from_numpy(values[chosen] * np.float32(factor)).to(tensor.device)

    def keep_rest(self, indices: Array, values: Array, sent: Array, applied: Array) -> None:
        """See ``Accumulator``."""
        if applied.size:
            nearest = np.minimum(np.searchsorted(applied, indices), applied.size - 1)
            common = applied[nearest] == indices
            self.put(indices[common], (values - sent)[common])

    def take(self, indices: Array) -> Array:
        """See ``Accumulator``."""
        parts = [tensor[places].cpu().numpy() for tensor, places, _ in self._places(indices)]
        return np.concatenate([np.empty(0, np.float32), *parts])

    def clear(self) -> None:
        """See ``Accumulator``."""
        for _, tensor in self._each():
            tensor.zero_()

    def assign(self, values: Array, factor: float) -> None:
        """See ``Accumulator``."""
        for number, tensor in self._each():
            tensor.copy_(self._part(values, number)).mul_(factor)

    def add_all(self, values: Array, factor: float) -> None:
        """See ``Accumulator``."""
        for number, tensor in self._each():
            tensor.add_(self._part(values, number).to(tensor.device), alpha=factor)

    def flat(self) -> Array:
        """See ``Accumulator``."""
        return np.concatenate([np.empty(0, np.float32), *(tensor.cpu().numpy() for _, tensor in self._each())])

    @contextlib.contextmanager
    def on_host(self) -> Iterator[list[Array]]:
        """See ``Accumulator``."""
        copies = [tensor.cpu() for _, tensor in self._each()]
        yield [copy.numpy() for copy in copies]
        for number, tensor in self._each():
            tensor.copy_(copies[number])

    def _each(self) -> Iterator[tuple[int, Tensor]]:
        """Number and memory of each segment; what is done with it is done in the lane."""
        for number, tensor in enumerate(self._tensors):
            with self._lane.beside(tensor.device, self._ready.get(tensor.device)):
                yield number, tensor

    def _places(self, indices: Array) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """Segments that have some of the indices: memory, places in it, and which of the indices; in the lane."""
        for number, start, chosen in self._split(indices):
            tensor = self._tensors[number]
            with self._lane.beside(tensor.device, self._ready.get(tensor.device)):
                yield tensor, torch.from_numpy(indices[chosen].astype(np.int64) - start).to(tensor.device), chosen

    def _list(self, number: int, listed: plain.Found, found: Candidates) -> None:
        indices = (listed.indices + self._starts[number]).cpu().numpy()
        found.append(indices, listed.values.cpu().numpy(), complete=listed.complete)

    def _part(self, values: Array, number: int) -> Tensor:
        start, end = self._starts[number : number + 2]
        return torch.from_numpy(np.ascontiguousarray(values[start:end]))
