"""The hosts of a run: lists of hosts as users write them, and which seat runs on which host. No clock, no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from totalreduce.foundation.errors import ConfigurationError

__all__ = ["Host", "HostPool", "Place", "Update", "parse_host_file", "parse_hosts"]

#: The first cool-down of a blacklisted host, in seconds, and the longest one: the range of Elastic Horovod.
_COOL_DOWN_S, _COOL_DOWN_MAX_S = 10.0, 100.0
#: A worker that fails earlier after its start counts against its host, and so many of these make a blacklisted host.
_SOON_S = 60.0
_FAILURES_MAX = 3
#: A longer list is a mistake.
_SLOTS_MAX = 65_536

#: A name or an IPv4 address, perhaps with a user. It does not begin with "-", which would be an option of ssh.
_NAME = r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*"
_WORD = re.compile(rf"({_NAME})(?::([0-9]{{1,5}}))?")
_LINE = re.compile(rf"({_NAME})(?::([0-9]{{1,5}})|[ \t]+slots[ \t]*=[ \t]*([0-9]{{1,5}}))?")


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the list."""

    name: str  #: Its name or address, as ssh takes it: ``node0`` or ``user@node0``.
    slots: int  #: How many workers run on it at most, but for spares.

    @property
    def address(self) -> str:
        """Its name without the user."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of ``node0:4,node1:4``. A host without a number has one slot. Raises ``ConfigurationError``."""
    words = [word.strip() for word in text.split(",")]
    found = [_WORD.fullmatch(word) for word in words]
    for word, match in zip(words, found, strict=True):
        if match is None:
            raise ConfigurationError(f"--hosts: {word!r} is no host with a number of slots, such as node0:4")
    return _hosts_of([(match[1], match[2]) for match in found if match is not None], "--hosts")


def parse_host_file(text: str, source: str) -> tuple[Host, ...]:
    """Return the hosts of a file with a host in each line: ``node0:4``, ``node0 slots=4``, or ``node0`` for one slot.

    ``#`` begins a comment. A host that comes again has the slots of all its lines, as in ``$PBS_NODEFILE``.

    Raises:
        ConfigurationError: A line is no host, or there is none. The message has the path and the number of the line.
    """
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise ConfigurationError(
                f"{source}, line {number}: {content[:80]!r} is no host with a number of slots. Write node0:4 or "
                "node0 slots=4"
            )
        entries.append((match[1], match[2] or match[3]))
    return _hosts_of(entries, source)


def _hosts_of(entries: Sequence[tuple[str, str | None]], source: str) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for name, count in entries:
        if count is not None and int(count) == 0:
            raise ConfigurationError(f"{source}: host {name!r} has 0 slots: remove it, or give it at least one")
        slots[name] = slots.get(name, 0) + int(count or 1)
    if not slots:
        raise ConfigurationError(f"{source} has no host")
    if sum(slots.values()) > _SLOTS_MAX:
        raise ConfigurationError(f"{source} has {sum(slots.values())} slots, and at most {_SLOTS_MAX} are possible")
    return tuple(Host(name, count) for name, count in slots.items())


@dataclass(frozen=True, slots=True)
class Place:
    """Where the worker of a seat runs."""

    host: str  #: The name of its host.
    host_number: int  #: The number of the host in the order in which hosts were listed first (``GROUP_RANK``).
    local_rank: int  #: Its rank among the workers of the host.
    local_world_size: int  #: The number of workers of the host.


@dataclass(frozen=True, slots=True)
class Update:
    """What another list of hosts has changed."""

    added: tuple[Host, ...] = ()  #: The hosts that were not listed before, or have more slots now.
    removed: tuple[str, ...] = ()  #: The names of the hosts that are not listed any more, or have fewer slots.
    displaced: tuple[int, ...] = ()  #: The seats that have no slot any more, and must be ended.


@dataclass(slots=True)
class _Record:
    """What is known of a host."""

    number: int
    slots: int
    failures: int = 0  #: Workers that failed soon after their start, since the last one that did not.
    next_cool_down_s: float = _COOL_DOWN_S
    blacklisted_until: float | None = None


