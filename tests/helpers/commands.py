"""The command line in the process of a test."""

from typer.testing import CliRunner

from totalreduce.cli.main import build


def invoke(*words):
    """Run ``totalreduce WORDS`` and return what Typer's runner has seen: output, exit code and exception."""
    return CliRunner().invoke(build([str(words[0])]), [str(word) for word in words])
