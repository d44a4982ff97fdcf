"""Kernels whose machine code cannot be kept in files: that costs time, and no job."""

import logging

import numba
import pytest
from numba.core.caching import FunctionCache

from totalreduce.kernels import compiled as module
from totalreduce.kernels.compiled import compiled


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """No process of the tests has warned yet."""
    monkeypatch.setattr(module._KeptCode, "has_warned", False)


def doubled(number):
    return 2 * number


def tripled(number):
    return 3 * number


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_code_is_kept_and_found_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert compiled()(doubled)(21) == 42
    again = compiled()(doubled)
    assert (again(21), dict(again.stats.cache_hits) != {}, warnings(caplog)) == (42, True, [])


def test_a_full_disk_is_one_warning(small_disk, monkeypatch, caplog):
    folder = small_disk(8)
    (folder / "other").write_bytes(bytes(4096))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    assert [compiled()(function)(2) for function in (doubled, tripled)] == [4, 6]
    reason = "No space left on device (ENOSPC)"
    assert warnings(caplog) == [f"compiled kernels cannot be kept in files: {reason}. This process compiles them anew"]


def test_without_any_folder_functions_are_compiled_nevertheless(monkeypatch, caplog):
    def refuse(*_):
        raise RuntimeError("cannot cache function: no locator available for file")

    monkeypatch.setattr(FunctionCache, "__init__", refuse)
    made = compiled()(doubled)
    assert (made(21), made.stats.cache_path, len(warnings(caplog))) == (42, None, 1)


def test_a_damaged_file_is_compiled_anew(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert compiled()(tripled)(2) == 6
    for path in tmp_path.rglob("*.nbi"):
        path.write_bytes(path.read_bytes()[:-20])
    assert compiled()(tripled)(2) == 6
    again = compiled()(tripled)
    assert (again(2), dict(again.stats.cache_hits) != {}, warnings(caplog)) == (6, True, [])
