"""Which process of a worker runs the program, so that a signal reaches the program and not what it has started.

A worker leads a process group. Its leader runs the program; or it is a shell script, or another command, that has
started the program (``totalreduce run --no-python``).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path

__all__ = ["send_to_program"]

#: What the names of Python's executables begin with.
_PYTHON = ("python", "pypy")


def send_to_program(leader: int, number: int) -> None:
    """Send a signal to the program that a process group runs. Raises ``ProcessLookupError``.

    The program is the first Python process on each way down from the leader. Processes above it get the signal if they
    handle it, as a shell script does with ``trap``; else they wait for the end of the program. A group without a Python
    process gets the signal as a whole, as if a terminal had sent it.
    """
    if _is_python(leader):  # nearly always
        os.kill(leader, number)
        return
    children = _children_in_group(leader)
    programs: list[int] = []
    above: list[int] = []
    found = deque([leader])
    while found:
        pid = found.popleft()
        if _is_python(pid):
            programs.append(pid)
        else:
            above.append(pid)
            found.extend(children.get(pid, ()))
    if not programs:
        os.killpg(leader, number)
        return
    for pid in (*programs, *(pid for pid in above if _handles(pid, number))):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, number)


def _is_python(pid: int) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name.startswith(_PYTHON)
    except OSError:  # it has ended, or nobody may look at it
        return True


def _children_in_group(leader: int) -> dict[int, list[int]]:
    """Return the processes of a group by their parents."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            parent, group = int(fields[1]), int(fields[2])
            if group == leader:
                children.setdefault(parent, []).append(int(name))
    return children


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
