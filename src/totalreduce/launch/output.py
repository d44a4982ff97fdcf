"""The output of the workers: marked with the rank, left to rank 0, written to files, or captured.

A worker's stream arrives in arbitrary pieces, which ``lines`` turns into lines. An :class:`OutputSink` writes the
lines of all workers of a run. No fault of the place where they go ends the run, or holds it up
(``observe/reporting.py``).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Literal, Self, final

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import describe_error
from totalreduce.launch.lines import LineStream, Piece, Printer, Tail
from totalreduce.launch.workers import Target
from totalreduce.observe.reporting import ReportWriter, is_of_place, open_report

__all__ = ["Output", "OutputSink", "Streams", "open_sink"]

Output = Literal["all", "rank0", "capture"] | Path
"""``all``: every line, marked with its rank. ``rank0``: rank 0's output as it is; of the other ranks only the last
errors are kept. ``capture``: in the result. A path: ``rank<i>.log`` in this folder."""

_ERROR_TAIL_BYTES = 32 * 1024
_CAPTURE_BYTES_MAX = 64 * 1024 * 1024


@final
class Streams:
    """The launcher's own standard output and standard error. A context manager, which waits for their readers.

    Attributes:
        files: Standard output and standard error, as Python has them; ``None`` if one was closed from the beginning.
        writers: What writes to them. If both are the same terminal, file or pipe, so are the writers.
        printers: What puts lines together for them.
    """

    def __init__(self) -> None:
        output, error = self.files = (sys.stdout, sys.stderr)
        if _same_file(output, error):
            self.writers = (ReportWriter("the output", output, self.note),) * 2
        else:
            self.writers = (
                ReportWriter("standard output", output, self.note),
                ReportWriter("standard error", error, self.note),
            )
        printers = [Printer(writer.write) for writer in self.writers]
        self.printers = printers if self.writers[0] is not self.writers[1] else [printers[0]] * 2

    def note(self, sentence: str) -> None:
        """Write a sentence of the launcher's own to standard error; to standard output if that fails."""
        line = f"totalreduce: {sentence}\n".encode()
        output, error = self.writers
        error.write(self.printers[1].interrupt() + line, is_urgent=True)
        if error.is_failing and output is not error and self.files[1] is not None:
            output.write(self.printers[0].interrupt() + line, is_urgent=True)

    @property
    def is_pending(self) -> bool:
        """Whether a reader is waited for."""
        return any(writer.is_pending for writer in self.writers)

    @property
    def is_full(self) -> bool:
        """Whether the workers should wait for a reader (``ReportWriter.is_full``)."""
        return any(writer.is_full for writer in self.writers)

    def wait(self, timeout_s: float, other: int) -> None:
        """Wait until a stream takes bytes, which it then gets, or until the descriptor ``other`` is readable."""
        pending = [writer for writer in set(self.writers) if writer.is_pending]
        poller = select.poll()
        for writer in pending:
            poller.register(writer.fileno(), select.POLLOUT)
        if not self.is_full:
            poller.register(other, select.POLLIN)
        poller.poll(timeout_s * 1000)
        for writer in pending:
            writer.flush()

    def losses(self) -> list[str]:
        """Wait for the readers, within limits; return sentences about what was lost."""
        for writer in dict.fromkeys(self.writers):
            writer.settle()
        return [loss for writer in dict.fromkeys(self.writers) if (loss := writer.describe_loss())]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in dict.fromkeys(self.writers):
            writer.close()


def _rank_prefixes(num_workers: int, stream: IO[str] | None) -> list[bytes]:
    """Return ``[0] `` for every rank, coloured on a terminal that shows colours, unless ``NO_COLOR`` is set."""
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    colours = ("cyan", "green", "magenta", "yellow", "blue", "bright_red", "bright_cyan", "bright_green")
    width = len(str(num_workers - 1))
    plain = [f"[{rank:>{width}}]" for rank in range(num_workers)]
    if stream is None:
        return [f"{text} ".encode() for text in plain]
    console = Console(file=stream, soft_wrap=True)
    if not console.is_terminal or console.no_color or console.color_system is None:
        return [f"{text} ".encode() for text in plain]
    prefixes = []
    for rank, text in enumerate(plain):
        with console.capture() as captured:
            console.print(Text(text, Style(color=colours[rank % len(colours)])), end=" ")
        prefixes.append(captured.get().encode())
    return prefixes


def _is_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _same_file(one: IO[str] | None, other: IO[str] | None) -> bool:
    """Whether two streams write to the same terminal or file, so that they share the cursor."""
    if one is None or other is None:
        return False
    try:
        first, second = os.fstat(one.fileno()), os.fstat(other.fileno())
    except (OSError, ValueError):  # a stream of a test or a notebook
        return False
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


class OutputSink:
    """Keeps the last errors of every rank, and shows nothing: the base of the four sinks."""

    def __init__(self, targets: Sequence[tuple[Target, Target]], streams: Streams) -> None:
        self.targets = targets  #: Standard output and standard error for the worker of each rank.
        self.streams = streams  #: The launcher's own output.
        self._tails = [Tail(_ERROR_TAIL_BYTES) for _ in targets]

    def feed(self, rank: int, data: bytes, *, is_error: bool) -> None:
        """Take bytes that a worker has written into a pipe."""
        if is_error:
            self._tails[rank].feed(data)

    def overdue(self, now: float) -> None:
        """Show unfinished lines that have waited long enough at a time."""

    def close(self) -> None:
        """Show the rest; no more output will come."""

    def losses(self) -> list[str]:
        """Wait for the readers of the output, within limits; return sentences about what was lost, after ``close``."""
        return self.streams.losses()

    def last_errors(self, rank: int) -> tuple[str, ...]:
        """Return the last lines of a worker's standard error, as many as are kept."""
        return self._tails[rank].lines()

    def forget_errors(self, rank: int) -> None:
        """Note that another process is the worker of a rank, whose errors are not those of the one before."""
        self._tails[rank] = Tail(_ERROR_TAIL_BYTES)

    def captured(self) -> tuple[list[str], list[str]]:
        """Return standard output and standard error by rank, if they were captured."""
        return [], []


