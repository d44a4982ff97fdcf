"""The folder of a running job: a file of figures from each rank, and a file of the launcher about the job.

Ranks and launcher replace their own files as a whole, and readers read when they like. So no reader can make a rank
wait, and a rank that was killed leaves its last figures. The folder lies in memory, belongs to the user, and nobody
else can open it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

from totalreduce.foundation.environment import runtime_folders
from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.foundation.files import replacing
from totalreduce.foundation.os_errors import describe_error
from totalreduce.observe.figures import DOCUMENT_BYTES_MAX, RankFigures

__all__ = ["Board", "RankReading", "find_boards", "launcher_identity", "make_board"]

_JOB_FILE = "job.json"
#: The launcher's file has a line for each seat and each of its last events.
_JOB_BYTES_MAX = 4 << 20
#: Seats of which figures are read, and jobs that are listed, at most.
SEATS_MAX, _JOBS_MAX = 4096, 256
#: A folder in which no launcher has said who it is, and nothing has changed for so long, belongs to no running job.
_ABANDONED_S = 24 * 3600.0


class RankReading(NamedTuple):
    """The figures of a rank, and how many seconds ago they were written, by the clock of the reader's host."""

    figures: RankFigures
    age_s: float


@final
class Board:
    """The folder of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path  #: The folder.

    def write_figures(self, seat: int, document: bytes) -> None:
        """Replace the figures of a seat. Raises ``OSError`` if that is impossible."""
        self._replace(f"rank{seat}.json", document)

    def write_job(self, document: dict[str, Any]) -> None:
        """Replace what the launcher says about the job. Raises ``OSError`` if that is impossible."""
        self._replace(_JOB_FILE, json.dumps(document).encode())

    def read_figures(self) -> dict[int, RankReading]:
        """Return the figures of all seats that have written some. Files that no rank writes are left out."""
        found = {}
        now = time.time()
        for path in self.figure_files():
            try:
                with path.open("rb") as file:
                    document, written_at = file.read(DOCUMENT_BYTES_MAX + 1), os.fstat(file.fileno()).st_mtime
                figures = RankFigures.decode(document)
            except (OSError, ProtocolError):
                continue
            if path.name == f"rank{figures.seat}.json":
                found[figures.seat] = RankReading(figures, max(0.0, now - written_at))
        return dict(sorted(found.items()))

    def figure_files(self) -> list[Path]:
        """Return the files of the ranks, at most ``SEATS_MAX``."""
        return [path for path, _ in zip(self.path.glob("rank*.json"), range(SEATS_MAX), strict=False)]

    def read_job(self) -> dict[str, Any]:
        """Return what the launcher says about the job; an empty dictionary if it has said nothing yet."""
        try:
            with (self.path / _JOB_FILE).open("rb") as file:
                document = json.loads(file.read(_JOB_BYTES_MAX))
        except (OSError, ValueError):
            return {}
        return document if isinstance(document, dict) else {}

    def is_alive(self) -> bool:
        """Whether the launcher of the job is known to run on this host, in this process's namespace of process ids."""
        job = self.read_job()
        return _is_of_here(job) and job.get("launcher_started") == process_start(job.get("launcher_pid"))

    def is_abandoned(self) -> bool:
        """Whether the job is known to have no launcher any more.

        That is not known of a launcher in another container or on another host that shares the folder. A folder
        without the launcher's file is that of a launcher that was killed when it began, if it is a day old.
        """
        job = self.read_job()
        if job:
            return _is_of_here(job) and job.get("launcher_started") != process_start(job.get("launcher_pid"))
        try:
            return time.time() - self.path.stat().st_mtime > _ABANDONED_S
        except OSError:
            return False

    def is_private(self) -> bool:
        """Whether the folder belongs to this user and nobody else can open it. Raises ``OSError`` if it is missing."""
        return _is_own(self.path)

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _replace(self, name: str, content: bytes) -> None:
        with replacing(self.path / name, mode=0o600) as file:
            file.write(content)


def make_board(job: str) -> Board:
    """Make the folder of a job, and remove those of jobs whose launcher was killed. Raises ``ConfigurationError``."""
    reasons = []
    for folder in runtime_folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(folder):
                reasons.append(f"{folder} is open to others, or theirs")
                continue
            for board in _boards_in(folder):
                if board.is_abandoned():
                    board.remove()
            made = Board(folder / f"{job}-{secrets.token_hex(4)}")
            made.path.mkdir(mode=0o700)
        except OSError as error:
            reasons.append(f"{folder}: {describe_error(error)}")
            continue
        try:
            made.write_job(launcher_identity())
        except OSError as error:  # such as a full disk
            made.remove()
            reasons.append(f"{folder}: {describe_error(error)}")
            continue
        return made
    raise ConfigurationError(f"no folder for the figures of the job can be made: {'; '.join(reasons)}")


def find_boards() -> list[Board]:
    """Return the folders of the jobs that this user's launchers run on this host, the newest first.

    Launchers in other containers are left out: this process cannot know whether they still run.

    Those of single ranks that a launcher on another host has started here come last.
    """
    folders = [folder for folder in runtime_folders() if folder.is_dir() and _is_own(folder)]
    found = [board for folder in folders for board in _boards_in(folder) if board.is_alive()]
    jobs = [({"is_part": False, "began_at": 0.0, **board.read_job()}, board) for board in found]
    return [board for _, board in sorted(jobs, key=lambda pair: (pair[0]["is_part"], -pair[0]["began_at"]))]


def launcher_identity() -> dict[str, Any]:
    """Return the entries of the launcher's file that say which process of which host this one is.

    The id of a process has a meaning only in its namespace of process ids, of which containers have their own.
    """
    pid = os.getpid()
    return {"launcher_pid": pid, "launcher_started": process_start(pid), **_this_namespace()}


def process_start(pid: object) -> int | None:
    """Return when a process of this host was started, in ticks of the kernel; ``None`` if it has ended.

    Together with its id this names a process: ids are used again.
    """
    try:
        fields = Path(f"/proc/{int(str(pid))}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _this_namespace() -> dict[str, str]:
    """Return what names this boot of this host, and the namespace of process ids; empty texts if that is unknown."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"boot_id": boot_id, "pid_namespace": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"boot_id": "", "pid_namespace": ""}


def _is_of_here(job: Mapping[str, Any]) -> bool:
    """Whether the process ids in a launcher's file are those of this process's namespace."""
    return all(value and job.get(name) == value for name, value in _this_namespace().items())


def _boards_in(folder: Path) -> Iterator[Board]:
    for path, _ in zip(folder.iterdir(), range(_JOBS_MAX), strict=False):
        if path.is_dir() and not path.is_symlink():
            yield Board(path)


def _is_own(folder: Path) -> bool:
    found = folder.lstat()
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    )
