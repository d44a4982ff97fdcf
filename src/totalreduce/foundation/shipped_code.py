"""Compiled functions that the package carries, so that the first job on a machine compiles nothing.

``make dist`` compiles each function for some levels of x86-64 (``tools/ship_code.py``), and links it into a library
that needs nothing but the C library: no Numba, no LLVM. The libraries lie in a folder of the package, with a manifest.
Whoever can write there can write the package's Python as well, so nobody asks for the owner; the digests find what
does not belong together: sources that somebody has changed, and files that are damaged. What does not fit is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from totalreduce.foundation.os_errors import describe_error

__all__ = ["LEVELS", "NoShippedCodeError", "ShippedLibrary", "digest_of", "find_library", "write_manifest"]

#: The instructions that processors of level 3 have beside those of every x86-64, by their names in /proc/cpuinfo, and
#: those that processors of level 4 have beside those.
_V3: Final = frozenset(
    (
        *("cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"),
        *("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"),
    )
)
_V4: Final = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
#: The levels of x86-64, by LLVM's names, and what a processor needs for each. The best one is first. Code for level 2
#: is as fast as that for every x86-64 (docs/design/0020-shipped-code.md).
LEVELS: Final[Mapping[str, frozenset[str]]] = {"x86-64-v4": _V4, "x86-64-v3": _V3, "x86-64": frozenset()}
_MACHINE: Final = "x86_64"
_MANIFEST: Final = "manifest.json"
#: The first processor is in the first lines of a file that has some kilobytes for each.
_CPUINFO_BYTES: Final = 8192


class NoShippedCodeError(Exception):
    """The package carries no code of a function that can be used here; the text says why."""


class ShippedLibrary(NamedTuple):
    """A library that fits the sources and this processor."""

    path: Path  #: The file.
    level: str  #: The level of x86-64 for which it was compiled.


def digest_of(sources: Iterable[Path]) -> str:
    """Return a digest of the text of files."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def find_library(folder: Path, name: str, sources: Iterable[Path]) -> ShippedLibrary:
    """Return the library of a function for this processor. Raises ``NoShippedCodeError``."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        machine, entry = str(manifest["machine"]), manifest["functions"][name]
        made_of, digests = str(entry["sources"]), {str(level): str(each) for level, each in entry["files"].items()}
    except FileNotFoundError as error:
        raise NoShippedCodeError("this installation carries none") from error
    except Exception as error:  # whatever can be in a file
        raise NoShippedCodeError(f"{folder / _MANIFEST} cannot be read: {describe_error(error)}") from error
    if os.uname().machine != machine:
        raise NoShippedCodeError(f"it is for {machine}, and this machine is {os.uname().machine}")
    try:
        if digest_of(sources) != made_of:
            raise NoShippedCodeError(f"the sources of {name} in this installation are not those that it was made of")
        flags = _processor_flags()
        level = next((level for level, needed in LEVELS.items() if level in digests and needed <= flags), None)
        if level is None:
            raise NoShippedCodeError(f"it is for {', '.join(sorted(digests))}, which this processor is not")
        path = folder / f"{name}-{level}.so"
        if hashlib.sha256(path.read_bytes()).hexdigest() != digests[level]:
            raise NoShippedCodeError(f"{path} is damaged")
    except OSError as error:
        raise NoShippedCodeError(f"it cannot be read: {describe_error(error)}") from error
    return ShippedLibrary(path, level)


def write_manifest(folder: Path, sources: Mapping[str, Iterable[Path]], levels: Iterable[str]) -> None:
    """Write the manifest of libraries that are in a folder."""
    functions: dict[str, Any] = {}
    for name, paths in sources.items():
        files = {level: hashlib.sha256((folder / f"{name}-{level}.so").read_bytes()).hexdigest() for level in levels}
        functions[name] = {"sources": digest_of(paths), "files": files}
    document = {"machine": _MACHINE, "functions": functions}
    (folder / _MANIFEST).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _processor_flags() -> frozenset[str]:
    """Return the names of this processor's instructions that the system lets programs use; none if it does not say."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            text = file.read(_CPUINFO_BYTES)
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
