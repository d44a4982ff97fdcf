"""Outputs that only report, such as logs, events and workers' lines: no fault of them ends a job, or holds it up.

They grow: pieces are appended to a file, a terminal, a pipe or a socket. Documents that are written as a whole, such as
timelines and figures, are in ``foundation/files.py``; who writes one says its error once, and goes on.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import stat
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, final

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.named_files import open_for_writing
from totalreduce.foundation.os_errors import describe_error

__all__ = ["Loss", "ReportWriter", "is_of_place", "open_report"]

#: So much waits for a reader. Callers that can wait should do so from then on (``ReportWriter.is_full``).
_BYTES_MAX = 16 << 20
#: If pieces wait for longer than this, and so many bytes wait, further pieces are lost.
_PATIENCE_S = 10.0
#: How often a held terminal is looked at.
_LOOK_S = 0.5
#: A write to a pipe or a socket that is ready for writing takes so many bytes without blocking.
_PIECE_BYTES = select.PIPE_BUF
#: Errors after which no later write can succeed: the other end is gone.
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ENXIO, errno.ENOTCONN)
#: Errors of what a file lies on, and not of its path, so that they can come at any time.
_OF_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENXIO, errno.ESTALE, errno.EMFILE, errno.ENFILE)


class _Stream:
    """A text stream without a descriptor, such as that of a notebook or a test. ``None``: it was closed before."""

    descriptor = -1
    is_file = True

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream

    @property
    def is_ready(self) -> bool:
        """Whether ``take`` does not block."""
        return True

    def take(self, data: memoryview) -> int:
        """Write bytes; return how many were written. Raises ``OSError``."""
        if self._stream is None or self._stream.closed:
            raise OSError(errno.EBADF, "it is closed")
        self._stream.write(bytes(data).decode("utf-8", "replace"))
        self._stream.flush()
        return len(data)

    def close(self) -> None:
        """Close nothing: the stream is somebody else's."""


class _Descriptor:
    """A descriptor, and if needed another one for the same pipe or terminal, which does not block.

    The flag ``O_NONBLOCK`` of a descriptor belongs to all processes that have it, such as the shell: it stays as it is.
    """

    def __init__(self, descriptor: int, *, is_own: bool = False, raw: io.FileIO | None = None) -> None:
        """Take a descriptor.

        Args:
            descriptor: The descriptor.
            is_own: It is closed with this object, and was opened with ``O_NONBLOCK``.
            raw: What it belongs to. When that is closed, the descriptor may be another file's.
        """
        self.descriptor, self._is_own, self._raw = descriptor, is_own, raw
        self.is_file = self._blocks = False
        with contextlib.suppress(OSError):  # the first write says that it is closed
            mode = os.fstat(descriptor).st_mode
            self.is_file = stat.S_ISREG(mode)
            self._blocks = not (self.is_file or is_own)
            if self._blocks and (stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)):
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self.descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
                self._is_own, self._blocks, self._raw = True, False, None

    @property
    def is_ready(self) -> bool:
        """Whether ``take`` does not block."""
        return not self._blocks or _poll(self.descriptor, 0.0)

    def take(self, data: memoryview) -> int:
        """Write bytes; return how many were written. Raises ``OSError``."""
        if self._raw is not None and self._raw.closed:
            raise OSError(errno.EBADF, "it is closed")
        return os.write(self.descriptor, data[:_PIECE_BYTES] if self._blocks else data)

    def close(self) -> None:
        """Close what is this object's own."""
        if self._is_own:
            os.close(self.descriptor)
            self.descriptor, self._is_own = -1, False


class _Piece(NamedTuple):
    data: memoryview
    size: int  #: The number of bytes of the caller, which are the last ones. Before them, a line may be ended.
    since: float  #: When it was to be written

    @property
    def rest(self) -> bytes:
        """The bytes of the caller that are not written."""
        return bytes(self.data[-self.size :])


