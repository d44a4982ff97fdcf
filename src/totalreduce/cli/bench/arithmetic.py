"""What the figures mean: sizes, bandwidths and limits. Pure functions, no torch."""

from __future__ import annotations

import re

from totalreduce.foundation.errors import ConfigurationError

__all__ = [
    "bus_factor",
    "format_bytes",
    "parse_size",
    "parse_sizes",
    "repetitions",
    "scheduling_ceiling",
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


def format_bytes(size: float) -> str:
    """``4194304`` as ``4 MiB``; at most three significant digits."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def bus_factor(world_size: int) -> float:
    """What an allreduce of one byte puts on each link, ``2 (n - 1) / n``: nccl-tests' bus bandwidth."""
    return 2 * (world_size - 1) / world_size


def wire_limit_s(num_bytes: int, world_size: int, rate_bits_per_s: float) -> float:
    """Shortest time in seconds in which links of that rate can allreduce ``num_bytes`` per rank."""
    return bus_factor(world_size) * num_bytes * 8 / rate_bits_per_s


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
