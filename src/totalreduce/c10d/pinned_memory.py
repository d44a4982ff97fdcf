"""Copies of CUDA tensors in pinned host memory, for transports that read host memory only.

The tensors that an operation reads are copied to pinned memory first, and its results are copied back, both on a side
stream. So the copies of one operation overlap with the transfer of another one and with the kernels that are queued on
the current stream. Pinned memory comes from torch's caching allocator, which reuses it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

import torch

__all__ = ["Staged", "Stager"]


@final
class Stager:
    """Makes ``Staged`` operations; keeps one side stream per device. Usable from any thread."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def stage(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Staged | None:
        """Return host memory for the tensors of one operation; ``None`` if all of them are in host memory.

        Returns when the tensors to read are copied: the caller's thread waits for the kernels that compute them, and
        the device does not.

        Args:
            reads: The tensors that the operation reads.
            writes: The tensors that it writes; a tensor may be in both.
        """
        device = next((tensor.device for tensor in (*reads, *writes) if tensor.is_cuda), None)
        if device is None:
            return None
        with self._lock:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return Staged(stream, reads, writes)


@final
class Staged:
    """The tensors of one operation, and their counterparts in pinned memory."""

    def __init__(
        self, stream: torch.cuda.Stream, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Copy the tensors to read; made by ``Stager``."""
        self._stream = stream
        self._writes = [tensor for tensor in writes if tensor.is_cuda]
        self._hosts: dict[int, torch.Tensor] = {}
        for tensor in (*reads, *writes):
            if tensor.is_cuda and id(tensor) not in self._hosts:
                self._hosts[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._lock = threading.Lock()
        self._copied: torch.cuda.Event | None = None
        outgoing = {id(tensor): tensor for tensor in reads if tensor.is_cuda}
        if outgoing:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            with torch.cuda.stream(stream), torch.no_grad():
                for tensor in outgoing.values():
                    self.host(tensor).copy_(tensor, non_blocking=True)
                    tensor.record_stream(stream)
                arrived = stream.record_event()
            arrived.synchronize()
        else:
            # Kernels that were queued before may still use the tensors that are only written.
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor's counterpart in host memory; the tensor itself if it is there already."""
        return self._hosts.get(id(tensor), tensor)

    def finish(self, *, blocking: bool) -> None:
        """Copy the results back. Called when the operation is done, once or several times.

        Args:
            blocking: Return when the results are copied. Otherwise the current stream waits for the copies, and this
                thread does not.
        """
        with self._lock:
            if self._copied is None:
                with torch.cuda.stream(self._stream), torch.no_grad():
                    for tensor in self._writes:
                        tensor.copy_(self.host(tensor), non_blocking=True)
                        tensor.record_stream(self._stream)
                    self._copied = self._stream.record_event()
        if blocking:
            self._copied.synchronize()
        else:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)
