"""Machine code that is kept in files: what one process can show."""

import ast
import contextlib
import logging
import os
from pathlib import Path

import pytest

import totalreduce
from totalreduce.foundation.private_files import PrivateFolder
from totalreduce.kernels import exchange, machine_code, relay


def test_without_a_home_no_process_compiles(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_code, "cache_folder", lambda: None)
    (tmp_path / "doubling.py").touch()
    function = machine_code.CompiledFunction("doubling", 1, (tmp_path / "doubling.py",), "what doubles")
    with pytest.raises(machine_code.NotKeptError, match="this user has no home"):
        machine_code.load(function)


def test_only_the_newest_files_stay(tmp_path):
    tmp_path.chmod(0o700)
    for number in range(20):
        path = tmp_path / f"{number}.o"
        path.write_bytes(b"code")
        os.utime(path, (number, number))
    (tmp_path / "other.lock").touch()
    with PrivateFolder(tmp_path) as folder:
        machine_code.keep_newest(folder, ".o", 3)
        assert folder.names() == ["other.lock", "19.o", "18.o", "17.o"]


def test_who_waits_says_how_long_it_takes(tmp_path, monkeypatch, caplog):
    """Rank 0 alone logs it, and another process may be the one that compiles."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(machine_code, "_SAY_S", 0.01)
    monkeypatch.setattr(machine_code.time, "sleep", lambda _: len(caplog.messages) < 3 or holder.close())
    caplog.set_level(logging.INFO)
    with PrivateFolder(tmp_path) as folder, contextlib.ExitStack() as holder:
        assert holder.enter_context(folder.locked("it.lock")) == 0
        with machine_code.only_one(folder, "it.lock"):
            said = caplog.messages
    assert said[:3] == [f"process {os.getpid()} compiles code, once on this machine: 0 s so far"] * 3


def test_a_function_that_refers_to_unknown_symbols_is_refused(tmp_path, monkeypatch):
    text = 'return "declare i64 @frobnicate(i64)\\ndefine i64 @double(i64 %0) {\\n  %2 = call i64 @frobnicate(i64 %0)'
    module = f'def assembly():\n    {text}\\n  ret i64 %2\\n}}", "double"\n'
    (tmp_path / "calling.py").write_text(module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(machine_code.NoCodeError, match=r"calling refers to symbols .*: frobnicate$"):
        machine_code.load(machine_code.CompiledFunction("calling", 1, (tmp_path / "calling.py",), "what calls"))
    assert list(tmp_path.glob("totalreduce/compiled/calling-*.o")) == []


#: Whose text changes no code: they are imported for errors, and for the names of Numba.
NOT_COMPILED = {"call_names.py", "errors.py", "numba_names.py", "os_errors.py"}


def modules_of(path):
    """Return the files of this package that a file imports, and those that these import; not of ``machine_code``."""
    package, found, rest = Path(totalreduce.__path__[0]), set(), [path]
    while rest:
        path = rest.pop()
        if path in found or not path.exists():
            continue
        found.add(path)
        if path.name == "machine_code.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("totalreduce."):
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                rest += [package.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in names]
    return {path for path in found if path.name not in NOT_COMPILED}


@pytest.mark.parametrize("module", [exchange, relay])
def test_the_name_of_a_file_depends_on_all_that_is_compiled(module):
    code = Path(module.__file__).with_name(Path(module.__file__).stem + "_code.py")
    assert {path.resolve() for path in module.FUNCTION.sources} == modules_of(code)
