"""The pins of constraints.txt can be installed on every Python that the library supports."""

from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from pages import ROOT

PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
#: The first release of each supported Python, of which a system may have no later one.
FIRST = ("3.11.0", "3.12.0", "3.13.0")


def applies(pin, python):
    version = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    return pin.marker is None or pin.marker.evaluate(version)


@pytest.mark.parametrize("python", FIRST)
def test_every_pin_has_one_version_on_each_python(python):
    names = [pin.name for pin in PINS if applies(pin, python)]
    assert sorted(set(names)) == sorted(names)
    assert {pin.name for pin in PINS} == set(names)


@pytest.mark.parametrize("python", FIRST)
def test_no_installed_pin_refuses_a_supported_python(python):
    """`make docs` could not install a pin on 3.11.2, because its package needed 3.11.5."""
    refused = []
    for pin in PINS:
        if not applies(pin, python):
            continue
        try:
            found = metadata.metadata(pin.name)
        except metadata.PackageNotFoundError:
            continue
        needed = found.get("Requires-Python")
        if needed and pin.specifier.contains(found["Version"]) and not SpecifierSet(needed).contains(python):
            refused.append((pin.name, needed))
    assert refused == []
