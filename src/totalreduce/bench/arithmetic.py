"""Sizes, bandwidths and limits, from which figures are computed. Pure functions, no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import OpKind

_BYTES = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_size(text: str) -> int:
    """Return the bytes of ``4KiB``, ``1MiB``, ``2.5MB`` or ``512``."""
    size = _parse(text, _BYTES)
    if size is None:
        raise ConfigurationError(f"{text!r} is not a size; write for example 4KiB, 1MiB or 512")
    if size < 1:
        raise ConfigurationError(f"a size must be at least one byte, not {text!r}")
    return int(size)


def parse_count(text: str | int) -> int:
    """Return the elements of ``14.7M``, ``100k`` or ``512``: at least one and below 2^31."""
    count = _parse(str(text), _COUNTS)
    if count is None:
        raise ConfigurationError(f"{text!r} is not a number of elements; write for example 14.7M, 100k or 512")
    if not 1 <= round(count) < 2**31:
        raise ConfigurationError(f"there are from 1 to 2^31 - 1 elements, not {text!r}")
    return round(count)


def format_count(count: float) -> str:
    """Return ``14.7 M`` for 14700000; at most three significant digits."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.3g}"


def parse_sizes(text: str) -> list[int]:
    """Bytes of each entry of a comma-separated list, in the order given."""
    return [parse_size(entry) for entry in text.split(",")]


def bus_factor(world_size: int) -> float:
    """Return the bytes that an allreduce of one byte puts on each link, ``2 (n - 1) / n``, as nccl-tests define it."""
    return 2 * (world_size - 1) / world_size


def wire_limit_s(num_bytes: int, world_size: int, rate_bits_per_s: float) -> float:
    """Shortest time in seconds in which links of that rate can allreduce ``num_bytes`` per rank."""
    return bus_factor(world_size) * num_bytes * 8 / rate_bits_per_s


def bus_factor_of(kind: OpKind, world_size: int) -> float:
    """From algorithm to bus bandwidth, as nccl-tests define it (its allgather's size, too, is that of all blocks)."""
    if kind is OpKind.ALLREDUCE:
        return bus_factor(world_size)
    if kind in (OpKind.BROADCAST, OpKind.REDUCE, OpKind.SEND_RECV):
        return 1.0
    return (world_size - 1) / world_size


def wire_bytes(kind: OpKind, num_bytes: int, hosts: Sequence[int], *, root: int = 0) -> float:
    """Bytes that must cross the busiest host's link, in the busier direction, whatever the schedule.

    Whatever can be combined or copied inside a host counts once for all ranks of the host.

    Args:
        kind: Which collective; a message goes from ``root`` to the last rank.
        num_bytes: Of the tensor; of all blocks together (of one rank) where there are blocks.
        hosts: Host of every rank.
        root: Where there is one.
    """
    size = len(hosts)
    counts = {host: sum(1 for other in hosts if other == host) for host in hosts}
    num_hosts, fewest = len(counts), min(counts.values())
    if num_hosts == 1:
        return 0.0
    match kind:
        case OpKind.ALLREDUCE:
            return 2 * (num_hosts - 1) / num_hosts * num_bytes
        case OpKind.BROADCAST | OpKind.REDUCE:
            return float(num_bytes)
        case OpKind.SEND_RECV:
            return 0.0 if hosts[root] == hosts[-1] else float(num_bytes)
        case OpKind.ALLGATHER | OpKind.REDUCE_SCATTER:
            return (size - fewest) / size * num_bytes
        case OpKind.GATHER | OpKind.SCATTER:
            return (size - counts[hosts[root]]) / size * num_bytes
        case OpKind.ALLTOALL:
            return max(count * (size - count) for count in counts.values()) / size * num_bytes
        case OpKind.BARRIER:
            return 0.0


def repetitions(num_bytes: int) -> int:
    """How many operations one sample of the allreduce benchmark averages over.

    Small operations are shorter than the ranks' skew after a barrier; 20 in a row make it a few per cent.
    All of one sample together stay at 16 MiB or one operation, which bounds memory.
    """
    return max(1, min(20, (16 << 20) // num_bytes))


def _parse(text: str, units: dict[str, int]) -> float | None:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = None if match is None else units.get(match[2].lower())
    return None if match is None or unit is None else float(match[1]) * unit
