"""How workers are started on the hosts of a run: as processes of this host, in emulated hosts, or over ssh."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from totalreduce.foundation.environment import users_path
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.named_files import read_named
from totalreduce.foundation.os_errors import describe_error
from totalreduce.launch.address import towards
from totalreduce.launch.emulate import EmulatedHost
from totalreduce.launch.hosts import Host, HostPool, parse_host_file
from totalreduce.launch.remote import RemoteWorker
from totalreduce.launch.spares import Spare
from totalreduce.launch.workers import Start, Target, Worker, default_num_threads, seat_environment

__all__ = ["HostOptions", "HostsFile", "Placement", "is_this_host", "launcher_address", "read_host_file", "ssh_command"]

#: How often the file of hosts is looked at. A change counts when the file is the same at the next look, because an
#: editor or a script may be writing it.
_LOOK_S = 1.0
_FILE_BYTES_MAX = 1 << 20
#: The module that a rank runs which only serves.
_SERVER = "totalreduce.server.serve"
#: sshd drops some of more than ten connections that have not logged in yet (``MaxStartups``).
_CONNECTING_MAX = 8


def ssh_command(*, port: int | None = None, identity: Path | None = None) -> tuple[str, ...]:
    """Return the command of a remote shell, to which a host and a command line are appended."""
    options = ["BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3"]
    options += ["ClearAllForwardings=yes", "LogLevel=ERROR"]
    words = ["ssh", *(word for option in options for word in ("-o", option))]
    words += [] if port is None else ["-p", str(port)]
    words += [] if identity is None else ["-i", str(identity)]
    return tuple(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostOptions:
    """The hosts of a run, and how workers are started there."""

    hosts: tuple[Host, ...]  #: The hosts at the begin. ``localhost`` and this host's own name need no remote shell.
    file: Path | None = None  #: The file that lists them. With ``RecoveryOptions`` it is read again when it changes.
    #: The remote shell: a command to which a host and a command line for it are appended.
    shell: tuple[str, ...] = ssh_command()
    #: The Python interpreter of the other hosts; by default at the path of this one.
    python: str = field(default_factory=lambda: users_path(sys.executable))
    address: str | None = None  #: The address of this host for the others; by default that of the route to them.


def is_this_host(name: str) -> bool:
    """Whether a host of the list is the one of this process, so that no remote shell is needed."""
    own = socket.gethostname()
    return name in ("localhost", own, own.partition(".")[0])


def launcher_address(options: HostOptions) -> tuple[str, str]:
    """Return the address at which workers reach this host, and how it was found. Raises ``ConfigurationError``."""
    if options.address is not None:
        return options.address, "--address"
    others = [host for host in options.hosts if not is_this_host(host.name)]
    for host in others:
        address = towards(host.address)
        if address is not None:
            return address, f"route to {host.address}"
    if others:
        raise ConfigurationError(
            f"no route leads from here to {others[0].address!r}: list hosts by names or addresses that all hosts can "
            "resolve, or give this host's address with --address"
        )
    address = None if options.file is None else towards()  # hosts may come
    return (address, "default route") if address is not None else ("127.0.0.1", "loopback")


def read_host_file(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file. Raises ``ConfigurationError``: it cannot be read, or has something else in it."""
    try:
        content = read_named(path, _FILE_BYTES_MAX, is_trusted=True)
    except OSError as error:
        raise ConfigurationError(f"the hosts file {path} cannot be read: {describe_error(error)}") from error
    return parse_host_file(content.decode("utf-8", "replace"), str(path))


@final
class HostsFile:
    """A file of hosts that may change."""

    def __init__(self, path: Path, hosts: Sequence[Host]) -> None:
        """Note what is known of the file, which may have changed since it was read."""
        self._path, self._hosts = path, tuple(hosts)
        self._known: tuple[int, int, int] | None = None  #: The time stamp of the hosts; ``None``: not looked at yet.
        self._seen = self._stamp()
        self._look_at = float("-inf")

    def changed(self, now: float) -> tuple[Host, ...] | None:
        """Return the hosts that the file lists, if they have changed since the last call; look once a second.

        Raises:
            ConfigurationError: It has changed, and cannot be read or understood. This comes once for each change.
        """
        if now < self._look_at:
            return None
        self._look_at = now + _LOOK_S
        stamp, before = self._stamp(), self._seen
        self._seen = stamp
        if stamp in (self._known, None) or stamp != before:
            return None
        self._known = stamp
        hosts = read_host_file(self._path)
        if hosts == self._hosts:
            return None
        self._hosts = hosts
        return hosts

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:  # it is being replaced, or has gone: the hosts stay
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


