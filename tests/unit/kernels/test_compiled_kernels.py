"""Kernels whose machine code cannot be kept in files: that costs time, and no job."""

import logging

import pytest

from totalreduce.kernels import machine_code
from totalreduce.kernels.compiled import compiled


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A folder of caches of its own; and no process of the tests has warned yet."""
    monkeypatch.setattr(machine_code, "_said", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def doubled(number):
    return 2 * number


def tripled(number):
    return 3 * number


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_code_is_kept_and_found_again(folder, caplog):
    assert compiled()(doubled)(21) == 42
    again = compiled()(doubled)
    assert (again(21), dict(again.stats.cache_hits) != {}, warnings(caplog)) == (42, True, [])
    made = [*folder.glob("totalreduce/compiled/*.kernels/*.nb?")]
    assert len(made) == 2
    assert {path.stat().st_mode & 0o777 for path in made} == {0o600}
    assert {path.parent.stat().st_mode & 0o777 for path in made} == {0o700}


def test_a_full_disk_is_one_warning(small_disk, folder, caplog):
    disk = small_disk(12)
    folder.symlink_to(disk)
    (disk / "other").write_bytes(bytes(4096))
    assert [compiled()(function)(2) for function in (doubled, tripled)] == [4, 6]
    [warning] = warnings(caplog)
    assert "compiled code cannot be kept in files: No space left on device (ENOSPC)" in warning
    assert [path.name for path in disk.rglob(".*")] == []


def test_without_any_folder_functions_are_compiled_nevertheless(folder, caplog):
    folder.write_text("no folder")
    assert (compiled()(doubled)(21), len(warnings(caplog))) == (42, 1)


@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc", "folder"])
def test_what_others_can_have_written_is_not_unpickled(folder, kind, monkeypatch, caplog):
    assert compiled()(doubled)(21) == 42
    for path in folder.glob(f"totalreduce/compiled/*.kernels{'' if kind == 'folder' else '/' + kind}"):
        path.chmod(0o777 if kind == "folder" else 0o666)
    again = compiled()(doubled)
    assert (again(21), dict(again.stats.cache_hits)) == (42, {})
    [warning] = warnings(caplog)
    assert "others may write to the " in warning


def test_a_damaged_file_is_compiled_anew(folder, caplog):
    assert compiled()(tripled)(2) == 6
    for path in folder.rglob("*.nbi"):
        path.write_bytes(path.read_bytes()[:-20])
    assert compiled()(tripled)(2) == 6
    again = compiled()(tripled)
    assert (again(2), dict(again.stats.cache_hits) != {}, warnings(caplog)) == (6, True, [])


def test_folders_of_old_versions_go(folder):
    compiled()(doubled)(21)
    [own] = folder.glob("totalreduce/compiled/*.kernels")
    for number in range(20):
        (own.parent / f"{number}.kernels").mkdir(mode=0o700)
        (own.parent / f"{number}.kernels" / "file.nbi").write_bytes(b"old")
    for path in own.iterdir():
        path.unlink()
    own.rmdir()
    compiled()(doubled)(21)
    assert len([*own.parent.glob("*.kernels")]) == machine_code._FOLDERS_MAX
    assert own.exists()
