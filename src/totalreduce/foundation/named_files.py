"""Files that a user names: they are opened so that nobody else can make the process wait, or have it write elsewhere.

A path may lie in a folder into which others write, too, such as ``/tmp``. Whatever lies there was perhaps put there by
somebody else: a named pipe, at which opening would wait for good; a file of many gigabytes; a link to a file of this
user, who would empty it. What is open is looked at, and not the path.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from totalreduce.foundation.private_files import check_owner

__all__ = ["open_for_writing", "read_named", "reading", "write_named"]

#: Opening waits for nothing, makes no terminal that of this process, and no other program inherits the descriptor.
_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@contextlib.contextmanager
def reading(path: Path, *, is_trusted: bool = False) -> Iterator[io.BufferedReader]:
    """Yield a file, open for reading. Links are followed: what they lead to counts. Raises ``OSError``.

    Args:
        path: The path.
        is_trusted: Its content decides what is run, or who may take part: it counts only if this user or root owns it,
            and nobody else may write to it.
    """
    with open(os.open(path, os.O_RDONLY | _FLAGS), "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EPERM, f"{path} is no file")
        if is_trusted:
            check_owner(found, f"the file {path}")
        yield file


def read_named(path: Path, bytes_max: int, *, is_trusted: bool = False) -> bytes:
    """Return the content of a file of at most ``bytes_max`` bytes. Raises ``OSError``."""
    with reading(path, is_trusted=is_trusted) as file:
        is_longer = os.fstat(file.fileno()).st_size > bytes_max
        content = b"" if is_longer else file.read(bytes_max + 1)  # it may grow, and files of /proc have no size
    if is_longer or len(content) > bytes_max:
        raise OSError(errno.EFBIG, f"{path} has more than {bytes_max:,} bytes")
    return content


def open_for_writing(path: Path, *, appends: bool = False) -> int:
    """Return a descriptor, which does not block, of a file to be written; an old one is emptied unless ``appends``.

    A link of this user or of root is followed, as ``/dev/stdout`` is one. A pipe has a reader, or cannot be opened.

    Raises:
        OSError: It cannot be opened; or it is a link, a file or a pipe of somebody else (EPERM).
    """
    flags = os.O_WRONLY | os.O_CREAT | _FLAGS | (os.O_APPEND if appends else 0)
    is_link = False
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        is_link = True
        check_owner(os.lstat(path), f"the link {path}", is_link=True)
        descriptor = os.open(path, flags, 0o666)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) or not is_link:  # /dev/stdout leads to a terminal or pipe of whoever made it
            check_owner(found, f"the file {path}", only_owner=True)
        if stat.S_ISREG(found.st_mode) and not appends:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_named(path: Path, text: str, *, appends: bool = False) -> None:
    """Write a text, in UTF-8, as the content of a file or, with ``appends``, at its end.

    Raises:
        OSError: As ``open_for_writing``; or it cannot be written.
    """
    descriptor = open_for_writing(path, appends=appends)
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        file.write(text.encode())
