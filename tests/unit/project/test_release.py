"""Versions and release notes: one source, and files that agree before a release."""

import re
import tomllib
from pathlib import Path

import pytest
import release_notes

import totalreduce
from totalreduce.foundation.version import VERSION

ROOT = Path(__file__).parents[3]
CHANGELOG = """# Changelog

## [0.2.0] - 2027-01-02

### Added

- A thing ([docs/thing.md](docs/thing.md), [elsewhere](https://example.org)).

## [0.1.0] - unreleased

- Older.
"""
PROJECT = '[tool.hatch.version]\nfallback-version = "0.2.0.dev0"\n'


def test_the_version_is_that_of_the_package():
    assert totalreduce.__version__ == VERSION
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?(\.(dev|post|a|b|rc)\d+|a\d+|b\d+|rc\d+)*(\+[\w.]+)?", VERSION)


def test_without_git_the_version_is_the_one_that_pyproject_names():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version"]
    source = (ROOT / "src/totalreduce/foundation/version.py").read_text()
    assert f'VERSION = "{settings["tool"]["hatch"]["version"]["fallback-version"]}"' in source


def test_notes_are_the_section_of_a_version_with_links_to_its_tag():
    newest, older = release_notes.sections(CHANGELOG)
    assert (newest.version, newest.date, older.text) == ("0.2.0", "2027-01-02", "- Older.")
    assert release_notes.notes(newest, tag="v0.2.0") == (
        "# totalreduce 0.2.0\n\n### Added\n\n"
        "- A thing ([docs/thing.md](../../blob/v0.2.0/docs/thing.md), [elsewhere](https://example.org)).\n"
    )


@pytest.mark.parametrize(
    ("changelog", "citation", "project", "what"),
    [
        (CHANGELOG, "version: 0.2.0", PROJECT, []),
        (CHANGELOG.replace("2027-01-02", "unreleased"), "version: 0.2.0", PROJECT, ["CHANGELOG.md"]),
        (CHANGELOG, "version: 0.1.0", PROJECT, ["CITATION.cff"]),
        (CHANGELOG, "title: x", PROJECT.replace("0.2.0", "0.1.9"), ["CITATION.cff", "pyproject.toml"]),
        (CHANGELOG, "version: 0.2.0", PROJECT.replace("0.2.0", "0.10.0"), []),
    ],
)
def test_files_that_name_the_version_are_compared(changelog, citation, project, what):
    found = release_notes.faults(release_notes.sections(changelog)[0], citation, project)
    assert [line.partition(":")[0] for line in found] == what


def test_the_repositorys_own_notes(capsys):
    assert release_notes.main([]) == 0
    newest = release_notes.sections((ROOT / "CHANGELOG.md").read_text())[0]
    assert capsys.readouterr().out.startswith(f"# totalreduce {newest.version}\n")
    assert f"version: {newest.version}\n" in (ROOT / "CITATION.cff").read_text()
    assert release_notes.main(["9.9.9"]) == 2
    assert "no version 9.9.9; it has 0.1.0" in capsys.readouterr().err
