"""The handles that asynchronous functions return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError
from totalreduce.tensors.work import Work

__all__ = ["Handle", "poll", "synchronize"]


@final
class Handle:
    """Operations in flight, for ``poll`` and ``synchronize``. They go on if the handle is dropped."""

    def __init__(self, works: Sequence[Work], finish: Callable[[list[torch.Tensor]], Any]) -> None:
        """``finish`` makes the result from the works' tensors; it is called once."""
        self.works, self.finish = works, finish
        self._finished = False
        self._result: Any = None

    def done(self) -> bool:
        """Whether ``wait`` returns at once."""
        return all(work.done() for work in self.works)

    def wait(self) -> Any:
        """Wait for the operations and return the result; each call returns the same object.

        Raises:
            DeadlineExceededError: An operation takes too long; ``wait`` may be called again.
            TotalReduceError: The error of the first work that failed, after all works have ended.
        """
        if self._finished:
            return self._result
        tensors, failure = [], None
        for work in self.works:
            try:
                tensors.append(work.wait())
            except DeadlineExceededError:
                raise
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        with torch.no_grad():
            self._result = self.finish(tensors)
        self._finished, self.works = True, ()
        return self._result

    __call__ = wait  #: Horovod's handles of sparse tensors are called


def poll(handle: Handle) -> bool:
    """Whether an operation has finished, with or without an error; ``synchronize`` then returns at once."""
    return _checked(handle).done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation.

    Returns:
        The result of the function without ``_async``; for ``alltoall_async`` always both results.

    Raises:
        MismatchError: The ranks submitted different operations under this name.
        PeerLost: A rank is gone.
        StallError: Some rank never submitted it.
        DeadlineExceededError: It takes too long; ``synchronize`` may be called again.
    """
    return _checked(handle).wait()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ConfigurationError(f"a {type(handle).__name__} is no handle of an asynchronous operation")
    return handle
