"""Folders whose files can be trusted, because nobody but this user and root can have written them.

What such a file holds may be run: compiled code. So a folder or a file counts only if it belongs to this user or to
root, and nobody else may write to it. That is asked of what is open, and not of a path, in whose place something else
may come at any time; links are not followed within the folder. Whoever can write into the folder needs no forged
digest to have a program run what he likes, so digests are no substitute.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self, final

from totalreduce.foundation.files import replacing

__all__ = ["PrivateFolder", "check_owner"]

#: Nothing is executed, followed, waited for (a named pipe), or inherited by another program.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@final
class PrivateFolder:
    """A folder that only this user or root can write to. A descriptor keeps it, whatever becomes of its path.

    Every method raises ``OSError`` if the folder or the file is missing, cannot be used, or may have been written by
    somebody else (EPERM; the text says why).
    """

    def __init__(self, path: Path, *, makes: bool = False) -> None:
        """Open a folder.

        Args:
            path: The path. The last part may be a link of this user or of root.
            makes: Make the folder, for this user alone, if there is none.
        """
        if makes:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_symlink():
            check_owner(path.lstat(), f"the link {path}", is_link=True)
            path = path.resolve()
        self.path = path  #: Where it was opened.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            check_owner(os.fstat(self._descriptor), f"the folder {path}")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return the folder, which is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the folder."""
        self.close()

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)

    def read(self, name: str, bytes_max: int) -> bytes:
        """Return the content of a file. A file with more than ``bytes_max`` bytes is refused (EFBIG)."""
        with self._open(name, os.O_RDONLY) as descriptor:
            if os.fstat(descriptor).st_size > bytes_max:
                raise OSError(errno.EFBIG, f"{self.path / name} has more than {bytes_max:,} bytes")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(bytes_max)

    def check(self, name: str) -> None:
        """Check a file that is read by others than this object."""
        with self._open(name, os.O_RDONLY):
            pass

    def has(self, name: str) -> bool:
        """Whether there is something of this name."""
        return os.access(name, os.F_OK, dir_fd=self._descriptor, follow_symlinks=False)

    def write(self, name: str, content: bytes) -> None:
        """Put a file in the place of what has the name. After an error nothing is left of it."""
        with self.writing(name) as file:
            file.write(content)

    def writing(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Return a context with a new file, which takes the place of what has the name when the block ends."""
        return replacing(Path(name), mode=0o600, folder=self._descriptor)

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[int | None]:
        """Yield 0 when this process has a lock, or at once the id of the process that has it.

        A file system without locks gives it to several processes.

        Yields:
            0: This process has the lock until the block ends. Another number: the process that has it. ``None``: a
            process has it that has not said which one it is.
        """
        with self._open(name, os.O_RDWR | os.O_CREAT) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 20, 0)
                yield int(holder) if holder.isdigit() else None
                return
            except OSError:
                yield 0
                return
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield 0

    def names(self) -> list[str]:
        """Return the names in the folder, those that were changed last first."""
        changed: dict[str, float] = {}
        for name in self._listed():
            with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                changed[name] = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_mtime
        return sorted(changed, key=lambda name: -changed[name])

    def size(self, name: str) -> int:
        """Return the bytes that a file takes; of a folder, those of the files in it."""
        found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            return found.st_size
        with PrivateFolder(self.path / name) as inner:
            return sum(inner.size(each) for each in inner._listed())

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with the files in it. What is gone already is no error."""
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                os.unlink(name, dir_fd=self._descriptor)
                return
            with PrivateFolder(self.path / name) as inner:
                for each in inner._listed():
                    inner.remove(each)
            os.rmdir(name, dir_fd=self._descriptor)

    def _listed(self) -> list[str]:
        return os.listdir(self._descriptor)

    @contextlib.contextmanager
    def _open(self, name: str, flags: int) -> Iterator[int]:
        descriptor = os.open(name, flags | _FLAGS, 0o600, dir_fd=self._descriptor)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EPERM, f"{self.path / name} is no file")
            check_owner(found, f"the file {self.path / name}")
            yield descriptor
        finally:
            os.close(descriptor)


def check_owner(found: os.stat_result, what: str, *, is_link: bool = False, only_owner: bool = False) -> None:
    """Raise ``OSError`` if somebody else than this user and root can have written something.

    Args:
        found: What it is.
        what: Its name in errors.
        is_link: It is a link, whose mode means nothing.
        only_owner: It is to be written, so others may write to it, too.
    """
    own = os.geteuid()
    if found.st_uid not in (own, 0):
        raise OSError(errno.EPERM, f"{what} belongs to user {found.st_uid}, and this process runs as user {own}")
    if not (is_link or only_owner) and found.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        raise OSError(errno.EPERM, f"others may write to {what} (mode {mode:o}): `chmod go-w` ends that")
