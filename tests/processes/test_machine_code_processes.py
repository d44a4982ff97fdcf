"""Machine code that is kept in files: it is found again, made anew when it is damaged, and refers to what exists.

The functions of these tests are LLVM's assembly, so that no process imports Numba. The real function is loaded by every
test of the fast lane.
"""

import os
import signal
import subprocess
import sys
import textwrap

import hostile
import pytest

#: The module is loaded by itself: the package ``kernels`` would import torch and Numba into every process.
PROGRAM = """
import importlib.util
import logging
import sys
from pathlib import Path
import totalreduce
path = Path(totalreduce.__path__[0], "kernels", "machine_code.py")
spec = importlib.util.spec_from_file_location("machine_code", path)
machine_code = importlib.util.module_from_spec(spec)
spec.loader.exec_module(machine_code)
logging.basicConfig(level=logging.WARNING, format="%(message)s")
sys.path.insert(0, sys.argv[1])
try:
    sources = (Path(sys.argv[1], "doubling.py"),)
    loaded = machine_code.load(machine_code.CompiledFunction("doubling", 1, sources, "what doubles"))
except machine_code.NoCodeError as error:
    print(f"no code: {error}")
else:
    print(loaded.function(21), "doubling" in sys.modules)
"""
MODULE = """
def assembly():
    return "define i64 @double(i64 %0) {\\n  %2 = mul i64 2, %0\\n  ret i64 %2\\n}", "double"
"""


def run(folder, **env):
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        capture_output=True,
        text=True,
        env={"XDG_CACHE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", **env},
        check=False,
        timeout=100,
    )
    assert made.returncode == 0, made.stderr
    return made


def call(folder, **env):
    return run(folder, **env).stdout.split()


def file_of(folder):
    (file,) = (folder / "home" / "totalreduce" / "compiled").glob("doubling-*.o")
    return file


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "doubling.py").write_text(textwrap.dedent(MODULE))
    return tmp_path


def test_the_second_process_compiles_nothing(folder):
    assert call(folder) == ["42", "True"]
    assert call(folder) == ["42", "False"]


def test_code_and_its_folder_are_for_this_user_alone(folder):
    call(folder)
    assert [path.stat().st_mode & 0o777 for path in (file_of(folder), file_of(folder).parent)] == [0o600, 0o700]


def test_another_source_is_compiled_anew(folder):
    call(folder)
    (folder / "doubling.py").write_text(textwrap.dedent(MODULE).replace("mul i64 2", "mul i64 30"))
    assert call(folder) == ["630", "True"]


def test_settings_of_numba_that_change_the_code_have_code_of_their_own(folder):
    assert call(folder) == ["42", "True"]
    assert call(folder, NUMBA_OPT="0") == ["42", "True"]
    assert call(folder, NUMBA_OPT="0") == ["42", "False"]
    assert call(folder, NUMBA_NUM_THREADS="2") == ["42", "False"]


@pytest.mark.parametrize("damage", ["cut", "other", "empty"])
def test_a_damaged_file_is_made_anew(folder, damage):
    call(folder)
    file = file_of(folder)
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-9], "other": content[:-1] + bytes([content[-1] ^ 1]), "empty": b""}[damage])
    assert call(folder) == ["42", "True"]
    assert file.read_bytes() == content


def replace_file(folder, kind):
    """Put something into the place of the file, or change who can write it; return what must stay as it is."""
    file, other = file_of(folder), folder / "victim"
    other.write_bytes(file.read_bytes())
    if kind == "others may write the file":
        file.chmod(0o666)
    elif kind == "others may write the folder":
        file.parent.chmod(0o770)
    elif kind == "the file is another user's":
        os.chown(file, 1234, 1234)
    elif kind == "the folder is another user's":
        os.chown(file.parent, 1234, 1234)
    else:
        file.unlink()
        if kind == "a link":
            file.symlink_to(other)
        else:
            assert hostile.put(file, kind)
    return other


