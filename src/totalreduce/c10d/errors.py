"""What went wrong, in the exceptions that users of torch.distributed catch.

The library's own error is always the ``__cause__``.
"""

from __future__ import annotations

import torch.distributed as dist

from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, PeerLost, TotalReduceError

__all__ = ["as_torch_error"]


def as_torch_error(error: BaseException, what: str = "") -> BaseException:
    """The ``torch.distributed`` error for one of the library's; others are returned as they are.

    ``DistBackendError`` (a ``RuntimeError``) for whatever the network or the other ranks did; it has the attribute
    ``rank`` where one is to blame. Wrong arguments stay what they are, a ``ValueError``, as with gloo.

    Args:
        error: Raised or kept by the group.
        what: The operation, for messages that do not name it.
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
