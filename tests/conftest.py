"""Fixtures of all tests."""

import datetime
import gc
import importlib.metadata
import os
import resource
import subprocess
from pathlib import Path

import pytest

from totalreduce.foundation.config import Tls
from totalreduce.foundation.os_errors import out_of_descriptors


class TestedWith:
    """Writes the table of the libraries with which tests have passed: ``pytest -m tested_with --tested-with FILE``."""

    def __init__(self, path):
        self.path, self.rows = path, {}

    def pytest_runtest_makereport(self, item, call):
        mark = item.get_closest_marker("tested_with")
        if mark is None or call.when != "call":
            return
        what, package = mark.args
        if call.excinfo is None:
            outcome = "passed"
        else:
            outcome = "not tried" if call.excinfo.errisinstance(pytest.skip.Exception) else "**failed**"
        version = importlib.metadata.version(package) if outcome != "not tried" else ""
        test = item.nodeid.partition("[")[0]
        self.rows[what] = f"| {what} | {package} {version} | {outcome} | `{test}` |"

    def pytest_sessionfinish(self):
        before, begin, table = self.path.read_text().partition("<!-- table -->\n")
        kept = {line.split("|")[1].strip(): line for line in table.splitlines()[3:] if line.startswith("|")}
        # The row of a test that was not run says with which version it has passed last.
        untried = {what for what, row in self.rows.items() if "| not tried |" in row} & kept.keys()
        rows = kept | {what: row for what, row in self.rows.items() if what not in untried}
        head = "| what | version | outcome | test |\n|---|---|---|---|\n"
        lines = "".join(f"{row}\n" for _, row in sorted(rows.items(), key=lambda pair: pair[0].lower()))
        self.path.write_text(f"{before}{begin}\n{head}{lines}")


def pytest_addoption(parser):
    parser.addoption("--tested-with", type=Path, help="write the table of libraries into this page")


def pytest_configure(config):
    if config.getoption("--tested-with"):
        config.pluginmanager.register(TestedWith(config.getoption("--tested-with")))


class Authorities:
    """Makes certificates; one authority is the job's, the other one nobody's."""

    def __init__(self, folder):
        trustme = pytest.importorskip("trustme", reason="certificates are made with trustme")
        self._folder = folder
        self._authorities = {name: trustme.CA(organization_name=name) for name in ("job", "foreign")}
        for name, authority in self._authorities.items():
            authority.cert_pem.write_to_path(str(folder / f"{name}-ca.pem"))

    def issue(self, name, authority="job", *, trusts="job", days=1.0):
        """A certificate, signed by ``authority`` and valid for so many days (negative: expired so long ago)."""
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        begin = min(end, datetime.datetime.now(datetime.UTC)) - datetime.timedelta(days=1)
        made = self._authorities[authority].issue_cert(f"{name}.test", not_before=begin, not_after=end)
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate.write_bytes(made.cert_chain_pems[0].bytes())
        key.write_bytes(made.private_key_pem.bytes())
        key.chmod(0o600)
        return Tls(certificate, key, self._folder / f"{trusts}-ca.pem")


@pytest.fixture(scope="session")
def authorities(tmp_path_factory):
    return Authorities(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def rank_tls(authorities):
    """Files of eight ranks, by rank."""
    return [authorities.issue(f"rank{rank}") for rank in range(8)]


@pytest.fixture
def small_disk(tmp_path):
    """Makes file systems that hold so many KiB; they are gone after the test."""
    mounted = []

    def make(kib):
        if os.geteuid() != 0:
            pytest.skip("mounting a file system needs root")
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode != 0:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", str(folder)], timeout=20, check=True)


class Descriptors:
    """Takes the descriptors that this process could still open, and gives them back."""

    def __init__(self):
        self.limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._held = []

    def exhaust(self, *, leave=0):
        """From now on only ``leave`` more can be opened."""
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, self.limits[1]))
        while out_of_descriptors() is None:
            self._held.append(os.dup(0))
        self.free(leave)

    def free(self, count):
        """So many more can be opened."""
        for _ in range(count):
            os.close(self._held.pop())

    def restore(self):
        """As before the test."""
        self.free(len(self._held))
        resource.setrlimit(resource.RLIMIT_NOFILE, self.limits)


@pytest.fixture
def descriptors():
    made = Descriptors()
    yield made
    made.restore()


def pytest_collection_finish():
    """Keep the garbage collector from reading torch's modules and thousands of tests again and again."""
    gc.collect()
    gc.freeze()
