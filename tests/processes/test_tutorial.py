"""The tutorial, followed as a reader would: its files are saved, its commands are run, its outputs are compared."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks

PAGE = "docs/tutorial.md"
NUMBER = re.compile(r"\d+\.\d+")


def run(block, folder):
    """Run the commands of a block, and return what they print."""
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.run(
        ["bash", "-euc", block.source],
        cwd=folder,
        env={**os.environ, **paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, f"{block}: exit code {process.returncode}\n{process.stdout}"
    return process.stdout


def check(expected, output, where):
    """Every line is there. Numbers with a decimal point depend a little on the processor."""
    lines = output.splitlines()
    for wanted in expected.splitlines():
        alike = [line for line in lines if NUMBER.sub("#", line) == NUMBER.sub("#", wanted)]
        assert alike, f"{where}: no line like {wanted!r} in\n{output}"
        numbers = [float(number) for number in NUMBER.findall(wanted)]
        assert [float(number) for number in NUMBER.findall(alike[0])] == pytest.approx(numbers, rel=0.2), where


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial(tmp_path):
    ran, output, losses = 0, "", []
    for block in blocks(PAGE):
        kind, argument = block.note or ("", "")
        if kind == "file":
            (tmp_path / argument).write_text(block.source)
        elif kind == "output" and output is None:
            continue  # of commands that need root
        elif kind == "output":
            check(block.source, output, str(block))
            losses.append(NUMBER.findall(output)[-1])
        elif kind == "not run" or (kind == "needs" and os.geteuid() != 0):
            output = None
        else:
            output = run(block, tmp_path)
            ran += 1
    assert ran >= 7
    assert losses[-1] == losses[-2]  # the run in which a process was killed, and the run in which none was
    assert (tmp_path / "timelines" / "timeline.json").is_file()
