"""Processes that use the fake accelerator: programs that are asked for cases, and the tests that ask.

A program ends with ``fake = loaded()``, what its cases need, and ``answer(CASES)``. A test has a ``DeviceJob``.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fake_accelerator import FakeAccelerator, NoCompiler, load

SOURCE = """
import runpy
sys.path.append({helpers!r})
sys.argv = [{program!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _say(event: str, **facts: Any) -> None:
    os.write(1, (json.dumps({"event": event, **facts}) + "\n").encode())


def loaded(**facts: Any) -> FakeAccelerator:
    """In the program: load the device without delays, and tell the test. Without a compiler, say so and end."""
    try:
        fake = load(0.0, 0.0)
    except NoCompiler as error:
        _say("loaded", missing=str(error))
        sys.exit()
    _say("loaded", missing=None, **facts)
    return fake


def answer(cases: Mapping[str, Callable[[], object]], begin: Callable[[], object] = lambda: None) -> None:
    """In the program: run cases until there are no more names, each after ``begin``; tell the test what they return."""
    for line in sys.stdin:
        outcome, failure = None, None
        begin()
        try:
            outcome = cases[line.strip()]()
        except BaseException:
            failure = traceback.format_exc()
        _say("case", failure=failure, outcome=outcome)


def names_of_cases(program: Path) -> list[Any]:
    """In the test: the functions with the decorator ``@case``, each after the decorator's argument if there is one."""
    found = re.findall(r'^@case(?:\("(\w+)"\))?\ndef (\w+)\(', program.read_text(), re.MULTILINE)
    return [(argument, name) if argument else name for argument, name in found]


class DeviceJob:
    """In the test: the ranks of a program. The test is skipped where there is no compiler.

    Attributes:
        facts: What rank 0 says after it has loaded the device.
    """

    def __init__(self, zygote: Any, program: Path, ranks: int, **variables: str) -> None:
        import pytest

        source = SOURCE.format(helpers=str(Path(__file__).parents[1]), program=str(program))
        self._workers = zygote.start(ranks, source, TOTALREDUCE_PEER_TIMEOUT_S="60", **variables)
        # The first process on a machine compiles the device.
        said = [worker.read("loaded", timeout_s=250.0) for worker in self._workers]
        self.facts: dict[str, Any] = said[0]
        if self.facts["missing"]:
            pytest.skip(self.facts["missing"])

    def run(self, name: str) -> list[Any]:
        """Run a case on all ranks; return what it returns on each. It must not fail."""
        for worker in self._workers:
            worker.tell(name)
        said = [worker.read("case", timeout_s=120.0) for worker in self._workers]
        failures = [facts["failure"] for facts in said if facts["failure"]]
        assert not failures, "\n".join(failures)
        return [facts["outcome"] for facts in said]
