"""Copies of CUDA tensors in pinned host memory, for transports that read host memory only.

The tensors that an operation reads are copied to pinned memory first, and its results are copied back, both on the side
stream of the tensors' device. So the copies of one operation overlap with the transfer of another one and with the
kernels that are queued on the current stream. Pinned memory comes from torch's caching allocator, which reuses it only
after the copies that use it have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

import torch

from totalreduce.tensors.modes import writing
from totalreduce.tensors.streams import SideStreams

__all__ = ["Staged", "Stager"]


@final
class Stager:
    """Makes ``Staged`` operations. Usable from any thread."""

    def __init__(self) -> None:
        self._streams = SideStreams()

    def stage(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Staged | None:
        """Return host memory for the tensors of one operation; ``None`` if all of them are in host memory.

        Returns when the tensors to read are copied: the caller's thread waits for the kernels that compute them, and
        the device does not.
        """
        if not any(tensor.is_cuda for tensor in (*reads, *writes)):
            return None
        return Staged(self._streams, reads, writes)


@final
class Staged:
    """The tensors of one operation, on one or several devices, and their counterparts in pinned memory."""

    def __init__(self, streams: SideStreams, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Copy the tensors to read; made by ``Stager``."""
        self._streams = streams
        self._hosts: dict[int, torch.Tensor] = {}
        self._reads, self._writes = _by_device(reads), _by_device(writes)
        for tensor in (*reads, *writes):
            if tensor.is_cuda and id(tensor) not in self._hosts:
                self._hosts[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
        self._lock = threading.Lock()
        self._copied: dict[torch.device, torch.cuda.Event] | None = None
        arrived: list[torch.cuda.Event] = []
        for device in {**self._reads, **self._writes}:
            side = streams.of(device)
            # The kernels that compute the tensors to read, and those that may still use the tensors to write.
            side.wait_stream(torch.cuda.current_stream(device))
            outgoing = self._reads.get(device)
            if outgoing:
                with streams.on(device), torch.no_grad():
                    for tensor in outgoing:
                        self.host(tensor).copy_(tensor, non_blocking=True)
                        tensor.record_stream(side)
                    arrived.append(side.record_event())
        for event in arrived:
            event.synchronize()

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor's counterpart in host memory; the tensor itself if it is there already."""
        return self._hosts.get(id(tensor), tensor)

    def finish(self, *, blocking: bool) -> None:
        """Copy the results back. Called when the operation is done, once or several times, by any thread.

        Args:
            blocking: Return when the results are copied. Otherwise the current stream of each device waits for the
                copies, and this thread does not.
        """
        with self._lock:
            if self._copied is None:
                self._copied = {device: self._copy_back(device, tensors) for device, tensors in self._writes.items()}
        for device, event in self._copied.items():
            if blocking:
                event.synchronize()
            else:
                torch.cuda.current_stream(device).wait_event(event)

    def _copy_back(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> torch.cuda.Event:
        side = self._streams.of(device)
        with self._streams.on(device), writing(*tensors):
            for tensor in tensors:
                tensor.copy_(self.host(tensor), non_blocking=True)
                tensor.record_stream(side)
            event: torch.cuda.Event = side.record_event()
        return event


def _by_device(tensors: Sequence[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    """Return the CUDA tensors, each one once, by device."""
    found: dict[torch.device, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_cuda:
            found.setdefault(tensor.device, {})[id(tensor)] = tensor
    return {device: list(each.values()) for device, each in found.items()}
