"""Measures the links of a group at start, so that the selector chooses schedules by measured costs. Collective.

All ranks measure at the same time, because collectives use links so:

* the latency between neighbours inside a host and between neighbouring hosts: a message travels to the neighbour and
  back;
* the bandwidth of each host's link: the first rank of every host streams to the first rank of the next host;
* the bandwidth inside a host: every rank streams to the next rank of its host.

Each stream is four times as long as the one before, until one takes long enough, which is repeated. It is compared with
the one before, so that neither the latency nor the burst of a token bucket (for example 256 KiB that pass at once)
counts as bandwidth. Between hosts in different cities the first streams take long enough.

One allreduce gives all measurements to all ranks, which compute the same ``LinkModel``. The slowest rank counts. The
numbers are rounded (``rounded``), so that two runs on one network mostly choose the same schedules and get the same
bits; a stored file makes that certain.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.named_files import read_named, write_named
from totalreduce.foundation.types import ReduceOp
from totalreduce.schedules.select import LinkModel, Selector

if TYPE_CHECKING:
    from totalreduce.groups.group import Group

__all__ = [
    "LinkPolicy",
    "Survey",
    "apply",
    "combined",
    "measure",
    "read_links",
    "resolve",
    "rounded",
    "selector_of",
    "survey",
    "wire_setting",
    "write_links",
]

#: ``auto`` measures if the job has several hosts, ``measure`` always, ``off`` never; or the numbers themselves.
LinkPolicy = Literal["auto", "measure", "off"] | LinkModel

_WORDS = ("auto", "measure", "off")
_FILE_BYTES_MAX = 64 * 1024

#: Round trips that measure the latency: one that makes the connection, then as many as fit into the time and the
#: bounds.
_ROUND_TRIPS_MIN = 2
_ROUND_TRIPS_MAX = 15
_LATENCY_S = 0.003


@dataclass(frozen=True, slots=True)
class _Streams:
    """The streams that measure a bandwidth.

    Attributes:
        bytes_min: Length of the first stream.
        bytes_max: Length of the longest stream.
        enough_s: A stream that takes so long, and is not the first, gives the bandwidth.
        repeat_s: It is repeated for so long: disturbances make a stream longer, never shorter.
    """

    bytes_min: int
    bytes_max: int
    enough_s: float
    repeat_s: float


#: At 1 Gbit/s the stream of 1 MiB gives the bandwidth, which is four times a usual burst.
_BETWEEN_HOSTS = _Streams(64 * 1024, 16 << 20, 0.005, 0.1)
#: Shorter streams would measure the time in which processes wake each other.
_INSIDE_HOST = _Streams(512 * 1024, 2 << 20, 0.005, 0.02)
_STREAM_GROWTH = 4
_REPETITIONS = 3
#: If the first stream takes so long, it gives the bandwidth: the next would take more than a second.
_STREAM_LONG_S = 0.3

#: The latency if a host has more ranks than cores. Measured with 4 ranks on 2 cores: star wins up to 512 KiB.
_CROWDED_LATENCY_S = 2e-4

#: Grids of ``rounded``: latencies vary from run to run, bandwidths hardly do.
_LATENCY_UNIT_S, _LATENCY_FACTOR = 1e-5, 4.0
_BANDWIDTH_UNIT, _BANDWIDTH_FACTOR = 1.25e8, 2.0


@dataclass(frozen=True, slots=True)
class Survey:
    """The measurements of all ranks, by rank; 0 for a rank without such a neighbour. Equal on all ranks.

    Attributes:
        hosts: The host of each rank.
        latency_s: Time of an empty message to the first rank of the next host, one way.
        bytes_per_s: Bandwidth from the first rank of the previous host, while all hosts stream.
        local_latency_s: Time of an empty message to the next rank of the host.
        local_bytes_per_s: Bandwidth from the previous rank of the host, while all ranks stream.
        seconds: Duration of the measurement on the slowest rank.
    """

    hosts: tuple[int, ...]
    latency_s: tuple[float, ...]
    bytes_per_s: tuple[float, ...]
    local_latency_s: tuple[float, ...]
    local_bytes_per_s: tuple[float, ...]
    seconds: float

    @property
    def links(self) -> LinkModel:
        """The slowest of each, not rounded; the default if nothing was measured."""
        default = LinkModel()
        return LinkModel(
            latency_s=max(self.latency_s) or default.latency_s,
            bytes_per_s=min(filter(None, self.bytes_per_s), default=default.bytes_per_s),
            local_latency_s=max(self.local_latency_s) or default.local_latency_s,
            local_bytes_per_s=min(filter(None, self.local_bytes_per_s), default=default.local_bytes_per_s),
            source="measured",
        )


# ------------------------------------------------------------------------------------------------------- what is wanted


def resolve(wanted: LinkPolicy | str | Path | None, from_environment: str | None) -> LinkPolicy:
    """Return the policy of the argument, else of ``TOTALREDUCE_LINKS``, else ``auto``. A path stands for its numbers.

    Raises:
        ConfigurationError: The file cannot be read, or ``write_links`` has not written it.
    """
    if wanted is None:
        wanted = from_environment or "auto"
    if isinstance(wanted, LinkModel):
        return wanted
    for word in _WORDS:
        if wanted == word:
            return word  # type: ignore[return-value]  # mypy does not see that it is one of the literals
    return read_links(Path(wanted))


def wire_setting(policy: LinkPolicy) -> str:
    """Return the policy as a setting, which is compared between the ranks at rendezvous."""
    return policy if isinstance(policy, str) else json.dumps(_numbers(policy), sort_keys=True)


def read_links(path: Path) -> LinkModel:
    """Read a file that ``write_links`` (``totalreduce doctor --store``) has written.

    Raises:
        ConfigurationError: The file cannot be read, or does not hold four positive numbers.
    """
    try:
        document = json.loads(read_named(path, _FILE_BYTES_MAX))
        numbers = {name: float(document[name]) for name in _numbers(LinkModel())}
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the links {path}: {error.strerror}; `totalreduce doctor --store {path}` writes them, and "
            "every rank needs the file"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{path} does not hold links ({error!r}): {{{', '.join(_numbers(LinkModel()))}}} as numbers"
        ) from error
    if not all(0 < value < math.inf for value in numbers.values()):
        raise ConfigurationError(f"{path}: latencies and bandwidths must be positive, not {numbers}")
    return LinkModel(**numbers, source=str(path))


def write_links(path: Path, links: LinkModel) -> None:
    """Store the numbers for ``TOTALREDUCE_LINKS``.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    try:
        write_named(path, json.dumps(_numbers(links), indent=1) + "\n")
    except OSError as error:
        raise ConfigurationError(f"cannot write the links {path}: {error.strerror}") from error


