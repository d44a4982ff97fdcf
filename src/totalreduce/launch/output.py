"""The output of the workers: cut into lines and marked with the rank, left to rank 0, written to files, or captured.

A worker's stream arrives in arbitrary pieces. :class:`LineStream` turns them into lines, carriage-return progress bars
and unfinished lines; :class:`Printer` writes the lines of several workers to one terminal or file; a :class:`Relay`
does so for all workers of a run.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import describe_error
from totalreduce.launch.workers import Target

__all__ = ["LineStream", "Output", "Piece", "Printer", "Relay", "Tail", "open_relay"]

Output = Literal["all", "rank0", "capture"] | Path
"""``all``: every line, marked with its rank. ``rank0``: rank 0 writes to the launcher's own streams directly; of the
other ranks only the last errors are kept. ``capture``: in the result. A path: ``rank<i>.log`` in this folder."""

_ERROR_TAIL_BYTES = 8 * 1024
_CAPTURE_BYTES_MAX = 64 * 1024 * 1024
_LAST_LINES = 10
#: An unfinished line (a prompt, "loading ...") is shown after this long.
_FLUSH_S = 0.2
#: In a file, a progress bar that only returns to the start of its line leaves one line this often.
_UPDATE_S = 10.0
_LINE_BYTES_MAX = 64 * 1024

_TOKEN = re.compile(rb"(\r\n|\n|\r)")


@dataclass(frozen=True, slots=True)
class Piece:
    """A line, or a part of one, to be shown.

    Attributes:
        text: Bytes without line ends.
        starts: Whether no part of this line was shown before.
        replaces: Whether it overwrites the part of this line that was shown.
        ends: Whether the line is complete.
    """

    text: bytes
    starts: bool
    replaces: bool
    ends: bool


class LineStream:
    """One stream of one worker, cut into pieces. It knows no file and no clock."""

    def __init__(self, *, in_place: bool) -> None:
        """``in_place``: a carriage return overwrites the line, as on a terminal; otherwise its last state is shown."""
        self._in_place = in_place
        self._pending = b""
        self._return_held = b""
        self._shown = False
        self._replaces = False
        self._pending_since: float | None = None
        self._shown_at = float("-inf")

    def feed(self, data: bytes, now: float) -> Iterator[Piece]:
        """Take bytes that arrived; yields the pieces that can be shown at once."""
        data = self._return_held + data
        # Half of a \r\n may still be on its way.
        self._return_held = b"\r" if data.endswith(b"\r") else b""
        for token in _TOKEN.split(data.removesuffix(b"\r")):
            if token in (b"\n", b"\r\n"):
                yield self._show(now, ends=True)
            elif token == b"\r":
                yield from self._carriage_return(now)
            elif token:
                self._pending_since = now if self._pending_since is None else self._pending_since
                self._pending += token
                if len(self._pending) > _LINE_BYTES_MAX:
                    yield self._show(now, ends=False)

    def overdue(self, now: float) -> Iterator[Piece]:
        """Yield the unfinished line if it has waited long enough."""
        if self._pending_since is not None and now - self._pending_since >= _FLUSH_S:
            if self._in_place or not self._replaces:
                yield self._show(now, ends=False)
            elif now - self._shown_at >= _UPDATE_S:
                yield self._show(now, ends=True)

    def close(self, now: float) -> Iterator[Piece]:
        """Yield the unfinished line as a complete one, at the end of the stream."""
        if self._pending or self._shown:
            yield self._show(now, ends=True)

    def _carriage_return(self, now: float) -> Iterator[Piece]:
        if self._in_place:
            if self._pending:
                yield self._show(now, ends=False)
        # In a file, the part of the line that was shown cannot be removed: the line is ended instead.
        elif self._shown or (self._pending and now - self._shown_at >= _UPDATE_S):
            yield self._show(now, ends=True)
        self._pending, self._pending_since = b"", None
        self._replaces = True

    def _show(self, now: float, *, ends: bool) -> Piece:
        piece = Piece(self._pending, not self._shown, self._replaces and bool(self._pending) and self._in_place, ends)
        self._pending, self._pending_since, self._replaces = b"", None, False
        self._shown = not ends
        self._shown_at = now
        return piece


class Printer:
    """Writes several streams to one terminal or file, never two in one line."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        """``write`` must write all the bytes that it is called with."""
        self._write = write
        self._open_by: object = None
        self._open_is_update = False

    def show(self, piece: Piece, prefix: bytes, key: object) -> None:
        """Write a piece of the stream ``key``. An unfinished line of another one is ended, or erased if it is a bar."""
        is_continued = self._open_by == key
        if not is_continued and not piece.starts and not piece.text and piece.ends:
            return  # the end of a line that another stream's output has already ended
        parts: list[bytes] = []
        if not is_continued and self._open_by is not None:
            parts.append(b"\r\x1b[K" if self._open_is_update else b"\n")
        if is_continued and piece.replaces:
            parts.append(b"\r" + prefix + piece.text + b"\x1b[K")
        else:
            parts.append(piece.text if is_continued else prefix + piece.text)
        if piece.ends:
            parts.append(b"\n")
        self._open_by = None if piece.ends else key
        self._open_is_update = piece.replaces
        self._write(b"".join(parts))

    def finish(self) -> None:
        """End an unfinished line."""
        if self._open_by is not None:
            self._open_by = None
            self._write(b"\n")


class Tail:
    """The last lines of a stream, within a bound."""

    def __init__(self, bytes_max: int) -> None:
        """Keep the last ``bytes_max`` bytes."""
        self._bytes_max = bytes_max
        self._content = bytearray()
        self.dropped_bytes = 0

    def feed(self, data: bytes) -> None:
        """Append bytes; the oldest bytes beyond the bound are dropped and counted."""
        self._content += data
        # Twice the bound before cutting: each byte is moved once, not once per call.
        if len(self._content) > 2 * self._bytes_max:
            self._cut()

    def text(self) -> str:
        """Return the bytes that are kept, as text."""
        self._cut()
        return self._content.decode("utf-8", "replace")

    def lines(self, count: int) -> tuple[str, ...]:
        """Return the last ``count`` lines that are not empty."""
        lines = [line.rstrip() for line in re.split(r"[\r\n]+", self.text())]
        return tuple([line for line in lines if line][-count:])

    def _cut(self) -> None:
        surplus = len(self._content) - self._bytes_max
        if surplus > 0:
            del self._content[:surplus]
            self.dropped_bytes += surplus


def _rank_prefixes(num_workers: int, stream: IO[str]) -> list[bytes]:
    """Return ``[0] `` for every rank, coloured on a terminal that shows colours, unless ``NO_COLOR`` is set."""
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    colours = ("cyan", "green", "magenta", "yellow", "blue", "bright_red", "bright_cyan", "bright_green")
    width = len(str(num_workers - 1))
    plain = [f"[{rank:>{width}}]" for rank in range(num_workers)]
    console = Console(file=stream, soft_wrap=True)
    if not console.is_terminal or console.no_color or console.color_system is None:
        return [f"{text} ".encode() for text in plain]
    prefixes = []
    for rank, text in enumerate(plain):
        with console.capture() as captured:
            console.print(Text(text, Style(color=colours[rank % len(colours)])), end=" ")
        prefixes.append(captured.get().encode())
    return prefixes


def _same_file(one: IO[str], other: IO[str]) -> bool:
    """Whether two streams write to the same terminal or file, so that they share the cursor."""
    try:
        first, second = os.fstat(one.fileno()), os.fstat(other.fileno())
    except (OSError, ValueError):  # a stream of a test or a notebook
        return False
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


class Relay:
    """Keeps the last errors of every rank, and shows nothing: the base of the four relays.

    Attributes:
        targets: Standard output and standard error for the worker of each rank.
    """

    def __init__(self, targets: list[tuple[Target, Target]]) -> None:
        self.targets = targets
        self._tails = [Tail(_ERROR_TAIL_BYTES) for _ in targets]

    def feed(self, rank: int, data: bytes, *, is_error: bool) -> None:
        """Take bytes that a worker has written into a pipe."""
        if is_error:
            self._tails[rank].feed(data)

    def overdue(self) -> None:
        """Show unfinished lines that have waited long enough."""

    def close(self) -> None:
        """Show the rest; no more output will come."""

    def last_errors(self, rank: int) -> tuple[str, ...]:
        """Return the last lines of a worker's standard error."""
        return self._tails[rank].lines(_LAST_LINES)

    def captured(self) -> tuple[list[str], list[str]]:
        """Return standard output and standard error by rank, if they were captured."""
        return [], []


