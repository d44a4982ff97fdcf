"""What is loaded ahead is what the methods call: in a process of its own, where nothing was compiled before."""

import importlib
import logging
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

from totalreduce.kernels import COMPILED, ahead, coding, machine_code, merging, selection, updates

SCRIPT = """
from totalreduce.codecs.codecs import CODECS
from totalreduce.codecs.threshold import Threshold
import totalreduce.kernels.coding, totalreduce.kernels.merging, totalreduce.kernels.quantisation
import totalreduce.kernels.scattering, totalreduce.kernels.selection
from totalreduce.kernels import ahead, coding, merging, quantisation, scattering, selection
from totalreduce.sparse.coded import Coded
from totalreduce.sparse.methods import METHODS
from totalreduce.testing.sparse_conformance import check_method

def called():
    return {
        f"{module.__name__}.{name}": len(kernel.signatures)
        for module in (coding, merging, quantisation, scattering, selection)
        for name, kernel in vars(module).items()
        if hasattr(kernel, "signatures") and name in module.__all__
    }

assert not any(called().values())
ahead.load()
ahead.load_codecs()
before = called()
assert len(before) >= 24 and set(before.values()) == {1}, before
for method in METHODS.values():
    for world_size in (1, 2, 3):
        check_method(method(), world_size, [(5000,), (300, 7)], moves=method.name == "gtopk")
for codec in CODECS.values():
    method = Coded(codec=codec(threshold=1.0) if codec is Threshold else codec())
    for world_size in (1, 2, 3):
        check_method(method, world_size, [(5000,), (300, 7)], moves=False)
assert called() == before, {name: (count, before[name]) for name, count in called().items() if count != before[name]}
"""


@pytest.mark.timeout(300)
def test_no_method_compiles_anything_more() -> None:
    """It takes as long as compiling everything does, if that was not done before."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr


COUNTING = """
import sys
with open("calls", "a") as file:
    file.write(sys.argv[1] + "\\n")
sys.exit(int(open("code").read()))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for Numba's files without any, and a program that counts its calls instead of compiling."""
    monkeypatch.setattr(ahead, "kernels_folder", lambda: tmp_path / "home" / "new.kernels")
    monkeypatch.setattr(ahead, "_PROGRAM", COUNTING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine_code, "_said", set())
    (tmp_path / "code").write_text("0")
    return tmp_path


