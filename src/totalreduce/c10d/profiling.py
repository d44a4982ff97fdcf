"""Operations as events of torch's profiler, named and shaped as gloo's are: ``totalreduce:all_reduce``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

import torch

__all__ = ["Record", "begin"]


@final
class Record:
    """One event, from submission to the end of the operation; the end comes from another thread, as with gloo."""

    def __init__(self, title: str, tensors: Sequence[torch.Tensor]) -> None:
        """Begin."""
        self.ended = threading.Event()
        self._event = torch._C._profiler._RecordFunctionFast(title, list(tensors))
        self._event.__enter__()

    def end(self) -> None:
        """End; called once."""
        self._event.__exit__(None, None, None)
        self.ended.set()


def begin(title: str, tensors: Sequence[torch.Tensor]) -> Record | None:
    """Begin an event if somebody profiles."""
    return Record(title, tensors) if torch.autograd._profiler_enabled() else None
