"""Side streams of accelerators, on which the library copies and computes beside the kernels of the program.

Four rules hold in every place that uses a stream, because they are kept here:

* *The device.* A thread that the library starts has device 0 as its current one, whatever device the rank uses. To
  enter a stream, torch makes the stream's device the current one, and then it goes back to the old device. If the
  process has not used the old device, that creates a context there, which takes several hundred MB of its memory. So
  ``torch.cuda.device`` is entered first, which goes back to no device without a context.
* *The order.* A side stream does not wait for the program's stream by itself. Each use names the event after which the
  tensors may be read and written.
* *The objects.* Streams and events are those of the device's module (``torch.cuda``). ``torch.Stream`` and
  ``torch.Event`` are other objects in C++, and torch does not check that both are of one kind.
* *The end.* ``SideStreams.beside`` returns when the kernels of the block have ended, so that any stream may use their
  results. ``SideStreams.on`` does not wait; its caller does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import final

import torch

__all__ = ["SideStreams", "current_stream", "entered", "is_on_accelerator", "new_stream", "record"]


def is_on_accelerator(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has its elements on an accelerator."""
    return not tensor.is_cpu and not tensor.is_meta


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream of ``device`` on which this thread enqueues kernels."""
    stream: torch.Stream = torch.get_device_module(device).current_stream(device)
    return stream


def new_stream(device: torch.device) -> torch.Stream:
    """Return another stream of ``device``."""
    stream: torch.Stream = torch.get_device_module(device).Stream(device)
    return stream


def record(stream: torch.Stream, device: torch.device) -> torch.Event:
    """Return an event at the end of what a stream has to do now; a thread that waits for one of CUDA's sleeps."""
    module = torch.get_device_module(device)
    with module.device(device):
        event: torch.Event = module.Event(blocking=True) if device.type == "cuda" else module.Event()
        event.record(stream)
    return event


@contextlib.contextmanager
def entered(stream: torch.Stream, device: torch.device) -> Iterator[None]:
    """Run the kernels of the block on a stream of ``device``."""
    module = torch.get_device_module(device)
    with module.device(device), module.stream(stream):
        yield


@final
class SideStreams:
    """One stream per device of an accelerator, made when it is first used. Any thread may call the methods."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._lock = threading.Lock()

    def of(self, device: torch.device) -> torch.Stream:
        """Return the side stream of a device of an accelerator."""
        with self._lock:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = new_stream(device)
            return stream

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Run the kernels of the block on the side stream of ``device``; on the CPU do nothing."""
        if device.type == "cpu":
            yield
            return
        with entered(self.of(device), device):
            yield

    @contextlib.contextmanager
    def beside(self, device: torch.device, ready: torch.Event | None = None) -> Iterator[None]:
        """Run the kernels of the block on the side stream after the event ``ready``, and wait until they have ended."""
        if device.type == "cpu":
            yield
            return
        with torch.no_grad(), self.on(device):
            stream = self.of(device)
            if ready is not None:
                stream.wait_event(ready)
            yield
            stream.synchronize()
