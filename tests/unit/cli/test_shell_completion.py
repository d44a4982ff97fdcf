"""Shells complete commands and options (``totalreduce --install-completion``)."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("typed", "offered"), [("exa", {"examples"}), ("run --emulate-h", {"--emulate-hosts"})])
def test_bash_is_offered_commands_and_options(typed, offered):
    words = f"totalreduce {typed}"
    asked = {"_TOTALREDUCE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv[0] = 'totalreduce'; from totalreduce.cli.main import main; main()",
    ]
    environment = {**os.environ, **asked}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert set(done.stdout.split()) == offered, done.stderr
