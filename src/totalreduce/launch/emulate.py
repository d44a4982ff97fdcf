"""Emulated hosts: network namespaces behind shaped links, on one Linux machine.

Every host is a network namespace with one interface, ``eth0``, whose other end (veth) is a port of a bridge.
The bridge lives in a namespace of its own: the machine's own network is neither touched nor reachable, and
addresses cannot clash with real ones. Both ends of every link send through a token bucket (``tbf``), which
shapes the uplink and the downlink of each host as a switch port would. With a delay, a link is a pair of TAP devices
between which a process hands frames on (``launch/delay.py``).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch import guard as guarding
from totalreduce.launch.delay import start_delay

__all__ = ["EmulateOptions", "EmulatedHost", "EmulatedNetwork", "rate_bits_per_s", "sweep_stale_namespaces"]

#: One /24, without its network, broadcast and a few spare addresses.
_HOSTS_MAX = 250
_SUBNET = "10.77.0"
_MTU_BYTES = 1500
_DELAY_MS_MAX = 1000
#: At the minimum a segmentation-offload packet of 64 KiB passes the bucket in one piece.
_BURST_BYTES_MIN, _BURST_BYTES_MAX = 72 * 1024, 256 * 1024

_UNITS = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit")
_NAME = re.compile(r"totalreduce-(\d+)-(\d+)-[0-9a-f]+-\w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulateOptions:
    """An emulated network.

    Attributes:
        num_hosts: Number of hosts, 1 to 250.
        rate: Rate of every link, in each direction, in ``tc``'s notation: ``1gbit``, ``250mbit``.
        ranks_per_host: Number of workers in each host.
        queue_ms: The longest time that a byte waits at a link's end before packets are dropped.
        delay_ms: How long a packet travels from one host to another, in addition; a round trip takes twice as long.
            One process carries all packets of delayed links: it keeps up with about 100 Mbit/s in all.
    """

    num_hosts: int
    rate: str = "1gbit"
    ranks_per_host: int = 1
    queue_ms: int = 20
    delay_ms: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if not 1 <= self.num_hosts <= _HOSTS_MAX:
            raise ConfigurationError(f"the number of emulated hosts must be 1 to {_HOSTS_MAX}, not {self.num_hosts}")
        if self.ranks_per_host < 1 or self.queue_ms < 1:
            raise ConfigurationError("ranks_per_host and queue_ms must be at least 1")
        if not 0 <= self.delay_ms <= _DELAY_MS_MAX:
            raise ConfigurationError(f"the delay must be 0 to {_DELAY_MS_MAX} ms, not {self.delay_ms:g}")
        rate_bits_per_s(self.rate)


def rate_bits_per_s(rate: str) -> float:
    """Return a rate in ``tc``'s notation as bits per second: ``1gbit`` is 1e9. Raises ``ConfigurationError``."""
    match = _RATE.fullmatch(rate)
    if match is None or float(match[1]) <= 0:
        raise ConfigurationError(f"a rate is a number with kbit, mbit or gbit, such as 1gbit, not {rate!r}")
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True, slots=True)
class EmulatedHost:
    """One host of an :class:`EmulatedNetwork`.

    Attributes:
        index: Number of the host, from 0 to ``num_hosts - 1``.
        address: Its IPv4 address, reachable from the other hosts of the network only.
        namespace: Name of its network namespace.
    """

    index: int
    address: str
    namespace: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs ``argv`` in this host."""
        return [_tool("ip") or "ip", "netns", "exec", self.namespace, *argv]

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` in this host; ``options`` are those of :class:`subprocess.Popen`."""
        return subprocess.Popen(self.command(argv), **options)

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` in this host to its end, with its output captured as text; it is killed at the time-out."""
        command = self.command(argv)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


class EmulatedNetwork:
    """Hosts behind shaped links, a context manager that makes them on entering and removes them on leaving.

    A guard process removes them if this process crashes or is killed. Processes that still run in a host are killed.
    This needs root, Linux, and ``ip`` and ``tc`` of iproute2.

    Attributes:
        hosts: The hosts, by index.
    """

    def __init__(self, num_hosts: int, rate: str = "1gbit", *, queue_ms: int = 20, delay_ms: float = 0.0) -> None:
        """Check the arguments; nothing is made yet. Raises ``ConfigurationError``."""
        self._options = EmulateOptions(num_hosts=num_hosts, rate=rate, queue_ms=queue_ms, delay_ms=delay_ms)
        _check_requirements()
        owner = os.getpid()
        # The start time differs between two processes with one id, and the token between two networks of a process.
        prefix = f"totalreduce-{owner}-{_start_time(owner)}-{secrets.token_hex(3)}"
        self._bridge = f"{prefix}-bridge"
        self.hosts = tuple(
            EmulatedHost(index, f"{_SUBNET}.{index + 1}", f"{prefix}-h{index}") for index in range(num_hosts)
        )
        self._guard: guarding.Guard | None = None
        self._delay: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Make the namespaces and links. Raises ``ConfigurationError``: the system refused (nothing is left behind)."""
        sweep_stale_namespaces()
        self._guard = guarding.Guard()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes in the hosts and remove the hosts; a second call does nothing."""
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._delay is not None:
            self._delay.communicate()  # the guard has killed it, as all processes in the namespaces
            self._delay = None

    def cut(self, index: int) -> None:
        """Cut the link of host ``index``, in both directions."""
        _command("ip", "-n", self._bridge, "link", "set", f"h{index}", "down")

    def restore(self, index: int) -> None:
        """Restore the link of host ``index``."""
        _command("ip", "-n", self._bridge, "link", "set", f"h{index}", "up")

    def _build(self) -> None:
        names = [self._bridge, *(host.namespace for host in self.hosts)]
        if self._guard is not None:
            for name in names:
                self._guard.watch_namespace(name)
        _batch(["ip"], [f"netns add {name}" for name in names])
        lines = ["link add br0 type bridge mcast_snooping 0", "link set br0 addrgenmode none up"]
        if self._options.delay_ms:
            self._start_delay()
        for host in self.hosts:
            port = f"h{host.index}"
            pair = f"mtu {_MTU_BYTES} type veth peer name eth0 mtu {_MTU_BYTES} netns {host.namespace}"
            made = f"link add {port} {pair}"
            if self._options.delay_ms:
                made = f"link set e{host.index} netns {host.namespace} name eth0"
            lines += [made, f"link set {port} master br0 addrgenmode none up"]
        _batch(["ip", "-n", self._bridge], lines)
        _batch(["tc", "-n", self._bridge], [self._shape(f"h{host.index}") for host in self.hosts])
        for host in self.hosts:
            address = f"addr add {host.address}/24 dev eth0"
            lines = ["link set lo up", address, "link set eth0 addrgenmode none up"]
            _batch(["ip", "-n", host.namespace], lines)
            _batch(["tc", "-n", host.namespace], [self._shape("eth0")])

    def _start_delay(self) -> None:
        prefix = [_tool("ip") or "ip", "netns", "exec", self._bridge]
        pairs = [(f"h{host.index}", f"e{host.index}") for host in self.hosts]
        # A packet crosses the links of two hosts.
        try:
            self._delay = start_delay(prefix, pairs, self._options.delay_ms / 2 / 1000)
        except OSError as error:
            raise ConfigurationError(f"delayed links need /dev/net/tun: {error}") from error

    def _shape(self, device: str) -> str:
        rate = self._options.rate
        # 2.1 ms of the rate, 256 KiB at 1 Gbit/s: on a slow link a fixed burst would be seconds unshaped.
        burst = min(_BURST_BYTES_MAX, max(_BURST_BYTES_MIN, int(rate_bits_per_s(rate) / 8 * 2.1e-3)))
        return f"qdisc add dev {device} root tbf rate {rate} burst {burst}b latency {self._options.queue_ms}ms"


def sweep_stale_namespaces() -> list[str]:
    """Remove emulated hosts whose process and guard have ended; returns their names."""
    stale = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(guarding.NETNS_DIRECTORY)):
            match = _NAME.fullmatch(name)
            if match is not None and _start_time(int(match[1])) != int(match[2]):
                stale.append(name)
    guarding.remove_namespaces(stale)
    return stale


def _check_requirements() -> None:
    missing = []
    if sys.platform != "linux":
        missing.append("Linux")
    elif os.geteuid() != 0:
        missing.append("root (sudo, or a privileged container)")
    missing += [f"the command `{tool}` (package iproute2)" for tool in ("ip", "tc") if not _tool(tool)]
    if missing:
        raise ConfigurationError(f"emulated hosts need {' and '.join(missing)}, which is missing here")


def _tool(name: str) -> str | None:
    # A user's PATH often lacks /usr/sbin, where iproute2 is.
    return shutil.which(name) or shutil.which(name, path=guarding.PATH)


def _start_time(pid: int) -> int:
    """Return the clock ticks from boot to the start of a process; -1 if there is no such process."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(content.rpartition(")")[2].split()[19])


def _batch(program: list[str], lines: list[str]) -> None:
    _command(*program, "-batch", "-", lines=lines)


def _command(*command: str, lines: Sequence[str] = ()) -> None:
    try:
        done = subprocess.run(
            [_tool(command[0]) or command[0], *command[1:]],
            input="\n".join([*lines, ""]),
            capture_output=True,
            text=True,
            timeout=guarding.COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"the emulated network cannot be made: {' '.join(command)} hangs") from error
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ConfigurationError(f"the emulated network cannot be made: {' '.join(command)}: {reason}")
