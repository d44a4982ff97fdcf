"""Settings of the agreement. All but the last two must be equal on all ranks, which compare them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["CoordinationConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinationConfig:
    """Settings of the agreement, of fusion, and of the watch for stalls."""

    cache_capacity: int = 1024
    """Number of operations that ranks remember, which then cost one bit each. 0 switches the cache off."""
    fusion_bytes: int = 64 * 1024 * 1024
    """Operations are fused up to this size in bytes; 0: no operations are fused."""
    join_divisor: Literal["world", "active"] = "world"
    """The divisor of averages while some ranks have joined: the number of all ranks, or of those with data."""
    cycle_s: float = 0.001
    """Operations are collected for so many seconds before the ranks agree on them, while no caller is blocked."""
    stall_warning_s: float = 10.0
    """Every rank reports an operation that waits so many seconds for some rank; 0: never."""
    stall_abort_s: float = 60.0
    """After so many seconds the agreement ends with ``StallError`` on every rank; 0: never."""

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
        """Return the settings that must be equal on all ranks."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("stall_")}
