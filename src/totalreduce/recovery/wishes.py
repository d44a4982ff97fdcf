"""What a rank asks for between two steps. The ranks agree on the largest wish of all of them."""

from __future__ import annotations

import enum

from totalreduce.recovery.snapshots import Snapshots

__all__ = ["Wish", "handles_signals", "wish_to_end"]


class Wish(enum.IntEnum):
    """What one rank asks of all ranks; the largest value of all ranks decides."""

    NOTHING = 0
    MEMBERS = 1  #: Take in the processes that wait to join.
    END = 2  #: Write a last version to disk, and end the loop.


def handles_signals(snapshots: Snapshots | None) -> bool:
    """Whether a signal can end the loop. Equal on all ranks, which then agree in each step."""
    return snapshots is not None and bool(snapshots.on_signal)


def wish_to_end(snapshots: Snapshots | None) -> Wish:
    """Return ``END`` if this process has got a signal to end, else ``NOTHING``."""
    return Wish.END if snapshots is not None and snapshots.is_asked else Wish.NOTHING
