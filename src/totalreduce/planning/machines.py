"""What ``totalreduce plan`` knows of machines: their description, which a user writes, and the calibration.

A description is a TOML file::

    [machines]
    ranks_per_host = 8
    rate = "10gbit"            # of a host's network card, in each direction
    latency_us = 60            # as `totalreduce doctor` measures it, software included
    cores = 32                 # of a host
    memory_gib = 256           # of a host; left out: not looked at
    cost_per_host_hour = 3.2   # left out: no costs
    emulated = false           # true: all hosts share the cores of this machine

The calibration has what a simulator cannot know, the processor time of messages and bytes. ``totalreduce plan
--measure`` measures it.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from totalreduce.bench.records import to_document
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.named_files import read_named, write_named
from totalreduce.launch.emulate import rate_bits_per_s
from totalreduce.schedules.spec import LinkModel

__all__ = ["IDEAL", "Calibration", "Machines", "read_calibration", "read_machines", "write_calibration"]

#: The share of a link's bits that is TCP's payload: 1,448 of the 1,514 bytes of an Ethernet frame, as traffic shapers
#: count them.
PAYLOAD_SHARE = 1448 / 1514
_FILE_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """The machines of a job."""

    ranks_per_host: int = 1  #: The number of ranks on each host.
    rate: str = "1gbit"  #: The rate of a host's network card in each direction, as ``10gbit``.
    latency_us: float = 150.0  #: Microseconds that an empty message takes to another host, software included.
    cores: int = 8  #: The number of cores of a host; with ``emulated`` those of the machine.
    memory_gib: float = 0.0  #: The memory of a host in GiB; 0: not looked at.
    cost_per_host_hour: float = 0.0  #: What an hour of a host costs, in any currency; 0: no costs.
    emulated: bool = False  #: Whether all hosts are emulated on one machine, whose cores they share.
    local_latency_us: float = 50.0  #: The latency between ranks of one host.
    payload_share: float = PAYLOAD_SHARE  #: The share of a link's bits that is payload.

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        rate_bits_per_s(self.rate)
        for name, least in (("ranks_per_host", 1), ("cores", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"{name} must be a whole number of at least {least}, not {value!r}")
        for name in ("latency_us", "local_latency_us", "memory_gib", "cost_per_host_hour"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise ConfigurationError(f"{name} must be a number of at least 0, not {value!r}")
        if not isinstance(self.payload_share, int | float) or not 0 < self.payload_share <= 1:
            raise ConfigurationError(f"payload_share must be above 0 and at most 1, not {self.payload_share!r}")
        if not isinstance(self.emulated, bool):
            raise ConfigurationError(f"emulated is true or false, not {self.emulated!r}")

    @property
    def card_bytes_per_s(self) -> float:
        """Bytes of messages that a network card carries in a second."""
        return rate_bits_per_s(self.rate) / 8 * self.payload_share

    @property
    def links(self) -> LinkModel:
        """The links between ranks, as a group measures them when it begins."""
        default = LinkModel()
        return LinkModel(
            latency_s=max(1e-6, self.latency_us / 1e6),
            bytes_per_s=self.card_bytes_per_s,
            local_latency_s=max(1e-6, self.local_latency_us / 1e6),
            local_bytes_per_s=default.local_bytes_per_s,
            source="plan",
        )

    def hosts(self, ranks: int) -> tuple[int, ...]:
        """Return the host of every rank: blocks of equal size, as the launcher places them."""
        return tuple(rank // self.ranks_per_host for rank in range(ranks))

    def describe(self) -> str:
        """Return a line for the title of a table."""
        kind = "emulated hosts" if self.emulated else "hosts"
        shared = "in all" if self.emulated else "each"
        return (
            f"{kind} of {self.ranks_per_host} rank{'s' if self.ranks_per_host > 1 else ''}, {self.rate}, "
            f"{self.latency_us:g} µs, {self.cores} cores {shared}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The costs on a rank's processor, which the simulator takes as given.

    The defaults are rounded figures of ``totalreduce plan --measure`` on the processor that ``source`` names. They are
    those of one machine, and each printed plan says so until it is given a calibration of the machine in question.
    """

    message_s: float = 20e-6  #: Processor seconds that a message takes on each of its two ranks.
    byte_s: float = 0.2e-9  #: Processor seconds that a byte of a message takes on each of its two ranks.
    #: Processor seconds that a message takes from training beside it on each of its two ranks, more than ``message_s``:
    #: the kernel handles packets in whatever thread runs, and caches are filled again.
    beside_message_s: float = 0.0
    beside_byte_s: float = 0.2e-9  #: The same for a byte of a message, more than ``byte_s``.
    operation_s: float = 300e-6  #: Processor seconds that an operation takes on each rank, whatever its size.
    #: Seconds for which a thread that wakes up waits for a core on average, if a thread trains on every core.
    wake_s: float = 1e-3
    crowded_wake_s: float = 3e-3  #: The same if two threads train on every core; at least ``wake_s``.
    #: The share of a core's time that is lost while two ranks train on it in turns, from 0 to 1.
    sharing_loss: float = 0.04
    reduce_bytes_per_s: float = 8e9  #: Bytes of float32 that a rank adds in a second.
    copy_bytes_per_s: float = 1e10  #: Bytes that a rank copies in a second, from memory to memory.
    select_elements_per_s: float = 1.2e9  #: Elements that a rank accumulates and selects from in a second.
    merge_bytes_per_s: float = 1.3e8  #: Bytes of received selections that a rank merges in a second.
    #: Where the numbers come from.
    source: str = "default, as measured on an AMD EPYC with 2 cores, loopback (--measure measures this machine)"

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        for name, value in _numbers(self).items():
            least_is_zero = name == "sharing_loss" or (name.endswith("_s") and "per_s" not in name)
            most = 1.0 if name == "sharing_loss" else math.inf
            if not (0 <= value < most) or (value == 0 and not least_is_zero):
                raise ConfigurationError(f"{name} of a calibration must be positive and below {most:g}, not {value!r}")


