"""Settings of the agreement. All but the last two must be equal on all ranks, and are compared when it is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["CoordinationConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinationConfig:
    """How operations are agreed on, fused and watched."""

    cache_capacity: int = 1024
    """Operations that are remembered; their readiness costs one bit. 0 switches the cache off."""
    fusion_bytes: int = 64 * 1024 * 1024
    """Operations are packed into native ones up to this size; 0: each on its own."""
    join_divisor: Literal["world", "active"] = "world"
    """What averages are divided by while some ranks have joined: all ranks, or those with data."""
    cycle_s: float = 0.001
    """While nobody is blocked, operations are collected for so long before the ranks agree on them."""
    stall_warning_s: float = 10.0
    """An operation that waits longer for some rank is reported, on every rank; 0: never."""
    stall_abort_s: float = 60.0
    """After this long the agreement ends with ``StallError``, on every rank; 0: never."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        checks.integer_fields(self, "cache_capacity", "fusion_bytes", minimum=0)
        checks.one_of("join_divisor", self.join_divisor, ("world", "active"))
        checks.real_field(self, "cycle_s", minimum=0, maximum=1, unit="seconds")
        checks.seconds_fields(self, "stall_warning_s", "stall_abort_s", or_zero=True)
        if 0 < self.stall_abort_s <= self.stall_warning_s:
            raise ConfigurationError(
                f"stall_abort_s ({self.stall_abort_s:g}) must be longer than stall_warning_s "
                f"({self.stall_warning_s:g}), or 0 for never"
            )

    def shared(self) -> dict[str, int | float | str]:
        """What must be equal on all ranks."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("stall_")}