class _Marked(Relay):
    """Shows every line of every rank on the launcher's own streams, behind the rank."""

    def __init__(self, num_workers: int) -> None:
        super().__init__([(subprocess.PIPE, subprocess.PIPE)] * num_workers)
        files = (sys.stdout, sys.stderr)
        self._printers = [Printer(functools.partial(_write, file)) for file in files]
        if _same_file(*files):
            self._printers[1] = self._printers[0]
        self._prefixes = [_rank_prefixes(num_workers, file) for file in files]
        # Only one bar can stay in place at the bottom of a terminal: rank 0's.
        self._streams = [
            [LineStream(in_place=rank == 0 and file.isatty()) for file in files] for rank in range(num_workers)
        ]

    def feed(self, rank: int, data: bytes, *, is_error: bool) -> None:
        super().feed(rank, data, is_error=is_error)
        for piece in self._streams[rank][is_error].feed(data, time.monotonic()):
            self._show(rank, is_error, piece)

    def overdue(self) -> None:
        self._show_all(lambda stream: stream.overdue(time.monotonic()))

    def close(self) -> None:
        self._show_all(lambda stream: stream.close(time.monotonic()))
        for printer in self._printers:
            printer.finish()

    def _show_all(self, pieces_of: Callable[[LineStream], Iterator[Piece]]) -> None:
        for rank, streams in enumerate(self._streams):
            for is_error, stream in enumerate(streams):
                for piece in pieces_of(stream):
                    self._show(rank, bool(is_error), piece)

    def _show(self, rank: int, is_error: bool, piece: Piece) -> None:
        self._printers[is_error].show(piece, self._prefixes[is_error][rank], (rank, is_error))


