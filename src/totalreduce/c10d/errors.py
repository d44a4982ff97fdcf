"""The library's errors as exceptions that users of torch.distributed catch."""

from __future__ import annotations

import torch.distributed as dist

from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, PeerLost, TotalReduceError

__all__ = ["as_torch_error"]


def as_torch_error(error: BaseException, what: str = "") -> BaseException:
    """Return the ``torch.distributed`` error for an error of the library; other errors are returned unchanged.

    Faults of the network and of other ranks become a ``DistBackendError`` (a ``RuntimeError``) with the library's error
    as its cause; its attribute ``rank`` names a lost rank. Wrong arguments stay a ``ValueError``, as with gloo.
    ``what`` is the operation, for messages that do not name it.
    """
    if not isinstance(error, TotalReduceError) or isinstance(error, ConfigurationError):
        return error
    text = str(error)
    if isinstance(error, DeadlineExceededError):
        text = f"{what}: Timed out ({text})" if what else text
    translated = dist.DistBackendError(text)
    if isinstance(error, PeerLost):
        translated.rank = error.rank  # type: ignore[attr-defined]
    translated.__cause__ = error
    return translated
