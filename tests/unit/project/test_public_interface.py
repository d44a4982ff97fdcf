"""What users rely on changes only on purpose: public names and signatures, commands and options, variables."""

import re

import public_interface
import pytest
from pages import ROOT

import totalreduce
import totalreduce.horovod
import totalreduce.horovod.elastic
import totalreduce.server
import totalreduce.testing
from totalreduce.foundation.environment import _KNOWN_NAMES

REFERENCE = ROOT / "docs" / "reference"
#: Names of values, which have no docstring: docs/reference/horovod.md has a table of them.
VALUES = {
    *("Adasum", "Average", "Max", "Min", "Product", "Sum"),
    *("HorovodInternalError", "__version__", "elastic", "global_process_set"),
}


def check(written, made):
    missing = sorted(set(written.splitlines()) - set(made.splitlines()))
    new = sorted(set(made.splitlines()) - set(written.splitlines()))
    assert written == made, f"gone: {missing}\nnew: {new}\nIf that is intended: make interface, and commit the files"


def test_names_and_signatures_are_those_of_the_list():
    check(public_interface.NAMES.read_text(), public_interface.public_names())


def test_commands_and_options_are_those_of_the_page():
    check(public_interface.COMMANDS.read_text(), public_interface.commands_page())


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("totalreduce", set(totalreduce.__all__) - {"ps", "__version__"}),
        ("totalreduce.server", set(totalreduce.server.__all__)),
        ("totalreduce.horovod", set(totalreduce.horovod.__all__) - VALUES),
        ("totalreduce.horovod.elastic", set(totalreduce.horovod.elastic.__all__)),
        ("totalreduce.testing", set(totalreduce.testing.__all__)),
    ],
)
def test_every_public_name_is_in_the_reference_once(prefix, names):
    text = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    assert sorted(re.findall(rf"^::: {re.escape(prefix)}\.(\w+)$", text, re.MULTILINE)) == sorted(names)


def test_values_of_horovod_are_in_the_reference():
    table = (REFERENCE / "horovod.md").read_text().partition("## Values")[2]
    assert set(re.findall(r"`(\w+)`", table)) - {"TotalReduceError"} == VALUES


def test_every_variable_is_in_the_reference():
    rows = [line for line in (REFERENCE / "environment.md").read_text().splitlines() if line.startswith("| `TOTAL")]
    described = {name for row in rows for name in re.findall(r"`(TOTALREDUCE_\w+)`", row.split("|")[1])}
    assert described == _KNOWN_NAMES
