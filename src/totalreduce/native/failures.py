"""Who made a native library fail? It says that a connection broke; the heartbeats beside it know whose."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["LOOK_S", "find_culprit"]

#: How often a wait for a library looks whether a rank was lost.
LOOK_S = 0.1
#: The heartbeats need some seconds to name a silent rank.
_PATIENCE_S = 3.0


def find_culprit(error: BaseException, lost: Callable[[], BaseException | None]) -> BaseException:
    """The loss of a rank that a library's error is the echo of, or else that error."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        culprit = lost()
        if culprit is not None:
            return culprit
        time.sleep(LOOK_S)
    return error