@dataclass(slots=True)
class Loss:
    """What was lost."""

    lines: int = 0  #: The number of line ends.
    num_bytes: int = 0
    reason: str = ""  #: The first reason; "" if nothing was lost.

    def add(self, data: bytes) -> None:
        """Count bytes."""
        self.lines += data.count(b"\n")
        self.num_bytes += len(data)


@final
class ReportWriter:
    """Appends pieces to a file, a terminal, a pipe or a socket. No method raises an ``OSError``.

    A file is written at once. What a terminal, a pipe or a socket does not take at once waits in memory, and ``flush``
    goes on. The first fault is said to ``warn``, and what is lost is counted. A full disk is tried again with the next
    piece. It has no lock: use it in one thread, or under a lock.
    """

    def __init__(
        self,
        name: str,
        target: int | IO[str] | None,
        warn: Callable[[str], object],
        *,
        is_own: bool = False,
        wait_s: float = 0.0,
        bytes_max: int = _BYTES_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write to a target from now on.

        Args:
            name: What is written to, in warnings.
            target: A descriptor; a text stream, which need not have one; or ``None``: it is closed, and all is lost.
            warn: Is called with a sentence about the first fault.
            is_own: The descriptor is the writer's, and was opened with ``O_NONBLOCK``.
            wait_s: How long ``write`` waits for a slow reader.
            bytes_max: The number of bytes from which on pieces that wait are too many.
            clock: Returns seconds.
        """
        self.name = name  #: What is written to, in warnings.
        self.loss = Loss()  #: What was lost.
        self._warn, self._wait_s, self._bytes_max, self._clock = warn, wait_s, bytes_max, clock
        self._target = _target_of(target, is_own=is_own)
        self._queue: deque[_Piece] = deque()
        self._num_queued = 0
        self._is_gone = self._is_failing = False
        self._is_stuck = False  #: Whether a write has waited in vain since bytes were taken last.
        self._is_mid_line = self._is_torn = False  #: Whether the last line is unfinished; whether its rest was lost.

    @property
    def is_pending(self) -> bool:
        """Whether bytes wait for the reader."""
        return bool(self._queue)

    @property
    def is_full(self) -> bool:
        """Whether so many bytes wait that the caller should wait, too, because the reader is not too slow."""
        return self._num_queued >= self._bytes_max and not self._is_overdue

    @property
    def is_failing(self) -> bool:
        """Whether the last piece was lost."""
        return self._is_failing

    def fileno(self) -> int:
        """Return the descriptor, which is ready for writing when ``flush`` can go on."""
        return self._target.descriptor

    def write(self, data: bytes, *, is_urgent: bool = False) -> None:
        """Write a piece, have it wait, or lose it.

        Args:
            data: Complete lines, or a part of one.
            is_urgent: It may wait although too many bytes do: few pieces are urgent.
        """
        if not data:
            return
        bytes_max = (2 if is_urgent else 1) * self._bytes_max
        if self._is_gone:
            self._lose(data, "")
        elif self._num_queued >= bytes_max and (self._is_overdue or self._num_queued >= 2 * self._bytes_max):
            self._lose(data, f"its reader is too slow: {self._num_queued:,} bytes wait")
        else:
            whole = b"\n" + data if self._is_torn else data
            self._is_torn = False
            self._queue.append(_Piece(memoryview(whole), len(data), self._clock()))
            self._num_queued += len(whole)
            self.flush()
            if self._queue and self._wait_s and not self._is_stuck:
                self._await_reader(self._wait_s)

    def flush(self) -> None:
        """Write what the target takes now."""
        while self._queue and self._target.is_ready:
            data, size, since = self._queue[0]
            try:
                count = self._target.take(data)
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(error)
                continue
            self._is_mid_line = data[count - 1] != ord("\n")
            self._num_queued -= count
            self._is_failing = self._is_stuck = False
            if count < len(data):
                self._queue[0] = _Piece(data[count:], size, since)
            else:
                self._queue.popleft()

    def forget(self) -> None:
        """Drop what waits, in a forked child: the parent writes it."""
        self._queue.clear()
        self._num_queued = 0

    def settle(self) -> None:
        """Wait for the reader until all is written. If it takes nothing for ten seconds, the rest is lost.

        A terminal that is held (Ctrl-S) is waited for: somebody reads what stands there.
        """
        self.flush()
        if self._queue and not self._await_reader(0.0 if self._is_stuck else _PATIENCE_S):
            self._lose(self._take_queue(), "its reader takes nothing")

    def close(self) -> None:
        """Write the rest as ``settle`` does. A descriptor that is not the writer's own stays open."""
        self.settle()
        self._target.close()

    def describe_loss(self) -> str:
        """Return a sentence about what was lost; "" if nothing was."""
        if not self.loss.num_bytes:
            return ""
        return f"{self.name}: {self.loss.lines:,} lines ({self.loss.num_bytes:,} bytes) were lost: {self.loss.reason}"

    @property
    def _is_overdue(self) -> bool:
        return bool(self._queue) and self._clock() - self._queue[0].since >= _PATIENCE_S

    def _await_reader(self, patience_s: float) -> bool:
        """Wait until all is written, or the target has taken nothing for so long; return whether all is written."""
        is_held = self._wait_s == 0 and os.isatty(self._target.descriptor)
        give_up_at = self._clock() + patience_s
        while self._queue and (is_held or self._clock() < give_up_at):
            before = self._num_queued
            _poll(self._target.descriptor, _LOOK_S if is_held else give_up_at - self._clock())
            self.flush()
            if self._num_queued < before:
                give_up_at = self._clock() + patience_s
        self._is_stuck = bool(self._queue)
        return not self._is_stuck

    def _fail(self, error: OSError) -> None:
        """Lose the piece that could not be written; if the target is gone, all that wait."""
        self._is_torn = self._is_mid_line
        self._is_gone = error.errno in _GONE or (error.errno == errno.EIO and not self._target.is_file)
        piece = self._queue.popleft()
        self._num_queued -= len(piece.data)
        self._lose(piece.rest + (self._take_queue() if self._is_gone else b""), describe_error(error))

    def _take_queue(self) -> bytes:
        """Return what waits, which does not wait any more."""
        rest = b"".join(piece.rest for piece in self._queue)
        self.forget()
        return rest

    def _lose(self, data: bytes, reason: str) -> None:
        self.loss.add(data)
        self._is_failing = True
        if not self.loss.reason:
            self.loss.reason = reason
            self._warn(f"{self.name} cannot be written: {reason}. The job goes on; at its end is said what was lost")


def open_report(path: Path, what: str, warn: Callable[[str], object]) -> ReportWriter:
    """Open a file to which reports are appended, anew. Raises ``ConfigurationError``.

    A full disk costs the reports, and a job begins nevertheless. A named pipe without a reader counts as such.

    Args:
        path: The path of the file.
        what: What it is, in errors.
        warn: As for ``ReportWriter``.
    """
    name = f"{what} {path}"
    try:
        return ReportWriter(name, open_for_writing(path), warn, is_own=True)
    except OSError as error:
        if not is_of_place(error):
            raise ConfigurationError(f"cannot write {name}: {describe_error(error)}") from error
        failed = ReportWriter(name, None, warn)
        failed._lose(b"", describe_error(error))
        return failed


def is_of_place(error: OSError) -> bool:
    """Whether an error is one of the disk, or of what else a file lies on, and not of its path."""
    return error.errno in _OF_PLACE


def _target_of(target: int | IO[str] | None, *, is_own: bool) -> _Stream | _Descriptor:
    if isinstance(target, int):
        return _Descriptor(target, is_own=is_own)
    if target is not None:
        with contextlib.suppress(OSError, ValueError):
            target.flush()
    # A stream that writes to a descriptor as it is, and not to a notebook or a test.
    buffer = getattr(target, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return _Descriptor(raw.fileno(), raw=raw) if isinstance(raw, io.FileIO) and not raw.closed else _Stream(target)


def _poll(descriptor: int, timeout_s: float) -> bool:
    """Whether a descriptor can be written without blocking, or has an error that a write would show."""
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))
