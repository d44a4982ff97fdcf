"""What the figures mean: sizes, bandwidths and limits. Pure functions, no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import OpKind

__all__ = [
    "bus_factor",
    "bus_factor_of",
    "parse_size",
    "parse_sizes",
    "repetitions",
    "scheduling_ceiling",
    "wire_bytes",
    "wire_limit_s",
]

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


def parse_size(text: str) -> int:
    """Bytes of ``4KiB``, ``1MiB``, ``2.5MB`` or ``512``.

    Raises:
        ConfigurationError: Not a size, or not at least one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigurationError(f"{text!r} is not a size; write for example 4KiB, 1MiB or 512")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < 1:
        raise ConfigurationError(f"a size must be at least one byte, not {text!r}")
    return size


def parse_sizes(text: str) -> list[int]:
    """Bytes of each entry of a comma-separated list, in the order given.

    Raises:
        ConfigurationError: An entry is not a size.
    """
    return [parse_size(entry) for entry in text.split(",")]


def bus_factor(world_size: int) -> float:
    """What an allreduce of one byte puts on each link, ``2 (n - 1) / n``: nccl-tests' bus bandwidth."""
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


def scheduling_ceiling(forward_s: float, compute_s: float, communication_s: float) -> float:
    """The most that any scheduler gains over a perfect DDP: ``1 + F / (F + B)`` where both take equally long.

    A perfect DDP hides communication behind everything but the forward pass: its step takes
    ``max(compute - F, communication) + F``, an ideal one ``max(compute, communication)``.
    """
    perfect_ddp = max(compute_s - forward_s, communication_s) + forward_s
    return perfect_ddp / max(compute_s, communication_s)
