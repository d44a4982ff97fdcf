"""The end of a group while the thread that ends it is in the midst of another call of the library.

A signal handler runs in the main thread, between two of its steps. There this thread may hold a lock, or be half-way
through sending a message, and it goes on when the handler returns. So a handler cannot wait for anything that takes
such a lock, and must not change what the interrupted call works on.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final

__all__ = ["is_amid_call"]

_LIBRARY: Final = __name__.partition(".")[0] + "."
#: Packages and modules whose functions take locks or wait for operations. Functions that run the program's own ones for
#: long, as those of ``recovery``, are not among them: the program may well end a group there.
_AMID: Final = tuple(
    _LIBRARY + name
    for name in ("runner.", "tensors.", "native.", "sparse.", "pytorch.", "server.", "c10d.calls", "c10d.work")
) + tuple(_LIBRARY + name for name in ("c10d.callbacks", "c10d.process_group"))


def is_amid_call() -> bool:
    """Return whether a function of the library has been interrupted by the one that calls this.

    That is a signal handler of the program, or a callback of an operation. The functions of the library that have led
    to this call directly, without one of the program in between, do not count.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame).startswith(_LIBRARY):
        frame = frame.f_back
    while frame is not None:
        if _module(frame).startswith(_AMID):
            return True
        frame = frame.f_back
    return False


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
