"""Side streams of accelerators, on which the library copies and computes beside the kernels of the program.

Three rules hold in every place that uses a stream, because they are kept here:

* *The device.* A thread that the library starts has device 0 as its current one, whatever device the rank uses. To
  enter a stream, torch makes the stream's device the current one, and then it goes back to the old device. If the
  process has not used the old device, that creates a context there, which takes several hundred MB of its memory. So
  ``torch.accelerator.device_index`` is entered first, which goes back to no device without a context.
* *The order.* A side stream does not wait for the program's stream by itself. Each use names the event after which the
  tensors may be read and written.
* *The end.* ``SideStreams.beside`` returns when the kernels of the block have ended, so that any stream may use their
  results. ``SideStreams.on`` does not wait; its caller does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import final

import torch

__all__ = ["SideStreams", "entered", "is_on_accelerator", "record"]


def is_on_accelerator(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has its elements on an accelerator."""
    return not tensor.is_cpu and not tensor.is_meta


@contextlib.contextmanager
def entered(stream: torch.Stream, device: torch.device) -> Iterator[None]:
    """Run the kernels of the block on a stream of ``device``."""
    with torch.accelerator.device_index(device.index), stream:
        yield


def record(stream: torch.Stream, device: torch.device) -> torch.Event:
    """Return an event at the end of what a stream has to do now; a thread that waits for one of CUDA's sleeps."""
    with torch.accelerator.device_index(device.index):
        event = torch.cuda.Event(blocking=True) if device.type == "cuda" else torch.Event(device)  # type: ignore[no-untyped-call]
        event.record(stream)
    return event


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
                stream = self._streams[device] = torch.Stream(device)
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