def test_of_those_that_begin_together_one_compiles(folder) -> None:
    threads = [threading.Thread(target=ahead._compile_once, args=("sparse_calls",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ahead._compile_once("codec_calls")
    ahead._compile_once("sparse_calls")
    assert (folder / "calls").read_text().split() == ["sparse_calls", "codec_calls"]


def test_who_could_not_compile_tries_again_and_says_why(folder, caplog) -> None:
    (folder / "code").write_text("7")
    with caplog.at_level(logging.WARNING):
        ahead._compile_once("sparse_calls")
    assert "has failed (exit code 7); this process compiles them now" in caplog.text
    (folder / "code").write_text("0")
    ahead._compile_once("sparse_calls")
    ahead._compile_once("sparse_calls")
    assert (folder / "calls").read_text().split() == ["sparse_calls", "sparse_calls"]


SLOW = """
import sys
print("7 of 16", flush=True)
sys.stdin = open("wait")
sys.stdin.read()
"""


def test_the_log_says_how_many_kernels_are_compiled_and_when(folder, monkeypatch, caplog) -> None:
    os.mkfifo(folder / "wait")
    said = threading.Event()

    class Heard(logging.Handler):
        def emit(self, record):
            if "7 of 16" in record.getMessage():
                said.set()

    monkeypatch.setattr(ahead, "_PROGRAM", SLOW)
    monkeypatch.setattr(ahead, "_SAY_S", 0.1)
    caplog.set_level(logging.INFO)
    heard = Heard()
    ahead._log.addHandler(heard)
    thread = threading.Thread(target=ahead._compile_once, args=("sparse_calls",))
    thread.start()
    try:
        assert said.wait(60.0)
    finally:
        (folder / "wait").write_text("")
        thread.join()
        ahead._log.removeHandler(heard)
    assert re.search(r"compiled 7 of 16 kernels after \d+ s\n", caplog.text)
    assert re.search(r"the kernels were compiled in \d+ s\n", caplog.text)


def test_a_process_that_takes_too_long_is_ended(folder, monkeypatch, caplog) -> None:
    os.mkfifo(folder / "wait")
    monkeypatch.setattr(ahead, "_PROGRAM", SLOW)
    monkeypatch.setattr(ahead, "_SAY_S", 0.1)
    monkeypatch.setattr(ahead, "_COMPILE_S", 0.3)
    ahead._compile_once("sparse_calls")
    assert "the kernels were not compiled within 0.3 s; this process compiles them now" in caplog.text
    assert not list((folder / "home").rglob("*.compiled"))


def test_a_full_disk_costs_no_process_that_compiles_in_vain(folder, small_disk, caplog) -> None:
    (folder / "home").symlink_to(small_disk(4096) / "own")
    (folder / "home").readlink().mkdir(mode=0o700)
    with pytest.raises(machine_code.NotKeptError, match=r"No space left on device \(ENOSPC\)"):
        ahead._compile_once("sparse_calls")
    assert not (folder / "calls").exists()
    assert [path.name for path in (folder / "home" / "new.kernels").iterdir()] == []


def fails() -> None:
    raise TypeError("Failed in nopython mode\nand more")


@pytest.mark.parametrize("kind", ["Numba fails", "no folder", "a stopped process has the lock"])
def test_where_no_kernel_can_be_compiled_all_are_those_of_numpy(folder, monkeypatch, caplog, kind: str) -> None:
    for module_name in COMPILED:
        module = importlib.import_module(f"totalreduce.kernels.{module_name}")
        for name, kernel in list(vars(module).items()):
            if hasattr(kernel, "twin"):
                monkeypatch.setattr(module, name, kernel)  # is put back after the test
    calls = [fails] if kind == "Numba fails" else []
    expected = "TypeError: Failed in nopython mode"
    if kind == "no folder":
        (folder / "home").write_text("no folder")
        expected = "it cannot be kept in files ("
    elif kind == "a stopped process has the lock":
        expected = "process 7, which compiles it, is stopped"

        def only_one(*_: object) -> None:
            raise machine_code.NoCodeError(expected)

        monkeypatch.setattr(machine_code, "only_one", only_one)
    for _ in range(2):
        ahead._load("sparse_calls", calls)
    assert selection.select.__wrapped__ is selection.plain.select
    assert not any(hasattr(kernel, "signatures") for kernel in (updates.adam, merging.found_in, coding.encode_gaps))
    assert merging.add_up(np.array([1, 1], np.int32), np.ones(2, np.float32), np.array([0, 1, 2]))[1].tolist() == [2.0]
    machine_code.warn("another consequence of rank %d", 3)
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "compute with NumPy, which is slower, because there is no compiled code: " + expected in warning


COLD = """
import totalreduce.kernels.coding, totalreduce.kernels.merging, totalreduce.kernels.quantisation
import totalreduce.kernels.scattering, totalreduce.kernels.selection
from totalreduce.kernels import ahead, coding, merging, quantisation, scattering, selection

ahead.load()
ahead.load_codecs()
for module in (coding, merging, quantisation, scattering, selection):
    for kernel in vars(module).values():
        if hasattr(kernel, "signatures"):
            assert not kernel.stats.cache_misses, (kernel, kernel.stats)
"""


@pytest.mark.slow  # compiles all kernels
def test_no_rank_compiles_in_its_own_process(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = [subprocess.Popen([sys.executable, "-c", COLD], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [run.communicate(timeout=600)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    assert len(list(tmp_path.rglob("*.compiled"))) == 2