class _Marked(OutputSink):
    """Shows every line of every rank on the launcher's own streams, behind the rank."""

    def __init__(self, num_workers: int, streams: Streams) -> None:
        super().__init__([(subprocess.PIPE, subprocess.PIPE)] * num_workers, streams)
        self._printers = streams.printers
        self._prefixes = [_rank_prefixes(num_workers, file) for file in streams.files]
        # Only one bar can stay in place at the bottom of a terminal: rank 0's.
        self._lines = [
            [LineStream(in_place=rank == 0 and _is_terminal(file)) for file in streams.files]
            for rank in range(num_workers)
        ]

    def feed(self, rank: int, data: bytes, *, is_error: bool) -> None:
        super().feed(rank, data, is_error=is_error)
        for piece in self._lines[rank][is_error].feed(data, time.monotonic()):
            self._show(rank, is_error, piece)

    def overdue(self, now: float) -> None:
        self._show_all(lambda lines: lines.overdue(now))

    def close(self) -> None:
        self._show_all(lambda lines: lines.close(time.monotonic()))
        for printer in self._printers:
            printer.finish()

    def _show_all(self, pieces_of: Callable[[LineStream], Iterator[Piece]]) -> None:
        for rank, both in enumerate(self._lines):
            for is_error, lines in enumerate(both):
                for piece in pieces_of(lines):
                    self._show(rank, bool(is_error), piece)

    def _show(self, rank: int, is_error: bool, piece: Piece) -> None:
        self._printers[is_error].show(piece, self._prefixes[is_error][rank], (rank, is_error))


class _RankZero(OutputSink):
    """Shows rank 0's output as it is. It inherits terminals of the launcher: its progress bars work as always.

    Other streams get its output from the launcher, so that a full disk or a closed pipe does not end rank 0. So does a
    terminal that may go before the job ends, because SIGHUP is ignored (``nohup``).
    """

    def __init__(self, num_workers: int, streams: Streams) -> None:
        stays = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        output, error = (None if stays and _is_terminal(file) else subprocess.PIPE for file in streams.files)
        others: list[tuple[Target, Target]] = [(subprocess.DEVNULL, subprocess.PIPE)] * (num_workers - 1)
        super().__init__([(output, error), *others], streams)

    def feed(self, rank: int, data: bytes, *, is_error: bool) -> None:
        super().feed(rank, data, is_error=is_error)
        if rank == 0:
            self.streams.writers[is_error].write(data)


class _Captured(OutputSink):
    """Keeps all output in memory, the last 64 MiB of each stream."""

    def __init__(self, num_workers: int, streams: Streams) -> None:
        super().__init__([(subprocess.PIPE, subprocess.PIPE)] * num_workers, streams)
        self._kept = [[Tail(_CAPTURE_BYTES_MAX) for _ in range(num_workers)] for _ in range(2)]

    def feed(self, rank: int, data: bytes, *, is_error: bool) -> None:
        super().feed(rank, data, is_error=is_error)
        self._kept[is_error][rank].feed(data)

    def captured(self) -> tuple[list[str], list[str]]:
        output, errors = ([tail.text() for tail in tails] for tails in self._kept)
        return output, errors


class _Files(OutputSink):
    """Writes both streams of each worker, in their order, to a file of its own.

    The workers write into pipes: a worker that writes to a full disk gets an error, which would end most programs.
    """

    def __init__(self, num_workers: int, streams: Streams, folder: Path) -> None:
        super().__init__([(subprocess.PIPE, subprocess.STDOUT)] * num_workers, streams)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if not is_of_place(error):  # else the files say it
                raise ConfigurationError(f"cannot write the output to {folder}: {describe_error(error)}") from error
        self._has_warned = False
        self._writers = [
            open_report(folder / f"rank{rank}.log", "the output", self._warn) for rank in range(num_workers)
        ]

    def feed(self, rank: int, data: bytes, *, is_error: bool) -> None:  # noqa: ARG002  (both streams are one)
        super().feed(rank, data, is_error=True)  # its last lines may be those of either stream
        self._writers[rank].write(data)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    def losses(self) -> list[str]:
        return [*(loss for writer in self._writers if (loss := writer.describe_loss())), *super().losses()]

    def _warn(self, sentence: str) -> None:
        """Say the first fault: those of the other files have the same reason."""
        if not self._has_warned:
            self._has_warned = True
            self.streams.note(sentence)


def open_sink(output: Output, num_workers: int, streams: Streams) -> OutputSink:
    """Return the sink for an output mode. Raises ``ConfigurationError``."""
    if isinstance(output, Path):
        return _Files(num_workers, streams, output)
    modes = {"all": _Marked, "rank0": _RankZero, "capture": _Captured}
    if output not in modes:
        raise ConfigurationError(f"output is 'all', 'rank0', 'capture' or a folder, not {output!r}")
    return modes[output](num_workers, streams)
