"""Machine code that is kept in files: it is found again, made anew when it is damaged, and refers to what exists."""

import subprocess
import sys
import textwrap

import pytest
from llvmlite import binding

from totalreduce.kernels import exchange_code, machine_code

PROGRAM = """
import sys
from pathlib import Path
from totalreduce.kernels import machine_code
machine_code.__file__ = sys.argv[1] + "/here.py"
sys.path.insert(0, sys.argv[1])
loaded = machine_code.load("doubling", 1, [Path(sys.argv[1], "doubling.py")])
print(loaded.function(21), "numba" in sys.modules)
"""
MODULE = """
from numba import cfunc, int64

def assembly():
    compiled = cfunc(int64(int64))(lambda number: 2 * number)
    return compiled.inspect_llvm(), compiled.native_name
"""


def call(folder, home="."):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        capture_output=True,
        text=True,
        env={"XDG_CACHE_HOME": str(home), "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "doubling.py").write_text(textwrap.dedent(MODULE))
    return tmp_path


def test_the_second_process_needs_no_numba(folder):
    assert call(folder) == ["42", "True"]
    assert call(folder) == ["42", "False"]


def test_another_source_is_compiled_anew(folder):
    call(folder)
    (folder / "doubling.py").write_text(textwrap.dedent(MODULE).replace("2 *", "3 *"))
    assert call(folder) == ["63", "True"]


@pytest.mark.parametrize("damage", ["cut", "other", "empty"])
def test_a_damaged_file_is_made_anew(folder, damage):
    call(folder)
    (file,) = (folder / "__pycache__").glob("doubling-*.o")
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-9], "other": content[:-1] + bytes([content[-1] ^ 1]), "empty": b""}[damage])
    assert call(folder) == ["42", "True"]
    assert file.read_bytes() == content


def test_without_a_folder_beside_the_source_the_users_folder_serves(folder, tmp_path_factory):
    (folder / "__pycache__").write_text("not a folder")
    home = tmp_path_factory.mktemp("home")
    assert call(folder, home) == ["42", "True"]
    assert call(folder, home) == ["42", "False"]
    assert list((home / "totalreduce").glob("doubling-*.o"))


def test_without_any_folder_every_process_compiles(folder):
    (folder / "__pycache__").write_text("not a folder")
    (folder / "home").write_text("not a folder")
    for _ in range(2):
        assert call(folder, folder / "home") == ["42", "True"]


def test_processes_that_start_together_compile_once(folder):
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": "1"},
        )
        for _ in range(3)
    ]
    said = [run.communicate(timeout=100)[0].split() for run in runs]
    assert sorted(said) == [["42", "False"], ["42", "False"], ["42", "True"]]


def test_the_exchange_refers_to_known_symbols_only():
    module = binding.parse_assembly(exchange_code.assembly()[0])
    needed = {symbol.name for symbol in (*module.functions, *module.global_variables) if symbol.is_declaration}
    assert {name for name in needed if not name.startswith("llvm.")} <= set(machine_code.SYMBOLS)
