"""Runs tests of this library for aarch64 under ``qemu-user``, on an x86-64 machine with Debian's apt (``make arm``).

It needs no root and changes nothing outside of its folder: Debian's packages are downloaded with a configuration of
apt's own, and unpacked. The folder has these parts:

* ``qemu``: the emulator, which must be of version 10 (with 7.2, the one of Debian 12, torch ends with a fault);
* ``root``: Python for aarch64 with its libraries, from Debian 12;
* ``site``: torch, Numba and pytest for aarch64, from PyPI. PyPI's torch is the one for CUDA, which needs NVIDIA's
  libraries to be imported: 2.4 GB. ``PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`` avoids that;
* ``cache``: compiled code. Numba takes minutes for it.

qemu has no ``process_vm_readv`` and says little of TCP connections, and it runs on the order of accesses of x86-64.
``docs/platforms.md`` says what has passed, and what that does not show.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: What is run without arguments: what depends on the processor and on the system, and ranks as threads.
TESTS = (
    "tests/unit/fastlane",
    "tests/unit/kernels/test_memory_order.py",
    "tests/processes/test_memory_order_compiled.py",
    "tests/unit/relay",
    *(f"tests/unit/transports/test_{name}.py" for name in ("liveness", "tcp")),
    *(f"tests/unit/transports/test_shm_{name}.py" for name in ("arena", "life", "messages", "reads", "waiting")),
    *(f"tests/threads/test_{name}.py" for name in ("fast_lane", "relayed", "shm")),
)
_QEMU_SUITE, _ROOT_SUITE, _PYTHON = "trixie", "bookworm", "3.11"
_DEBIAN = ("python3", "python3-venv", "libc6", "libstdc++6", "libgomp1", "libatomic1", "zlib1g")
_WHEELS = ["torch", "numba", "pytest", "pytest-timeout", "hypothesis", "psutil", "trustme", "typer", "rich"]
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_25", "manylinux_2_18", "manylinux2014", "manylinux_2_17")


def apt(folder: Path, suite: str, architecture: str, *words: str) -> None:
    """Call apt-get with lists, packages and a configuration of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "state" / "status").touch()
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (folder / "sources.list").write_text(f"deb [signed-by={key}] http://deb.debian.org/debian {suite} main\n")
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Install-Recommends": "false",
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "state" / "status",
        "Dir::Cache": folder / "cache",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Debug::NoLocking": "true",
    }
    if os.geteuid() == 0:
        settings["APT::Sandbox::User"] = "root"
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    subprocess.run(["apt-get", "--quiet", "--quiet", *options, *words], cwd=folder, check=True)


def fetch_debian(folder: Path, suite: str, architecture: str, target: Path, packages: Sequence[str]) -> None:
    """Download packages with all that they need, and unpack them into ``target``."""
    apt(folder, suite, architecture, "update")
    apt(folder, suite, architecture, "install", "--download-only", "--yes", *packages)
    for package in sorted((folder / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(target)], check=True)


def fetch_wheels(folder: Path, target: Path) -> None:
    """Download Python packages for aarch64, and unpack them into ``target``."""
    version = _PYTHON.replace(".", "")
    options = ["--python-version", _PYTHON, "--implementation", "cp", "--only-binary=:all:"]
    options += [word for name in (f"cp{version}", "abi3", "none") for word in ("--abi", name)]
    options += [word for name in _PLATFORMS for word in ("--platform", f"{name}_aarch64")]
    pinned = {line.partition("==")[0]: line for line in (ROOT / "constraints.txt").read_text().split()}
    wanted = [pinned.get(name, name) for name in _WHEELS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *options, *wanted]
    subprocess.run(command, check=True)
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as files:
            files.extractall(target)


def prepare(folder: Path) -> Path:
    """Return the command that runs Python for aarch64; download what it needs if that was not done."""
    python = folder / "python"
    if python.exists():
        return python
    fetch_debian(folder / "apt-qemu", _QEMU_SUITE, "amd64", folder / "qemu", ["qemu-user"])
    fetch_debian(folder / "apt-root", _ROOT_SUITE, "arm64", folder / "root", _DEBIAN)
    # A library in torch reads the processor's number there, and ends the process if there is none.
    for number in range(os.cpu_count() or 1):
        place = folder / "root" / f"sys/devices/system/cpu/cpu{number}/regs/identification"
        place.mkdir(parents=True, exist_ok=True)
        (place / "midr_el1").write_text("0x00000000410fd083\n")
    fetch_wheels(folder / "wheels", folder / "site")
    (folder / "cache").mkdir(mode=0o700, exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    python.write_text(
        "#!/bin/sh\n"
        f'exec {folder}/qemu/usr/bin/qemu-aarch64 -0 "$0" -L {folder}/root {folder}/root/usr/bin/python{_PYTHON} "$@"\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


def main() -> None:
    """Run the tests that are given, with options of pytest, or those of ``TESTS``."""
    if shutil.which("apt-get") is None or os.uname().machine != "x86_64":
        sys.exit("make arm needs an x86-64 machine with apt-get; on an aarch64 machine `make test` is what to run")
    folder = ROOT / "build" / "arm"
    python = prepare(folder)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {
        "PYTHONHOME": str(folder / "root" / "usr"),
        "PYTHONPATH": f"{ROOT / 'src'}:{folder / 'site'}:{ROOT / 'tools'}",
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    options = ["-p", "no:cacheprovider", "-p", "emulator_patience", "--hypothesis-profile", "ci", "--timeout", "1800"]
    command = [str(python), "-m", "pytest", *options, "-m", "not slow", *(sys.argv[1:] or TESTS)]
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)


main()