def _numbers(links: LinkModel) -> dict[str, float]:
    values = asdict(links)
    return {each.name: values[each.name] for each in fields(links) if each.name != "source"}


# ------------------------------------------------------------------------------------------------------------ measuring


def apply(group: Group, policy: LinkPolicy) -> None:
    """Measure, or take the given numbers, and give them to the selector. Collective; no operation is in flight.

    Raises:
        PeerLost: A rank is lost.
        DeadlineExceededError: A rank did not take part in time.
    """
    if isinstance(policy, LinkModel):
        links = policy
    elif policy == "measure" or (policy == "auto" and len(set(selector_of(group).hosts)) > 1):
        links = rounded(measure(group))
    elif policy == "auto" and group.world_size > (os.cpu_count() or 1):
        links = replace(LinkModel(), local_latency_s=_CROWDED_LATENCY_S)
    else:
        return
    with group._runner.locked():
        group._runner.engine.planner.use_links(links)


def selector_of(group: Group) -> Selector:
    """Return the selector, which chooses the schedules of a group."""
    return group._runner.engine.planner.selector


def measure(group: Group) -> LinkModel:
    """Measure the links, equal on all ranks and not rounded. Collective; takes about 50 ms on a LAN.

    Raises as for ``apply``.
    """
    return survey(group).links


def rounded(links: LinkModel) -> LinkModel:
    """Round latencies to powers of 4 times 10 µs, and bandwidths to powers of 2 times 1 Gbit/s.

    Choosing by rounded numbers costs little. A choice that changes from run to run would change the order of additions,
    and with it the last bits of a result.
    """

    def near(value: float, unit: float, factor: float) -> float:
        return float(unit * factor ** round(math.log(value / unit, factor)))

    return replace(
        links,
        latency_s=near(links.latency_s, _LATENCY_UNIT_S, _LATENCY_FACTOR),
        bytes_per_s=near(links.bytes_per_s, _BANDWIDTH_UNIT, _BANDWIDTH_FACTOR),
        local_latency_s=near(links.local_latency_s, _LATENCY_UNIT_S, _LATENCY_FACTOR),
        local_bytes_per_s=near(links.local_bytes_per_s, _BANDWIDTH_UNIT, _BANDWIDTH_FACTOR),
    )


def survey(group: Group) -> Survey:
    """Measure, and return the measurements of all ranks on every rank. Collective.

    Raises as for ``apply``.
    """
    begin = time.monotonic()
    hosts = selector_of(group).hosts_of(group.ranks)
    neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[group.rank]]
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    several = max(hosts.count(host) for host in hosts) > 1
    local_latency_s = latency_s = local_bytes_per_s = bytes_per_s = 0.0
    if several:
        local_latency_s = _latency(group, neighbours)
        local_bytes_per_s = _bandwidth(group, neighbours, _INSIDE_HOST)
    if len(leaders) > 1:
        latency_s = _latency(group, leaders)
        bytes_per_s = _bandwidth(group, leaders, _BETWEEN_HOSTS)
    found = torch.zeros(group.world_size, 5, dtype=torch.float64, device="cpu")
    mine = [latency_s, bytes_per_s, local_latency_s, local_bytes_per_s, time.monotonic() - begin]
    found[group.rank] = torch.tensor(mine, dtype=torch.float64, device="cpu")
    group.allreduce(found, name="probe.found", op=ReduceOp.MAX).wait()
    columns = [tuple(column) for column in found.T.tolist()]
    return Survey(hosts, columns[0], columns[1], columns[2], columns[3], max(columns[4]))


