"""A make-believe CUDA: tensors that lie in host memory and say that they are on a GPU, and streams that keep a record.

So the choice of device, stream and event is tested on a machine without a GPU; the arithmetic is the CPU's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on ``cuda:index``. Results of torch's functions are tensors of the CPU."""

    index: int
    owner: FakeCuda
    is_cuda = True
    is_cpu = False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)

    def record_stream(self, stream: Stream) -> None:
        self.owner.note(f"record {self.index}", stream)

    def copy_(self, source: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        self.owner.note(f"copy to {self.index}, non_blocking={non_blocking}")
        return super().copy_(source)

    def detach(self) -> OnGpu:
        return self


class Pinned(torch.Tensor):
    """Pinned memory."""

    owner: FakeCuda
    __torch_function__ = torch._C._disabled_torch_function_impl

    def copy_(self, source: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        self.owner.note(f"copy from {source.index}, non_blocking={non_blocking}")
        return super().copy_(source)


class Event:
    def __init__(self, owner: FakeCuda) -> None:
        self.owner = owner

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.owner.note(f"host waits for {self.stream.name}")


class Stream:
    def __init__(self, owner: FakeCuda, device: torch.device, name: str) -> None:
        self.owner, self.device, self.name = owner, device, name

    def wait_stream(self, other: Stream) -> None:
        self.owner.note(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.owner.note(f"{self.name} waits for {event.stream.name}")

    def synchronize(self) -> None:
        self.owner.note(f"host waits for {self.name}")


class FakeCuda:
    """What the library uses of ``torch.cuda``.

    Attributes:
        log: What happened, each with the current device of the thread and its current stream.
        contexts: The devices that have a context, which is several hundred MB of memory.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, int, str]] = []
        self.contexts: set[int] = set()
        self._here = threading.local()
        self._made = 0
        for name in ("device", "stream", "current_stream", "Stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Event(self))
        empty, to = torch.empty, torch.Tensor.to

        def pinned(*size: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
            memory = empty(*size, **options)
            if pin_memory:
                memory = memory.as_subclass(Pinned)
                memory.owner = self
            return memory

        def moved(tensor: torch.Tensor, *where: object) -> torch.Tensor:
            return tensor if getattr(where[0], "type", "") == "cuda" else to(tensor, *where)

        monkeypatch.setattr(torch, "empty", pinned)
        monkeypatch.setattr(torch.Tensor, "to", moved)

    def tensor(self, values: torch.Tensor, index: int) -> torch.Tensor:
        made = values.as_subclass(OnGpu)
        made.index, made.owner = index, self
        self.contexts.add(index)
        return made

    def note(self, what: str, stream: Stream | None = None) -> None:
        device = self.current_device()
        self.log.append((what, device, (stream or self.current_stream(torch.device("cuda", device))).name))

    def take(self) -> list[tuple[str, int, str]]:
        log, self.log = self.log, []
        return log

    # ------------------------------------------------------------------------------------------ torch.cuda's functions

    def current_device(self) -> int:
        return getattr(self._here, "device", 0)

    def _set_device(self, index: int) -> None:
        if index != self.current_device():
            self.contexts.add(index)  # cudaSetDevice makes one
        self._here.device = index

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        self._made += 1
        return Stream(self, device, f"side {device.index}.{self._made}")

    def current_stream(self, device: torch.device) -> Stream:
        set_here = getattr(self._here, "streams", {})
        return set_here.get(device.index) or Stream(self, device, f"default {device.index}")

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before = self.current_device()
        self._set_device(device.index)
        try:
            yield
        finally:
            if before in self.contexts:  # torch goes back to no device that has no context
                self._set_device(before)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        # As torch does: the present stream of the present device comes back, and with it the device.
        before = self.current_stream(torch.device("cuda", self.current_device()))
        inside = self.current_stream(stream.device)
        self._enter(stream)
        try:
            yield
        finally:
            self._enter(inside)
            self._enter(before)

    def _enter(self, stream: Stream) -> None:
        self._set_device(stream.device.index)
        self._here.streams = {**getattr(self._here, "streams", {}), stream.device.index: stream}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)
