"""What the asynchronous forms return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError
from totalreduce.tensors.work import Work

__all__ = ["Handle", "poll", "synchronize"]


@final
class Handle:
    """Operations under way, for ``poll`` and ``synchronize``. It may be dropped: they go on."""

    def __init__(self, works: Sequence[Work], finish: Callable[[list[torch.Tensor]], Any]) -> None:
        """``finish`` makes the result of what the works return, once."""
        self.works, self.finish = works, finish
        self._finished = False
        self._result: Any = None

    def done(self) -> bool:
        """Whether ``wait`` returns at once."""
        return all(work.done() for work in self.works)

    def wait(self) -> Any:
        """The result, when it is there; the same one every time.

        Raises:
            DeadlineExceededError: It is not there in time; ``wait`` may be called again.
            TotalReduceError: The first work's that failed, after all of them have ended.
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

    __call__ = wait
    """Horovod's handles of sparse tensors are called."""


def poll(handle: Handle) -> bool:
    """Whether an operation has finished, well or not; ``synchronize`` then returns at once."""
    return _checked(handle).done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation.

    Returns:
        What the form without ``_async`` returns; for ``alltoall_async`` always both of its results.

    Raises:
        MismatchError: The ranks submitted different operations under this name.
        PeerLost: A rank is gone.
        StallError: Some rank never submitted it.
        DeadlineExceededError: It takes too long; it may be waited for again.
    """
    return _checked(handle).wait()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ConfigurationError(f"a {type(handle).__name__} is no handle of an asynchronous operation")
    return handle