def _latency(group: Group, line: Sequence[int]) -> float:
    """Return the latency in seconds from this rank to the next one of a line. Every second pair measures at a time."""
    if group.rank not in line:
        return 0.0
    place = line.index(group.rank)
    found = 0.0
    for parity in (0, 1):
        first = place if place % 2 == parity else place - 1
        if first < 0 or first + 1 >= len(line):
            continue
        seconds = _round_trips(group.subgroup((line[first], line[first + 1]), name="probe"), leads=first == place)
        if first == place:
            found = seconds
    return found


def _round_trips(pair: Group, *, leads: bool) -> float:
    """Return the time of a message, half that of a broadcast to the other rank and back. The leader decides the end."""
    more = torch.ones(1, dtype=torch.uint8, device="cpu")
    took: list[float] = []
    begin = time.monotonic()
    while True:
        now = time.monotonic()
        if leads:
            enough = len(took) > _ROUND_TRIPS_MIN and now - begin > _LATENCY_S
            more.fill_(0 if enough or len(took) >= _ROUND_TRIPS_MAX else 1)
        pair.broadcast(more, root=0, name="probe.latency", schedule="chain")
        took.append(time.monotonic() - now)
        if not more.item():
            break
    # The first round trip made the connection. Disturbances make a round trip longer, never shorter.
    return min(took[1:]) / 2


def _bandwidth(group: Group, ring: Sequence[int], how: _Streams) -> float:
    """Return the bytes per second from the previous rank of a ring. All ranks of the group take part."""
    takes_part = group.rank in ring and len(ring) > 1

    def seconds_of(size: int) -> tuple[float, float]:
        """Return the time of a stream on this rank, and on the slowest rank."""
        mine = _stream(group, ring, size) if takes_part else 0.0
        longest = torch.tensor([mine], dtype=torch.float64, device="cpu")
        group.allreduce(longest, name="probe.longest", op=ReduceOp.MAX).wait()
        return mine, longest.item()

    earlier_size, earlier_s, size = 0, 0.0, how.bytes_min
    mine, longest = seconds_of(size)
    if longest >= _STREAM_LONG_S:
        mine, longest = seconds_of(size)  # a rank may have been delayed for a moment
    while longest < (how.enough_s if earlier_size else _STREAM_LONG_S) and size < how.bytes_max:
        earlier_size, earlier_s = size, mine
        size *= _STREAM_GROWTH
        mine, longest = seconds_of(size)
    spent_s = longest
    for _ in range(_REPETITIONS - 1):
        if spent_s >= how.repeat_s:
            break
        if earlier_size:  # its time is subtracted: a delay of it would make the link look faster
            again, longest = seconds_of(earlier_size)
            earlier_s, spent_s = min(earlier_s, again), spent_s + longest
        again, longest = seconds_of(size)
        mine, spent_s = min(mine, again), spent_s + longest
    if not takes_part:
        return 0.0
    # The difference of both streams has neither latency nor burst. Noise cannot make the result more than twice the
    # bandwidth of the longer stream alone.
    return (size - earlier_size) / max(mine - earlier_s, mine / 2)


def _stream(group: Group, ring: Sequence[int], size: int) -> float:
    place = ring.index(group.rank)
    # Both are written before, so that the time in which the kernel makes memory is not measured.
    outgoing = torch.zeros(size, dtype=torch.uint8, device="cpu")
    incoming = torch.ones(size, dtype=torch.uint8, device="cpu")
    begin = time.monotonic()
    receiving = group.recv(incoming, src=ring[place - 1], tag=_TAG)
    sending = group.send(outgoing, dst=ring[(place + 1) % len(ring)], tag=_TAG)
    receiving.wait()
    elapsed = time.monotonic() - begin
    sending.wait()
    return elapsed


#: The tag of the streams' messages.
_TAG = -(1 << 20)


def combined(surveys: Sequence[Survey]) -> Survey:
    """Return the median of every number of several surveys, which has less noise than one survey."""

    def medians(name: str) -> tuple[float, ...]:
        return tuple(map(median, zip(*(getattr(each, name) for each in surveys), strict=True)))

    return Survey(
        surveys[0].hosts,
        medians("latency_s"),
        medians("bytes_per_s"),
        medians("local_latency_s"),
        medians("local_bytes_per_s"),
        median(each.seconds for each in surveys),
    )
