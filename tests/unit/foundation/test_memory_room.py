"""What the containers of a process leave it: control groups of both versions, as files that the test writes."""

from pathlib import Path

import pytest

from totalreduce.foundation.memory_room import memory_room

MIB = 1 << 20


def make_group(folder: Path, names: tuple[str, str], limit: str, usage: int, statistics: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip((*names, "memory.stat"), (limit, str(usage), statistics), strict=True):
        (folder / name).write_text(f"{text}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


@pytest.mark.parametrize("top", ["", "unified"])
def test_the_tightest_group_counts_and_pages_of_files_are_free(tmp_path: Path, top: str) -> None:
    mount, membership = tmp_path / "mount", tmp_path / "cgroup"
    membership.write_text("0::/job/step\n")
    make_group(mount / top / "job", V2, str(100 * MIB), 70 * MIB, f"anon 5\ninactive_file {20 * MIB}")
    make_group(mount / top / "job/step", V2, "max", 60 * MIB, "inactive_file 7")
    assert memory_room(mount, membership) == 50 * MIB
    make_group(mount / top / "job/step", V2, str(80 * MIB), 81 * MIB, "inactive_file 0")
    assert memory_room(mount, membership) == 0


def test_the_first_version(tmp_path: Path) -> None:
    mount, membership = tmp_path / "mount", tmp_path / "cgroup"
    membership.write_text("7:cpu:/elsewhere\n4:memory:/job\n")
    make_group(mount / "memory/job", V1, str(64 * MIB), 24 * MIB, f"total_inactive_file {MIB}")
    make_group(mount / "memory", V1, "9223372036854771712", 90 * MIB, "total_inactive_file 0")
    assert memory_room(mount, membership) == 41 * MIB


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    mount, membership = tmp_path / "mount", tmp_path / "cgroup"
    membership.write_text("0::/docker/1234\n")
    make_group(mount, V2, str(10 * MIB), 4 * MIB, "inactive_file 0")
    assert memory_room(mount, membership) == 6 * MIB


@pytest.mark.parametrize("text", ["", "0::/job\n", "nonsense\n", "0::/job\n4:memory:/\n"])
def test_without_a_limit_there_is_none(tmp_path: Path, text: str) -> None:
    mount, membership = tmp_path / "mount", tmp_path / "cgroup"
    membership.write_text(text)
    make_group(mount / "job", V2, "max", MIB, "inactive_file 0")
    make_group(mount / "memory", V1, "9223372036854771712", MIB, "total_inactive_file 0")
    assert memory_room(mount, membership) is None
    assert memory_room(mount, tmp_path / "missing") is None