KINDS = [
    *("others may write the file", "others may write the folder", "the file is another user's"),
    *("the folder is another user's", "a link", "a pipe", "a folder", "a huge file"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_somebody_else_can_have_written_is_not_loaded(folder, kind):
    if "another user's" in kind and os.geteuid() != 0:
        pytest.skip("giving files away needs root")
    call(folder)
    (folder / "doubling.py").touch()
    other = replace_file(folder, kind)
    before = other.read_bytes()
    made = run(folder)
    assert made.stdout.startswith("no code: it cannot be kept in files (")
    assert made.stderr == "", "who calls it warns, once for all ranks"
    assert other.read_bytes() == before


def test_the_lock_is_no_way_to_empty_a_file(folder):
    call(folder)
    file, victim = file_of(folder), folder / "victim"
    victim.write_text("dear")
    file.unlink()
    lock = file.with_name(f"{file.name}.lock")
    lock.unlink()
    lock.symlink_to(victim)
    assert run(folder).stdout.startswith("no code: it cannot be kept in files (")
    assert victim.read_text() == "dear"


def test_a_link_of_this_user_in_the_place_of_the_folder_is_followed(folder):
    (folder / "home" / "totalreduce").mkdir(parents=True)
    (folder / "elsewhere").mkdir(mode=0o700)
    (folder / "home" / "totalreduce" / "compiled").symlink_to(folder / "elsewhere")
    assert call(folder) == ["42", "True"]
    assert call(folder) == ["42", "False"]
    assert list((folder / "elsewhere").glob("doubling-*.o"))


def test_without_a_folder_no_process_compiles(folder):
    (folder / "home").write_text("not a folder")
    (folder / "doubling.py").write_text("import nothing_must_be_compiled")
    made = run(folder)
    assert made.stdout.startswith("no code: it cannot be kept in files (")
    assert made.stdout.endswith("; XDG_CACHE_HOME can name another folder\n")


def test_a_read_only_folder_has_code_that_is_there(folder, small_disk):
    disk = small_disk(4096)
    (folder / "home").symlink_to(disk)
    call(folder)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True, timeout=20)
    assert call(folder) == ["42", "False"]
    (folder / "doubling.py").write_text(textwrap.dedent(MODULE).replace("mul i64 2", "mul i64 30"))
    assert run(folder).stdout.startswith("no code: it cannot be kept in files (Read-only file system (EROFS))")


def test_on_a_full_disk_no_process_compiles_and_nothing_is_left_there(folder, small_disk):
    disk = small_disk(2048)
    (folder / "home").symlink_to(disk)
    call(folder)
    file_of(folder).unlink()
    (folder / "doubling.py").write_text("import nothing_must_be_compiled")
    (disk / "rest").write_bytes(bytes(1792 << 10))  # files can still be made, but what is compiled may need more
    made = run(folder)
    assert made.stdout.startswith("no code: it cannot be kept in files (No space left on device (ENOSPC))")
    names = [path.name for path in (disk / "totalreduce" / "compiled").iterdir()]
    assert [name for name in names if name[0] == "." or name == "room"] == []


@pytest.mark.parametrize("says_who", [True, False])
def test_a_stopped_process_that_compiles_is_not_waited_for(folder, says_who):
    call(folder)
    file = file_of(folder)
    file.unlink()
    hold = (
        "import fcntl, os, sys, time\n"
        f"lock = open({str(file) + '.lock'!r}, 'r+')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        f"lock.truncate(0); lock.write(str(os.getpid()) if {says_who} else ''); lock.flush()\n"
        "print('ready', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "ready\n"
        holder.send_signal(signal.SIGSTOP)
        waiting = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={"XDG_CACHE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"},
        )
        if says_who:
            said = waiting.communicate(timeout=30)[0]
            assert said.startswith(f"no code: process {holder.pid}, which compiles it, is stopped (lock ")
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.communicate(timeout=3)
        holder.kill()
        assert says_who or waiting.communicate(timeout=30)[0].split() == ["42", "True"]


def test_what_cannot_be_compiled_is_an_error_that_says_why(folder):
    (folder / "doubling.py").write_text("def assembly():\n    raise TypeError('another Numba\\nand more')\n")
    assert run(folder).stdout == "no code: doubling cannot be compiled: TypeError: another Numba\n"
    assert run(folder, NUMBA_DISABLE_JIT="1").stdout == "no code: NUMBA_DISABLE_JIT is set\n"


def test_processes_that_start_together_compile_once(folder):
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={"XDG_CACHE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"},
        )
        for _ in range(3)
    ]
    said = [run.communicate(timeout=100)[0].split() for run in runs]
    assert sorted(said) == [["42", "False"], ["42", "False"], ["42", "True"]]
