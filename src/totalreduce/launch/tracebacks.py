"""Tracebacks that workers have written to standard error: the lines of the user's own files, and whose fault it is."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from totalreduce.foundation.checks import listed

__all__ = ["Frame", "Trace", "usage_error", "without_rank"]

_FRAME = re.compile(r'^  File "(.+)", line (\d+)(?:, in (.+))?$')
#: What torch writes before each line of a traceback.
_OF_TORCH = re.compile(r"^\[rank\d+\]: ?")
_PACKAGE = f"{Path(__file__).parents[1]}/"
_INSTALLED = re.compile(r"/(?:site|dist)-packages/([^/]+)")
_STANDARD_LIBRARY = re.compile(r"^<frozen |/lib(?:64)?/python3[^/]*/")
#: What ``argparse`` and Click write, after the usage, if they do not understand the words of a command.
_USAGE = re.compile(r"^(?:\S+: error: |Error: )\S")
#: Errors that say nothing about the program, by the last word of their type: ranks or servers that are gone, and what a
#: machine lacks at the moment.
_PASSING = frozenset(
    {
        *("PeerLost", "RecoveryError", "RendezvousError", "AuthenticationError", "GroupClosed", "ProtocolError"),
        *("DeadlineExceededError", "SlowWorkersError", "StallError", "RefusedError"),
        *("DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "AcceleratorError"),
        *("HorovodInternalError", "HostsUpdatedInterrupt", "KeyboardInterrupt", "EOFError"),
        *("OSError", "IOError", "ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "TimeoutError"),
        *("ConnectionAbortedError", "BrokenPipeError", "BlockingIOError", "InterruptedError", "gaierror", "herror"),
        *("URLError", "HTTPError", "Timeout", "ReadTimeout", "MemoryError", "OutOfMemoryError"),
    }
)
#: The same in the text of an error, of whatever type: libraries have ``RuntimeError`` for these.
_PASSING_TEXT = re.compile(
    r"\brank \d+ is lost: |CUDA|NCCL|[Cc]onnection (?:reset|refused|closed)|[Tt]imed out|out of memory|can't allocate"
)
#: Errors that another host may not have.
_OF_HOST = frozenset({"FileNotFoundError", "PermissionError", "ModuleNotFoundError", "ImportError"})
#: The number of the user's frames that are shown: of more, the first ones and the last ones.
_FIRST_FRAMES, _LAST_FRAMES = 2, 6


class Frame(NamedTuple):
    """A call in a traceback."""

    path: str  #: The file.
    line: int  #: The number of the line.
    source: str  #: The line; "" if the traceback does not show it.

    @property
    def package(self) -> str:
        """The package to which the file belongs; "" if it is the user's own."""
        if self.path.startswith(_PACKAGE):
            return "totalreduce"
        found = _INSTALLED.search(self.path)
        if found is not None:
            return found[1].removesuffix(".py")
        return "Python" if _STANDARD_LIBRARY.search(self.path) else ""

    def describe(self, folder: str) -> str:
        """Return ``train.py:9 (loss = step())``, with the path from a folder if the file is in it."""
        path = os.path.relpath(self.path, folder) if self.path.startswith(f"{folder}/") else self.path
        return f"{path}:{self.line}" + (f" ({self.source})" if self.source else "")


class Trace(NamedTuple):
    """The exception that has ended a process."""

    frames: tuple[Frame, ...]  #: The calls, the innermost one last; none if only the error is known.
    error: str  #: The line with its type and text; "" if the process has written no exception.

    @classmethod
    def of(cls, lines: Sequence[str], error: str) -> Trace:
        """Return what the lines of a traceback say; none of them has torch's mark."""
        frames = []
        for line, following in itertools.pairwise([*lines, ""]):
            match = _FRAME.match(line)
            if match is not None:
                source = following.strip() if following.startswith("    ") else ""
                frames.append(Frame(match[1], int(match[2]), source))
        return cls(tuple(frames), error)

    @property
    def own(self) -> Frame | None:
        """The innermost line of the user's own files."""
        return next((frame for frame in reversed(self.frames) if not frame.package), None)

    @property
    def kind(self) -> str:
        """The name of the type of the exception, without its module."""
        return self.error.partition(":")[0].rpartition(".")[2]

    @property
    def is_of_host(self) -> bool:
        """Whether another host may not have this error: a file or a module is missing."""
        return self.kind in _OF_HOST

    @property
    def of_program(self) -> str:
        """What is equal if the program fails again by the same error; "" if the program is not to blame."""
        if not self.error or self.kind in _PASSING or _PASSING_TEXT.search(self.error):
            return ""
        if not self.frames:
            return self.error
        frame = self.own or self.frames[-1]
        return f"{self.kind} at {frame.path}:{frame.line}"

    def folded(self, folder: str) -> list[str]:
        """Return a line for each call of the user's own files; those of packages are counted."""
        lines: list[str] = []
        for is_own, group in itertools.groupby(self.frames, key=lambda frame: not frame.package):
            frames = list(group)
            if is_own:
                lines += [f"  {frame.describe(folder)}" for frame in frames]
                continue
            names = listed(dict.fromkeys(frame.package for frame in frames), "and")
            lines.append(f"  … {len(frames)} frame{'s' if len(frames) > 1 else ''} of {names}")
        left_out = len(lines) - _FIRST_FRAMES - _LAST_FRAMES
        if left_out > 0:
            lines[_FIRST_FRAMES:-_LAST_FRAMES] = [f"  … {left_out} lines"]
        return lines


def without_rank(line: str) -> str:
    """Return a line without torch's mark of the rank."""
    return _OF_TORCH.sub("", line)


def usage_error(lines: Sequence[str]) -> str:
    """Return the line by which a program refuses the words of its command; "" if it does not."""
    has_usage = any(line.lower().startswith("usage: ") for line in lines)
    return lines[-1] if has_usage and _USAGE.match(lines[-1]) else ""
