"""Other systems than Linux: one sentence says what to do, and torch can be imported as before."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import totalreduce_autoload

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
#: As far as an import can tell the system is another one, without the modules that only Unix or only Linux has.
ELSEWHERE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "grp", "pwd", "pty", "resource", "termios", "torch", "numba", "llvmlite"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules.pop(name, None)
sys.platform, system = sys.argv[1], sys.platform
"""


def run(platform, program):
    command = [sys.executable, "-c", ELSEWHERE + program, platform]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("platform", "system", "advice"),
    [
        ("win32", "Windows", "use WSL2"),
        ("darwin", "macOS", "a container with Linux"),
        ("freebsd14", "freebsd14", "Linux"),
    ],
)
@pytest.mark.parametrize("module", ["totalreduce", "totalreduce.cli.main", "totalreduce.c10d.registration"])
def test_an_import_says_in_one_sentence_that_linux_is_needed(platform, system, advice, module):
    made = run(platform, f"import {module}")
    assert made.returncode == 1
    last = made.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: totalreduce needs Linux, and this is {system}: ")
    assert advice in last
    assert "During handling" not in made.stderr


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_torch_can_be_imported_where_the_library_cannot(platform):
    """Torch calls the entry points of installed packages at its import, and fails if one of them does."""
    made = run(
        platform, "import totalreduce_autoload\ntotalreduce_autoload.install()\nprint('totalreduce' in sys.modules)"
    )
    assert (made.returncode, made.stdout.strip()) == (0, "False"), made.stderr


def test_torchs_entry_point_registers_the_back_end():
    module, _, function = PROJECT["entry-points"]["torch.backends"]["totalreduce"].partition(":")
    assert (module, getattr(totalreduce_autoload, function)) == ("totalreduce_autoload", totalreduce_autoload.install)
    program = (
        "sys.platform = system\nsys.meta_path.pop(0)\nimport totalreduce_autoload\ntotalreduce_autoload.install()\n"
        "import torch.distributed as dist\nprint('totalreduce' in dist.Backend.backend_list)"
    )
    made = run("linux", program)
    assert made.stdout.strip() == "True", made.stderr
