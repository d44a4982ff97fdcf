"""Lines of workers' output: streams cut into lines and progress bars, and put together for one terminal or file.

Plain objects, without files and clocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["LineStream", "Piece", "Printer", "Tail"]

#: An unfinished line (a prompt, "loading ...") is shown after this long.
_FLUSH_S = 0.2
#: In a file, a progress bar that only returns to the start of its line leaves one line this often.
_UPDATE_S = 10.0
_LINE_BYTES_MAX = 64 * 1024

_TOKEN = re.compile(rb"(\r\n|\n|\r)")


@dataclass(frozen=True, slots=True)
class Piece:
    """A line, or a part of one, to be shown."""

    text: bytes  #: Bytes without line ends.
    starts: bool  #: Whether no part of this line was shown before.
    replaces: bool  #: Whether it overwrites the part of this line that was shown.
    ends: bool  #: Whether the line is complete.


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
        parts = [] if is_continued else [self.interrupt()]
        if is_continued and piece.replaces:
            parts.append(b"\r" + prefix + piece.text + b"\x1b[K")
        else:
            parts.append(piece.text if is_continued else prefix + piece.text)
        if piece.ends:
            parts.append(b"\n")
        self._open_by = None if piece.ends else key
        self._open_is_update = piece.replaces
        self._write(b"".join(parts))

    def interrupt(self) -> bytes:
        """Return what is to be written before another line: it ends an unfinished one, or erases a bar."""
        if self._open_by is None:
            return b""
        self._open_by = None
        return b"\r\x1b[K" if self._open_is_update else b"\n"

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

    def lines(self) -> tuple[str, ...]:
        """Return the lines that are not empty. The first one may lack its begin."""
        lines = [line.rstrip() for line in re.split(r"[\r\n]+", self.text())]
        return tuple(line for line in lines if line)

    def _cut(self) -> None:
        surplus = len(self._content) - self._bytes_max
        if surplus > 0:
            del self._content[:surplus]
            self.dropped_bytes += surplus