def read_machines(path: Path) -> Machines:
    """Read a description of machines. Raises ``ConfigurationError``."""
    try:
        document = tomllib.loads(read_named(path, _FILE_BYTES_MAX).decode("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read the machines {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error
    table = document.get("machines")
    known = [field.name for field in fields(Machines)]
    if set(document) != {"machines"} or not isinstance(table, dict):
        raise ConfigurationError(f"{path} must have one table, [machines], not {', '.join(document) or 'nothing'}")
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise ConfigurationError(f"{path}: [machines] knows {', '.join(known)}, not {', '.join(unknown)}")
    try:
        return Machines(**table)
    except (ConfigurationError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error


def read_calibration(path: Path) -> Calibration:
    """Read a file that ``write_calibration`` (``totalreduce plan --measure``) has written.

    Raises:
        ConfigurationError: The file cannot be read, or does not hold a calibration.
    """
    try:
        document = json.loads(read_named(path, _FILE_BYTES_MAX))
        numbers = {name: float(document[name]) for name in _numbers(Calibration())}
        return Calibration(**numbers, source=str(document["source"]))
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the calibration {path}: {error.strerror}; `totalreduce plan --measure {path}` writes it"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{path} does not hold a calibration ({error!r}); `totalreduce plan --measure {path}` writes it"
        ) from error


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration as JSON. Raises ``ConfigurationError``: the file cannot be written."""
    try:
        write_named(path, json.dumps(to_document(calibration), indent=1) + "\n")
    except OSError as error:
        raise ConfigurationError(f"cannot write the calibration {path}: {error.strerror}") from error


def _numbers(calibration: Calibration) -> dict[str, Any]:
    return {field.name: getattr(calibration, field.name) for field in fields(calibration) if field.name != "source"}


#: Processors whose work takes no time, as in textbook formulas.
IDEAL = Calibration(
    message_s=0.0,
    byte_s=0.0,
    beside_message_s=0.0,
    beside_byte_s=0.0,
    operation_s=0.0,
    wake_s=0.0,
    crowded_wake_s=0.0,
    sharing_loss=0.0,
    reduce_bytes_per_s=1e18,
    copy_bytes_per_s=1e18,
    select_elements_per_s=1e18,
    merge_bytes_per_s=1e18,
    source="ideal: processors take no time for messages, and links carry nothing but payload",
)
