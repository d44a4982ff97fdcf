"""Remote shells for tests: one that only drops the host, and an sshd on loopback."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

#: Drops the host and runs the command line here, in another folder, as a login does, and in a session of its own, so
#: that the end of the shell is not its end.
#: A host is unreachable while the file ``down-HOST`` exists.
FAKE = """#!/bin/sh
host=$1; shift
if [ -e "{folder}/down-$host" ]; then echo "ssh: connect to host $host: No route to host" >&2; exit 255; fi
unset TOTALREDUCE_JOB_ID
cd /
HOME=/home/of-$host XDG_CACHE_HOME={cache} exec setsid --wait sh -c "$*"
"""


def fake_shell(folder: Path) -> tuple[str, ...]:
    """Return the command of a remote shell that needs no sshd."""
    path = folder / "shell"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"  # else each host would compile kernels
    path.write_text(FAKE.format(folder=folder, cache=cache))
    path.chmod(0o755)
    return (str(path),)


class Sshd:
    """An sshd on loopback, with keys of its own. It serves every address of 127.0.0.0/8."""

    def __init__(self, folder: Path, port: int) -> None:
        program = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
        if program is None or shutil.which("ssh") is None:
            pytest.skip("no sshd here (package openssh-server)")
        self.folder, self.port = folder, port
        for name in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True, timeout=20)
        shutil.copy(folder / "user.pub", folder / "authorized_keys")
        (folder / "authorized_keys").chmod(0o600)
        (folder / "sshd_config").write_text(
            f"Port {port}\nListenAddress 0.0.0.0\nHostKey {folder}/host\nPidFile {folder}/pid\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nPasswordAuthentication no\nUsePAM no\n"
            f"SetEnv PYTHONPATH={os.environ.get('PYTHONPATH', '')}\n"
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # the service's own start makes it
        log = (folder / "log").open("w")
        self._process = subprocess.Popen([program, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
        log.close()
        self._await_start()

    @property
    def shell(self) -> tuple[str, ...]:
        """The command of the remote shell."""
        options = ("StrictHostKeyChecking=no", f"UserKnownHostsFile={self.folder}/known", "IdentitiesOnly=yes")
        words = [word for option in (*options, "BatchMode=yes", "LogLevel=ERROR") for word in ("-o", option)]
        return ("ssh", "-F", "none", *words, "-i", str(self.folder / "user"), "-p", str(self.port))

    def cut(self, rank: int) -> None:
        """End the connection of a rank, which knows nothing of it."""
        (server,) = [pid for pid in _children_of(self._process.pid) if _has_below(pid, f"RANK={rank}".encode())]
        os.kill(server, signal.SIGKILL)

    def _await_start(self) -> None:
        give_up_at = time.monotonic() + 20.0
        while "listening on 0.0.0.0" not in (self.folder / "log").read_text():
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                pytest.skip(f"sshd does not start here: {(self.folder / 'log').read_text()}")
            time.sleep(0.02)

    def close(self) -> None:
        """End it, and its connections."""
        for pid in _children_of(self._process.pid):
            _kill(pid)
        self._process.kill()
        self._process.wait(20)


def _children_of(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _has_below(pid: int, variable: bytes) -> bool:
    """Whether a process, or one that it has started, has this variable."""
    try:
        found = variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return found or any(_has_below(child, variable) for child in _children_of(pid))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
