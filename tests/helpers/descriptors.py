"""The open files of this process, so that tests can see which ones they left behind."""

from __future__ import annotations

import contextlib
import os


def open_files() -> set[tuple[str, str]]:
    """Return the number and the target of every open file.

    A test compares the sets of before and after: counts would also differ where the garbage collector closes a file
    that an earlier test of the same process had left open.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