class _RankZero(Relay):
    """Rank 0 inherits the launcher's streams, terminal included: its progress bars work as always."""

    def __init__(self, num_workers: int) -> None:
        super().__init__([(None, None), *[(subprocess.DEVNULL, subprocess.PIPE)] * (num_workers - 1)])

    def feed(self, rank: int, data: bytes, *, is_error: bool) -> None:
        super().feed(rank, data, is_error=is_error)
        if rank == 0:  # its worker was a spare or runs on another host, and has a pipe
            _write(sys.stderr if is_error else sys.stdout, data)


class _Captured(Relay):
    """Keeps all output in memory, the last 64 MiB of each stream."""

    def __init__(self, num_workers: int) -> None:
        super().__init__([(subprocess.PIPE, subprocess.PIPE)] * num_workers)
        self._kept = [[Tail(_CAPTURE_BYTES_MAX) for _ in range(num_workers)] for _ in range(2)]

    def feed(self, rank: int, data: bytes, *, is_error: bool) -> None:
        super().feed(rank, data, is_error=is_error)
        self._kept[is_error][rank].feed(data)

    def captured(self) -> tuple[list[str], list[str]]:
        output, errors = ([tail.text() for tail in tails] for tails in self._kept)
        return output, errors


class _Files(Relay):
    """Lets each worker write both its streams, in their order, to a file of its own."""

    def __init__(self, num_workers: int, folder: Path) -> None:
        self._paths = [folder / f"rank{rank}.log" for rank in range(num_workers)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._files: list[IO[bytes]] = [path.open("wb") for path in self._paths]
        except OSError as error:
            raise ConfigurationError(f"cannot write the output to {folder}: {describe_error(error)}") from error
        super().__init__([(file, subprocess.STDOUT) for file in self._files])

    def feed(self, rank: int, data: bytes, *, is_error: bool) -> None:
        super().feed(rank, data, is_error=is_error)
        # Only a worker that was a spare or runs on another host has a pipe.
        self._files[rank].write(data)
        self._files[rank].flush()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def last_errors(self, rank: int) -> tuple[str, ...]:
        tail = Tail(_ERROR_TAIL_BYTES)
        with self._paths[rank].open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _ERROR_TAIL_BYTES))
            tail.feed(file.read(_ERROR_TAIL_BYTES))
        return tail.lines(_LAST_LINES)


def open_relay(output: Output, num_workers: int) -> Relay:
    """Return the relay for an output mode.

    Raises:
        ConfigurationError: The mode is unknown, or the folder cannot be written.
    """
    if isinstance(output, Path):
        return _Files(num_workers, output)
    modes = {"all": _Marked, "rank0": _RankZero, "capture": _Captured}
    if output not in modes:
        raise ConfigurationError(f"output is 'all', 'rank0', 'capture' or a folder, not {output!r}")
    return modes[output](num_workers)


def _write(file: IO[str], data: bytes) -> None:
    """Write bytes to a text stream, past its encoding if it has a binary side."""
    binary = getattr(file, "buffer", None)
    if binary is None:  # a stream of a notebook or a test
        file.write(data.decode("utf-8", "replace"))
    else:
        binary.write(data)
    file.flush()
