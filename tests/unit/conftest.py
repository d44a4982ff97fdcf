"""Tests of plain objects start no interpreter: one that imports torch costs more than a hundred such tests."""

import sys

_running = []
#: As they are before tests change them.
_INTERPRETERS = (sys.executable, sys._base_executable)


def _refuse(event, arguments):
    if event == "subprocess.Popen" and _running and arguments[0] in _INTERPRETERS:
        raise AssertionError(f"{_running[-1]} starts an interpreter: such a test belongs in tests/processes")


def pytest_configure(config):
    sys.addaudithook(_refuse)


def pytest_runtest_setup(item):
    _running.append(item.nodeid)


def pytest_runtest_teardown(item):
    _running.clear()
