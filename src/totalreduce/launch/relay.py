"""Where the workers' output goes: marked lines on the terminal, rank 0 alone, a file per rank, or memory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Literal

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import describe_error
from totalreduce.launch.output import LineStream, Piece, Printer, Tail, rank_prefixes, same_file
from totalreduce.launch.workers import Target

__all__ = ["Output", "Relay", "open_relay"]

Output = Literal["all", "rank0", "capture"] | Path
"""``all``: every line, marked with its rank. ``rank0``: rank 0 writes to the launcher's own streams directly;
of the others only the last errors are kept. ``capture``: in the result. A path: ``rank<i>.log`` in it."""

ERROR_TAIL_BYTES = 8 * 1024
CAPTURE_BYTES_MAX = 64 * 1024 * 1024
LAST_LINES = 10


class Relay:
    """Base of the four: keeps the last errors of every rank, and shows nothing.

    Attributes:
        targets: Standard output and standard error for the worker of each rank.
    """

    def __init__(self, targets: list[tuple[Target, Target]]) -> None:
        """Prepare for the ranks 0 to ``len(targets) - 1``."""
        self.targets = targets
        self._tails = [Tail(ERROR_TAIL_BYTES) for _ in targets]

    def feed(self, rank: int, data: bytes, *, is_error: bool) -> None:
        """Take what a worker wrote into a pipe."""
        if is_error:
            self._tails[rank].feed(data)

    def overdue(self) -> None:
        """Show unfinished lines that have waited long enough."""

    def close(self) -> None:
        """No more output will come."""

    def last_errors(self, rank: int) -> tuple[str, ...]:
        """The last lines of a worker's standard error."""
        return self._tails[rank].lines(LAST_LINES)

    def captured(self) -> tuple[list[str], list[str]]:
        """Standard output and standard error per rank, if that was asked for."""
        return [], []


class _Marked(Relay):
    """Every line of every rank on the launcher's own streams, behind the rank."""

    def __init__(self, num_workers: int) -> None:
        super().__init__([(subprocess.PIPE, subprocess.PIPE)] * num_workers)
        files = (sys.stdout, sys.stderr)
        self._printers = [Printer(_Write(file)) for file in files]
        if same_file(*files):
            self._printers[1] = self._printers[0]
        self._prefixes = [rank_prefixes(num_workers, file) for file in files]
        # Only one bar can stay in place at the bottom of a terminal: rank 0's.
        self._streams = [
            [LineStream(in_place=rank == 0 and file.isatty()) for file in files] for rank in range(num_workers)
        ]

    def feed(self, rank: int, data: bytes, *, is_error: bool) -> None:
        super().feed(rank, data, is_error=is_error)
        for piece in self._streams[rank][is_error].feed(data, time.monotonic()):
            self._show(rank, is_error, piece)

    def overdue(self) -> None:
        now = time.monotonic()
        for rank, streams in enumerate(self._streams):
            for is_error, stream in enumerate(streams):
                for piece in stream.overdue(now):
                    self._show(rank, bool(is_error), piece)

    def close(self) -> None:
        now = time.monotonic()
        for rank, streams in enumerate(self._streams):
            for is_error, stream in enumerate(streams):
                for piece in stream.close(now):
                    self._show(rank, bool(is_error), piece)
        for printer in self._printers:
            printer.finish()

    def _show(self, rank: int, is_error: bool, piece: Piece) -> None:
        self._printers[is_error].show(piece, self._prefixes[is_error][rank], (rank, is_error))


class _RankZero(Relay):
    """Rank 0 inherits the launcher's streams, terminal included: its progress bars work as always."""

    def __init__(self, num_workers: int) -> None:
        super().__init__([(None, None), *[(subprocess.DEVNULL, subprocess.PIPE)] * (num_workers - 1)])


class _Captured(Relay):
    """Everything into memory, the last 64 MiB of each stream."""

    def __init__(self, num_workers: int) -> None:
        super().__init__([(subprocess.PIPE, subprocess.PIPE)] * num_workers)
        self._kept = [[Tail(CAPTURE_BYTES_MAX) for _ in range(num_workers)] for _ in range(2)]

    def feed(self, rank: int, data: bytes, *, is_error: bool) -> None:
        super().feed(rank, data, is_error=is_error)
        self._kept[is_error][rank].feed(data)

    def captured(self) -> tuple[list[str], list[str]]:
        output, errors = ([tail.text() for tail in tails] for tails in self._kept)
        return output, errors


class _Files(Relay):
    """One file a rank, both streams in the order written; the workers write it themselves."""

    def __init__(self, num_workers: int, folder: Path) -> None:
        self._paths = [folder / f"rank{rank}.log" for rank in range(num_workers)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._files: list[IO[bytes]] = [path.open("wb") for path in self._paths]
        except OSError as error:
            raise ConfigurationError(f"cannot write the output to {folder}: {describe_error(error)}") from error
        super().__init__([(file, subprocess.STDOUT) for file in self._files])

    def close(self) -> None:
        for file in self._files:
            file.close()

    def last_errors(self, rank: int) -> tuple[str, ...]:
        tail = Tail(ERROR_TAIL_BYTES)
        with self._paths[rank].open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - ERROR_TAIL_BYTES))
            tail.feed(file.read(ERROR_TAIL_BYTES))
        return tail.lines(LAST_LINES)


def open_relay(output: Output, num_workers: int) -> Relay:
    """The relay for an output mode.

    Raises:
        ConfigurationError: The mode is unknown, or the folder cannot be written.
    """
    if isinstance(output, Path):
        return _Files(num_workers, output)
    modes = {"all": _Marked, "rank0": _RankZero, "capture": _Captured}
    if output not in modes:
        raise ConfigurationError(f"output is 'all', 'rank0', 'capture' or a folder, not {output!r}")
    return modes[output](num_workers)


class _Write:
    """Writes bytes to a text stream, past its encoding where it has a binary side."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __call__(self, data: bytes) -> None:
        binary = getattr(self._file, "buffer", None)
        if binary is None:  # a stand-in of a notebook or a test
            self._file.write(data.decode("utf-8", "replace"))
        else:
            binary.write(data)
        self._file.flush()
