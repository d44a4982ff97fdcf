"""Side streams of accelerators, on which the library copies and computes beside the kernels of the program.

Three rules hold in every place that uses a stream, because they are kept here:

* *The device.* A thread that the library starts has device 0 as its current one, whatever device the rank uses. To
  enter a stream, torch makes the stream's device the current one, and then it goes back to the old device. If the
  process has not used the old device, that creates a context there, which takes several hundred MB of its memory. So
  ``torch.cuda.device`` is entered first, which goes back to no device without a context.
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

__all__ = ["SideStreams"]


@final
class SideStreams:
    """One stream per CUDA device, made when it is first used. Any thread may call the methods."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def of(self, device: torch.device) -> torch.cuda.Stream:
        """Return the side stream of a CUDA device."""
        with self._lock:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return stream

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Run the kernels of the block on the side stream of ``device``; on the CPU do nothing."""
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device), torch.cuda.stream(self.of(device)):
            yield

    @contextlib.contextmanager
    def beside(self, device: torch.device, ready: torch.cuda.Event | None = None) -> Iterator[None]:
        """Run the kernels of the block on the side stream after the event ``ready``, and wait until they have ended."""
        if device.type != "cuda":
            yield
            return
        with torch.no_grad(), self.on(device):
            stream = self.of(device)
            if ready is not None:
                stream.wait_event(ready)
            yield
            stream.synchronize()
