"""Prints the release notes of a version: its section of CHANGELOG.md, for the page of a release.

    python tools/release_notes.py            the newest section
    python tools/release_notes.py 0.1.0      that of this version
    python tools/release_notes.py --check    also compare the newest section with CITATION.cff and pyproject.toml

With ``--check``, what a release must say in several places is compared: the newest section has a date, CITATION.cff has
its version, and the fallback version in pyproject.toml is one in development of this version or a later one.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\] - (?P<date>.+)$", re.MULTILINE)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")


@dataclass(frozen=True, slots=True)
class Section:
    """One version in the changelog.

    Attributes:
        version: The version.
        date: The date of the release, or ``unreleased``.
        text: What stands below the heading.
    """

    version: str
    date: str
    text: str


def sections(changelog: str) -> list[Section]:
    """Return the sections of a changelog in the form of Keep a Changelog, the newest one first."""
    found = list(_HEADING.finditer(changelog))
    ends = [match.start() for match in found[1:]] + [len(changelog)]
    return [
        Section(match["version"], match["date"].strip(), changelog[match.end() : end].strip())
        for match, end in zip(found, ends, strict=True)
    ]


def notes(section: Section, *, tag: str = "") -> str:
    """Return the notes of a version; with ``tag``, links to files of the repository name the file at that tag."""
    text = _LINK.sub(rf"](../../blob/{tag}/\1)", section.text) if tag else section.text
    return f"# totalreduce {section.version}\n\n{text}\n"


def faults(newest: Section, citation: str, project: str) -> list[str]:
    """Return what the files do not agree on before a release of the newest section."""
    found = []
    if not _DATE.fullmatch(newest.date):
        found.append(f"CHANGELOG.md: version {newest.version} has no date, but {newest.date!r}")
    cited = re.search(r"^version: (.+)$", citation, re.MULTILINE)
    if cited is None or cited[1] != newest.version:
        found.append(f"CITATION.cff: the version is {cited and cited[1]}, not {newest.version}")
    fallback = tomllib.loads(project)["tool"]["hatch"]["version"]["fallback-version"]
    if not fallback.endswith(".dev0") or _numbers(fallback.removesuffix(".dev0")) < _numbers(newest.version):
        found.append(
            f"pyproject.toml: the fallback version {fallback} is not one in development of {newest.version} or later"
        )
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def main(arguments: list[str] | None = None) -> int:
    """Command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?")
    parser.add_argument("--check", action="store_true", help="compare the files that name the version")
    given = parser.parse_args(arguments)
    known = sections((ROOT / "CHANGELOG.md").read_text("utf-8"))
    chosen = next((section for section in known if given.version in (None, section.version)), None)
    if chosen is None:
        print(
            f"CHANGELOG.md has no version {given.version}; it has {', '.join(each.version for each in known)}",
            file=sys.stderr,
        )
        return 2
    if given.check:
        wrong = faults(
            known[0], (ROOT / "CITATION.cff").read_text("utf-8"), (ROOT / "pyproject.toml").read_text("utf-8")
        )
        for line in wrong:
            print(line, file=sys.stderr)
        if wrong:
            return 1
    print(notes(chosen, tag=f"v{chosen.version}"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
