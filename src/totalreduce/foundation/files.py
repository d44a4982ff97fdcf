"""Files that are replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666, folder: int | None = None) -> Iterator[IO[bytes]]:
    """Write a file that takes the place of ``path`` when the block ends: a reader finds the old content or the new one.

    After an error nothing is left of the new file.

    Args:
        path: The path; its folder exists.
        mode: The permissions of the file, without those of the umask.
        folder: The descriptor of the folder from which the path leads; ``None``: the present one.

    Raises:
        OSError: The file cannot be written.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(beside, flags, mode, dir_fd=folder), "wb") as file:
            yield file
        os.replace(beside, path, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside, dir_fd=folder)
        raise
