"""What the demo's launcher and its workers share: the text, the settings, the way progress is reported.

Imports no torch: the launcher does not need it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.named_files import read_named
from totalreduce.observe.progress import TrainingReport

__all__ = ["DemoSettings", "ProgressListener", "ProgressSender", "built_in_text", "read_text"]

_TEXT_BYTES_MAX = 64 * 1024 * 1024
_TEXT_CHARACTERS_MIN = 2_000
_ALPHABET_MAX = 256
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """One training, as a worker reads it from a file. The model has about 0.8 million parameters."""

    folder: str  #: Where ``text.txt`` is, where the results go and where the launcher listens for progress
    num_ranks: int  #: Ranks whose batches make up the batch of a step, also where one process takes all of it
    distributed: bool  #: Whether the ranks share the work, or one process without communication does it all
    num_steps: int
    seed: int
    timeline: str | None = None  #: Folder of the ranks' timelines
    batch_per_rank: int = 4
    context: int = 64
    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    learning_rate: float = 1.5e-3
    #: Small, so that a small model has several buckets whose communication overlaps with backward.
    bucket_bytes: int = 512 * 1024

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def load(cls, path: Path) -> DemoSettings:
        """Read what ``save`` wrote."""
        return cls(**json.loads(path.read_text("utf-8")))

    def result_path(self, rank: int) -> Path:
        """Where a rank leaves its result."""
        return Path(self.folder) / f"result-{'distributed' if self.distributed else 'single'}-{rank}.json"


def built_in_text() -> str:
    """English prose that every CPython brings along: the documentation behind ``help()``, 450 kB.

    Raises:
        ConfigurationError: This Python comes without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigurationError("this Python comes without pydoc_data.topics; use --text FILE") from error
    return _limit_alphabet("\n\n".join(topics[name] for name in sorted(topics)))


def read_text(path: Path) -> str:
    """Read a text to train on; all but the 255 most frequent characters become one. Raises ``ConfigurationError``."""
    try:
        data = read_named(path, _TEXT_BYTES_MAX)
    except OSError as error:
        raise ConfigurationError(f"--text: cannot read {path}: {error.strerror}") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--text: {path} is not UTF-8 text (byte {error.start})") from error
    if "\0" in text:
        raise ConfigurationError(f"--text: {path} is a binary file (a zero at character {text.index(chr(0))})")
    if len(text) < _TEXT_CHARACTERS_MIN:
        raise ConfigurationError(
            f"--text: {path} has {len(text):,} characters; at least {_TEXT_CHARACTERS_MIN:,} are needed"
        )
    if len(set(text)) < 2:
        raise ConfigurationError(f"--text: {path} has only one character, over and over; nothing to learn")
    return _limit_alphabet(text)


def _limit_alphabet(text: str) -> str:
    counts = Counter(text)
    rare = [character for character, _ in counts.most_common()[_ALPHABET_MAX - 1 :]]
    return text.translate(dict.fromkeys(map(ord, rare), _UNKNOWN)) if len(counts) > _ALPHABET_MAX else text


class _SocketPath:
    """The path of the socket in a folder: a short one, since a socket's path has 107 bytes at most."""

    def __init__(self, folder: str) -> None:
        self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.path = f"/proc/self/fd/{self._folder}/progress"

    def close(self) -> None:
        """Close the folder."""
        os.close(self._folder)


class ProgressSender:
    """The worker's end. A report that nobody can take at once is dropped: watching slows nothing down."""

    def __init__(self, folder: str) -> None:
        self._address = _SocketPath(folder)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def send(self, report: TrainingReport) -> None:
        """Send one report."""
        with suppress(OSError):
            self._socket.sendto(json.dumps(asdict(report)).encode(), self._address.path)

    def close(self) -> None:
        """Free the socket."""
        self._socket.close()
        self._address.close()


class ProgressListener:
    """The launcher's end: a thread that hands every report to ``show`` until the context ends."""

    def __init__(self, folder: str, show: Callable[[TrainingReport], None]) -> None:
        self._address, self._show = _SocketPath(folder), show
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="demo-progress", daemon=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def __enter__(self) -> Self:
        """Begin to listen."""
        self._socket.bind(self._address.path)
        self._socket.settimeout(0.1)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Hand on what has arrived and end the thread."""
        self._stop.set()
        self._thread.join()
        self._socket.close()
        Path(self._address.path).unlink()
        self._address.close()

    def _listen(self) -> None:
        while True:
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                if self._stop.is_set():
                    return
                continue
            self._show(TrainingReport(**json.loads(data)))
