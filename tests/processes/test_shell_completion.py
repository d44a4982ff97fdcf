"""Shells complete commands and options (``totalreduce --install-completion``)."""

import os
import subprocess
import sys

import pytest

from totalreduce.foundation.environment import words_to_complete

PROGRAM = "import sys; sys.argv[0] = 'totalreduce'; from totalreduce.cli.main import main; main()"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("exa", {"examples"}),
        ("run --emulate-h", {"--emulate-hosts"}),
        ("run --ho", {"--hosts", "--hosts-file"}),
    ],
)
def test_bash_is_offered_commands_and_options(warm_python, typed, offered):
    words = f"totalreduce {typed}"
    asked = {"_TOTALREDUCE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env={**os.environ, **asked}, capture_output=True, text=True, timeout=110, check=False
    )
    assert set(done.stdout.split()) == offered, done.stderr


def test_the_words_are_those_of_the_shell():
    assert words_to_complete({"_TOTALREDUCE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "totalreduce be"}) == [
        "be"
    ]
    assert words_to_complete({"COMP_WORDS": "totalreduce be"}) == []