@final
class HostPool:
    """The hosts of a run, their slots, and the seats that run on them."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        """Begin with a list of hosts, none of which has a seat."""
        self._numbers: dict[str, int] = {}  #: Also of hosts that have left.
        self._hosts: dict[str, _Record] = {}  #: In the order of the list.
        self._slots: dict[int, tuple[str, int]] = {}  #: By seat: its host, and the number of its slot there.
        self.update(hosts)

    @property
    def usable(self) -> tuple[str, ...]:
        """The hosts on which a worker can be started: those of the list that are not blacklisted."""
        return tuple(name for name, record in self._hosts.items() if record.blacklisted_until is None)

    @property
    def num_slots(self) -> int:
        """The number of slots of all hosts of the list."""
        return sum(record.slots for record in self._hosts.values())

    def slots_of(self, host: str) -> int:
        """Return the number of slots of a host of the list; 0 of another one."""
        return self._hosts[host].slots if host in self._hosts else 0

    def place(self, seat: int, spares: Mapping[str, int] | None = None) -> str | None:
        """Give a seat a slot, if there is one, and return the host.

        A seat stays on its host, if that is usable. Otherwise it gets a free slot of another host, if possible of one
        where a spare process waits, or the place of a spare of a host that has no free slot.

        Args:
            seat: The seat. Its worker does not run.
            spares: By host: the number of spare processes that wait for a seat there.
        """
        spares = spares or {}
        usable = self.usable
        known = self._slots.get(seat)
        if known is not None and known[0] in usable:
            return known[0]
        free = [name for name in usable if self._num_seats(name) < self._hosts[name].slots]
        candidates = (
            [name for name in free if spares.get(name)] or free or [name for name in usable if spares.get(name)]
        )
        if not candidates:
            return None
        host = candidates[0]
        taken = {slot for name, slot in self._slots.values() if name == host}
        self._slots[seat] = host, next(slot for slot in range(len(taken) + 1) if slot not in taken)
        return host

    def place_of(self, seat: int) -> Place | None:
        """Return where a seat runs; ``None`` if it has no place."""
        if seat not in self._slots:
            return None
        host, slot = self._slots[seat]
        # Seats with a lower slot may have moved to other hosts.
        return Place(host, self._numbers[host], slot, max(self._num_seats(host), slot + 1))

    def update(self, hosts: Sequence[Host]) -> Update:
        """Take another list of hosts, and return what has changed. Seats without a slot have no place from now on."""
        before = self._hosts
        self._hosts = {}
        added, removed = [], [name for name in before if name not in {host.name for host in hosts}]
        displaced = [seat for seat, (name, _) in self._slots.items() if name in removed]
        for host in hosts:
            number = self._numbers.setdefault(host.name, len(self._numbers))
            record = before.get(host.name, _Record(number, 0))
            if host.slots > record.slots:
                added.append(host)
            elif host.slots < record.slots:
                removed.append(host.name)
                # Seats beyond the slots that the host had took the place of a spare, and stay.
                gone = range(host.slots, record.slots)
                displaced += [seat for seat, (name, slot) in self._slots.items() if name == host.name and slot in gone]
            record.slots = host.slots
            self._hosts[host.name] = record
        for seat in displaced:
            del self._slots[seat]
        return Update(tuple(added), tuple(removed), tuple(sorted(displaced)))

    def failed(self, host: str, now: float, *, after_s: float, is_reached: bool) -> float | None:
        """Note that a worker of a host has failed.

        Args:
            host: The name of the host.
            now: The time in seconds.
            after_s: The time from the start of the worker to its end, in seconds.
            is_reached: Whether the worker was started on the host. If the host cannot be reached, it is blacklisted at
                once; otherwise after three workers that failed soon after their start.

        Returns:
            The cool-down in seconds, if the host is blacklisted now and was not before. It doubles each time.
        """
        record = self._hosts.get(host)
        if record is None or record.blacklisted_until is not None:
            return None
        if is_reached and after_s >= _SOON_S:
            record.failures, record.next_cool_down_s = 0, _COOL_DOWN_S
            return None
        record.failures += 1
        if is_reached and record.failures < _FAILURES_MAX:
            return None
        cool_down_s = record.next_cool_down_s
        record.failures, record.next_cool_down_s = 0, min(2 * cool_down_s, _COOL_DOWN_MAX_S)
        record.blacklisted_until = now + cool_down_s
        return cool_down_s

    def returned(self, now: float) -> tuple[str, ...]:
        """Return the hosts whose cool-down has ended since the last call. They are tried again."""
        names = [
            name
            for name, record in self._hosts.items()
            if record.blacklisted_until is not None and record.blacklisted_until <= now
        ]
        for name in names:
            self._hosts[name].blacklisted_until = None
        return tuple(names)

    def _num_seats(self, host: str) -> int:
        return sum(name == host for name, _ in self._slots.values())