@final
class Placement:
    """Starts the workers of a run on the hosts of a pool."""

    def __init__(
        self,
        pool: HostPool,
        argv: Sequence[str],
        common: Mapping[str, str],
        *,
        num_local: int,
        serving: range = range(0),
        options: HostOptions | None = None,
        emulated: Mapping[str, EmulatedHost] | None = None,
    ) -> None:
        """Note what to start.

        Args:
            pool: The hosts.
            argv: The command of all workers.
            common: The variables that all workers have. Without ``OMP_NUM_THREADS``, the workers of a host share its
                cores.
            num_local: The number of workers that share the cores of this host.
            serving: The seats whose processes run a parameter server instead of the command.
            options: How workers on listed hosts are started; ``None``: all hosts are this one, or emulated.
            emulated: By name: the emulated hosts.
        """
        self.pool = pool  #: The hosts, and which seat runs where.
        self.serving = serving  #: The seats whose processes run a parameter server instead of the command.
        self.waiting: list[int] = []  #: Seats that have a place, and whose worker is to be started.
        self.leaving: set[int] = set()  #: Seats whose worker has lost its slot, and was killed for that.
        self._argv, self._common, self._options, self._emulated = list(argv), common, options, emulated or {}
        self._threads = {"OMP_NUM_THREADS": str(default_num_threads(num_local))}
        self._connecting: list[RemoteWorker] = []

    @property
    def blacklists(self) -> bool:
        """Whether a host on which workers fail is left alone for a while. This host and emulated hosts are not."""
        return self._options is not None

    def environment(self, seat: int, incarnation: int | None) -> dict[str, str]:
        """Return the variables of the worker of a seat that has a place."""
        place = self.pool.place_of(seat)
        assert place is not None
        own = seat_environment(seat, place, has_servers=bool(self.serving))
        if incarnation is not None:
            own["TOTALREDUCE_INCARNATION"] = str(incarnation)
        return {**self._common, **own}

    def queue(self, seat: int, spares: Mapping[str, int] | None = None) -> str | None:
        """Give a seat a place, if there is one, have its worker started, and return the host (``HostPool.place``)."""
        host = self.pool.place(seat, spares)
        if host is not None:
            self.waiting.append(seat)
        return host

    def take_startable(self) -> list[int]:
        """Return the seats whose workers can be started now. Not too many connections to a host may be on the way."""
        self._connecting = [each for each in self._connecting if each.is_starting]
        connecting = Counter(each.host for each in self._connecting)
        taken = []
        for seat in self.waiting:
            place = self.pool.place_of(seat)
            if place is not None and (connecting[place.host] < _CONNECTING_MAX or not self._is_remote(place.host)):
                connecting[place.host] += 1
                taken.append(seat)
        self.waiting = [seat for seat in self.waiting if seat not in taken]
        return taken

    def withdraw(self, host: str) -> list[int]:
        """Return the seats that wait for being started on a host, and have them wait no more."""
        places = {seat: self.pool.place_of(seat) for seat in self.waiting}
        withdrawn = [seat for seat, place in places.items() if place is not None and place.host == host]
        self.waiting = [seat for seat in self.waiting if seat not in withdrawn]
        return withdrawn

    def start(self, seat: int, incarnation: int | None, targets: tuple[Target, Target]) -> Worker:
        """Start the worker of a seat that has a place. Raises ``ConfigurationError`` if that is impossible.

        Args:
            seat: The seat.
            incarnation: How often its worker was started before; ``None`` if workers are not started again.
            targets: Where standard output and standard error of a worker on this host go.
        """
        place = self.pool.place_of(seat)
        assert place is not None
        variables = self.environment(seat, incarnation)
        start = Start(seat, self._command(serves=seat in self.serving), variables)
        return self._start(place.host, start, targets, place.local_world_size)

    def start_spare(self, host: str, *, serves: bool) -> Spare:
        """Start a spare on a host, for a seat that serves or for another one. Raises ``ConfigurationError``."""
        pipes, num_local = (subprocess.PIPE, subprocess.PIPE), self.pool.slots_of(host)
        command = self._command(serves=serves)

        def start(variables: Mapping[str, str]) -> Worker:
            return self._start(host, Start(-1, command, variables, has_input=True), pipes, num_local)

        return Spare(start, self._common, serves=serves)

    def _command(self, *, serves: bool) -> list[str]:
        return [sys.executable, "-m", _SERVER] if serves else self._argv

    def _is_remote(self, host: str) -> bool:
        return self._options is not None and not is_this_host(host)

    def _start(self, host: str, start: Start, targets: tuple[Target, Target], num_local: int) -> Worker:
        options, command = self._options, list(start.command)
        if options is None or not self._is_remote(host):
            command = self._emulated[host].command(command) if host in self._emulated else command
            environment = {**self._threads, **start.environment}
            return Worker(start._replace(command=command, environment=environment), *targets, host=host)
        command = [options.python, *command[1:]] if command[0] == sys.executable else command
        start = start._replace(command=command)
        worker = RemoteWorker(start, host=host, shell=options.shell, python=options.python, num_local=num_local)
        self._connecting.append(worker)
        return worker
