"""The settings that several methods share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["DensitySettings", "TopkSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DensitySettings:
    """The number of elements that are sent.

    Attributes:
        name: The name of the method, whose class inherits from this one.
        density: Share of a bucket's elements that is sent, from 0 to 1.
        warmup_steps: The number of steps in which the density falls geometrically from ``warmup_density``.
        warmup_density: The density of the first of these steps.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str]
    whole: ClassVar[bool] = False

    density: float = 0.01
    warmup_steps: int = 0
    warmup_density: float = 0.25

    def __post_init__(self) -> None:
        for name in ("density", "warmup_density"):
            checks.real_field(self, name, minimum=0, maximum=1)
        checks.integer_fields(self, "warmup_steps", minimum=0)
        if self.warmup_steps and not self.density:
            raise ConfigurationError(f"warmup_steps cannot be {self.warmup_steps} with a density of {self.density}")

    def count(self, num_elements: int, step: int) -> int:
        """Return the number of elements to send in a step (from 0): at least one, unless the density is 0."""
        density = self.density
        if step < self.warmup_steps and self.warmup_density > density:
            density = self.warmup_density * (density / self.warmup_density) ** (step / self.warmup_steps)
        if density == 0 or num_elements == 0:
            return 0
        return min(num_elements, max(1, round(density * num_elements)))


@dataclass(frozen=True, kw_only=True, slots=True)
class TopkSettings(DensitySettings):
    """The number of elements that are sent (see ``DensitySettings``), and the encoding of their values.

    Attributes:
        values: ``"bfloat16"``: values are rounded, and the residual keeps the rounding errors; or ``"float32"``.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    values: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        DensitySettings.__post_init__(self)  # super() would look for the class that dataclass(slots=True) has replaced
        checks.one_of("values", self.values, ("bfloat16", "float32"))
