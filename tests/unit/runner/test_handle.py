"""The handle of an operation: who waits for its end, what it ends, and in which order they learn of it."""

import gc
import threading
import time
import weakref
from typing import cast

import pytest
import torch

from totalreduce.engine.submission import Submission
from totalreduce.fastlane.lane import LaneCarriage
from totalreduce.foundation.errors import TotalReduceError
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature
from totalreduce.runner.handle import Begun, Handle
from totalreduce.tensors.memory import MemoryInFlight, Operands


def waiters_of(handle, number):
    """Start threads that wait for the handle; return them and the list of what their waits return."""
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(handle.wait(10.0))) for _ in range(number)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while len(handle._callbacks) < number and time.monotonic() < deadline:
        time.sleep(0.001)
    return threads, results


@pytest.mark.parametrize("number", [1, 2, 5])
def test_every_waiting_thread_learns_of_the_end(number: int) -> None:
    handle = Handle()
    threads, results = waiters_of(handle, number)
    assert results == []
    handle.complete(None)
    for thread in threads:
        thread.join(10)
    assert results == [True] * number
    assert handle._callbacks == []


def test_a_callback_that_fails_strands_no_waiting_thread() -> None:
    handle = Handle()
    handle.on_done(lambda: 1 / 0)
    threads, results = waiters_of(handle, 1)  # waits behind one callback, and is called before it
    while len(handle._callbacks) < 2:
        time.sleep(0.001)
    with pytest.raises(ZeroDivisionError):
        handle.complete(None)
    threads[0].join(10)
    assert results == [True]


def test_a_wait_that_runs_out_of_time_leaves_nothing() -> None:
    handle = Handle()
    assert not handle.wait(0.01)
    assert not handle.wait(0.0)
    assert handle._callbacks == []
    handle.complete(None)
    assert handle.wait(0.0)


def test_what_the_operation_uses_is_ended_once_and_first() -> None:
    order: list[object] = []
    handle = Handle(lambda *, well: order.append(well))
    handle.on_done(lambda: order.append("callback"))
    handle.complete(TotalReduceError("lost"))
    assert order == [False, "callback"]
    assert str(handle.error) == "lost"


def test_an_error_at_the_end_is_that_of_the_operation() -> None:
    def end(*, well: bool) -> None:
        assert well
        raise TotalReduceError("moved")

    handle = Handle(end)
    handle.complete(None)
    assert handle.done
    assert str(handle.error) == "moved"


def test_the_handle_of_an_ended_operation_keeps_no_memory() -> None:
    """A program may keep many handles."""
    tensor = torch.zeros(4)
    operands, memory = Operands("t"), MemoryInFlight()
    signature = Signature(OpKind.ALLREDUCE, DType.FLOAT32, ReduceOp.SUM, 4, ())
    submission = Submission("t", signature, [operands.add(tensor, writes=True)])
    memory.claim(operands)
    handle = Begun(submission, (1, 0), cast(LaneCarriage, None), operands.end).handle()
    storage = weakref.ref(tensor.untyped_storage())
    del operands, submission, tensor
    assert storage() is not None
    handle.complete(None)
    gc.collect()
    assert storage() is None
