"""Faults of the network between emulated hosts, for ``totalreduce bench faults``."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostOfProcess", "host_of"]


@dataclass(frozen=True, slots=True)
class HostOfProcess:
    """The emulated host in which a process runs.

    Attributes:
        namespace: The name of its network namespace.
        address: Its IPv4 address.
        keeper_port: The port of the launcher's store, whose connections are left alone.
    """

    namespace: str
    address: str
    keeper_port: int

    def reset(self, peer: HostOfProcess) -> bool:
        """Reset the connections with another host, as a router or a kernel that has lost its state does.

        Both ends get an error in the middle of what they send. Returns whether there was a connection.
        """
        ports = [f"{end} != :{self.keeper_port}" for end in ("sport", "dport")]
        condition = f"dst {peer.address} and {' and '.join(ports)}"
        shown = _run("ip", "netns", "exec", self.namespace, "ss", "-K", "-H", "-n", "-t", condition)
        return bool(shown.strip())

    def block(self, peer: HostOfProcess) -> None:
        """Drop what this host sends to another one; the other direction still works."""
        _run("ip", "-n", self.namespace, "route", "add", "blackhole", f"{peer.address}/32")

    def unblock(self, peer: HostOfProcess) -> None:
        """Undo ``block``."""
        _run("ip", "-n", self.namespace, "route", "del", "blackhole", f"{peer.address}/32")


def host_of(pid: int) -> HostOfProcess:
    """Return the host of a worker.

    Raises:
        subprocess.CalledProcessError, ProcessLookupError: The process has ended, or runs in no emulated host.
    """
    namespace = _run("ip", "netns", "identify", str(pid)).strip()
    (link,) = json.loads(_run("ip", "-n", namespace, "-j", "-4", "address", "show", "dev", "eth0"))
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    keeper = next((each for each in variables if each.startswith(b"TOTALREDUCE_KEEPER=")), None)
    if keeper is None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), f"/proc/{pid}/environ")
    return HostOfProcess(namespace, link["addr_info"][0]["local"], int(keeper.rpartition(b":")[2]))


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10.0).stdout
