"""How much memory this process may still take: the limits of its containers (control groups of Linux).

A process that takes more than its container may have is killed, and the kernel tells it nothing before. That holds also
where memory is reserved and not touched, as ``posix_fallocate`` does with shared memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["memory_room"]

_UNLIMITED: Final = 1 << 60
_MOUNT: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    """The files of a control group: its limit, what it uses, and which line of its statistics can be given up."""

    limit: str
    usage: str
    reclaimable: str


_VERSION_1: Final = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2: Final = _Files("memory.max", "memory.current", "inactive_file")


def memory_room(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return how many bytes the containers of this process have left for it; ``None`` if none has a limit.

    Pages of files that the kernel can give up count as free. Others may take memory meanwhile.
    """
    rooms: list[int] = []
    with contextlib.suppress(OSError, ValueError):  # a system that says nothing limits nothing that is known here
        for line in membership.read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                rooms += [*_rooms(mount, path, _VERSION_2), *_rooms(mount / "unified", path, _VERSION_2)]
            elif "memory" in controllers.split(","):
                rooms += _rooms(mount / "memory", path, _VERSION_1)
    return min(rooms, default=None)


def _rooms(top: Path, path: str, files: _Files) -> Iterator[int]:
    """Yield the room in a control group, and in each one that contains it, as far as they can be seen from here."""
    group = top / path.strip("/")
    for each in (group, *group.parents):
        if each.is_relative_to(top):
            with contextlib.suppress(OSError, ValueError):  # the root has no limit; "max" is none
                # Version 1 writes the largest number for "no limit".
                limit = int((each / files.limit).read_text(encoding="utf-8"))
                usage = int((each / files.usage).read_text(encoding="utf-8"))
                if limit < _UNLIMITED:
                    yield max(0, limit - usage + _statistic(each / "memory.stat", files.reclaimable))


def _statistic(file: Path, name: str) -> int:
    for line in file.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
