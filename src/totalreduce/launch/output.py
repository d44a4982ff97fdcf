"""What becomes of the workers' output: cut into lines, marked with the rank, kept, or left alone.

A worker's stream arrives in arbitrary pieces. :class:`LineStream` turns them into lines, carriage-return
progress bars and overdue unfinished lines; :class:`Printer` puts the lines of many workers onto one terminal
or file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

__all__ = ["LineStream", "Piece", "Printer", "Tail", "rank_prefixes", "same_file"]

FLUSH_S = 0.2
"""An unfinished line (a prompt, "loading ...") is shown after this long."""

UPDATE_S = 10.0
"""In a file, a progress bar that only ever returns to its line's start leaves one line this often."""

LINE_BYTES_MAX = 64 * 1024

_TOKEN = re.compile(rb"(\r\n|\n|\r)")


@dataclass(frozen=True, slots=True)
class Piece:
    """Something to show.

    Attributes:
        text: Bytes without line ends.
        starts: Nothing of this line was shown before.
        replaces: It overwrites what was shown of this line.
        ends: The line is complete.
    """

    text: bytes
    starts: bool
    replaces: bool
    ends: bool


class LineStream:
    """One stream of one worker, cut into pieces. Knows no file and no clock."""

    def __init__(self, *, in_place: bool) -> None:
        """Choose what a carriage return does.

        Args:
            in_place: It overwrites the line, as on a terminal. Otherwise only a line's last state is shown.
        """
        self._in_place = in_place
        self._pending = b""
        self._return_held = b""
        self._shown = False
        self._replaces = False
        self._pending_since: float | None = None
        self._shown_at = float("-inf")

    def feed(self, data: bytes, now: float) -> Iterator[Piece]:
        """Take what arrived; yields what can be shown at once."""
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
                if len(self._pending) > LINE_BYTES_MAX:
                    yield self._show(now, ends=False)

    def overdue(self, now: float) -> Iterator[Piece]:
        """Yields the unfinished line if it has waited long enough."""
        if self._pending_since is not None and now - self._pending_since >= FLUSH_S:
            if self._in_place or not self._replaces:
                yield self._show(now, ends=False)
            elif now - self._shown_at >= UPDATE_S:
                yield self._show(now, ends=True)

    def close(self, now: float) -> Iterator[Piece]:
        """The stream ended; yields what is left, as a complete line."""
        if self._pending or self._shown:
            yield self._show(now, ends=True)

    def _carriage_return(self, now: float) -> Iterator[Piece]:
        if self._in_place:
            if self._pending:
                yield self._show(now, ends=False)
        # In a file, what was shown of the line cannot be taken back: it is ended instead.
        elif self._shown or (self._pending and now - self._shown_at >= UPDATE_S):
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
    """Several streams onto one terminal or file, never two in one line."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        """Take the function that writes bytes; it must write all of them."""
        self._write = write
        self._open_by: object = None
        self._open_is_update = False

    def show(self, piece: Piece, prefix: bytes, key: object) -> None:
        """Write a piece.

        Args:
            piece: What to show.
            prefix: Put before every line.
            key: Which stream it comes from. A line left open by another is ended, or erased if it is a bar.
        """
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
        """End a line left open, so that what follows starts on its own."""
        if self._open_by is not None:
            self._open_by = None
            self._write(b"\n")


class Tail:
    """The last lines of a stream, within a bound."""

    def __init__(self, bytes_max: int) -> None:
        """Keep at most ``bytes_max`` bytes, the last ones."""
        self._bytes_max = bytes_max
        self._content = bytearray()
        self.dropped_bytes = 0

    def feed(self, data: bytes) -> None:
        """Append; the oldest bytes beyond the bound are dropped and counted."""
        self._content += data
        # Twice the bound before cutting: each byte is moved once, not once per call.
        if len(self._content) > 2 * self._bytes_max:
            self._cut()

    def text(self) -> str:
        """All that is kept."""
        self._cut()
        return self._content.decode("utf-8", "replace")

    def lines(self, count: int) -> tuple[str, ...]:
        """The last ``count`` lines that are not empty."""
        lines = [line.rstrip() for line in re.split(r"[\r\n]+", self.text())]
        return tuple([line for line in lines if line][-count:])

    def _cut(self) -> None:
        surplus = len(self._content) - self._bytes_max
        if surplus > 0:
            del self._content[:surplus]
            self.dropped_bytes += surplus


def rank_prefixes(num_workers: int, stream: IO[str]) -> list[bytes]:
    """``[0] `` for every rank, coloured on a terminal that shows colours, unless ``NO_COLOR`` is set."""
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


def same_file(one: IO[str], other: IO[str]) -> bool:
    """Whether two streams lead to the same terminal or file, so that they share the cursor."""
    try:
        first, second = os.fstat(one.fileno()), os.fstat(other.fileno())
    except (OSError, ValueError):  # a stand-in of a test or a notebook
        return False
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)
