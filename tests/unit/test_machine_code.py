"""Machine code that is kept in files: it is found again, made anew when it is damaged, and refers to what exists.

The functions of these tests are LLVM's assembly, so that no process imports Numba. The real function is loaded by every
test of the fast lane.
"""

import subprocess
import sys
import textwrap

import pytest

from totalreduce.kernels import machine_code

#: The module is loaded by itself: the package ``kernels`` would import torch and Numba into every process.
PROGRAM = """
import importlib.util
import sys
from pathlib import Path
import totalreduce
path = Path(totalreduce.__path__[0], "kernels", "machine_code.py")
spec = importlib.util.spec_from_file_location("machine_code", path)
machine_code = importlib.util.module_from_spec(spec)
spec.loader.exec_module(machine_code)
machine_code.__file__ = sys.argv[1] + "/here.py"
sys.path.insert(0, sys.argv[1])
loaded = machine_code.load("doubling", 1, [Path(sys.argv[1], "doubling.py")])
print(loaded.function(21), "doubling" in sys.modules)
"""
MODULE = """
def assembly():
    return "define i64 @double(i64 %0) {\\n  %2 = mul i64 2, %0\\n  ret i64 %2\\n}", "double"
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


def test_the_second_process_compiles_nothing(folder):
    assert call(folder) == ["42", "True"]
    assert call(folder) == ["42", "False"]


def test_another_source_is_compiled_anew(folder):
    call(folder)
    (folder / "doubling.py").write_text(textwrap.dedent(MODULE).replace("mul i64 2", "mul i64 30"))
    assert call(folder) == ["630", "True"]


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


def test_a_full_disk_beside_the_source_costs_one_compilation_in_all(folder, small_disk, tmp_path_factory):
    """The code is kept in the next folder, and nothing is left on the full disk."""
    disk = small_disk(8)
    (disk / "other").write_bytes(bytes(8 << 10))
    (folder / "__pycache__").symlink_to(disk)
    home = tmp_path_factory.mktemp("home")
    (folder / "doubling.py").write_text(textwrap.dedent(MODULE).replace("return", "print('compiled')\n    return"))
    assert call(folder, home) == ["compiled", "42", "True"]
    assert call(folder, home) == ["42", "False"]
    assert not [path for path in disk.iterdir() if path.suffix not in ("", ".lock")]


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


def test_a_function_that_refers_to_unknown_symbols_is_refused(folder, monkeypatch):
    text = 'return "declare i64 @frobnicate(i64)\\ndefine i64 @double(i64 %0) {\\n  %2 = call i64 @frobnicate(i64 %0)'
    module = f'def assembly():\n    {text}\\n  ret i64 %2\\n}}", "double"\n'
    (folder / "calling.py").write_text(module)
    monkeypatch.setattr(machine_code, "__file__", str(folder / "here.py"))
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(RuntimeError, match=r"calling refers to symbols .*: frobnicate$"):
        machine_code.load("calling", 1, [folder / "calling.py"])
    assert list(folder.glob("__pycache__/calling-*.o")) == []
