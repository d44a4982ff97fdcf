"""`totalreduce bench growth --dense` as a command."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_command_prints_and_writes_them(tmp_path):
    out = tmp_path / "out.json"
    options = ["--lockstep", "3", "--sizes", "1KiB,300KiB", "--schedules", "ring,tree", "--json", str(out)]
    found = subprocess.run(
        [sys.executable, "-m", "totalreduce", "bench", "growth", "--dense", *options],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert "dense allreduce by number of ranks" in found.stdout
    figures = json.loads(out.read_text())["figures"]
    assert [(figure["ranks"], figure["size"], figure["schedule"]) for figure in figures] == [
        (3, size, name) for size in (1024, 300 * 1024) for name in ("ring", "tree")
    ]
