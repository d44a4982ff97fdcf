"""Which device and stream copies and kernels run on, and what waits for what. Needs no GPU: see ``gpu.py``."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpu import FakeCuda, cuda
from totalreduce.c10d.work import OperationWork
from totalreduce.coordination.requests import Request, Response
from totalreduce.foundation.errors import TotalReduceError
from totalreduce.foundation.types import OpKind, ReduceOp
from totalreduce.kernels import device as plain
from totalreduce.native import torch_collectives
from totalreduce.native.operation import prepare
from totalreduce.native.packing import Batch, Packer
from totalreduce.sparse.candidates import Candidates
from totalreduce.sparse.device import DeviceAccumulator
from totalreduce.tensors.streams import SideStreams, record

__all__ = ["cuda"]


def in_a_new_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_thread_enters_a_stream_and_leaves_no_context_on_its_current_device(cuda: FakeCuda) -> None:
    cuda.contexts.add(3)
    inside = []

    def work() -> None:
        with SideStreams().on(torch.device("cuda", 3)):
            inside.append((cuda.current_device(), cuda.current_stream(torch.device("cuda", 3)).name))
        inside.append((cuda.current_stream(torch.device("cuda", 3)).name,))

    in_a_new_thread(work)
    assert inside == [(3, "side 3.1"), ("default 3",)]
    assert cuda.contexts == {3}


def test_a_stream_of_a_device_is_made_once_and_the_cpu_has_none(cuda: FakeCuda) -> None:
    streams = SideStreams()
    assert streams.of(torch.device("cuda", 1)) is streams.of(torch.device("cuda", 1))
    assert streams.of(torch.device("cuda", 2)).name == "side 2.2"
    with streams.beside(torch.device("cpu")):
        assert cuda.current_device() == 0
    assert cuda.take() == []


def test_kernels_beside_wait_for_the_event_and_the_host_waits_for_them(cuda: FakeCuda) -> None:
    streams, device = SideStreams(), torch.device("cuda", 1)
    ready = record(cuda.current_stream(device), device)
    with streams.beside(device, ready):
        cuda.note("kernel")
    assert cuda.take() == [
        ("side 1.1 waits for default 1", 1, "side 1.1"),
        ("kernel", 1, "side 1.1"),
        ("host waits for side 1.1", 1, "side 1.1"),
    ]


def test_a_future_knows_the_devices_of_its_tensors(cuda: FakeCuda, monkeypatch) -> None:
    made = []

    def future(devices: list[torch.device]) -> SimpleNamespace:
        made.append(devices)
        return SimpleNamespace(then=lambda _: torch._C.Future([]), set_result=lambda _: None)

    monkeypatch.setattr(torch.futures, "Future", future)
    outputs = [[cuda.tensor(torch.zeros(2), 3), torch.zeros(1)], cuda.tensor(torch.zeros(2), 1)]
    for result in (outputs, [torch.zeros(1)]):
        OperationWork([], result, title="x", timeout_s=1.0, callbacks=None).get_future()
    assert made == [[torch.device("cuda", 1), torch.device("cuda", 3)], []]


def accumulator(cuda: FakeCuda, streams: SideStreams, *indices: int, settled: bool = False) -> DeviceAccumulator:
    tensors = [cuda.tensor(torch.arange(1.0, 4.0), index) for index in indices]
    return DeviceAccumulator(tensors, streams, plain, settled=settled)


def test_a_selection_waits_for_gradients_and_residuals(cuda: FakeCuda) -> None:
    streams = SideStreams()
    gradient, residual = accumulator(cuda, streams, 1), accumulator(cuda, streams, 1)
    cuda.take()
    gradient.accumulate(residual, 1.0, 0, Candidates(3))
    assert gradient.flat().tolist() == [2.0, 4.0, 6.0]
    waits = [what for what, _, _ in cuda.take()]
    assert waits[:2] == ["side 1.1 waits for default 1"] * 2
    assert waits[2] == "host waits for side 1.1"


def test_settled_memory_waits_for_nothing(cuda: FakeCuda) -> None:
    accumulator(cuda, SideStreams(), 1, settled=True).clear()
    assert [what for what, _, _ in cuda.take()] == ["host waits for side 1.1"]


def test_the_host_waits_once_for_each_device_and_not_for_each_segment(cuda: FakeCuda) -> None:
    memory = accumulator(cuda, SideStreams(), 1, 1, 1, 2, 2)
    assert memory.present() == [True] * 5
    assert [what for what, _, _ in cuda.take() if what.startswith("host")] == [
        "host waits for side 1.1",
        "host waits for side 2.2",
    ]
    memory.put(np.array([0, 4, 8, 14], np.int32), np.array([9, 8, 7, 6], np.float32))
    assert [what for what, _, _ in cuda.take() if what.startswith("host")] == [
        "host waits for side 1.1",
        "host waits for side 2.2",
    ]
    assert memory.flat().tolist() == [9, 2, 3, 1, 8, 3, 1, 2, 7, 1, 2, 3, 1, 2, 6]


class Natives:
    """A library of one rank, whose allreduce adds one."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.world_size, self.device = cuda, 1, torch.device("cpu")

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> object:
        self.cuda.note("allreduce")
        tensor.add_(1.0)
        return SimpleNamespace()


def test_the_executor_packs_beside_the_programs_kernels(cuda: FakeCuda, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", cuda.current_device)
    recorded = []
    event = SimpleNamespace(record=lambda stream: recorded.append(stream.name), wait=lambda s: cuda.note("wait", s))
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event)
    tensor = cuda.tensor(torch.zeros(2), 3)
    request = Request("x", OpKind.ALLREDUCE, "float32", 4, (2,), "cuda", "sum")
    operation = prepare(request, tensor, writes=True)
    operation.begin()
    assert recorded == ["default 3"]
    packer = Packer(0, Natives(cuda), divide_by_active=False, empty=lambda count, dtype: torch.empty(count))
    batch = Batch(0, [Response(request)], [operation], 0.0, 0.0)

    def carry_out() -> None:
        with packer.beside(batch):
            packer.start(batch)
        with packer.beside(batch):
            batch.finish()
            packer.synchronise(batch)

    in_a_new_thread(carry_out)
    assert tensor.tolist() == [1.0, 1.0]
    assert cuda.contexts == {3}
    assert cuda.take() == [
        ("wait", 3, "side 3.1"),
        ("allreduce", 3, "side 3.1"),
        ("host waits for side 3.1", 3, "side 3.1"),
    ]


class NcclWork:
    """A work that would abort its communicator, as NCCL's does, if it got a time-out."""

    def __init__(self, looks: int, error: str = "") -> None:
        self.looks, self.error, self.waits = looks, error, 0

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:  # takes no time-out
        self.waits += 1
        if self.error:
            raise RuntimeError(self.error)


def test_a_collective_of_a_gpu_is_looked_at_and_never_given_a_time_out() -> None:
    finished = []
    work = NcclWork(looks=4)
    mine = torch_collectives._TorchWork("all_reduce", 0, work, lambda: finished.append(1), polled=True)
    assert not mine.wait(0.0)
    assert (work.waits, finished) == (0, [])
    assert mine.wait(5.0)
    assert (work.waits, finished) == (1, [1])


def test_the_error_of_a_collective_of_a_gpu_names_it() -> None:
    mine = torch_collectives._TorchWork("all_reduce", 2, NcclWork(0, "remote process exited"), None, polled=True)
    with pytest.raises(TotalReduceError, match="rank 2: torch's all_reduce failed: remote process exited"):
        mine.wait(1.0)
