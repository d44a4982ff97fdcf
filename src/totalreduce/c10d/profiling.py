"""Operations as events of torch's profiler, named and shaped as gloo's are: ``totalreduce:all_reduce``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, final

import torch

__all__ = ["Record", "begin"]


@final
class Record:
    """One event, from the submission to the end of an operation. Another thread ends it, as with gloo.

    Attributes:
        ended: Set when the event has ended.
    """

    def __init__(self, title: str, tensors: Sequence[torch.Tensor]) -> None:
        self.ended = threading.Event()
        handle = torch._C._autograd._record_function_with_args_enter(title, *tensors)
        # Through a future, because that alone carries the profiler's state over to the thread where the event ends.
        self._future: Any = torch.futures.Future()
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(handle, self._future)

    def end(self) -> None:
        """End the event; called once."""
        self._future.set_result(None)
        self.ended.set()


def begin(title: str, tensors: Sequence[torch.Tensor]) -> Record | None:
    """Begin an event, if a profiler is active."""
    return Record(title, tensors) if torch._C._autograd._profiler_enabled() else None
