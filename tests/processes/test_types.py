"""The types of the package reach a user's program: mypy and pyright check one that imports it."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("programs") / "typed_user.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def program(tmp_path):
    """The program, far from the sources of the package, so that checkers find the installed one."""
    return Path(shutil.copy(PROGRAM, tmp_path))


def run(module, *options):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    command = [sys.executable, "-m", module, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=580, check=False, cwd=options[-1].parent)


def test_mypy(program):
    result = run("mypy", "--strict", "--warn-unused-ignores", program)
    assert result.stdout == "Success: no issues found in 1 source file\n", result.stdout


def test_pyright(program):
    text = program.read_text()
    program.write_text(re.sub(r"  # type: ignore\[.*\]", "", text))
    wrong = [number for number, line in enumerate(text.splitlines()) if "# type: ignore" in line]
    found = json.loads(run("pyright", "--outputjson", "--pythonpath", sys.executable, program).stdout)
    errors = [(each["range"]["start"]["line"], each["message"]) for each in found["generalDiagnostics"]]
    assert sorted({line for line, _ in errors}) == wrong, errors
    assert len(wrong) == 3
