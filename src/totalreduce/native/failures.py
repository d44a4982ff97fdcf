"""The lost rank behind a failure of a native library: the library knows the broken connection, heartbeats the rank."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["GRACE_S", "LOOK_S", "find_lost_rank"]

#: How often a wait for a library looks whether a rank was lost.
LOOK_S = 0.1
#: The heartbeats need some seconds to name a silent rank. Operations that a rank has carried out before it left need
#: some time to end on the other ranks.
GRACE_S = 3.0


def find_lost_rank(error: BaseException, lost: Callable[[], BaseException | None]) -> BaseException:
    """Return the loss of a rank that made a library fail with ``error``; ``error`` itself if no rank is lost."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        loss = lost()
        if loss is not None:
            return loss
        time.sleep(LOOK_S)
    return error
